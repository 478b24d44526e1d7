//! `blobd __suggest`, which the completions of shells run: names for the word that is being typed.
//!
//! A running daemon is asked, or the store's directory is read. Nothing is opened, created or started, no error is
//! shown, and after a moment the shell gets no names instead of waiting.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobd_cli_common::Global;
use blobd_cli_common::connect::{is_own, load_settings};
use blobd_cli_common::local_server::StoredNames;
use blobd_cli_common::output::printable;
use blobd_cli_common::system_service::within;
use blobd_client::paths::{GivenPaths, SYSTEM_ROOT, default_root};
use blobd_client::sockets::user_sockets;
use clap::{Args, ValueEnum};

use crate::Client;

/// The name of the command, which users do not type.
pub(super) const COMMAND: &str = "__suggest";

/// Print names for the word that is being typed
#[derive(Clone, Debug, Args)]
pub(super) struct Params {
    /// What is expected at this place
    #[arg(required = true, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// The command line so far, for its options --root, --socket and --config
    #[arg(last = true)]
    words: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Kind {
    Models,
    /// Models in the trash.
    Trash,
    /// Unfinished downloads.
    Downloads,
    /// Processes that have models open.
    Processes,
    /// Commands of blobd.
    Commands,
}

impl Kind {
    /// The argument of this command that stands for it.
    pub(super) fn word(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Longer than any daemon of this machine needs, and short enough for somebody who waits for a word.
const TIME_LIMIT: Duration = Duration::from_millis(1500);

/// Returns one name per line, and none after a failure: a shell could not show it.
pub(super) fn names(global: &Global, params: &Params) -> String {
    let (global, params) = (global.clone(), params.clone());
    let search = move || {
        let global = with_typed_options(global, &params.words);
        params.kinds.iter().flat_map(|kind| found(&global, *kind)).collect::<BTreeSet<_>>()
    };
    let names = within(TIME_LIMIT, search).unwrap_or_default();
    names.iter().map(|name| printable(name) + "\n").collect()
}

/// The options on the line that is being typed come before those of the environment.
fn with_typed_options(global: Global, words: &[OsString]) -> Global {
    let value = |name: &str| {
        let equals = format!("{name}=");
        words.iter().enumerate().find_map(|(place, word)| {
            let text = word.to_str()?;
            if text != name {
                return text.strip_prefix(&equals).map(PathBuf::from);
            }
            // Bash makes the sign a word of its own.
            words.iter().skip(place + 1).find(|word| *word != "=").map(PathBuf::from)
        })
    };
    let paths = GivenPaths {
        root: value("--root").or(global.paths.root),
        socket: value("--socket").or(global.paths.socket),
        config: value("--config").or(global.paths.config),
        ..global.paths
    };
    Global { paths, ..global }
}

fn found(global: &Global, kind: Kind) -> Vec<String> {
    if kind == Kind::Commands {
        let blobd = crate::command();
        let visible = blobd.get_subcommands().filter(|command| !command.is_hide_set());
        return visible.map(|command| command.get_name().to_owned()).collect();
    }
    match name_source(global) {
        None => Vec::new(),
        Some(NameSource::Daemon(client)) => served(&client, kind).unwrap_or_default(),
        Some(NameSource::Store(root)) => {
            let lower = if kind == Kind::Models { lower_stores(global) } else { Vec::new() };
            let roots = std::iter::once(root).chain(lower);
            roots.flat_map(|root| stored(global, &root, kind)).collect()
        }
    }
}

fn lower_stores(global: &Global) -> Vec<PathBuf> {
    load_settings(global).map(|settings| settings.lower_stores()).unwrap_or_default()
}

enum NameSource {
    Daemon(Client),
    Store(PathBuf),
}

impl NameSource {
    fn is_of(&self, root: &Path) -> bool {
        let canonical = |path: &Path| path.canonicalize().ok();
        match self {
            Self::Daemon(client) => {
                client.version().is_ok_and(|version| canonical(Path::new(&version.root)) == canonical(root))
            }
            Self::Store(own) => own == root,
        }
    }
}

/// The place that all commands use, except that no store is opened.
fn name_source(global: &Global) -> Option<NameSource> {
    let daemon = |socket: &Path| Client::connect(socket).ok().map(NameSource::Daemon);
    match (&global.paths.root, &global.paths.socket) {
        // A daemon of another store is refused by all commands.
        (Some(root), Some(socket)) => return daemon(socket).filter(|served| served.is_of(root)),
        (None, Some(socket)) => return daemon(socket),
        (Some(root), None) => return Some(NameSource::Store(root.clone())),
        (None, None) => {}
    }
    let settings = load_settings(global).ok()?;
    let root = settings.root().map(Path::to_path_buf);
    if let Some(socket) = settings.socket() {
        let own = || root.clone().or_else(|| default_root().ok().filter(|_root| is_own(socket)));
        return daemon(socket).or_else(|| own().map(NameSource::Store));
    }
    if let Some(root) = root {
        return Some(NameSource::Store(root));
    }
    match Client::connect_to_system() {
        Ok(Some(client)) => return Some(NameSource::Daemon(client)),
        Ok(None) => {}
        // Commands open the system's own store then, and no other.
        Err(_) => {
            return default_root().ok().filter(|root| root == Path::new(SYSTEM_ROOT)).map(NameSource::Store);
        }
    }
    let served = user_sockets().iter().find_map(|socket| daemon(socket));
    served.or_else(|| default_root().ok().map(NameSource::Store))
}

fn served(client: &Client, kind: Kind) -> Option<Vec<String>> {
    Some(match kind {
        Kind::Models => client.models().ok()?.models.into_iter().map(|model| model.name).collect(),
        Kind::Trash => client.trash().ok()?.models.into_iter().map(|model| model.name).collect(),
        Kind::Downloads => {
            let downloads = client.unfinished_downloads().ok()?.downloads;
            downloads.into_iter().filter_map(|download| download.name).collect()
        }
        Kind::Processes => {
            let sessions = client.sessions().ok()?.sessions;
            sessions.into_iter().map(|session| session.pid.to_string()).collect()
        }
        Kind::Commands => Vec::new(),
    })
}

/// Reads the store's directory. Only a process that has the store open knows which processes use its models.
fn stored(global: &Global, root: &Path, kind: Kind) -> Vec<String> {
    let names = |kind| (global.server.stored_names)(root, kind);
    match kind {
        Kind::Models => names(StoredNames::Models),
        Kind::Trash => names(StoredNames::Trash),
        Kind::Downloads => names(StoredNames::Downloads),
        Kind::Processes => (global.server.client_of_holder)(root)
            .and_then(|client| served(&client, kind))
            .unwrap_or_default(),
        Kind::Commands => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn global(root: &Path) -> Global {
        let paths = GivenPaths { root: Some(root.to_owned()), ..GivenPaths::default() };
        Global { paths, ..Global::default() }
    }

    #[test]
    fn options_on_the_typed_line_say_where_the_names_are() {
        let typed = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            with_typed_options(global(Path::new("/a")), &words).paths.root
        };
        assert_eq!(typed("blobd rm"), Some(PathBuf::from("/a")));
        for line in ["blobd --root /b rm", "blobd rm --root=/b", "blobd --root = /b rm"] {
            assert_eq!(typed(line), Some(PathBuf::from("/b")), "{line}");
        }
    }

    #[test]
    fn names_of_a_store_without_a_daemon_are_read_from_its_directory() {
        let global = global(Path::new("/absent"));
        assert_eq!(found(&global, Kind::Trash), ["Trash"]);
        assert_eq!(found(&global, Kind::Downloads), ["Downloads"]);
        assert_eq!(found(&global, Kind::Processes), [""; 0], "no process has it open");
    }
}
