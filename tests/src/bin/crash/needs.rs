//! What the program needs of the machine, and what is missing.

use std::env;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Set in the process that has a mount namespace of its own.
const PRIVATE: &str = "BLOBD_CRASH_PRIVATE";

/// Why nothing can be mounted; none if it can.
///
/// Mounts are made in a mount namespace of this program's own, so the program starts itself anew
/// in one and does not come back from here. Then they go with the last process in it, and their
/// loop devices with them, even if this one is killed.
pub(crate) fn mounts() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("mounting takes root".to_owned());
    }
    let missing = |device: &&&str| !Path::new(device).exists();
    if let Some(device) = ["/dev/loop-control", "/dev/fuse"].iter().find(missing) {
        return Some(format!("{device} is not there"));
    }
    if env::var_os(PRIVATE).is_some() {
        return None;
    }
    if let Some(lack) = program("unshare", "util-linux").or_else(|| program("mount", "mount")) {
        return Some(lack);
    }
    if !Command::new("unshare").args(["--mount", "true"]).output().is_ok_and(|run| run.status.success()) {
        return Some("a mount namespace of its own is not allowed here".to_owned());
    }
    let own = env::current_exe().map_err(|error| error.to_string());
    let restart = |own: PathBuf| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--"]).arg(own).args(env::args_os().skip(1)).env(PRIVATE, "1");
        command.exec().to_string()
    };
    Some(own.map_or_else(|error| error, restart))
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
