//! The program's requirements on the machine.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use blobd_tests::{mount_namespace, programs};

use crate::DAEMON_UID;

/// Set in the process that runs in a private mount namespace.
const PRIVATE: &str = "BLOBD_ABUSE_PRIVATE";

/// The reason why the program cannot run here; `None` if it can.
pub(crate) fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("acting as three users takes root".to_owned());
    }
    if let Err(error) = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status() {
        return Some(format!("setpriv: {error}; Debian has it in util-linux"));
    }
    let own = std::env::current_exe().unwrap_or_default();
    [programs::blobd(), &own].into_iter().find_map(|program| {
        // Neither program has this option: both print their usage and end.
        let run = Command::new(program).arg("--help").uid(DAEMON_UID).gid(DAEMON_UID).output();
        let error = run.err()?;
        Some(format!("{}: uid {DAEMON_UID} cannot run it: {error}", program.display()))
    })
}

/// Enters a private mount namespace; the reason if that is not possible.
pub(crate) fn private_mounts() -> Option<String> {
    mount_namespace::enter(PRIVATE, &["/dev/fuse"])
}
