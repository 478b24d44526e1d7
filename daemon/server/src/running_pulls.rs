//! The pulls, pushes and transfers in progress, with how much has moved and how fast.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use blobd_client::protocol::event::{Phase, State, WorkProgress};
use blobd_client::protocol::pull::{PullProgress, RunningKind};
use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;
use crate::requester::Requester;

#[derive(Clone, Debug, Default)]
pub(crate) struct RunningPulls(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    running: BTreeMap<u64, PullState>,
}

#[derive(Clone, Debug)]
pub(crate) struct PullState {
    pub(crate) subject: PullSubject,
    pub(crate) requester: Requester,
    pub(crate) since: SystemTime,
    pub(crate) status: String,
    pub(crate) state: State,
    pub(crate) phase: Option<Phase>,
    pub(crate) total_bytes: Option<u64>,
    files: BTreeMap<Digest, FileState>,
    speed: Speed,
}

/// What is in progress: [`blobd_client::protocol::pull::RunningPull`] says what the names mean.
#[derive(Clone, Debug)]
pub(crate) struct PullSubject {
    pub(crate) kind: RunningKind,
    pub(crate) model: String,
    pub(crate) source: String,
    pub(crate) destination: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct FileState {
    /// The bytes that were there when it was first reported: received earlier, or stored already.
    first: u64,
    completed: u64,
}

/// A pull's entry, removed when it is dropped.
#[derive(Debug)]
pub struct PullWatch {
    pulls: RunningPulls,
    id: u64,
}

impl RunningPulls {
    pub(crate) fn begin(&self, requester: Requester, model: String, source: String) -> PullWatch {
        let subject = PullSubject { kind: RunningKind::Pull, model, source, destination: None };
        self.begin_any(requester, subject, "waiting for other pulls to end")
    }

    /// `waiting` is the status until its turn comes.
    pub(crate) fn begin_any(&self, requester: Requester, subject: PullSubject, waiting: &str) -> PullWatch {
        let pull = PullState {
            subject,
            requester,
            since: SystemTime::now(),
            status: waiting.to_owned(),
            state: State::Queued,
            phase: None,
            total_bytes: None,
            files: BTreeMap::new(),
            speed: Speed::default(),
        };
        let mut table = lock(&self.0);
        let id = table.next_id;
        table.next_id += 1;
        table.running.insert(id, pull);
        PullWatch { pulls: self.clone(), id }
    }

    pub(crate) fn list(&self) -> Vec<PullState> {
        lock(&self.0).running.values().cloned().collect()
    }

    pub(crate) fn count(&self, is_counted: impl Fn(RunningKind) -> bool) -> usize {
        lock(&self.0).running.values().filter(|pull| is_counted(pull.subject.kind)).count()
    }
}

impl PullWatch {
    /// Notes the step, and adds to it how much of the whole model has arrived.
    pub(crate) fn step(&self, mut progress: PullProgress) -> PullProgress {
        self.change(|pull| {
            progress.status.clone_into(&mut pull.status);
            (pull.state, pull.phase) = (progress.state, progress.phase);
            if pull.total_bytes.is_some() {
                progress.total_bytes = pull.total_bytes;
                progress.completed_bytes = Some(pull.completed_bytes());
                progress.bytes_per_second = Some(pull.bytes_per_second());
            }
        });
        progress
    }

    /// Notes the step of a push or a transfer.
    pub(crate) fn work_step(&self, progress: &WorkProgress) {
        self.change(|pull| {
            progress.status.clone_into(&mut pull.status);
            (pull.state, pull.phase) = (progress.state, progress.phase);
        });
    }

    pub(crate) fn expect(&self, total_bytes: u64) {
        self.change(|pull| pull.total_bytes = Some(total_bytes));
    }

    pub(crate) fn note(&self, file: Digest, completed: u64) {
        self.change(|pull| {
            let state = pull.files.entry(file).or_insert(FileState { first: completed, completed });
            state.completed = completed;
            let arrived = pull.arrived_bytes();
            pull.speed.note(Instant::now(), arrived);
        });
    }

    fn change(&self, change: impl FnOnce(&mut PullState)) {
        lock(&self.pulls.0).running.get_mut(&self.id).map(change).unwrap_or_default();
    }
}

impl Drop for PullWatch {
    fn drop(&mut self) {
        lock(&self.pulls.0).running.remove(&self.id);
    }
}

impl PullState {
    pub(crate) fn completed_bytes(&self) -> u64 {
        self.files.values().map(|file| file.completed).fold(0, u64::saturating_add)
    }

    /// What has arrived since each file was first reported.
    fn arrived_bytes(&self) -> u64 {
        let arrived = self.files.values().map(|file| file.completed.saturating_sub(file.first));
        arrived.fold(0, u64::saturating_add)
    }

    pub(crate) fn bytes_per_second(&self) -> u64 {
        self.speed.at(Instant::now(), self.arrived_bytes())
    }
}

#[derive(Clone, Debug, Default)]
struct Speed {
    /// How many bytes had arrived at a time, the oldest sample first.
    samples: VecDeque<(Instant, u64)>,
}

impl Speed {
    /// The speed is the average over this time: shorter ones vary with each range that is complete.
    const WINDOW: Duration = Duration::from_secs(5);
    const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

    fn note(&mut self, now: Instant, arrived: u64) {
        let is_new = |(last, _): &(Instant, u64)| now.duration_since(*last) >= Self::SAMPLE_INTERVAL;
        if self.samples.back().is_none_or(is_new) {
            self.samples.push_back((now, arrived));
        }
        // One sample that is older than the window is kept: it is where the window begins.
        while self.samples.get(1).is_some_and(|(second, _)| now.duration_since(*second) >= Self::WINDOW) {
            self.samples.pop_front();
        }
    }

    /// Bytes per second up to now, from the first sample in the window, or the last one before it.
    fn at(&self, now: Instant, arrived: u64) -> u64 {
        let is_outside = |(at, _): &&(Instant, u64)| now.duration_since(*at) >= Self::WINDOW;
        let begin = self.samples.iter().rev().find(is_outside).or_else(|| self.samples.front());
        let Some((since, before)) = begin else { return 0 };
        let milliseconds = now.duration_since(*since).as_millis().max(1);
        let bytes = u128::from(arrived.saturating_sub(*before));
        u64::try_from(bytes.saturating_mul(1000) / milliseconds).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::event::Progress as _;

    use super::*;

    #[test]
    fn pull_is_listed_until_it_ends() {
        let pulls = RunningPulls::default();
        let watch = pulls.begin(Requester::own(), "m:latest".to_owned(), "r.example/m".to_owned());
        let other = pulls.begin(Requester::own(), "n:latest".to_owned(), "r.example/n".to_owned());
        watch.step(PullProgress::working("pulling model", Phase::Receiving));
        watch.expect(1000);
        watch.note(Digest::of(b"one"), 100);
        watch.note(Digest::of(b"two"), 7);
        watch.note(Digest::of(b"one"), 150);
        let [first, second] = pulls.list().try_into().unwrap();
        assert_eq!(
            (first.completed_bytes(), first.arrived_bytes(), first.total_bytes),
            (157, 50, Some(1000))
        );
        assert_eq!((&*first.status, &*second.subject.model), ("pulling model", "n:latest"));
        drop(watch);
        assert_eq!(pulls.list().len(), 1);
        drop(other);
        assert!(pulls.list().is_empty());
    }

    #[test]
    fn speed_is_that_of_the_last_seconds() {
        let (mut speed, start) = (Speed::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(speed.at(start, 5), 0, "nothing is known");
        // A thousand bytes per second, then two thousand.
        (0..10).for_each(|second| speed.note(after(second), second * 1000));
        assert_eq!(speed.at(after(10), 10_000), 1000);
        (0..10).for_each(|second| speed.note(after(10 + second), 10_000 + second * 2000));
        assert_eq!(speed.at(after(20), 30_000), 2000);
        assert!(speed.samples.len() <= 7, "{:?}", speed.samples);
        // Then nothing: the speed falls, and ends at zero.
        assert!(speed.at(after(23), 28_000) < 2000);
        assert_eq!(speed.at(after(60), 28_000), 0);
    }
}
