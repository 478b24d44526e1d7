//! Detects whether a process has a blob open or mapped.

use std::collections::BTreeSet;
use std::io;
use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

use blobd_store_format::digest::Digest;
use rustix::io::Errno;
use tracing_mutex::stdsync::{Condvar, Mutex};

use crate::{Store, StoreError};

/// Whether any process, this one included, has the blob open or mapped. In doubt the result is true: a blob
/// that was kept can still be collected later.
pub(super) fn is_held(store: &Store, digest: Digest) -> bool {
    // If it were unlinked while this process reads it, its space would only be freed when the reader closes
    // it.
    store.is_reading(digest) || is_in_use(store, digest)
}

/// Like `is_held`, without this process's own verification, which releases a blob that is to be deleted.
pub(super) fn is_held_by_a_program(store: &Store, digest: Digest) -> bool {
    // The second `is_reading` catches a read that began between the first and the kernel's response.
    !store.is_reading(digest) && is_in_use(store, digest) && !store.is_reading(digest)
}

fn is_in_use(store: &Store, digest: Digest) -> bool {
    let _check = Check::begin(digest);
    let check = || match store.open_own_blob(digest, 0) {
        Ok(file) => crate::sys::is_in_use(&file).unwrap_or_else(|error| !is_permanent(&error)),
        Err(StoreError::Io { source, .. }) => !is_permanent(&source),
        // There is no blob, or something else has its name.
        Err(_) => false,
    };
    // A program that this process is starting has a copy of the last check's descriptor for a moment.
    check() && {
        thread::sleep(Duration::from_millis(1));
        check()
    }
}

/// A check of one blob; another check of the same blob waits until it is dropped. To check, a process opens
/// the blob, so two checks at the same time would detect each other.
struct Check(Digest);

static CHECKED: Mutex<BTreeSet<Digest>> = Mutex::new(BTreeSet::new());
static CHECK_ENDED: Condvar = Condvar::new();

impl Check {
    fn begin(digest: Digest) -> Self {
        let checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = CHECK_ENDED.wait_while(checked, |checked| checked.contains(&digest));
        waited.unwrap_or_else(PoisonError::into_inner).insert(digest);
        Self(digest)
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        CHECKED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        CHECK_ENDED.notify_all();
    }
}

/// Whether the kernel can never say who holds the blob: it is gone or another user's, or the file system
/// has no leases. Then only the sessions' own leases protect it. Other failures, such as too many open
/// files, are temporary.
fn is_permanent(error: &io::Error) -> bool {
    let never = [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP];
    Errno::from_io_error(error).is_some_and(|errno| never.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_failure_does_not_make_a_blob_unheld() {
        for errno in [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP] {
            assert!(is_permanent(&errno.into()), "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::NOLCK, Errno::AGAIN] {
            assert!(!is_permanent(&errno.into()), "{errno}");
        }
    }
}
