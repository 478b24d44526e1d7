//! Runs `blobd` commands as a user or a script would.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use blobd_client::protocol::error::{ErrorBody, ErrorResponse};
use blobd_registry::Proxies;
use serde_json::Value as Json;

use crate::programs;
use crate::wait::DEADLINE;

/// Variables that say where the models of other programs are.
const OTHER_PROGRAMS: [&str; 10] = [
    "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "LLAMA_CACHE",
    "OLLAMA_MODELS",
    "MODELS_PATH",
    "MODELSCOPE_CACHE",
    "EXO_MODELS_DIR",
];

/// The command line with one store. The user's own configuration and environment do not affect it.
#[derive(Clone, Debug)]
pub struct Blobd {
    place: Vec<(&'static str, PathBuf)>,
    home: PathBuf,
}

/// The result of a command.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its arguments, for messages.
    pub arguments: String,
    /// Its exit code; -1 when a signal ended it.
    pub code: i32,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: String,
}

impl Blobd {
    /// Commands that open the store in `root` themselves, or use the daemon that has it open.
    #[must_use]
    pub fn at_root(root: &Path) -> Self {
        Self { place: vec![("BLOBD_ROOT", root.to_path_buf())], home: root.with_extension("home") }
    }

    /// Commands that use only the daemon at `socket`.
    #[must_use]
    pub fn at_socket(socket: &Path) -> Self {
        Self { place: vec![("BLOBD_SOCKET", socket.to_path_buf())], home: socket.with_extension("home") }
    }

    /// The same commands with this configuration file.
    #[must_use]
    pub fn configured_by(mut self, config: &Path) -> Self {
        self.place.push(("BLOBD_CONFIG", config.to_path_buf()));
        self
    }

    /// Runs a command to its end.
    ///
    /// # Panics
    /// When it does not end before the deadline.
    pub fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Run {
        let mut command = self.command();
        command.args(arguments);
        run(&mut command)
    }

    /// Runs a command given as one line; its arguments are separated by spaces.
    ///
    /// # Panics
    /// As for [`Self::run`].
    #[must_use]
    pub fn line(&self, line: &str) -> Run {
        self.run(line.split_whitespace())
    }

    /// The command without arguments, for a test that runs it itself.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(programs::blobd());
        self.prepare(&mut command);
        command
    }

    /// Sets the environment so that any command uses the store.
    pub fn prepare(&self, command: &mut Command) {
        for variable in ["BLOBD_ROOT", "BLOBD_SOCKET", "BLOBD_CONFIG", "BLOBD_LOG", "RUST_LOG"] {
            command.env_remove(variable);
        }
        for variable in Proxies::VARIABLES.iter().chain(&OTHER_PROGRAMS) {
            command.env_remove(variable);
        }
        let variables = ["HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"];
        command.envs(variables.map(|variable| (variable, &self.home)));
        // Otherwise lines of progress would be in a test's output on a busy machine only.
        command.env("BLOBD_PROGRESS_INTERVAL", "0");
        command.envs(self.place.iter().map(|(variable, path)| (*variable, path)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
}

/// Runs any command to its end.
///
/// # Panics
/// When it cannot be started or does not end before the deadline.
pub fn run(command: &mut Command) -> Run {
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
    let arguments = arguments.join(" ");
    let mut child = command.spawn().expect("the program starts");
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let code = wait(&mut child, &arguments);
    let stderr = String::from_utf8_lossy(&stderr.join().expect("the pipe is read")).into_owned();
    Run { arguments, code, stdout: stdout.join().expect("the pipe is read"), stderr }
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // After an error, the output read so far is used.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn wait(child: &mut Child, arguments: &str) -> i32 {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return status.code().unwrap_or(-1);
        }
        if start.elapsed() > DEADLINE {
            let _ = child.kill();
            panic!("{arguments}: still running after {DEADLINE:?}");
        }
        thread::sleep(std::time::Duration::from_millis(2));
    }
}

impl Run {
    /// Asserts that the command succeeded.
    ///
    /// # Panics
    /// When it did not.
    pub fn succeeds(self) -> Self {
        self.exits_with(0)
    }

    /// Asserts the exit code.
    ///
    /// # Panics
    /// When it is another one.
    pub fn exits_with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}: {}", self.arguments, self.stderr);
        self
    }

    /// The JSON document on standard output.
    ///
    /// # Panics
    /// When there is no such document.
    #[must_use]
    pub fn json(&self) -> Json {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|error| panic!("{}: {error}: {}", self.arguments, self.text()))
    }

    /// The JSON documents on standard output, one per line.
    ///
    /// # Panics
    /// When a line is not JSON.
    #[must_use]
    pub fn json_lines(&self) -> Vec<Json> {
        self.text().lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The error that a command with `--json` printed.
    ///
    /// # Panics
    /// When it printed none.
    #[must_use]
    pub fn error(&self) -> ErrorBody {
        let line = self.stderr.lines().last().unwrap_or_default();
        let response: ErrorResponse = serde_json::from_str(line)
            .unwrap_or_else(|error| panic!("{}: {error}: {}", self.arguments, self.stderr));
        response.error
    }
}
