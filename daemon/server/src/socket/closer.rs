//! Closes client descriptors on separate threads, because closing one can block.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

/// Closing one descriptor takes longer than this only if its user has made it block.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// How long an idle thread waits for more before it ends.
const IDLE: Duration = Duration::from_secs(1);

/// Threads that drop values whose destructors can block. Each user has one thread, so that blocking
/// descriptors delay only their own user and take at most that thread.
#[derive(Debug, Default)]
pub(crate) struct Closer(Mutex<BTreeMap<u32, Queue>>);

#[derive(Debug)]
struct Queue {
    values: Sender<Box<dyn Any + Send>>,
    /// When the thread has begun to drop its current value; `None` while it waits.
    busy_since: Arc<Mutex<Option<Instant>>>,
}

impl Closer {
    /// Drops a value that the user `uid` has sent, soon and on another thread.
    pub(crate) fn close(self: &Arc<Self>, uid: u32, value: impl Any + Send) {
        let value: Box<dyn Any + Send> = Box::new(value);
        let mut queues = lock(&self.0);
        let unsent = match queues.get(&uid) {
            Some(queue) => queue.values.send(value).err().map(|unsent| unsent.0),
            None => Some(value),
        };
        if let Some(value) = unsent
            && let Some(queue) = self.start(uid, value)
        {
            queues.insert(uid, queue);
        }
    }

    /// Whether the user's thread has been dropping one value for longer than [`STUCK_AFTER`].
    pub(crate) fn is_stuck(&self, uid: u32) -> bool {
        let busy_since = lock(&self.0).get(&uid).map(|queue| Arc::clone(&queue.busy_since));
        busy_since.and_then(|since| *lock(&since)).is_some_and(|since| since.elapsed() > STUCK_AFTER)
    }

    fn start(self: &Arc<Self>, uid: u32, first: Box<dyn Any + Send>) -> Option<Queue> {
        let (values, waiting) = channel();
        let busy_since = Arc::new(Mutex::new(None));
        let (closer, busy) = (Arc::clone(self), Arc::clone(&busy_since));
        let sent = values.send(first);
        let run = move || closer.run(uid, &waiting, &busy);
        let started = thread::Builder::new().name("closer".to_owned()).spawn(run);
        // Without a thread, the queue and its value are dropped here.
        (sent.is_ok() && started.is_ok()).then_some(Queue { values, busy_since })
    }

    fn run(&self, uid: u32, waiting: &Receiver<Box<dyn Any + Send>>, busy_since: &Mutex<Option<Instant>>) {
        loop {
            let value = match waiting.recv_timeout(IDLE) {
                Ok(value) => value,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let mut queues = lock(&self.0);
                    // Values are sent under this lock: a value that is not here yet goes to a new thread.
                    let Ok(last) = waiting.try_recv() else {
                        queues.remove(&uid);
                        return;
                    };
                    last
                }
            };
            *lock(busy_since) = Some(Instant::now());
            drop(value);
            *lock(busy_since) = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    struct BlocksOnDrop(Receiver<()>);

    impl Drop for BlocksOnDrop {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    struct ReportsDrop(Sender<()>);

    impl Drop for ReportsDrop {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    const DEADLINE: Duration = Duration::from_secs(60);

    fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < DEADLINE, "{what}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn blocking_descriptors_affect_only_their_user() {
        let closer = Arc::new(Closer::default());
        let (release, blocked) = sync_channel(0);
        let (dropped, closed) = channel();
        closer.close(1, BlocksOnDrop(blocked));
        closer.close(1, ReportsDrop(dropped.clone()));
        closer.close(2, ReportsDrop(dropped));
        closed.recv_timeout(DEADLINE).unwrap();
        assert!(closed.try_recv().is_err(), "the first user's second value waits");
        eventually("it is stuck", || closer.is_stuck(1));
        assert!(!closer.is_stuck(2) && !closer.is_stuck(3));
        drop(release);
        closed.recv_timeout(DEADLINE).unwrap();
        assert!(!closer.is_stuck(1));
        eventually("idle threads end", || lock(&closer.0).is_empty());
    }
}
