//! A mount namespace of the program's own: what it mounts is seen by nobody else.

use std::env;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why nothing can be mounted; none if it can. `devices` must be there.
///
/// The program starts itself anew in a mount namespace of its own, with `marker` in its environment, and
/// does not come back from here. So its mounts end with the last of its processes, even if this one is
/// killed.
#[must_use]
pub fn enter(marker: &str, devices: &[&str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("mounting takes root".to_owned());
    }
    if let Some(device) = devices.iter().find(|device| !Path::new(device).exists()) {
        return Some(format!("{device} is not there"));
    }
    if env::var_os(marker).is_some() {
        return None;
    }
    match Command::new("unshare").args(["--mount", "true"]).output() {
        Err(error) => return Some(format!("unshare: {error}; Debian has it in util-linux")),
        Ok(run) if !run.status.success() => {
            return Some("a mount namespace of its own is not allowed here".to_owned());
        }
        Ok(_) => {}
    }
    let restart = |own: PathBuf| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--"]).arg(own).args(env::args_os().skip(1)).env(marker, "1");
        command.exec().to_string()
    };
    Some(env::current_exe().map_or_else(|error| error.to_string(), restart))
}
