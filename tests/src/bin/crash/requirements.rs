//! The program's requirements on the machine.

use std::env;
use std::path::PathBuf;

use blobd_tests::mount_namespace;

/// Set in the process that runs in a private mount namespace.
const PRIVATE: &str = "BLOBD_CRASH_PRIVATE";

/// The reason why nothing can be mounted; `None` if it can.
///
/// The program restarts itself in a private mount namespace; then this function does not return. All mounts
/// and their loop devices disappear with the last process in the namespace, even if this one is killed.
pub(crate) fn mounts() -> Option<String> {
    mount_namespace::enter(PRIVATE, &["/dev/loop-control", "/dev/fuse"]).or_else(|| program("mount", "mount"))
}

/// The reason why a program cannot run; `None` if it can.
pub(crate) fn program(name: &str, debian_package: &str) -> Option<String> {
    (!path(name).is_file()).then(|| format!("no {name} here; Debian has it in {debian_package}"))
}

/// The path of a program, or just its name if it is not found. System programs are not always in `PATH`.
pub(crate) fn path(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file()).unwrap_or_else(|| name.into())
}
