//! Connects a command to the running daemon, or to a server in the command's own process.
//!
//! Without a daemon, the command opens the store and runs the daemon's server code on a socket pair, so
//! that every command has one code path. If another command has the store open, that one serves it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_client::error::{ClientError, ModelError};
use blobd_client::paths::{SYSTEM_ROOT, default_root};
use blobd_client::sockets::user_sockets;
use serde::Serialize;

use crate::local_server::{OpenedStore, Settings, StoreAccess};
use crate::output::{print_json, print_message, print_text, printable};
use crate::{Client, ErrorBody, ErrorCode, Global, Reference, system_service};

/// A connection to the store's server.
#[derive(Debug)]
pub struct Connected {
    /// Sends requests over it.
    pub client: Client,
    /// Set without a daemon.
    access: Option<Box<dyn StoreAccess>>,
}

/// Connects to the socket given on the command line, else opens the store given there (or connects to
/// the daemon that has it), else tries the configured ones, the default sockets and the default store. A user's own
/// default store is used only on a machine without a daemon for all users.
///
/// A store that `--root` names must exist: the path may be mistyped.
pub fn connect(global: &Global) -> Result<Connected, ErrorBody> {
    let is_named = global.paths.root.is_some() && !global.paths.root_is_from_environment;
    connect_by(
        global,
        &*load_settings(global)?,
        if is_named { WhenAbsent::Refuse } else { WhenAbsent::Create },
    )
}

/// As [`connect`], but for a command that adds models: creates a missing store.
pub fn connect_or_create(global: &Global) -> Result<Connected, ErrorBody> {
    connect_by(global, &*load_settings(global)?, WhenAbsent::Create)
}

/// As [`connect`], but creates nothing, wherever the store would be.
pub fn connect_for_checks(global: &Global, settings: &dyn Settings) -> Result<Connected, ErrorBody> {
    connect_by(global, settings, WhenAbsent::Refuse)
}

/// As [`connect`], but returns `None` if there is no store yet: for a command that only says what it would add to one.
pub fn connect_if_stored(global: &Global) -> Result<Option<Connected>, ErrorBody> {
    match connect_for_checks(global, &*load_settings(global)?) {
        Ok(connected) => Ok(Some(connected)),
        Err(error) if error.code == ErrorCode::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WhenAbsent {
    Create,
    Refuse,
}

fn connect_by(global: &Global, settings: &dyn Settings, absent: WhenAbsent) -> Result<Connected, ErrorBody> {
    match (&global.paths.root, &global.paths.socket) {
        (Some(root), Some(socket)) => return connect_to_store(root, socket),
        (Some(root), None) => return embedded(global, root, settings, absent),
        (None, Some(socket)) => return connect_to(socket).map_err(client_error),
        (None, None) => {}
    }
    if let Some(socket) = settings.socket() {
        match connect_to(socket) {
            // Without its configured daemon the command opens the store itself, but not another one than that daemon has.
            Err(ClientError::NotRunning { .. }) if settings.root().is_some() || is_own(socket) => {}
            connected => return connected.map_err(client_error),
        }
    }
    match (settings.root(), settings.socket()) {
        (Some(root), _) => embedded(global, root, settings, absent),
        (None, Some(_own)) => embedded(global, &default_root()?, settings, absent),
        (None, None) => connect_to_default(global, settings, absent),
    }
}

fn connect_to_default(
    global: &Global,
    settings: &dyn Settings,
    absent: WhenAbsent,
) -> Result<Connected, ErrorBody> {
    match Client::connect_to_system() {
        Ok(Some(client)) => return Ok(Connected { client, access: None }),
        Ok(None) => {}
        Err(error) => return without_system_daemon(global, settings, error),
    }
    match user_sockets().iter().find_map(|socket| connect_to(socket).ok()) {
        Some(connected) => Ok(connected),
        None => embedded(global, &default_root()?, settings, absent),
    }
}

/// For a system daemon that does not answer, or refuses this user. Users whose default is the system's store, such as
/// root, open that store. Others would get a store without the models that they know, and fill it with copies.
fn without_system_daemon(
    global: &Global,
    settings: &dyn Settings,
    error: ClientError,
) -> Result<Connected, ErrorBody> {
    const OWN_STORE: &str =
        "for a store of your own, give --root, or set root in your configuration or BLOBD_ROOT";
    let is_silent = matches!(error, ClientError::Unavailable { .. });
    let refusal = client_error(error);
    let root = default_root().ok().filter(|root| root == Path::new(SYSTEM_ROOT) && is_silent);
    if let Some(root) = root.filter(|root| (global.server.find_store)(root).is_ok()) {
        if !global.hides_reports() {
            print_message(&format!("blobd: {}; using {}\n", printable(&refusal.message), root.display()));
        }
        return embedded(global, &root, settings, WhenAbsent::Refuse);
    }
    let hint =
        refusal.hint.as_ref().map_or_else(|| OWN_STORE.to_owned(), |hint| format!("{hint}; {OWN_STORE}"));
    Err(refusal.with_hint(hint))
}

/// Whether the directory of a socket is this user's, so that nobody else's daemon listens there.
pub fn is_own(socket: &Path) -> bool {
    let uid = rustix::process::geteuid();
    let nearest = socket.ancestors().skip(1).find_map(|directory| fs::metadata(directory).ok());
    uid.is_root() || nearest.is_some_and(|directory| directory.uid() == uid.as_raw())
}

/// Sends one request and prints its result.
pub fn show<T: Serialize>(
    global: &Global,
    request: impl FnOnce(&Client) -> Result<T, ClientError>,
    render: impl FnOnce(&T) -> String,
) -> Result<(), ErrorBody> {
    let result = request(&connect(global)?.client).map_err(client_error)?;
    print_result(global, &result, render)
}

/// Prints on standard error which model is used, if the user has named it by its ID or without its tag.
pub fn note_name(global: &Global, asked: &Reference, stored: &str) {
    let is_other = !stored.parse().is_ok_and(|stored: Reference| stored.same_model(asked));
    if is_other && !global.hides_reports() {
        print_message(&format!("blobd: {} is {}\n", as_typed(asked), printable(stored)));
    }
}

/// The reference without a tag that the user has left out.
pub fn as_typed(reference: &Reference) -> String {
    let short = reference.short();
    let tag = format!(":{}", reference.tag());
    if reference.omits_tag() { short.strip_suffix(&tag).unwrap_or(&short).to_owned() } else { short }
}

/// Sends one request and prints what was done, unless `--quiet` is given.
pub fn report<T: Serialize>(
    global: &Global,
    request: impl FnOnce(&Client) -> Result<T, ClientError>,
    render: impl FnOnce(&T) -> String,
) -> Result<(), ErrorBody> {
    let done = request(&connect(global)?.client).map_err(client_error)?;
    print_report(global, &done, render)
}

/// Prints what was done, as JSON or as text; with `--quiet` no text.
pub fn print_report<T: Serialize>(
    global: &Global,
    done: &T,
    render: impl FnOnce(&T) -> String,
) -> Result<(), ErrorBody> {
    if global.quiet && !global.json { Ok(()) } else { print_result(global, done, render) }
}

/// Prints what the command was asked for: as JSON with `--json`, otherwise as `render` says.
pub fn print_result<T: Serialize>(
    global: &Global,
    result: &T,
    render: impl FnOnce(&T) -> String,
) -> Result<(), ErrorBody> {
    if global.json { print_json(result) } else { print_text(&render(result)) }
}

impl Connected {
    /// Whether the server runs in this process, so that its settings end with this command.
    pub fn is_embedded(&self) -> bool {
        self.access.as_ref().is_some_and(|access| access.is_served_here())
    }

    /// Refuses a command that only a daemon can serve, if there is none.
    pub fn require_daemon(&self, verb: &str) -> Result<(), ErrorBody> {
        if self.has_daemon() {
            return Ok(());
        }
        let error = ErrorBody::new(ErrorCode::NotFound, format!("{verb}: no daemon is running"));
        Err(error.with_hint("start it with `blobd serve` or `systemctl start blobd`"))
    }

    /// Whether a daemon serves the store, and not a command, which ends when its work is done.
    pub const fn has_daemon(&self) -> bool {
        self.access.is_none()
    }
}

/// The settings of this machine's daemon. Fails if its configuration file cannot be read or is wrong.
pub fn load_settings(global: &Global) -> Result<Arc<dyn Settings>, ErrorBody> {
    (global.server.settings)(&global.paths)
}

/// The error of a request, with the next step if the daemon cannot be reached.
pub fn client_error(error: ClientError) -> ErrorBody {
    let code = error.code();
    match error {
        ClientError::Daemon(body) => body,
        ClientError::Connect { socket, reason, hint: Some(hint) } => {
            ErrorBody::new(code, format!("{socket}: cannot connect: {reason}")).with_hint(hint)
        }
        ClientError::Unavailable { socket, evidence } => system_service::unavailable(&socket, &evidence),
        ClientError::NotRunning { socket } => {
            ErrorBody::new(code, format!("{socket}: nothing listens there")).with_hint(NOT_RUNNING_HINT)
        }
        error => ErrorBody::new(code, without_program(&error.to_string())),
    }
}

/// The error of an open model.
pub fn model_error(error: ModelError) -> ErrorBody {
    ErrorBody::new(error.code(), error)
}

/// The command line prints the name of the program in front of each message.
fn without_program(message: &str) -> String {
    match message.strip_prefix("blobd daemon: ") {
        Some(rest) => format!("daemon: {rest}"),
        None => message.strip_prefix("blobd: ").unwrap_or(message).to_owned(),
    }
}

const NOT_RUNNING_HINT: &str =
    "start the daemon there with `blobd serve`, or name another socket with --socket or BLOBD_SOCKET";

/// Returns `NotFound` if nothing listens on a socket that the user has named: for commands that only ask the daemon, a
/// missing daemon has another exit code.
pub fn refuse_silent_socket(global: &Global) -> Result<(), ErrorBody> {
    let Some(socket) = &global.paths.socket else { return Ok(()) };
    match Client::connect(socket) {
        Err(error @ ClientError::NotRunning { .. }) => {
            Err(ErrorBody { code: ErrorCode::NotFound, ..client_error(error) })
        }
        _ => Ok(()),
    }
}

fn connect_to(socket: &Path) -> Result<Connected, ClientError> {
    let client = Client::connect(socket)?;
    tracing::debug!("connected to the daemon at {}", socket.display());
    Ok(Connected { client, access: None })
}

/// Refuses a socket whose daemon serves another store than `root`: `BLOBD_SOCKET` may still be set, and
/// a command such as `rm` must not change the wrong store.
fn connect_to_store(root: &Path, socket: &Path) -> Result<Connected, ErrorBody> {
    let connected = connect_to(socket).map_err(client_error)?;
    let served = PathBuf::from(connected.client.version().map_err(client_error)?.root);
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_absent| path.to_path_buf());
    if canonical(&served) == canonical(root) {
        return Ok(connected);
    }
    let message = format!("{}: serves {}, not {}", socket.display(), served.display(), root.display());
    Err(super::usage(message).with_hint("leave out --root or --socket (BLOBD_ROOT, BLOBD_SOCKET)"))
}

/// Uses the store through this process, or through the process that has it open.
fn embedded(
    global: &Global,
    root: &Path,
    settings: &dyn Settings,
    absent: WhenAbsent,
) -> Result<Connected, ErrorBody> {
    // Models of lower stores can be used without a store of one's own, which is then created.
    if absent == WhenAbsent::Refuse && settings.lower_stores().is_empty() {
        (global.server.find_store)(root)?;
    }
    match settings.open_store(root)? {
        OpenedStore::ByDaemon(socket) => connect_to(&socket).map_err(client_error),
        OpenedStore::ByCommand(access) => Ok(Connected { client: access.client(), access: Some(access) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_do_not_repeat_the_name_of_the_program() {
        let message = |error| client_error(error).message;
        assert!(message(ClientError::Closed).starts_with("daemon: closed the connection"));
        assert!(message(ClientError::ServerEnded).starts_with("the process that had the store open"));
        let silent = client_error(ClientError::NotRunning { socket: "/run/x.sock".to_owned() });
        assert_eq!(silent.message, "/run/x.sock: nothing listens there");
        assert!(silent.hint.unwrap().contains("`blobd serve`"));
    }
}
