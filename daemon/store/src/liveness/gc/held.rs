//! Which processes have a blob open or mapped: whether there is one, and their names as found in `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::PoisonError;
use std::time::Duration;
use std::{fs, io, thread};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use rustix::io::Errno;
use tracing_mutex::stdsync::{Condvar, Mutex};

use crate::StoreError;
use crate::liveness::Liveness;

/// Whether any process, this one included, has the blob open or mapped; in doubt true: it can be collected later.
pub(super) fn is_held(store: &Liveness, digest: Digest) -> bool {
    // Unlinking it while this process reads it would free nothing yet.
    store.content.is_reading(digest) || is_in_use(store, digest)
}

/// Like `is_held`, without this process's own verification, which releases a blob that is to be deleted.
pub(super) fn is_held_by_a_program(store: &Liveness, digest: Digest) -> bool {
    // The second `is_reading` catches a read that began between the first and the kernel's response.
    !store.content.is_reading(digest) && is_in_use(store, digest) && !store.content.is_reading(digest)
}

fn is_in_use(store: &Liveness, digest: Digest) -> bool {
    let _check = Check::begin(digest);
    let check = || match store.content.open_own_blob(digest, 0) {
        Ok(file) => crate::sys::is_in_use(&file).unwrap_or_else(|error| !is_permanent(&error)),
        Err(StoreError::Io { source, .. }) => !is_permanent(&source),
        // There is nothing, or something else has its name.
        Err(_) => false,
    };
    // A program that this process is starting has a copy of the last check's descriptor for a moment.
    check() && {
        thread::sleep(Duration::from_millis(1));
        check()
    }
}

/// A check of one blob opens it, so two at the same time would detect each other: the second waits.
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

/// Whether the kernel can never tell: the blob is gone or another user's, or the file system has no leases. Then only
/// our own leases protect it. Other failures, such as too many open files, are temporary.
fn is_permanent(error: &io::Error) -> bool {
    let never = [Errno::NOENT, Errno::ACCESS, Errno::INVAL, Errno::OPNOTSUPP];
    Errno::from_io_error(error).is_some_and(|errno| never.contains(&errno))
}

const OWN_VERIFICATION: &str = "blobd's own verification";

/// Describes the processes that have these blobs open or mapped. Only root sees those of other users.
#[expect(clippy::disallowed_methods, reason = "processes, not the store")]
pub fn holders(store: &Liveness, digests: &BTreeSet<Digest>) -> BTreeMap<Digest, BTreeSet<String>> {
    let mut found: BTreeMap<Digest, BTreeSet<String>> = BTreeMap::new();
    if digests.is_empty() {
        return found;
    }
    let Some(blobs) = store.content.blobs_location() else { return found };
    for digest in digests.iter().filter(|digest| store.content.is_reading(**digest)) {
        found.entry(*digest).or_default().insert(OWN_VERIFICATION.to_owned());
    }
    let own = std::process::id();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(pid) = pid.filter(|pid| *pid != own) else { continue };
        let held = held_by(&entry.path(), &blobs);
        for digest in held.intersection(digests) {
            found.entry(*digest).or_default().insert(describe(pid, &entry.path()));
        }
    }
    found
}

#[expect(clippy::disallowed_methods, reason = "processes, not the store")]
fn held_by(process: &Path, blobs: &Path) -> BTreeSet<Digest> {
    let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
    let mapped = maps.lines().filter_map(|line| digest_of(line.get(line.find('/')?..)?, blobs));
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let open = descriptors.filter_map(|entry| digest_of(fs::read_link(entry.path()).ok()?.to_str()?, blobs));
    mapped.chain(open).collect()
}

fn digest_of(path: &str, blobs: &Path) -> Option<Digest> {
    let (directory, name) = path.rsplit_once('/')?;
    if Path::new(directory) == blobs { layout::parse_blob_name(name) } else { None }
}

#[expect(clippy::disallowed_methods, reason = "processes, not the store")]
fn describe(pid: u32, process: &Path) -> String {
    let command = fs::read_to_string(process.join("comm")).unwrap_or_default();
    let command: String = command.trim_end().chars().filter(|c| !c.is_control()).collect();
    format!("process {pid} ({command}), which has it open or mapped")
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

    #[test]
    fn own_verification_holds_a_blob_but_is_not_a_program() {
        let (_folder, store, digest) = crate::testing::store_with(b"x");
        let (store, content) = (&store.liveness, &store.content);
        assert!(!is_held(store, digest) && !is_held_by_a_program(store, digest));
        let _open = content.open_own_blob(digest, 0).unwrap();
        assert!(is_held(store, digest) && is_held_by_a_program(store, digest));
        let _read = content.begin_internal_read(digest);
        assert!(is_held(store, digest) && !is_held_by_a_program(store, digest));
    }

    #[test]
    fn only_files_among_the_blobs_count() {
        let digest = Digest::of(b"x");
        let name = layout::blob_name(digest);
        let blobs = Path::new("/my store/blobs");
        assert_eq!(digest_of(&format!("/my store/blobs/{name}"), blobs), Some(digest));
        for path in [
            format!("/store/blobs/{name}"),
            format!("/my store/{name}"),
            name,
            "/store/blobs/x".to_owned(),
            "[heap]".to_owned(),
        ] {
            assert_eq!(digest_of(&path, blobs), None, "{path}");
        }
    }

    #[test]
    fn program_that_has_a_blob_open_is_described() {
        let (_folder, store, digest) = crate::testing::store_with(b"x");
        let blob = store.content.open_blob(digest, 0).unwrap();
        let other = Digest::of(b"other");
        let found = || holders(&store.liveness, &[digest, other].into());
        assert!(found().is_empty(), "this process is not one");
        let mut child = std::process::Command::new("sleep").arg("60").stdin(blob).spawn().unwrap();
        let described = format!("process {} (sleep), which has it open or mapped", child.id());
        let expected = BTreeMap::from([(digest, BTreeSet::from([described]))]);
        // Until it has started, its name is that of this process.
        let begun = std::time::Instant::now();
        while found() != expected && begun.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(5));
        }
        let result = (found(), is_held(&store.liveness, digest));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(result, (expected, true));
        assert!(!is_held(&store.liveness, digest) && found().is_empty());
        let _read = store.content.begin_internal_read(digest);
        assert_eq!(found(), BTreeMap::from([(digest, BTreeSet::from([OWN_VERIFICATION.to_owned()]))]));
        assert!(holders(&store.liveness, &BTreeSet::new()).is_empty());
    }

    #[test]
    fn blob_that_is_not_there_is_not_held() {
        let (_folder, store, digest) = crate::testing::store_with(b"x");
        assert!(!is_held(&store.liveness, Digest::of(b"absent")));
        let path = store.path(layout::blob(digest));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(!is_held(&store.liveness, digest), "something else has its name");
    }
}
