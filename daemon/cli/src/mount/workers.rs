//! Threads for requests to the daemon, so that the threads which serve the kernel do not wait for it.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread;

use tracing_mutex::stdsync::Mutex;

/// Opening a model takes milliseconds; more threads would only wait for the daemon's disk.
const THREADS: usize = 4;

type Work = Box<dyn FnOnce() + Send>;

/// The threads end when this is dropped.
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

    /// Runs the closure on the next free thread.
    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) {
        // Cannot fail: the threads live as long as the sender.
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
