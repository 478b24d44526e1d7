//! Threads for what waits for the daemon, so that those which serve the kernel never do.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Opening a model takes milliseconds; more at a time wait for the daemon's disk.
const THREADS: usize = 4;

type Work = Box<dyn FnOnce() + Send>;

/// The threads, which end with it.
#[derive(Debug)]
pub(super) struct Workers(Sender<Work>);

impl Workers {
    pub(super) fn start() -> io::Result<Self> {
        let (sender, waiting) = channel();
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..THREADS {
            let waiting = Arc::clone(&waiting);
            thread::Builder::new().name("mount-open".to_owned()).spawn(move || work(&waiting))?;
        }
        Ok(Self(sender))
    }

    /// Has it done as soon as one of them has time.
    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) {
        // They live as long as the sender.
        let _ = self.0.send(Box::new(work));
    }
}

fn work(waiting: &Mutex<Receiver<Work>>) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(next) = next else { return };
        next();
    }
}
