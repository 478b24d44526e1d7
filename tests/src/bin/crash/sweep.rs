//! Kills commands, or makes a system call of them fail, at one call after the other.
//!
//! `strace` injects the fault into the real binary. It counts the calls of each thread by name, so if two
//! threads make the same call, the fault hits the first one that reaches the given number; commands write to
//! the disk from one thread at a time. Calls that do not concern files must not fail, so `write` and `mkdir`
//! are traced only for certain paths.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::store_dir::names;
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

use crate::durability::Durability;
use crate::history::{Contents, History};
use crate::invariants::{CrashedStore, give_to_owner};
use crate::report::Report;
use crate::samples::{Sample, SampleRegistry};
use crate::workload::{import, pull};
use crate::{Outcome, Setup, invariants, requirements};

/// The system calls with which the store changes the disk. `strace` ignores those that this architecture
/// lacks.
const CALLS: [&str; 16] = [
    "write",
    "pwrite64",
    "ftruncate",
    "fsync",
    "syncfs",
    "sync_file_range",
    "fallocate",
    "chmod",
    "fchmodat",
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
];

const FAULTS: [Fault; 3] = [Fault::Kill, Fault::Error("EIO"), Fault::Error("ENOSPC")];

const OPERATIONS: [Operation; 12] = [
    Operation::of("first start", &["ls"], None),
    Operation::of("import", &["import", "NEW", "--name", "new"], Some(("new", "NEW"))).of_blobs(),
    Operation::of(
        "import of a relative",
        &["import", "RELATIVE", "--name", "new"],
        Some(("new", "RELATIVE")),
    )
    .of_blobs(),
    Operation::of(
        "import under an existing name",
        &["import", "RELATIVE", "--name", "kept", "--force"],
        Some(("kept", "RELATIVE")),
    )
    .of_blobs(),
    Operation::of("import of a folder", &["import", "in:NEW", "--name", "new"], Some(("new", "NEW")))
        .of_blobs(),
    Operation::of("moving import", &["import", "--move", "in:NEW", "--name", "new"], Some(("new", "NEW")))
        .of_blobs(),
    Operation::of("pull", &["pull", "at:NEW", "--name", "new"], Some(("new", "NEW"))).of_blobs(),
    Operation::of("pull of a relative", &["pull", "at:RELATIVE", "--name", "new"], Some(("new", "RELATIVE")))
        .of_blobs(),
    Operation::of("resumed pull", &["pull", "at:BEGUN", "--name", "new"], Some(("new", "BEGUN"))).of_blobs(),
    Operation::of("tag", &["tag", "kept", "new"], Some(("new", "KEPT"))),
    Operation::of("rm", &["rm", "kept"], Some(("kept", ""))),
    Operation::of("gc", &["gc"], None),
];

/// A command to run with a fault.
struct Operation {
    name: &'static str,
    /// Its arguments. `NEW` and the other placeholders stand for the paths of models, `at:NEW` for the
    /// reference to pull, `in:NEW` for a folder with a copy of the model.
    arguments: &'static [&'static str],
    /// The name that it changes, and the placeholder of the model that the name then stands for; an empty one
    /// if the name is removed.
    change: Option<(&'static str, &'static str)>,
    /// Whether it stores new blobs: then it depends on the mode of durability.
    brings_blobs: bool,
}

impl Operation {
    const fn of(
        name: &'static str,
        arguments: &'static [&'static str],
        change: Option<(&'static str, &'static str)>,
    ) -> Self {
        Self { name, arguments, change, brings_blobs: false }
    }

    fn is_move(&self) -> bool {
        self.arguments.contains(&"--move")
    }

    const fn of_blobs(self) -> Self {
        Self { brings_blobs: true, ..self }
    }
}

/// The fault that replaces the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The process is killed.
    Kill,
    /// The call fails with this error.
    Error(&'static str),
}

/// One system call of a command, and its fault.
#[derive(Clone, Copy, Debug)]
struct Point {
    call: &'static str,
    /// Counted from 1.
    ordinal: usize,
    fault: Fault,
}

/// Runs every command with a fault at every call, in every mode of durability on which it depends.
///
/// # Errors
/// When a test cannot be run. A violation is not an error; it is reported.
pub(crate) fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    if let Some(reason) = requirements::program("strace", "strace").or_else(tracing_missing) {
        report.skip("sweep", &reason);
        return Ok(());
    }
    for (number, durability) in setup.durabilities.iter().enumerate() {
        let fixture = Fixture::build(*durability)?;
        let is_wanted = |operation: &&Operation| {
            setup.operations.is_empty() || setup.operations.iter().any(|name| name == operation.name)
        };
        let operations = OPERATIONS.iter().filter(|operation| number == 0 || operation.brings_blobs);
        for operation in operations.filter(is_wanted) {
            sweep(&fixture, operation, &format!("sweep of {}, {durability}", operation.name), report)?;
        }
    }
    Ok(())
}

fn sweep(fixture: &Fixture, operation: &Operation, part: &str, report: &mut Report) -> Outcome<()> {
    let start = Instant::now();
    let (mut fault_count, mut violations) = (0, 0);
    for call in CALLS {
        sweep_call(fixture, operation, call, &mut |point, checked| {
            fault_count += 1;
            if let Err(violation) = checked {
                violations += 1;
                report.violation(&format!("{part}, inject={point}: {violation}"));
            }
        })?;
    }
    report.done(part, fault_count, violations, start.elapsed());
    Ok(())
}

/// The reason why no process can be traced; `None` if it can.
fn tracing_missing() -> Option<String> {
    let traced = Command::new("strace").args(["-D", "-f", "-o", "/dev/null", "true"]).output();
    let may_trace = traced.is_ok_and(|run| run.status.success());
    (!may_trace).then(|| "processes cannot be traced here".to_owned())
}

/// Runs a command with every fault at each call of this name.
fn sweep_call(
    fixture: &Fixture,
    operation: &Operation,
    call: &'static str,
    found: &mut dyn FnMut(Point, Outcome<()>),
) -> Outcome<()> {
    for fault in FAULTS {
        for ordinal in 1.. {
            let point = Point { call, ordinal, fault };
            match fixture.run_with_fault(operation, point)? {
                Some(checked) => found(point, checked),
                // The command never makes this call.
                None if ordinal == 1 => return Ok(()),
                None => break,
            }
        }
    }
    Ok(())
}

/// The store and the models that every command starts with.
struct Fixture {
    /// A store with a model named `kept`, unneeded blobs, and an unfinished download.
    template: PathBuf,
    root: PathBuf,
    config: PathBuf,
    kept: Sample,
    relative: Sample,
    new: Sample,
    begun: Sample,
    probe: Sample,
    /// Has all of them.
    registry: SampleRegistry,
    folder: TempDir,
}

impl Fixture {
    fn build(durability: Durability) -> Outcome<Self> {
        let folder = tmpfs_directory();
        let path = folder.path();
        let registry = SampleRegistry::new(path)?;
        let garbage = registry.add("garbage", &small_model(4))?;
        let fixture = Self {
            template: path.join("template"),
            root: path.join("store"),
            config: durability.write_config(path)?,
            kept: registry.add("kept", &large_model(1))?,
            relative: registry.add("relative", &large_model(1).with_changed("t0"))?,
            new: registry.add("new", &small_model(2))?,
            begun: registry.add("begun", &small_model(5))?,
            probe: registry.add("probe", &small_model(3))?,
            registry,
            folder,
        };
        let blobd = fixture.blobd(&fixture.template);
        import(&blobd, &fixture.kept, "kept").succeeds();
        import(&blobd, &garbage, "garbage").succeeds();
        fs::remove_dir_all(fixture.template.join("manifests/registry.ollama.ai/library/garbage"))?;
        fixture.registry.break_pull_in_the_middle(&fixture.begun);
        if pull(&blobd, &fixture.begun, "begun").code == 0
            || names(&fixture.template.join("partial")).is_empty()
        {
            return Err("the pull has left no unfinished download".into());
        }
        fixture.registry.clear_faults(&fixture.begun);
        Ok(fixture)
    }

    fn blobd(&self, root: &Path) -> Blobd {
        Blobd::at_root(root).configured_by(&self.config)
    }

    /// Runs a command with a fault on a copy of the store, and checks the store and the command's exit code
    /// and messages. Returns `None` if the command has made no such call.
    fn run_with_fault(&self, operation: &Operation, point: Point) -> Outcome<Option<Outcome<()>>> {
        let is_first_start = operation.name == "first start";
        if self.root.exists() {
            fs::remove_dir_all(&self.root)?;
        }
        if !is_first_start {
            copy_tree(&self.template, &self.root)?;
        }
        fs::create_dir_all(self.copies())?;
        fs::copy(&self.new.path, self.copy_of_new())?;
        let kept = ("kept".to_owned(), self.kept.digest.clone());
        let history = History::of(&Contents::from_iter((!is_first_start).then_some(kept)));
        let change = operation.change.map(|(name, content)| history.begin(name, self.digest(content), 1));
        let run = self.run(operation, point, is_first_start);
        let log = fs::read_to_string(self.log())?;
        if !has_fault(&log) {
            return Ok(None);
        }
        if let Some(change) = change.filter(|_| run.code == 0) {
            history.acknowledge(&change, 2);
        }
        let check = || {
            check_exit(&run, point.fault)?;
            let begun = std::slice::from_ref(&self.begun);
            let (root, config) = (&self.root, &self.config);
            invariants::check(CrashedStore { root, config, probe: &self.probe, pulled: begun }, &history, 2)?;
            self.check_source(operation)?;
            self.check_again(operation)
        };
        Ok(Some(invariants::caught(check)))
    }

    /// Runs the command under `strace`. The tracer is a daemonised grandchild (`-D`), so that the command has
    /// the shell's process ID, which is a part of the name of its staging directory.
    fn run(&self, operation: &Operation, point: Point, is_first_start: bool) -> Run {
        const SCRIPT: &str = r#"
            root=$1 call=$2 inject=$3 log=$4 paths=$5; shift 5
            for path in $paths; do
                set -- -P "$root/$(echo "$path" | sed "s/PID/$$/")" "$@"
            done
            exec strace -D -f -o "$log" -e "trace=?$call" -e "inject=?$inject" "$@"
        "#;
        let paths = match point.call {
            "write" | "mkdir" | "mkdirat" if is_first_start => {
                "store.json.new lock . blobs recipes manifests origins staging"
            }
            "write" | "mkdir" | "mkdirat" => {
                "staging/PID-0 staging/PID-0/recipe staging/PID-0/tag manifests/registry.ollama.ai \
                 manifests/registry.ollama.ai/library manifests/registry.ollama.ai/library/new"
            }
            _ => "",
        };
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "sh"]).arg(&self.root).arg(point.call).arg(point.to_string());
        command.arg(self.log()).arg(paths).arg(programs::blobd()).args(self.arguments(operation));
        self.blobd(&self.root).prepare(&mut command);
        command::run(command.stdin(Stdio::null()))
    }

    /// A source file is only gone if the model is stored.
    fn check_source(&self, operation: &Operation) -> Outcome<()> {
        let is_stored = || -> Outcome<bool> {
            let models = invariants::exported_models(&self.blobd(&self.root))?;
            Ok(models.get("new").map(String::as_str) == self.digest("NEW"))
        };
        match self.copy_of_new().exists() || operation.is_move() && is_stored()? {
            true => Ok(()),
            false => Err("the source is deleted, and the model is not stored".into()),
        }
    }

    /// Runs the command again without the fault: it must succeed.
    fn check_again(&self, operation: &Operation) -> Outcome<()> {
        let blobd = self.blobd(&self.root);
        let run = blobd.run(self.arguments(operation));
        let was_removed = operation.name == "rm" && run.code == 3;
        let was_moved = operation.is_move() && !self.copy_of_new().exists();
        if run.code != 0 && !was_removed && !was_moved {
            return Err(format!("I7: again: exit code {}: {}", run.code, run.stderr.trim()).into());
        }
        let Some((name, content)) = operation.change else { return Ok(()) };
        let found = invariants::exported_models(&blobd)?.get(name).cloned();
        if found.as_deref() != self.digest(content) {
            return Err(format!("I7: again: {name} is {found:?}").into());
        }
        Ok(())
    }

    fn arguments(&self, operation: &Operation) -> Vec<OsString> {
        let word = |word: &&str| match word.split_once(':') {
            Some(("at", word)) => {
                self.sample(word).map_or_else(|| word.into(), |sample| sample.source.clone().into())
            }
            Some(("in", _)) => self.copies().into(),
            _ => self.sample(word).map_or_else(|| word.into(), |sample| sample.path.clone().into()),
        };
        operation.arguments.iter().map(word).collect()
    }

    fn digest(&self, placeholder: &str) -> Option<&str> {
        self.sample(placeholder).map(|sample| sample.digest.as_str())
    }

    fn sample(&self, placeholder: &str) -> Option<&Sample> {
        match placeholder {
            "NEW" => Some(&self.new),
            "RELATIVE" => Some(&self.relative),
            "KEPT" => Some(&self.kept),
            "BEGUN" => Some(&self.begun),
            _ => None,
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("strace.log")
    }

    /// A folder with a copy of a model.
    fn copies(&self) -> PathBuf {
        self.folder.path().join("copies")
    }

    fn copy_of_new(&self) -> PathBuf {
        self.copies().join("new.gguf")
    }
}

/// Whether `strace` has made a call fail, or has killed a process in a call. A process killed outside the traced
/// calls is no fault: an import kills the process that reads the file when it no longer needs it.
fn has_fault(log: &str) -> bool {
    // Process IDs are padded with spaces.
    let lines = log.lines().filter_map(|line| line.split_once(' '));
    let events: Vec<(&str, &str)> = lines.map(|(pid, event)| (pid, event.trim_start())).collect();
    let is_killed = |pid: &str| events.contains(&(pid, "+++ killed by SIGKILL +++"));
    log.contains("INJECTED") || events.iter().any(|(pid, event)| event.ends_with("= ?") && is_killed(pid))
}

/// A command that failed must have the right exit code and print an error, and must not panic.
fn check_exit(run: &Run, fault: Fault) -> Outcome<()> {
    const KILLED: i32 = -1;
    let expected: &[i32] = match fault {
        Fault::Kill => &[KILLED],
        Fault::Error(_) => &[0, 1, 6],
    };
    let is_silent = run.code > 0 && !run.stderr.contains("blobd: ");
    if expected.contains(&run.code) && !is_silent && !run.stderr.contains("panicked") {
        return Ok(());
    }
    Err(format!("exit code {}, standard error: {:?}", run.code, run.stderr.trim()).into())
}

/// Nine blobs and a configuration: enough for `syncfs` in the mode `auto`.
fn small_model(seed: u64) -> ModelFile {
    let mut model = ModelFile::empty();
    for tensor in 0..8 {
        model.add_noise(seed, &format!("t{tensor}"), GgmlType::F32, &[256]);
    }
    model
}

/// The same and a tensor that is large enough for a pull to reuse it from a related model.
fn large_model(seed: u64) -> ModelFile {
    let mut model = small_model(seed);
    model.add_noise(seed, "large", GgmlType::F32, &[288 << 10]);
    model
}

/// Copies a store and gives the copy to its owner, if this process is root.
fn copy_tree(from: &Path, to: &Path) -> Outcome<()> {
    fs::create_dir(to)?;
    give_to_owner(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            give_to_owner(&target)?;
        }
    }
    Ok(())
}

impl fmt::Display for Point {
    /// The syntax of `strace --inject`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::Kill => write!(f, "{}:signal=KILL:when={}", self.call, self.ordinal),
            Fault::Error(error) => write!(f, "{}:error={error}:when={}", self.call, self.ordinal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_fail_or_end_a_process_are_faults() {
        let written = "7 pwrite64(5, \"a\", 1, 0) = 1\n";
        assert!(has_fault("7 pwrite64(5, \"a\", 1, 0) = -1 EIO (Input/output error) (INJECTED)\n"));
        assert!(has_fault(&format!(
            "{written}8  pwrite64(5, \"a\", 1, 0)        = ?\n7  +++ killed by SIGKILL +++\n8  +++ killed by SIGKILL +++\n"
        )));
        for log in [
            String::new(),
            format!("{written}7 +++ exited with 0 +++\n"),
            format!("{written}9 +++ killed by SIGKILL +++\n7 +++ exited with 0 +++\n"),
            format!("{written}8 fsync(5) = ?\n9 +++ killed by SIGKILL +++\n8 +++ exited with 0 +++\n"),
        ] {
            assert!(!has_fault(&log), "{log}");
        }
    }
}
