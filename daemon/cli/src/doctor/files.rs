//! Checks of the configuration file and of the file of credentials.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use blobd_cli_common::Global;
use blobd_cli_common::local_server::Settings;
use blobd_client::paths::default_config;
use blobd_client::protocol::upkeep::{Check, CheckStatus};
use blobd_store_format::text::quoted;

use crate::ErrorBody;

#[derive(Clone, Copy, Debug)]
struct Status {
    mode: u32,
    owner: u32,
}

impl Status {
    fn of(path: &Path) -> Option<Self> {
        let of = |found: Metadata| Self { mode: found.mode() & 0o7777, owner: found.uid() };
        fs::metadata(path).ok().map(of)
    }
}

pub(super) fn configuration(global: &Global, refusal: Option<&ErrorBody>) -> Check {
    let path = global.paths.config.clone().or_else(default_config);
    let Some(path) = path else {
        return Check::new("configuration", CheckStatus::Ok, "no file: HOME is not set; the defaults apply");
    };
    match refusal {
        None => permissions_of_configuration(&path, Status::of(&path)),
        Some(error) => wrong_configuration(&path, error),
    }
}

fn wrong_configuration(path: &Path, error: &ErrorBody) -> Check {
    let hint = error.hint.clone();
    Check::new("configuration", CheckStatus::Failure, &error.message)
        .because(
            "commands and the daemon refuse to work with a wrong file; the checks below use the defaults",
        )
        .with_hint(hint.unwrap_or_else(|| "correct it; `man blobd.toml` lists all keys".to_owned()))
        .mended_by(format!("\"${{EDITOR:-vi}}\" {}", quoted(&path.to_string_lossy())))
}

fn permissions_of_configuration(path: &Path, status: Option<Status>) -> Check {
    let name = path.display();
    let Some(Status { mode, owner }) = status else {
        return Check::new("configuration", CheckStatus::Ok, format!("{name}: none; the defaults apply"));
    };
    let detail = format!("{name}: mode {mode:04o}, owned by uid {owner}");
    if mode & 0o022 == 0 {
        return Check::new("configuration", CheckStatus::Ok, detail);
    }
    Check::new("configuration", CheckStatus::Warning, format!("{detail}: others may write to it"))
        .because("any of them can choose the registries and the directory that this user's blobd uses")
        .with_hint("remove that permission")
        .mended_by(format!("{}chmod go-w {}", sudo(owner), quoted(&path.to_string_lossy())))
}

pub(super) fn credentials(settings: &dyn Settings) -> Check {
    match settings.credential_file() {
        Ok(file) => permissions_of_credentials(&file, Status::of(&file)),
        Err(_no_home) => Check::new("credentials", CheckStatus::Ok, "no file: HOME is not set"),
    }
}

fn permissions_of_credentials(path: &Path, status: Option<Status>) -> Check {
    let name = path.display();
    let Some(Status { mode, owner }) = status else {
        return Check::new("credentials", CheckStatus::Ok, format!("{name}: none; `blobd login` makes it"));
    };
    let detail = format!("{name}: mode {mode:04o}, owned by uid {owner}");
    if mode & 0o077 == 0 {
        return Check::new("credentials", CheckStatus::Ok, detail);
    }
    Check::new("credentials", CheckStatus::Failure, format!("{detail}: others may use it"))
        .because("others can read the passwords and tokens in it, so blobd does not use them")
        .with_hint("remove that permission, and replace the passwords if somebody may have read them")
        .mended_by(format!("{}chmod 0600 {}", sudo(owner), quoted(&path.to_string_lossy())))
}

/// The start of a command that changes a file of this owner.
fn sudo(owner: u32) -> &'static str {
    if owner == rustix::process::geteuid().as_raw() { "" } else { "sudo " }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::error::ErrorCode;

    use super::*;

    #[test]
    fn files_that_others_may_use_are_reported_with_the_command() {
        let owner = rustix::process::geteuid().as_raw();
        let path = Path::new("/home/ann/my config/credentials.json");
        let check = permissions_of_credentials(path, Some(Status { mode: 0o640, owner }));
        assert_eq!(check.status, CheckStatus::Failure);
        assert_eq!(check.command.unwrap(), "chmod 0600 '/home/ann/my config/credentials.json'");
        let check = permissions_of_configuration(path, Some(Status { mode: 0o664, owner: owner + 1 }));
        assert_eq!(check.status, CheckStatus::Warning);
        assert!(check.command.unwrap().starts_with("sudo chmod go-w "));
        for check in [
            permissions_of_credentials(path, Some(Status { mode: 0o600, owner })),
            permissions_of_credentials(path, None),
            permissions_of_configuration(path, Some(Status { mode: 0o644, owner })),
            permissions_of_configuration(path, None),
        ] {
            assert_eq!((check.status, check.hint), (CheckStatus::Ok, None));
        }
    }

    #[test]
    fn wrong_configuration_is_a_failure_with_its_place() {
        let error = ErrorBody::new(ErrorCode::InvalidRequest, "c.toml:3:1: unknown key \"roots\"");
        let check = wrong_configuration(Path::new("/etc/blobd/c.toml"), &error);
        assert!(check.detail.contains("c.toml:3:1") && check.hint.unwrap().contains("man blobd.toml"));
        assert!(check.command.unwrap().ends_with(" /etc/blobd/c.toml"));
    }
}
