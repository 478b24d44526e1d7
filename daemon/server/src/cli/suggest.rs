//! `blobd __suggest`, which the completions of shells run: names for the word that is being typed.
//!
//! A running daemon is asked, or the store's directory is read. Nothing is opened, created or started, no error is
//! shown, and after a moment the shell gets no names instead of waiting.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use blobd_client::client::Client;
use blobd_client::sockets::user_sockets;
use blobd_store::Glance;
use blobd_store_format::reference::Reference;
use blobd_store_format::text::printable;
use clap::{Args, CommandFactory as _, ValueEnum};

use super::connect::{is_own, load_config};
use super::{Cli, Global};
use crate::config::{SYSTEM_ROOT, default_root};
use crate::socket::connect_announced;

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

/// What a word names.
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
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Models => "models",
            Self::Trash => "trash",
            Self::Downloads => "downloads",
            Self::Processes => "processes",
            Self::Commands => "commands",
        }
    }
}

/// Longer than any daemon of this machine needs, and short enough for somebody who waits for a word.
const TIME_LIMIT: Duration = Duration::from_millis(1500);

/// Returns one name per line. There is no failure: a shell has nobody to tell it to.
pub(super) fn names(global: &Global, params: &Params) -> String {
    let (done, result) = channel();
    let (global, params) = (global.clone(), params.clone());
    let search = move || {
        let global = with_typed_options(global, &params.words);
        // The receiver may have given up.
        let _ =
            done.send(params.kinds.iter().flat_map(|kind| found(&global, *kind)).collect::<BTreeSet<_>>());
    };
    // Not joined: it may wait for a daemon that does not respond.
    let names = match thread::Builder::new().name("suggest".to_owned()).spawn(search) {
        Ok(_thread) => result.recv_timeout(TIME_LIMIT).unwrap_or_default(),
        Err(_) => BTreeSet::new(),
    };
    names.iter().map(|name| printable(name) + "\n").collect()
}

/// The options on the line that is being typed come before those of the environment.
fn with_typed_options(global: Global, words: &[OsString]) -> Global {
    let value = |name: &str| {
        let equals = format!("{name}=");
        words.iter().enumerate().find_map(|(place, word)| {
            let text = word.to_str()?;
            match text == name {
                // Bash makes the sign a word of its own.
                true => words.iter().skip(place + 1).find(|word| *word != "=").map(PathBuf::from),
                false => text.strip_prefix(&equals).map(PathBuf::from),
            }
        })
    };
    Global {
        root: value("--root").or(global.root),
        socket: value("--socket").or(global.socket),
        config: value("--config").or(global.config),
        ..global
    }
}

fn found(global: &Global, kind: Kind) -> Vec<String> {
    if kind == Kind::Commands {
        let blobd = Cli::command();
        let visible = blobd.get_subcommands().filter(|command| !command.is_hide_set());
        return visible.map(|command| command.get_name().to_owned()).collect();
    }
    match place(global) {
        None => Vec::new(),
        Some(Place::Daemon(client)) => served(&client, kind).unwrap_or_default(),
        Some(Place::Store(root)) => {
            let lower = if kind == Kind::Models { lower_stores(global) } else { Vec::new() };
            let roots = std::iter::once(root).chain(lower);
            roots.flat_map(|root| stored(&root, kind).unwrap_or_default()).collect()
        }
    }
}

fn lower_stores(global: &Global) -> Vec<PathBuf> {
    load_config(global).map(|config| config.lower_paths()).unwrap_or_default()
}

/// Where the names are.
enum Place {
    Daemon(Client),
    Store(PathBuf),
}

impl Place {
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

/// The same place as that of all commands, except that no store is opened.
fn place(global: &Global) -> Option<Place> {
    let daemon = |socket: &Path| Client::connect(socket).ok().map(Place::Daemon);
    match (&global.root, &global.socket) {
        // A daemon of another store is refused by all commands.
        (Some(root), Some(socket)) => return daemon(socket).filter(|served| served.is_of(root)),
        (None, Some(socket)) => return daemon(socket),
        (Some(root), None) => return Some(Place::Store(root.clone())),
        (None, None) => {}
    }
    let config = load_config(global).ok()?;
    if let Some(socket) = &config.socket {
        let own = || config.root.clone().or_else(|| default_root().ok().filter(|_root| is_own(socket)));
        return daemon(socket).or_else(|| own().map(Place::Store));
    }
    if let Some(root) = config.root {
        return Some(Place::Store(root));
    }
    match Client::connect_to_system() {
        Ok(Some(client)) => return Some(Place::Daemon(client)),
        Ok(None) => {}
        // Commands open the system's own store then, and no other.
        Err(_) => return default_root().ok().filter(|root| root == Path::new(SYSTEM_ROOT)).map(Place::Store),
    }
    let served = user_sockets().iter().find_map(|socket| daemon(socket));
    served.or_else(|| default_root().ok().map(Place::Store))
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

/// What the directory says. Only a process that has the store open knows which processes use its models.
fn stored(root: &Path, kind: Kind) -> Option<Vec<String>> {
    let store = Glance::at(root).ok()?;
    let short = |names: Vec<Reference>| names.iter().map(Reference::short).collect();
    Some(match kind {
        Kind::Models => short(store.models()),
        Kind::Trash => short(store.trash()),
        Kind::Downloads => store.downloads(),
        Kind::Processes => {
            let (root, socket) = (root.to_owned(), store.holder()?.socket?);
            let client =
                Client::with_connector(std::sync::Arc::new(move || connect_announced(&root, &socket)));
            served(&client, kind)?
        }
        Kind::Commands => Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::new_store;

    use super::*;

    fn global(root: &Path) -> Global {
        Global { root: Some(root.to_owned()), ..Global::default() }
    }

    #[test]
    fn options_on_the_typed_line_say_where_the_names_are() {
        let typed = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            with_typed_options(global(Path::new("/a")), &words).root
        };
        assert_eq!(typed("blobd rm"), Some(PathBuf::from("/a")));
        for line in ["blobd --root /b rm", "blobd rm --root=/b", "blobd --root = /b rm"] {
            assert_eq!(typed(line), Some(PathBuf::from("/b")), "{line}");
        }
    }

    #[test]
    fn store_that_is_open_or_absent_or_empty_is_only_looked_at() {
        let (folder, _store) = new_store();
        let root = folder.path().join("store");
        let before = std::fs::read(root.join("lock")).unwrap();
        for kind in [Kind::Models, Kind::Trash, Kind::Downloads, Kind::Processes] {
            assert_eq!(found(&global(&root), kind), Vec::<String>::new(), "{kind:?}");
        }
        assert_eq!(std::fs::read(root.join("lock")).unwrap(), before);
        let absent = folder.path().join("absent");
        assert_eq!(found(&global(&absent), Kind::Models), Vec::<String>::new());
        assert!(!absent.exists());
    }

    #[test]
    fn word_of_each_kind_is_the_argument_for_it() {
        for kind in Kind::value_variants() {
            assert_eq!(kind.to_possible_value().unwrap().get_name(), kind.word());
        }
    }
}
