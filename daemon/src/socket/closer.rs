//! Closes what may block while it is closed.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long closing one descriptor takes at the most unless somebody has made it block.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a thread with nothing to close waits for more before it ends.
const IDLE: Duration = Duration::from_secs(1);

/// Threads that drop what would block others. Each user's things have one thread, so that a user whose
/// descriptors block is waited for by nobody else, and has no more than that thread.
#[derive(Debug, Default)]
pub(crate) struct Closer(Mutex<BTreeMap<u32, Queue>>);

#[derive(Debug)]
struct Queue {
    things: Sender<Box<dyn Any + Send>>,
    /// Since when the thread has been dropping the thing that it drops now.
    busy_since: Arc<Mutex<Option<Instant>>>,
}

impl Closer {
    /// Drops `thing`, which came from the user `uid`, soon and on another thread.
    pub(crate) fn close(self: &Arc<Self>, uid: u32, thing: impl Any + Send) {
        let thing: Box<dyn Any + Send> = Box::new(thing);
        let mut queues = lock(&self.0);
        let unsent = match queues.get(&uid) {
            Some(queue) => queue.things.send(thing).err().map(|unsent| unsent.0),
            None => Some(thing),
        };
        if let Some(thing) = unsent
            && let Some(queue) = self.start(uid, thing)
        {
            queues.insert(uid, queue);
        }
    }

    /// Whether the user's things have not been closed for longer than closing takes.
    pub(crate) fn is_stuck(&self, uid: u32) -> bool {
        let busy_since = lock(&self.0).get(&uid).map(|queue| Arc::clone(&queue.busy_since));
        busy_since.and_then(|since| *lock(&since)).is_some_and(|since| since.elapsed() > PATIENCE)
    }

    fn start(self: &Arc<Self>, uid: u32, first: Box<dyn Any + Send>) -> Option<Queue> {
        let (things, waiting) = channel();
        let busy_since = Arc::new(Mutex::new(None));
        let (closer, busy) = (Arc::clone(self), Arc::clone(&busy_since));
        let sent = things.send(first);
        let run = move || closer.run(uid, &waiting, &busy);
        let started = thread::Builder::new().name("closer".to_owned()).spawn(run);
        // Without a thread the things are dropped here, with the queue: late is better than never.
        (sent.is_ok() && started.is_ok()).then_some(Queue { things, busy_since })
    }

    fn run(&self, uid: u32, waiting: &Receiver<Box<dyn Any + Send>>, busy_since: &Mutex<Option<Instant>>) {
        loop {
            match waiting.recv_timeout(IDLE) {
                Ok(thing) => {
                    *lock(busy_since) = Some(Instant::now());
                    drop(thing);
                    *lock(busy_since) = None;
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let mut queues = lock(&self.0);
                    // Things are sent under this lock: what is not there now comes to another thread.
                    let Ok(last) = waiting.try_recv() else {
                        queues.remove(&uid);
                        return;
                    };
                    drop(queues);
                    *lock(busy_since) = Some(Instant::now());
                    drop(last);
                    *lock(busy_since) = None;
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is complete before anything could panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// Blocks its dropping until the other end is dropped.
    struct Lingering(Receiver<()>);

    impl Drop for Lingering {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    /// Says that it was dropped.
    struct Told(Sender<()>);

    impl Drop for Told {
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
    fn user_whose_descriptors_block_is_stuck_and_no_other_is() {
        let closer = Arc::new(Closer::default());
        let (release, blocked) = sync_channel(0);
        let (told, closed) = channel();
        closer.close(1, Lingering(blocked));
        closer.close(1, Told(told.clone()));
        closer.close(2, Told(told));
        closed.recv_timeout(DEADLINE).unwrap();
        assert!(closed.try_recv().is_err(), "the first user's second thing waits");
        eventually("it is stuck", || closer.is_stuck(1));
        assert!(!closer.is_stuck(2) && !closer.is_stuck(3));
        drop(release);
        closed.recv_timeout(DEADLINE).unwrap();
        assert!(!closer.is_stuck(1));
        eventually("idle threads end", || lock(&closer.0).is_empty());
    }
}
