//! Client processes.

use std::io::{BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value as Json;

use crate::programs;

/// A process that has a model open and mapped; ended when dropped.
#[derive(Debug)]
pub struct Reader {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Its first line of JSON, with `tensors` and `fds`, after it has mapped everything.
    pub opened: Json,
}

impl Reader {
    /// Starts a process that opens a model.
    ///
    /// # Panics
    /// When it cannot.
    #[must_use]
    pub fn open(socket: &Path, model: &str) -> Self {
        Self::try_open(&[], socket, &[model]).unwrap_or_else(|(code, error)| panic!("exit {code}: {error}"))
    }

    /// The same, started by another program, such as `sh -c 'ulimit …'`, with further arguments. If it cannot
    /// open the model, returns its exit code and standard error.
    ///
    /// # Errors
    /// Exit code and standard error.
    ///
    /// # Panics
    /// When the program cannot be started.
    pub fn try_open(wrapper: &[&str], socket: &Path, arguments: &[&str]) -> Result<Self, (i32, String)> {
        let program = programs::test_client();
        let mut words = wrapper.iter().copied().chain(program.to_str());
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).arg(socket).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the client starts");
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        match read_line(&mut output) {
            Some(opened) => Ok(Self { child, input, output, opened }),
            None => {
                let mut error = String::new();
                let _ = child.stderr.take().expect("a pipe").read_to_string(&mut error);
                Err((child.wait().expect("a child ends").code().unwrap_or(-1), error))
            }
        }
    }

    /// Its process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads every mapped byte; returns the SHA-256 of all tensors in file order.
    ///
    /// # Panics
    /// When the process has died, for instance because a map is gone.
    pub fn touch(&mut self) -> String {
        let response = self.tell("touch");
        response["sha256"].as_str().expect("a digest").to_owned()
    }

    /// Ends the lease and keeps the maps.
    ///
    /// # Panics
    /// When the process has died.
    pub fn close(&mut self) {
        let response = self.tell("close");
        assert_eq!(response["closed"], true);
    }

    /// Kills the process with SIGKILL.
    ///
    /// # Panics
    /// When it is gone already.
    pub fn kill(mut self) {
        self.child.kill().expect("the client is alive");
    }

    /// Sends it one of its other commands and returns the response.
    ///
    /// # Panics
    /// When the process has died.
    pub fn tell(&mut self, command: &str) -> Json {
        let input = self.input.as_mut().expect("a pipe");
        writeln!(input, "{command}").expect("the client listens");
        read_line(&mut self.output).expect("the client is alive")
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        drop(self.input.take());
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_line(output: &mut impl std::io::BufRead) -> Option<Json> {
    let mut line = String::new();
    output.read_line(&mut line).ok().filter(|count| *count > 0)?;
    Some(serde_json::from_str(&line).expect("a line of JSON"))
}
