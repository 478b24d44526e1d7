//! Questions to the name service: each is asked once at a time, by one of a few threads, and its answer is kept.
//!
//! A call that hangs keeps its thread; nobody waits for it longer than the given time, and only the first who asks waits
//! so long. Answers are bounded in number and in age.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use blobd_client::name_service::{Group, User};
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard};

use super::source::Source;

/// Calls at a time. Each that hangs takes a thread until the name service gives up.
const MAX_THREADS: usize = 8;
/// Answers that are kept: more users than one machine serves at a time.
const MAX_ANSWERS: usize = 4096;
/// How long an answer is used. Names change rarely, and a reload of the configuration asks again at once.
const KEEP_FOUND: Duration = Duration::from_secs(5 * 60);
/// A user that was created meanwhile is found after this time.
const KEEP_ABSENT: Duration = Duration::from_secs(60);
/// How long nothing is asked again after a failure.
const KEEP_FAILED: Duration = Duration::from_secs(10);
/// How long others wait while a call hangs: the files of the system itself answer within microseconds.
const WAIT_WHILE_STALLED: Duration = Duration::from_millis(20);
/// A call that takes longer hangs.
const STALLED_AFTER: Duration = Duration::from_millis(500);

pub(super) const NO_ANSWER: &str = "the name service of the system does not answer";

/// A question.
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
    /// There is no such user or group.
    Absent,
    /// There is no answer, for this reason.
    Unavailable(Arc<str>),
}

impl Answer {
    const fn is_found(&self) -> bool {
        !matches!(self, Self::Absent | Self::Unavailable(_))
    }
}

pub(super) struct Lookups {
    source: Box<dyn Source>,
    table: Mutex<Table>,
    /// Notified with each answer.
    answered: Condvar,
}

#[derive(Default)]
struct Table {
    slots: BTreeMap<Key, Slot>,
    queue: VecDeque<Key>,
    /// Calls that run, with their start.
    running: BTreeMap<Key, Instant>,
    threads: usize,
}

#[derive(Default)]
struct Slot {
    /// The last answer, whatever its age.
    answer: Option<Answer>,
    /// `None`: the answer is to be asked for again.
    fresh_until: Option<Instant>,
    /// Whether the question waits for a thread or is being asked.
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

    pub(super) fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// The answer, for which this waits at most `wait`; then the last one that there was.
    pub(super) fn ask(self: &Arc<Self>, key: &Key, wait: Duration) -> Answer {
        let mut table = self.lock();
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

    /// Whether asking would not wait.
    pub(super) fn is_fresh(&self, key: &Key) -> bool {
        self.lock().slots.get(key).is_some_and(Slot::is_fresh)
    }

    /// Every question is asked again when its answer is next needed.
    pub(super) fn expire(&self) {
        self.lock().slots.values_mut().for_each(|slot| slot.fresh_until = None);
    }

    /// Has the question asked, if there is room for its answer.
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

    /// Asks until no question is left.
    fn work(&self) {
        let mut table = self.lock();
        while let Some(key) = table.queue.pop_front() {
            table.running.insert(key.clone(), Instant::now());
            drop(table);
            let answer = self.call(&key);
            table = self.lock();
            table.running.remove(&key);
            table.enter(key, answer);
            self.answered.notify_all();
        }
        table.threads -= 1;
    }

    fn call(&self, key: &Key) -> io::Result<Answer> {
        let source = &self.source;
        let found = match key {
            Key::Uid(uid) => source.user_by_id(*uid)?.map(Answer::User),
            Key::UserName(name) => source.user_by_name(name)?.map(Answer::User),
            Key::GroupName(name) => source.group_by_name(name)?.map(Answer::Group),
            Key::GroupsOf(uid) => source.groups_of(*uid)?.map(|groups| Answer::Groups(groups.into())),
        };
        Ok(found.unwrap_or(Answer::Absent))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each change of the table is complete before anything can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn answer(&self, key: &Key) -> Answer {
        let known = self.slots.get(key).and_then(|slot| slot.answer.clone());
        known.unwrap_or_else(|| Answer::Unavailable(NO_ANSWER.into()))
    }

    /// Whether a call hangs.
    fn is_stalled(&self) -> bool {
        self.running.values().any(|start| start.elapsed() > STALLED_AFTER)
    }

    /// Enters an answer. A failure does not replace what was found before.
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

    /// Drops the oldest answer if there are too many. False if all are being asked for.
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
        fn user_by_id(&self, uid: u32) -> io::Result<Option<User>> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            match &self.answers {
                Some(answers) => answers.lock().unwrap().recv().unwrap_or(Ok(None)),
                None => Ok(Some(user(uid, "ann"))),
            }
        }

        fn user_by_name(&self, _name: &str) -> io::Result<Option<User>> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            Ok(None)
        }

        fn group_by_name(&self, _name: &str) -> io::Result<Option<Group>> {
            Err(io::ErrorKind::ConnectionRefused.into())
        }

        fn groups_of(&self, _uid: u32) -> io::Result<Option<Vec<u32>>> {
            Ok(Some(vec![1]))
        }

        fn local_users(&self) -> Vec<String> {
            Vec::new()
        }

        fn local_groups(&self) -> Vec<String> {
            Vec::new()
        }
    }

    fn user(uid: u32, name: &str) -> User {
        User { uid, name: name.to_owned(), primary_group: 1 }
    }

    /// A service that answers with what is sent.
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
    fn failure_keeps_what_was_known_and_is_not_an_absence() {
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
        assert_eq!(lookups.lock().slots.len(), MAX_ANSWERS);
        let (_answer, _calls, lookups) = controlled();
        for uid in 0..100 {
            lookups.ask(&Key::Uid(uid), Duration::ZERO);
        }
        assert_eq!(lookups.lock().threads, MAX_THREADS);
    }
}
