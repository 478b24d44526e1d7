//! Which files and stores programs use at this moment.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blobd_cli_common::output::printable;

use crate::local_folder::Inode;
use crate::other_stores::Removal;

/// The files that other programs than blobd have open or mapped, each with one program. Of the programs of other users only
/// root sees them. A daemon can still read a file for a command that was killed, and only reads.
pub(super) fn open_files() -> BTreeMap<Inode, String> {
    let mut used = BTreeMap::new();
    let executable =
        |process: &Path| fs::metadata(process.join("exe")).map(|data| (data.dev(), data.ino())).ok();
    let own = executable(Path::new("/proc/self"));
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_string_lossy().into_owned();
        let is_process = pid.bytes().all(|byte| byte.is_ascii_digit());
        if !is_process || executable(&process.path()).is_some_and(|found| Some(found) == own) {
            continue;
        }
        // A map keeps its file in `map_files`, also when the descriptor is closed.
        let links = ["fd", "map_files"].map(|folder| fs::read_dir(process.path().join(folder)));
        for link in links.into_iter().flatten().flatten().flatten() {
            if let Ok(data) = fs::metadata(link.path())
                && data.is_file()
            {
                used.entry((data.dev(), data.ino())).or_insert_with(|| program(&process.path(), &pid));
            }
        }
    }
    used
}

fn program(process: &Path, pid: &str) -> String {
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    format!("{} (process {pid})", printable(name.trim_end()))
}

/// A running process of the program that uses the store in `folder`, or may use it.
pub(super) fn user_of_store(removal: &Removal, folder: &Path) -> Option<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.map(|process| process.path()).find_map(|process| {
        let name = fs::read_to_string(process.join("comm")).ok()?;
        let is_user = removal.processes.contains(&name.trim_end()) && may_use(&process, removal, folder);
        let pid = process.file_name()?.to_string_lossy().into_owned();
        is_user.then(|| program(&process, &pid))
    })
}

/// Only root sees the environment of other users' processes.
fn may_use(process: &Path, removal: &Removal, folder: &Path) -> bool {
    let Ok(environment) = fs::read(process.join("environ")) else { return true };
    let variable = |name: &str| {
        let mut variables = environment.split(|byte| *byte == 0);
        let value = variables.find_map(|text| text.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        Some(PathBuf::from(OsString::from_vec(value.to_owned())))
            .filter(|value| !value.as_os_str().is_empty())
    };
    let store = (removal.store_of)(&variable);
    store.is_none_or(|store| fs::canonicalize(store).is_ok_and(|store| store == folder))
}
