//! Forks: no lock of this library may be held in the child by a thread that exists only in the parent.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};

use crate::files::{self, OpenFile};
use crate::image::{self, Slot};
use crate::paths::{self, Folder};
use crate::streams::{self, Stream};
use crate::sys::pthread_atfork;

/// All locks of this library. Elsewhere no thread holds two of them at once, or holds one while it blocks.
type Locks = (
    MutexGuard<'static, Option<HashMap<Vec<u8>, Slot>>>,
    MutexGuard<'static, Vec<Arc<OpenFile>>>,
    MutexGuard<'static, Vec<Stream>>,
    MutexGuard<'static, Vec<Arc<Folder>>>,
);

thread_local! {
    /// The locks that the forking thread holds during the fork, in the parent and in the child.
    static HELD: RefCell<Option<Locks>> = const { RefCell::new(None) };
}

/// Installs the handlers: from now on a thread that forks takes all locks first.
pub(crate) fn install_handlers() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::Relaxed) {
        // SAFETY: Needed to install the handlers. They stay valid because this library is never unloaded.
        unsafe { pthread_atfork(Some(lock), Some(unlock), Some(unlock)) };
    }
}

extern "C" fn lock() {
    // In a thread that is ending, thread-local storage is gone: it forks without the locks.
    let _thread_ending = HELD.try_with(|held| {
        let files = files::open_files();
        held.replace(Some((image::images(), files, streams::open_streams(), paths::folders())));
    });
}

extern "C" fn unlock() {
    let _thread_ending = HELD.try_with(|held| drop(held.take()));
}
