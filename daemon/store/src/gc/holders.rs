//! Names the programs that hold a blob, as found in `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::Store;

const OWN_VERIFICATION: &str = "blobd's own verification";

/// For each of `digests`, describes the processes that have the blob open or mapped. Only root sees the
/// processes of other users, so some may be missing.
#[expect(clippy::disallowed_methods, reason = "processes, not the store")]
pub fn holders(store: &Store, digests: &BTreeSet<Digest>) -> BTreeMap<Digest, BTreeSet<String>> {
    let mut found: BTreeMap<Digest, BTreeSet<String>> = BTreeMap::new();
    if digests.is_empty() {
        return found;
    }
    let Some(blobs) = store.blobs_location() else { return found };
    for digest in digests.iter().filter(|digest| store.is_reading(**digest)) {
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
}
