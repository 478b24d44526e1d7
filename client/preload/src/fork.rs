//! Forks: a child must not find a lock that a thread of its parent's held.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};

use crate::files::{self, Opened};
use crate::image::{self, Slot};
use crate::streams::{self, Stream};
use crate::sys::pthread_atfork;

/// All locks of this library. None is held while another is taken, nor while something is waited for.
type Locks = (
    MutexGuard<'static, Option<HashMap<Vec<u8>, Slot>>>,
    MutexGuard<'static, Vec<Arc<Opened>>>,
    MutexGuard<'static, Vec<Stream>>,
);

thread_local! {
    /// Held by the thread that forks, in the parent and in the child.
    static HELD: RefCell<Option<Locks>> = const { RefCell::new(None) };
}

/// From now on the thread that forks takes all locks first.
pub(crate) fn prepare() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::Relaxed) {
        // SAFETY: Needed to be told. The functions live as long as this library, which nobody unloads.
        unsafe { pthread_atfork(Some(lock), Some(unlock), Some(unlock)) };
    }
}

extern "C" fn lock() {
    // A thread that is ending has no such place any more; it forks without.
    let _ending = HELD.try_with(|held| {
        held.replace(Some((image::images(), files::all_opened(), streams::all())));
    });
}

extern "C" fn unlock() {
    let _ending = HELD.try_with(|held| drop(held.take()));
}
