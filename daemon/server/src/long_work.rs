//! Threads for work that can keep a processor busy for seconds. They have a lower priority, so that short requests get a
//! processor first.
//!
//! A thread that has lowered its priority cannot raise it again without privileges. So each piece of work has a thread of
//! its own instead of one of the runtime.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tracing_mutex::stdsync::{Condvar, Mutex};

use crate::locks::lock;

/// How much lower the priority is (`nice`): if all processors are busy, such a thread gets a third of the time of the
/// others.
pub(crate) const NICENESS: i32 = 5;

#[derive(Clone, Debug, Default)]
pub(crate) struct LongWork(Arc<Running>);

#[derive(Debug, Default)]
struct Running {
    threads: Mutex<usize>,
    all_ended: Condvar,
}

impl LongWork {
    /// Does the work on a thread within the context of the runtime, even if the future is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let (runtime, thread) = (Handle::current(), RunningThread::new(&self.0));
        let (sender, result) = oneshot::channel();
        let run = move || {
            let _until_it_ends = thread;
            let _context = runtime.enter();
            // If this fails, the work takes processors from others, but it is done.
            let _ = rustix::process::nice(NICENESS);
            // The client may have gone.
            let _ = sender.send(work());
        };
        thread::Builder::new().name("long work".to_owned()).spawn(run)?;
        result.await.map_err(|_panicked| io::Error::other("the thread has panicked"))
    }

    /// Waits until all threads have ended, but no longer than `limit`.
    pub(crate) fn wait(&self, limit: Duration) {
        let threads = lock(&self.0.threads);
        let waited = self.0.all_ended.wait_timeout_while(threads, limit, |threads| *threads > 0);
        drop(waited);
    }
}

struct RunningThread(Arc<Running>);

impl RunningThread {
    fn new(running: &Arc<Running>) -> Self {
        *lock(&running.threads) += 1;
        Self(Arc::clone(running))
    }
}

impl Drop for RunningThread {
    fn drop(&mut self) {
        let mut threads = lock(&self.0.threads);
        *threads = threads.saturating_sub(1);
        if *threads == 0 {
            self.0.all_ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn work_runs_at_a_lower_priority_and_other_threads_keep_theirs() {
        let own = || getpriority_process(None).unwrap();
        let (before, work) = (own(), LongWork::default());
        assert_eq!(work.run(own).await.unwrap(), (before + NICENESS).min(19));
        assert_eq!(own(), before);
    }

    #[tokio::test]
    async fn work_can_wait_for_the_runtime() {
        let runtime = Handle::current();
        let work = move || runtime.block_on(async { tokio::spawn(async { 7 }).await.unwrap() });
        assert_eq!(LongWork::default().run(work).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn panic_of_the_work_is_an_error() {
        let error = LongWork::default().run(|| panic!("in a test")).await.unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
    }

    #[tokio::test]
    async fn wait_lasts_until_the_work_has_ended_or_the_limit() {
        let (work, (end, ended)) = (LongWork::default(), std::sync::mpsc::channel::<()>());
        work.wait(Duration::from_secs(60));
        let running = work.clone();
        let task = tokio::spawn(async move { running.run(move || ended.recv()).await });
        while *lock(&work.0.threads) == 0 {
            tokio::task::yield_now().await;
        }
        let start = Instant::now();
        work.wait(Duration::from_millis(10));
        assert!(start.elapsed() >= Duration::from_millis(10));
        assert_eq!(*lock(&work.0.threads), 1);
        end.send(()).unwrap();
        work.wait(Duration::from_secs(60));
        assert_eq!(*lock(&work.0.threads), 0);
        task.await.unwrap().unwrap().unwrap();
    }
}
