//! What the program needs of the machine, and what is missing.

use std::env;
use std::path::PathBuf;

use blobd_tests::mount_namespace;

/// Set in the process that has a mount namespace of its own.
const PRIVATE: &str = "BLOBD_CRASH_PRIVATE";

/// Why nothing can be mounted; none if it can.
///
/// Mounts are made in a mount namespace of this program's own, so the program starts itself anew
/// in one and does not come back from here. Then they go with the last process in it, and their
/// loop devices with them, even if this one is killed.
pub(crate) fn mounts() -> Option<String> {
    mount_namespace::enter(PRIVATE, &["/dev/loop-control", "/dev/fuse"]).or_else(|| program("mount", "mount"))
}

/// Why a program cannot be run; none if it can.
pub(crate) fn program(name: &str, debian_package: &str) -> Option<String> {
    (!path(name).is_file()).then(|| format!("no {name} here; Debian has it in {debian_package}"))
}

/// Where a program is; just its name if it is nowhere. Root's programs are not always in `PATH`.
pub(crate) fn path(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file()).unwrap_or_else(|| name.into())
}
