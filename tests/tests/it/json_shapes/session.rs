//! Runs commands with `--json` and compares what they print with the document.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::process::Command;

use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::programs;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

use super::document::{Document, Shape};
use super::matching::{Seen, parse_strictly};

/// Commands that have been run, and what their outputs have shown.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) document: Document,
    pub(super) blobd: Blobd,
    /// Whether a daemon has the store open.
    pub(super) has_daemon: bool,
    pub(super) seen: Seen,
    /// The options that were used, by command.
    pub(super) used_options: BTreeMap<String, BTreeSet<String>>,
    /// One output for each documented command line, and whether it has several documents.
    pub(super) outputs: BTreeMap<String, (Vec<u8>, bool)>,
    /// Outputs that were not as documented.
    pub(super) problems: Vec<String>,
}

impl Session {
    pub(super) fn new(blobd: Blobd, has_daemon: bool) -> Self {
        Self {
            document: Document::read(),
            blobd,
            has_daemon,
            seen: Seen::new(),
            used_options: BTreeMap::new(),
            outputs: BTreeMap::new(),
            problems: Vec::new(),
        }
    }

    /// Runs a command that succeeds, with `--json`; its output must have the shape of the documented line `form`,
    /// which is given without `blobd`. Returns the only or last document.
    pub(super) fn ok<A: AsRef<OsStr>>(&mut self, form: &str, arguments: impl IntoIterator<Item = A>) -> Json {
        let run = self.run(arguments);
        self.succeeded(form, &run)
    }

    /// The same for a command given as one line, with the documented line at its start.
    pub(super) fn line(&mut self, form: &str, rest: &str) -> Json {
        let line = format!("{form} {rest}");
        self.ok(form, line.split_whitespace())
    }

    /// Runs a command that prints its document and then fails.
    pub(super) fn fails_after_output<A: AsRef<OsStr>>(
        &mut self,
        form: &str,
        arguments: impl IntoIterator<Item = A>,
        code: &str,
    ) -> Json {
        let run = self.run(arguments);
        self.check_failure(&run, code);
        self.check(form, &run)
    }

    /// Runs a command that fails and prints nothing on standard output.
    pub(super) fn fails<A: AsRef<OsStr>>(&mut self, code: &str, arguments: impl IntoIterator<Item = A>) {
        let run = self.run(arguments);
        self.expect(&run, run.text().is_empty(), || format!("standard output has {}", run.text()));
        self.check_failure(&run, code);
    }

    /// The same for a command given as one line.
    pub(super) fn line_fails(&mut self, code: &str, line: &str) {
        self.fails(code, line.split_whitespace());
    }

    /// Runs a command with `--json` and records its options.
    pub(super) fn run<A: AsRef<OsStr>>(&mut self, arguments: impl IntoIterator<Item = A>) -> Run {
        let mut command = self.blobd.command();
        // First, because what follows the command line of `exec` is not an option of blobd.
        command.arg("--json").args(arguments);
        self.record_options(&command);
        command::run(&mut command)
    }

    pub(super) fn record_options(&mut self, command: &Command) {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let Some(name) = words.iter().find(|word| !word.starts_with('-')) else { return };
        let options = words.iter().filter(|word| word.starts_with('-'));
        let options = options.map(|option| option.split('=').next().unwrap_or_default().to_owned());
        self.used_options.entry(name.clone()).or_default().extend(options);
    }

    /// Checks a run that must have succeeded; returns the last document.
    pub(super) fn succeeded(&mut self, form: &str, run: &Run) -> Json {
        let is_right = run.code == 0 && run.stderr.is_empty();
        self.expect(run, is_right, || format!("exit code {}, standard error: {}", run.code, run.stderr));
        self.check(form, run)
    }

    /// Checks standard output; returns the last document.
    pub(super) fn check(&mut self, form: &str, run: &Run) -> Json {
        let form = format!("blobd {form}");
        let Shape { type_name, per_line } = self.document.shape(&form).clone();
        let text = run.text();
        let is_right = text.ends_with('\n') && (per_line || text.lines().count() == 1);
        self.expect(run, is_right, || format!("expected lines of JSON, found {text:?}"));
        let mut last = Json::Null;
        for line in text.lines() {
            match parse_strictly(line) {
                Ok(document) => {
                    self.check_type(run, &document, &type_name);
                    last = document;
                }
                Err(error) => self.expect(run, false, || format!("{error}: {line}")),
            }
        }
        self.outputs.insert(form, (run.stdout.clone(), per_line));
        last
    }

    /// Checks that standard error has exactly one error with this code, and the exit code that the document gives.
    pub(super) fn check_failure(&mut self, run: &Run, code: &str) {
        let failure = match parse_strictly(&run.stderr) {
            Ok(failure) => failure,
            Err(error) => {
                return self.expect(run, false, || format!("{error}: standard error: {}", run.stderr));
            }
        };
        self.expect(run, run.stderr.lines().count() == 1, || {
            format!("expected one line, found {:?}", run.stderr)
        });
        self.check_type(run, &failure, "Failure");
        let row = self.document.errors.iter().find(|row| row.code == code);
        let is_right = failure["error"]["code"] == code && Some(run.code) == row.map(|row| row.exit_code);
        self.expect(run, is_right, || format!("{code} expected, found exit code {}, {failure}", run.code));
        self.outputs.insert(format!("error {code}"), (run.stderr.clone().into_bytes(), false));
    }

    fn check_type(&mut self, run: &Run, document: &Json, type_name: &str) {
        match self.document.types.check(document, type_name) {
            Ok(seen) => self.seen.extend(seen),
            Err(mismatches) => self.expect(run, false, || {
                let list = mismatches.iter().map(|one| format!("\n    {}: {}", one.path, one.reason));
                format!("not {type_name}:{}", list.collect::<String>())
            }),
        }
    }

    fn expect(&mut self, run: &Run, is_right: bool, problem: impl FnOnce() -> String) {
        if !is_right {
            let daemon = if self.has_daemon { "with" } else { "without" };
            self.problems.push(format!("{} ({daemon} a daemon): {}", run.arguments, problem().trim_end()));
        }
    }
}

/// Runs a command that prints a document and goes on, and stops it then.
pub(super) fn until_document(session: &mut Session, arguments: &[&str], signal: Signal) -> Run {
    until_document_and(session, arguments, signal, |_| ())
}

/// The same, and does something meanwhile.
pub(super) fn until_document_and(
    session: &mut Session,
    arguments: &[&str],
    signal: Signal,
    meanwhile: impl FnOnce(&mut Session),
) -> Run {
    let mut command = session.blobd.command();
    session.record_options(command.args(arguments));
    let mut command = Command::new("env");
    session.blobd.prepare(&mut command);
    // SIGINT may be ignored in the process of the tests.
    command.arg("--default-signal=INT").arg(programs::blobd()).arg("--json").args(arguments);
    let mut child = command.spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    meanwhile(session);
    kill_process(Pid::from_child(&child), signal).unwrap();
    let ended = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
    let code = ended.status.code().unwrap_or(-1);
    Run { arguments: arguments.join(" "), code, stdout: line.into_bytes(), stderr }
}
