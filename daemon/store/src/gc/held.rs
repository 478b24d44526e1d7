//! Whether a process has a blob open or mapped.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use rustix::io::Errno;

use crate::{Store, StoreError};

/// Whether a process has the blob open or mapped, as far as the kernel tells; also this one, to
/// verify it. When in doubt it is: what is kept for nothing can still be collected later.
pub(super) fn is_held(store: &Store, digest: Digest) -> bool {
    // Unlinked while it is read, its bytes would be free only when the reader lets go.
    store.is_reading(digest) || is_in_use(store, digest)
}

/// The same, but for this process's own verification, which lets go of what is to be deleted.
pub(super) fn is_held_by_a_program(store: &Store, digest: Digest) -> bool {
    // The second look is for a reading that began between the first and the kernel's answer.
    !store.is_reading(digest) && is_in_use(store, digest) && !store.is_reading(digest)
}

fn is_in_use(store: &Store, digest: Digest) -> bool {
    let _alone = Look::at(digest);
    let look = || match store.open_blob(digest, 0) {
        Ok(file) => crate::sys::is_in_use(&file).unwrap_or_else(|error| !has_no_answer(&error)),
        Err(StoreError::Io { source, .. }) => !has_no_answer(&source),
        // There is none, or something else has its name.
        Err(_) => false,
    };
    // A program that this process is starting has a copy of the last look's descriptor for a moment.
    look() && {
        thread::sleep(Duration::from_millis(1));
        look()
    }
}

/// A look at who holds a blob, until it is dropped. To the kernel two who look at once have the blob open,
/// and each would see the other.
struct Look(Digest);

static LOOKED_AT: Mutex<BTreeSet<Digest>> = Mutex::new(BTreeSet::new());
static LOOK_OVER: Condvar = Condvar::new();

impl Look {
    fn at(digest: Digest) -> Self {
        let looked_at = LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = LOOK_OVER.wait_while(looked_at, |looked_at| looked_at.contains(&digest));
        waited.unwrap_or_else(PoisonError::into_inner).insert(digest);
        Self(digest)
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        LOOK_OVER.notify_all();
    }
}

/// Whether the kernel will never say who holds the blob: it is gone, it is another user's, or the
/// file system has no leases. Then the sessions' own leases have to do. Any other failure, such
/// as too many open files, passes.
fn has_no_answer(error: &io::Error) -> bool {
    let never = [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP];
    Errno::from_io_error(error).is_some_and(|errno| never.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_that_passes_does_not_make_a_blob_free() {
        for errno in [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP] {
            assert!(has_no_answer(&errno.into()), "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::NOLCK, Errno::AGAIN] {
            assert!(!has_no_answer(&errno.into()), "{errno}");
        }
    }
}
