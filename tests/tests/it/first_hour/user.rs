//! A new user and their terminal.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use blobd_fixtures::skipped::skipped;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::terminal::Terminal;
use tempfile::TempDir;

const COLUMNS: u16 = 80;
const ROWS: u16 = 24;
/// An ordinary user without a home of its own, if the tests run as root.
const NOBODY: u32 = 65534;

/// A command line and what the user sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Run by `sh`, in the user's home.
    pub(super) line: &'static str,
    pub(super) code: i32,
    /// Each of these is in what is shown.
    pub(super) shows: &'static [&'static str],
}

impl Step {
    /// The commands of blobd in the line.
    pub(super) fn commands(&self) -> impl Iterator<Item = &'static str> {
        self.line.split("blobd ").skip(1).filter_map(|rest| rest.split_whitespace().next())
    }
}

/// A user with an empty home, but for a configuration file that sends pulls to a registry on loopback.
#[derive(Debug)]
pub(super) struct User {
    folder: TempDir,
    /// Its pulls are served while the test lasts.
    registry: FakeRegistry,
}

impl User {
    /// `None`, with the reason, where the user cannot have a `/tmp` and a `/run` of their own: a daemon of this
    /// machine must not be found.
    pub(super) fn new() -> Option<Self> {
        let folder = tmpfs_directory();
        if [folder.path(), programs::blobd()].iter().any(|path| path.starts_with("/tmp")) {
            skipped("the tests run in /tmp, which the user would not see");
            return None;
        }
        for (name, mode) in [("home", 0o700), ("tmp", 0o1777), ("run", 0o755)] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let registry = FakeRegistry::start().unwrap();
        publish(&registry);
        let user = Self { folder, registry };
        user.write(".config/blobd/config.toml", mirrors(&user.registry).as_bytes());
        let tuned = base().with_changed("output.weight");
        user.write("models/tuned-8b.gguf", &tuned.bytes());
        user.write("models/other-8b.gguf", &base().with_changed("token_embd.weight").bytes());
        user.give_home_away();
        let probe = user.shell().arg("true").output().unwrap();
        if !probe.status.success() {
            skipped(format_args!("no private namespaces here: {}", String::from_utf8_lossy(&probe.stderr)));
            return None;
        }
        Some(user)
    }

    fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.home().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// The home belongs to the user, who can reach it.
    fn give_home_away(&self) {
        if rustix::process::geteuid().is_root() {
            let found = Command::new("find").arg(self.folder.path()).output().unwrap();
            for path in String::from_utf8(found.stdout).unwrap().lines() {
                chown(Path::new(path), Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
    }

    /// Runs the steps one after the other, and fails with everything that is not as expected.
    pub(super) fn check_all<'a>(&self, steps: impl IntoIterator<Item = &'a Step>) {
        let differences: Vec<String> = steps.into_iter().filter_map(|step| self.difference(step)).collect();
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    }

    /// The output of a step on the terminal, if it differs from the expected one.
    fn difference(&self, step: &Step) -> Option<String> {
        let (code, shown) = self.run(step.line);
        let missing = step.shows.iter().find(|expected| !shown.contains(**expected));
        let problem = match missing {
            _ if code != step.code => format!("exit code: expected {}, found {code}", step.code),
            Some(missing) => format!("{missing:?} is missing"),
            None => unreadable(&shown)?,
        };
        Some(format!("$ {}\n{shown}[{problem}]", step.line))
    }

    fn run(&self, line: &str) -> (i32, String) {
        let terminal = Terminal::new(ROWS, COLUMNS);
        let mut command = self.shell();
        command.arg(line);
        command.stdin(terminal.another()).stdout(terminal.another()).stderr(terminal.another());
        let mut child = command.spawn().unwrap();
        // It holds the terminal's side too.
        drop(command);
        let status = child.wait().unwrap();
        (status.code().unwrap_or(-1), terminal.shown().replace("\r\n", "\n"))
    }

    /// `sh -c` with `/tmp` and `/run` of its own, without any variable but those that every login has.
    fn shell(&self) -> Command {
        const SCRIPT: &str =
            r#"mount --bind "$0/tmp" /tmp && mount --bind "$0/run" /run && cd "$0/home" && exec "$@""#;
        let is_root = rustix::process::geteuid().is_root();
        let mut command = Command::new("unshare");
        command.args(if is_root { &["--mount"][..] } else { &["--user", "--map-current-user", "--mount"] });
        command.args(["sh", "-c", SCRIPT]).arg(self.folder.path());
        if is_root {
            command.args(["setpriv", &format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}")]);
            command.args(["--clear-groups", "--"]);
        }
        let directory = programs::blobd().parent().unwrap();
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", directory.display());
        command.args(["sh", "-c"]).env_clear().env("PATH", path).env("HOME", self.home());
        command.env("TERM", "dumb").env("LANG", "C");
        command
    }

    /// Ends the user's daemon, if a step has started one.
    pub(super) fn stop(&self) {
        let mut command = self.shell();
        command.arg("test ! -e daemon.pid || kill $(cat daemon.pid)");
        assert!(command.stdout(Stdio::null()).status().unwrap().success());
    }
}

impl Drop for User {
    /// A failed test leaves no daemon.
    fn drop(&mut self) {
        let pid = fs::read_to_string(self.home().join("daemon.pid")).unwrap_or_default();
        if let Some(pid) = pid.trim().parse().ok().and_then(rustix::process::Pid::from_raw) {
            // It may have ended.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

fn base() -> ModelFile {
    ModelFile::dense_of(1, 2, 64)
        .with("llama.block_count", 2_u32)
        .with("llama.context_length", 8192_u32)
        .with("llama.embedding_length", 64_u32)
        .with("llama.feed_forward_length", 256_u32)
        .with("llama.attention.head_count", 4_u32)
}

fn publish(registry: &FakeRegistry) {
    let bytes = base().bytes();
    for tag in ["8b", "8b-instruct", "70b"] {
        let layers: &[(&str, &[u8])] = &[("application/vnd.ollama.image.model", &bytes)];
        registry.add_model(&format!("library/llama3:{tag}"), b"{}", layers).unwrap();
    }
}

fn mirrors(registry: &FakeRegistry) -> String {
    format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url())
}

/// Faults that no output may have on this terminal: a line that wraps, an escape sequence, internals.
fn unreadable(shown: &str) -> Option<String> {
    const INTERNALS: [&str; 7] =
        ["\u{1b}", "\u{fffd}", "panicked", "Some(", "Err(", "os error", "RUST_BACKTRACE"];
    // A digest cannot be broken.
    let wraps = |line: &&str| line.chars().count() > usize::from(COLUMNS) && !line.contains("sha256:");
    if let Some(line) = shown.split(['\n', '\r']).find(wraps) {
        return Some(format!("this line wraps: {line}"));
    }
    let internal = INTERNALS.iter().find(|internal| shown.contains(**internal))?;
    Some(format!("{internal:?} is shown"))
}
