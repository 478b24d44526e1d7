//! Checks which daemon or store the commands of this user reach.

use blobd_cli_common::Global;
use blobd_cli_common::connect::{Connected, client_error, connect_for_checks};
use blobd_cli_common::local_server::Settings;
use blobd_client::protocol::response::Version;
use blobd_client::protocol::upkeep::{Check, CheckStatus};

use crate::{ErrorBody, ErrorCode};

const NAME: &str = "connection";

pub(super) struct Reached {
    pub(super) connected: Option<Connected>,
    pub(super) check: Check,
}

pub(super) fn reach(global: &Global, settings: &dyn Settings) -> Reached {
    let reached = connect_for_checks(global, settings).and_then(|connected| {
        let version = connected.client.version().map_err(client_error)?;
        Ok((connected, version))
    });
    match reached {
        Ok((connected, version)) => {
            let check = served(&version, connected.is_embedded(), connected.has_daemon());
            Reached { connected: Some(connected), check }
        }
        Err(error) => Reached { connected: None, check: not_reached(global, &error) },
    }
}

fn served(version: &Version, is_embedded: bool, has_daemon: bool) -> Check {
    let Version { root, pid, version: theirs, .. } = version;
    if is_embedded {
        return Check::new(NAME, CheckStatus::Ok, format!("no daemon; commands open {root} themselves"));
    }
    let server = if has_daemon { "daemon" } else { "command" };
    let detail = format!("{server} {theirs}, process {pid}, serves {root}");
    let ours = env!("CARGO_PKG_VERSION");
    if theirs == ours {
        return Check::new(NAME, CheckStatus::Ok, detail);
    }
    Check::new(NAME, CheckStatus::Note, format!("{detail}; this command is version {ours}"))
        .because("what only the newer one supports does not work")
        .with_hint("restart the daemon after an update; programs keep what they have mapped")
        .mended_by("sudo systemctl restart blobd")
}

fn not_reached(global: &Global, error: &ErrorBody) -> Check {
    if error.code == ErrorCode::NotFound {
        return Check::new(NAME, CheckStatus::Note, &error.message)
            .because("there is nothing to check yet")
            .with_hint("the first `blobd pull` or `blobd import` creates the store")
            .mended_by("blobd pull smollm:135m");
    }
    let check = failed(NAME, error);
    if global.paths.socket.is_none() || !global.paths.socket_is_from_environment {
        return check;
    }
    check
        .with_hint("start the daemon of this socket, or unset BLOBD_SOCKET to use the default ones")
        .mended_by("unset BLOBD_SOCKET")
}

pub(super) fn failed(name: &str, error: &ErrorBody) -> Check {
    let hint = error.hint.clone();
    Check::new(name, CheckStatus::Failure, &error.message)
        .because("every command fails in the same way, and the store could not be checked")
        .with_hint(
            hint.unwrap_or_else(|| "correct what the message names, and run `blobd doctor` again".to_owned()),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(version: &str) -> Version {
        Version { version: version.to_owned(), protocol: 1, root: "/srv/m".to_owned(), pid: 7 }
    }

    #[test]
    fn daemon_of_another_version_is_noted() {
        let check = served(&version("0.0.0"), false, true);
        assert_eq!(check.status, CheckStatus::Note);
        assert!(check.detail.contains("daemon 0.0.0, process 7, serves /srv/m; this command is"));
        let same = version(env!("CARGO_PKG_VERSION"));
        assert_eq!(served(&same, false, true).status, CheckStatus::Ok);
        assert!(served(&same, true, false).detail.contains("no daemon"));
    }

    #[test]
    fn absent_store_is_noted_and_another_failure_fails() {
        let global = Global::default();
        let absent = ErrorBody::new(ErrorCode::NotFound, "/srv/m: contains no store");
        assert_eq!(not_reached(&global, &absent).status, CheckStatus::Note);
        let denied = ErrorBody::new(ErrorCode::Denied, "/run/blobd.sock: denied").with_hint("join the group");
        let check = not_reached(&global, &denied);
        assert_eq!((check.status, check.hint.as_deref()), (CheckStatus::Failure, Some("join the group")));
    }
}
