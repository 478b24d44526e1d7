//! Requests to the name service: each is made once at a time, by one of a few threads, and its answer is kept.
//!
//! A call that hangs keeps its thread, but nobody waits for it longer than a limit, and only the first who requests the
//! name waits that long. The number and the age of answers are limited.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use blobd_client::name_service::{Group, User};
use tracing_mutex::stdsync::{Condvar, Mutex};

use crate::locks::lock;

/// Calls at a time. Each that hangs takes a thread until the name service gives up.
const MAX_THREADS: usize = 8;
/// Answers that are kept: more users than one machine serves at a time.
const MAX_ANSWERS: usize = 4096;
/// How long an answer is used. Names change rarely, and a reload of the configuration requests them again.
const KEEP_FOUND: Duration = Duration::from_secs(5 * 60);
/// A user that was created meanwhile is found after this time.
const KEEP_ABSENT: Duration = Duration::from_secs(60);
/// How long a failed request is not repeated.
const KEEP_FAILED: Duration = Duration::from_secs(10);
/// How long others wait while a call hangs: the files of the system itself answer within microseconds.
const WAIT_WHILE_STALLED: Duration = Duration::from_millis(20);
/// A call that takes longer hangs.
const STALLED_AFTER: Duration = Duration::from_millis(500);

pub(super) const NO_ANSWER: &str = "the name service of the system does not answer";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Uid(u32),
    UserName(String),
    GroupName(String),
    GroupsOf(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    User(User),
    Group(Group),
    Groups(Arc<[u32]>),
    Absent,
    Unavailable(Arc<str>),
}

impl Answer {
    const fn is_found(&self) -> bool {
        !matches!(self, Self::Absent | Self::Unavailable(_))
    }
}

/// Where names come from: the system, or files in tests. May block.
pub(super) trait Source: Send + Sync {
    /// `None` if there is no such user or group.
    fn find(&self, key: &Key) -> io::Result<Option<Answer>>;

    fn local_users(&self) -> Vec<String> {
        Vec::new()
    }

    fn local_groups(&self) -> Vec<String> {
        Vec::new()
    }
}

pub(super) struct Lookups {
    pub(super) source: Box<dyn Source>,
    table: Mutex<Table>,
    answered: Condvar,
}

#[derive(Default)]
struct Table {
    slots: BTreeMap<Key, Slot>,
    queue: VecDeque<Key>,
    running: BTreeMap<Key, Instant>,
    threads: usize,
}

#[derive(Default)]
struct Slot {
    answer: Option<Answer>,
    /// `None`: the answer must be requested again.
    fresh_until: Option<Instant>,
    /// Whether the request waits for a thread or is being made.
    is_pending: bool,
}

impl Slot {
    fn is_fresh(&self) -> bool {
        self.fresh_until.is_some_and(|until| Instant::now() < until)
    }
}

impl Lookups {
    pub(super) fn new(source: Box<dyn Source>) -> Arc<Self> {
        Arc::new(Self { source, table: Mutex::default(), answered: Condvar::new() })
    }

    /// Waits at most `wait`, and then returns the last answer.
    pub(super) fn ask(self: &Arc<Self>, key: &Key, wait: Duration) -> Answer {
        let mut table = lock(&self.table);
        if table.slots.get(key).is_some_and(Slot::is_fresh) {
            return table.answer(key);
        }
        let is_stalled = table.is_stalled();
        self.request(&mut table, key);
        let wait = if is_stalled && wait <= STALLED_AFTER { wait.min(WAIT_WHILE_STALLED) } else { wait };
        let deadline = Instant::now() + wait;
        while table.slots.get(key).is_some_and(|slot| slot.is_pending) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            table = self.answered.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        table.answer(key)
    }

    pub(super) fn is_fresh(&self, key: &Key) -> bool {
        lock(&self.table).slots.get(key).is_some_and(Slot::is_fresh)
    }

    pub(super) fn expire(&self) {
        lock(&self.table).slots.values_mut().for_each(|slot| slot.fresh_until = None);
    }

    /// Queues the request, if there is room for its answer.
    fn request(self: &Arc<Self>, table: &mut Table, key: &Key) {
        if !table.make_room(key) {
            return;
        }
        let slot = table.slots.entry(key.clone()).or_default();
        if std::mem::replace(&mut slot.is_pending, true) {
            return;
        }
        table.queue.push_back(key.clone());
        if table.threads >= MAX_THREADS {
            return;
        }
        let lookups = Arc::clone(self);
        let started = std::thread::Builder::new().name("names".to_owned()).spawn(move || lookups.work());
        match started {
            Ok(_thread) => table.threads += 1,
            Err(_) if table.threads > 0 => {}
            Err(error) => {
                while let Some(key) = table.queue.pop_front() {
                    table.enter(key, Err(io::Error::new(error.kind(), error.to_string())));
                }
            }
        }
    }

    /// Makes requests until the queue is empty.
    fn work(&self) {
        let mut table = lock(&self.table);
        while let Some(key) = table.queue.pop_front() {
            table.running.insert(key.clone(), Instant::now());
            drop(table);
            let answer = self.source.find(&key).map(|found| found.unwrap_or(Answer::Absent));
            table = lock(&self.table);
            table.running.remove(&key);
            table.enter(key, answer);
            self.answered.notify_all();
        }
        table.threads -= 1;
    }
}

impl Table {
    fn answer(&self, key: &Key) -> Answer {
        let known = self.slots.get(key).and_then(|slot| slot.answer.clone());
        known.unwrap_or_else(|| Answer::Unavailable(NO_ANSWER.into()))
    }

    fn is_stalled(&self) -> bool {
        self.running.values().any(|start| start.elapsed() > STALLED_AFTER)
    }

    /// A failure does not replace an earlier answer.
    fn enter(&mut self, key: Key, found: io::Result<Answer>) {
        let slot = self.slots.entry(key).or_default();
        slot.is_pending = false;
        let (answer, keep) = match found {
            Ok(answer) if answer.is_found() => (answer, KEEP_FOUND),
            Ok(absent) => (absent, KEEP_ABSENT),
            Err(error) => {
                let failed = Answer::Unavailable(format!("{NO_ANSWER}: {error}").into());
                (slot.answer.take().filter(Answer::is_found).unwrap_or(failed), KEEP_FAILED)
            }
        };
        slot.answer = Some(answer);
        slot.fresh_until = Some(Instant::now() + keep);
    }

    /// Drops the oldest answer if there are too many. False if all are still requested.
    fn make_room(&mut self, key: &Key) -> bool {
        if self.slots.len() < MAX_ANSWERS || self.slots.contains_key(key) {
            return true;
        }
        let droppable = self.slots.iter().filter(|(_, slot)| !slot.is_pending);
        let oldest = droppable.min_by_key(|(_, slot)| slot.fresh_until).map(|(key, _)| key.clone());
        oldest.is_some_and(|key| self.slots.remove(&key).is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    /// Answers when it is told to, with what it is told; it counts the calls.
    #[derive(Default)]
    struct Scripted {
        calls: Arc<AtomicUsize>,
        answers: Option<Mutex<mpsc::Receiver<io::Result<Option<User>>>>>,
    }

    impl Source for Scripted {
        fn find(&self, key: &Key) -> io::Result<Option<Answer>> {
            if matches!(key, Key::Uid(_) | Key::UserName(_)) {
                self.calls.fetch_add(1, Ordering::SeqCst);
            }
            match (key, &self.answers) {
                (Key::Uid(_), Some(answers)) => {
                    let answer = answers.lock().unwrap().recv().unwrap_or(Ok(None));
                    answer.map(|user| user.map(Answer::User))
                }
                (Key::Uid(uid), None) => Ok(Some(Answer::User(user(*uid, "ann")))),
                (Key::UserName(_), _) => Ok(None),
                (Key::GroupName(_), _) => Err(io::ErrorKind::ConnectionRefused.into()),
                (Key::GroupsOf(_), _) => Ok(Some(Answer::Groups([1].into()))),
            }
        }
    }

    fn user(uid: u32, name: &str) -> User {
        User { uid, name: name.to_owned(), primary_group: 1 }
    }

    /// A service that answers with the values that are sent.
    fn controlled() -> (mpsc::Sender<io::Result<Option<User>>>, Arc<AtomicUsize>, Arc<Lookups>) {
        let (answer, answers) = mpsc::channel();
        let source = Scripted { answers: Some(Mutex::new(answers)), ..Scripted::default() };
        let calls = Arc::clone(&source.calls);
        (answer, calls, Lookups::new(Box::new(source)))
    }

    fn wait_for_answer(lookups: &Arc<Lookups>, key: &Key) {
        while !lookups.is_fresh(key) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn answers_are_kept_whether_found_or_not() {
        let source = Scripted::default();
        let calls = Arc::clone(&source.calls);
        let lookups = Lookups::new(Box::new(source));
        for _again in 0..3 {
            assert_eq!(lookups.ask(&Key::Uid(7), LONG), Answer::User(user(7, "ann")));
            assert_eq!(lookups.ask(&Key::UserName("bob".to_owned()), LONG), Answer::Absent);
        }
        assert_eq!(calls.load(Ordering::SeqCst), 2);
        lookups.expire();
        assert_eq!(lookups.ask(&Key::UserName("bob".to_owned()), LONG), Answer::Absent);
        assert_eq!(calls.load(Ordering::SeqCst), 3, "asked again");
    }

    #[test]
    fn call_that_hangs_is_made_once_and_nobody_waits_for_it() {
        let (answer, calls, lookups) = controlled();
        for _again in 0..5 {
            let unanswered = lookups.ask(&Key::Uid(7), Duration::ZERO);
            assert!(matches!(unanswered, Answer::Unavailable(_)), "{unanswered:?}");
        }
        // Another question is answered meanwhile.
        assert_eq!(lookups.ask(&Key::GroupsOf(8), LONG), Answer::Groups([1].into()));
        answer.send(Ok(Some(user(7, "ann")))).unwrap();
        assert_eq!(lookups.ask(&Key::Uid(7), LONG), Answer::User(user(7, "ann")));
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn failure_keeps_the_known_answer_and_does_not_mean_absent() {
        let (answer, _calls, lookups) = controlled();
        answer.send(Ok(Some(user(7, "ann")))).unwrap();
        lookups.ask(&Key::Uid(7), LONG);
        lookups.expire();
        answer.send(Err(io::ErrorKind::TimedOut.into())).unwrap();
        assert_eq!(lookups.ask(&Key::Uid(7), LONG), Answer::User(user(7, "ann")));
        let failed = lookups.ask(&Key::GroupName("staff".to_owned()), LONG);
        assert!(matches!(failed, Answer::Unavailable(_)), "{failed:?}");
    }

    #[test]
    fn changed_name_is_used_after_the_old_one_has_expired() {
        let (answer, _calls, lookups) = controlled();
        answer.send(Ok(Some(user(7, "ann")))).unwrap();
        lookups.ask(&Key::Uid(7), LONG);
        lookups.expire();
        assert_eq!(lookups.ask(&Key::Uid(7), Duration::ZERO), Answer::User(user(7, "ann")), "does not wait");
        answer.send(Ok(Some(user(7, "ann-lee")))).unwrap();
        wait_for_answer(&lookups, &Key::Uid(7));
        assert_eq!(lookups.ask(&Key::Uid(7), Duration::ZERO), Answer::User(user(7, "ann-lee")));
    }

    #[test]
    fn number_of_answers_and_of_threads_is_bounded() {
        let lookups = Lookups::new(Box::new(Scripted::default()));
        for uid in 0..u32::try_from(MAX_ANSWERS).unwrap() + 10 {
            lookups.ask(&Key::Uid(uid), LONG);
        }
        assert_eq!(lock(&lookups.table).slots.len(), MAX_ANSWERS);
        let (_answer, _calls, lookups) = controlled();
        for uid in 0..100 {
            lookups.ask(&Key::Uid(uid), Duration::ZERO);
        }
        assert_eq!(lock(&lookups.table).threads, MAX_THREADS);
    }
}
