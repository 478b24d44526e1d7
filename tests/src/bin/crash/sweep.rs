//! Kills commands, or makes a system call of them fail, at one call after the other.
//!
//! `strace` injects the fault into the real binary. It counts the calls of each thread by name, so if two
//! threads make the same call, the fault hits the first one that reaches the given number; commands write to
//! the disk from one thread at a time. Calls that do not concern files must not fail, so `write` and `mkdir`
//! are traced only for certain paths.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
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

mod operations;

use operations::{OPERATIONS, Operation, Signature};

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
    let prepared = fixture.prepare(operation)?;
    let (mut fault_count, mut violations) = (0, 0);
    for call in CALLS {
        sweep_call(&prepared, call, &mut |point, checked| {
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
    prepared: &Prepared<'_>,
    call: &'static str,
    found: &mut dyn FnMut(Point, Outcome<()>),
) -> Outcome<()> {
    for fault in FAULTS {
        for ordinal in 1.. {
            let point = Point { call, ordinal, fault };
            match prepared.run_with_fault(point)? {
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
    /// Its shards end within groups of experts.
    cut: Sample,
    probe: Sample,
    /// The SHA-256 of the file of the model that `edit` makes of `kept`.
    edited: String,
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
        let kept = large_model(1);
        let mut edited = kept.clone();
        edited.metadata.push(("general.name".to_owned(), "edited".into()));
        let fixture = Self {
            template: path.join("template"),
            root: path.join("store"),
            config: durability.write_config(path)?,
            kept: registry.add("kept", &kept)?,
            relative: registry.add("relative", &kept.with_changed("t0"))?,
            new: registry.add("new", &small_model(2))?,
            begun: registry.add("begun", &small_model(5))?,
            cut: registry.add_shards("cut", &ModelFile::separate_experts(6, 4).shards(3))?,
            probe: registry.add("probe", &small_model(3))?,
            edited: sha256(&edited.bytes()),
            registry,
            folder,
        };
        fs::write(fixture.key(), include_str!("../../../../daemon/keys/tests/ed25519.pem"))?;
        fs::write(fixture.public_key(), include_str!("../../../../daemon/keys/tests/ed25519-public.pem"))?;
        fixture.save_new()?;
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

    /// Writes an archive with the model `NEW` and its signature, from a store of its own.
    fn save_new(&self) -> Outcome<()> {
        let root = self.folder.path().join("saving");
        let blobd = self.blobd(&root);
        import(&blobd, &self.new, "new").succeeds();
        blobd.run(self.arguments("sign new --key KEY")).succeeds();
        blobd.run(["save".as_ref(), "new".as_ref(), "-o".as_ref(), self.saved().as_os_str()]).succeeds();
        Ok(fs::remove_dir_all(root)?)
    }

    /// Makes the store with which an operation starts.
    fn prepare<'f>(&'f self, operation: &'f Operation) -> Outcome<Prepared<'f>> {
        let template = self.folder.path().join("prepared");
        replace_tree(&template, &self.template)?;
        let mut prepared = Prepared {
            fixture: self,
            operation,
            template,
            contents: Contents::new(),
            models: BTreeSet::new(),
        };
        if operation.is_first_start() {
            fs::remove_dir_all(&prepared.template)?;
            return Ok(prepared);
        }
        let blobd = self.blobd(&prepared.template);
        for command in operation.before {
            blobd.run(self.arguments(command)).succeeds();
        }
        prepared.contents = invariants::exported_models(&blobd)?;
        replace_tree(&self.root, &prepared.template)?;
        prepared.models = all_models(&self.blobd(&self.root))?;
        Ok(prepared)
    }

    fn blobd(&self, root: &Path) -> Blobd {
        Blobd::at_root(root).configured_by(&self.config)
    }

    fn arguments(&self, command: &str) -> Vec<OsString> {
        let word = |word: &str| match word.split_once(':') {
            Some(("at", model)) => {
                self.sample(model).map_or_else(|| word.into(), |sample| sample.source.clone().into())
            }
            Some(("in", _)) => self.copies().into(),
            Some(("saved", _)) => self.saved().into(),
            _ if word == "KEY" => self.key().into(),
            _ => self.sample(word).map_or_else(|| word.into(), |sample| sample.path.clone().into()),
        };
        command.split_whitespace().map(word).collect()
    }

    fn digest(&self, placeholder: &str) -> Option<&str> {
        match placeholder {
            "EDITED" => Some(&self.edited),
            _ => self.sample(placeholder).map(|sample| sample.digest.as_str()),
        }
    }

    fn sample(&self, placeholder: &str) -> Option<&Sample> {
        match placeholder {
            "NEW" => Some(&self.new),
            "RELATIVE" => Some(&self.relative),
            "KEPT" => Some(&self.kept),
            "BEGUN" => Some(&self.begun),
            "CUT" => Some(&self.cut),
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

    fn saved(&self) -> PathBuf {
        self.folder.path().join("saved.tar")
    }

    fn key(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    fn public_key(&self) -> PathBuf {
        self.folder.path().join("key.pub")
    }
}

/// An operation, and the store with which it starts.
struct Prepared<'f> {
    fixture: &'f Fixture,
    operation: &'f Operation,
    template: PathBuf,
    /// The models that have a name.
    contents: Contents,
    /// Those, and the models in the trash: the SHA-256 of their files.
    models: BTreeSet<String>,
}

impl Prepared<'_> {
    /// Runs the command with a fault on a copy of the store, and checks the store and the command's exit code
    /// and messages. Returns `None` if the command has made no such call.
    fn run_with_fault(&self, point: Point) -> Outcome<Option<Outcome<()>>> {
        let (fixture, operation) = (self.fixture, self.operation);
        let root = &fixture.root;
        replace_tree(root, &self.template)?;
        fs::create_dir_all(fixture.copies())?;
        fs::copy(&fixture.new.path, fixture.copy_of_new())?;
        let history = History::of(&self.contents);
        let begin = |(name, content): &(&str, &str)| history.begin(name, fixture.digest(content), 1);
        let changes: Vec<_> = operation.changes.iter().map(begin).collect();
        let run = self.run(point);
        let log = fs::read_to_string(fixture.log())?;
        if !has_fault(&log) {
            return Ok(None);
        }
        let is_acknowledged = run.code == 0;
        for change in changes.iter().filter(|_| is_acknowledged) {
            history.acknowledge(change, 2);
        }
        let check = || {
            check_exit(&run, point.fault)?;
            // The checks change the store; the same command meets it as the crash has left it.
            let crashed = fixture.folder.path().join("crashed");
            replace_tree(&crashed, root)?;
            let begun = std::slice::from_ref(&fixture.begun);
            let config = &fixture.config;
            let store = CrashedStore { root, config, probe: &fixture.probe, pulled: begun };
            let contents = invariants::check(store, &history, 2)?;
            self.check_order(&contents)?;
            self.check_source()?;
            self.check_signature(is_acknowledged)?;
            self.check_nothing_lost(point.fault)?;
            replace_tree(root, &crashed)?;
            self.check_again()
        };
        Ok(Some(invariants::caught(check)))
    }

    /// Runs the command under `strace`. The tracer is a daemonised grandchild (`-D`), so that the command has
    /// the shell's process ID, which is a part of the names in the staging directory.
    fn run(&self, point: Point) -> Run {
        const SCRIPT: &str = r#"
            root=$1 call=$2 inject=$3 log=$4 paths=$5; shift 5
            for path in $paths; do
                set -- -P "$root/$(echo "$path" | sed "s/PID/$$/")" "$@"
            done
            exec strace -D -f -o "$log" -e "trace=?$call" -e "inject=?$inject" "$@"
        "#;
        let paths = match point.call {
            "write" | "mkdir" | "mkdirat" if self.operation.is_first_start() => {
                "store.json.new lock . blobs recipes manifests origins staging"
            }
            "write" | "mkdir" | "mkdirat" => {
                ". staging staging/PID-0 staging/PID-0/recipe staging/PID-0/tag staging/PID-1 staging/PID-2 \
                 staging/PID-2/tag manifests/registry.ollama.ai manifests/registry.ollama.ai/library \
                 manifests/registry.ollama.ai/library/new"
            }
            _ => "",
        };
        let fixture = self.fixture;
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "sh"]).arg(&fixture.root).arg(point.call).arg(point.to_string());
        command.arg(fixture.log()).arg(paths).arg(programs::blobd());
        command.args(fixture.arguments(self.operation.command));
        fixture.blobd(&fixture.root).prepare(&mut command);
        command::run(command.stdin(Stdio::null()))
    }

    fn blobd(&self) -> Blobd {
        self.fixture.blobd(&self.fixture.root)
    }

    /// The store's contents after the first changes of the operation.
    fn contents_after(&self, changes: usize) -> Contents {
        let mut contents = self.contents.clone();
        for (name, content) in &self.operation.changes[..changes] {
            match self.fixture.digest(content) {
                Some(digest) => contents.insert((*name).to_owned(), digest.to_owned()),
                None => contents.remove(*name),
            };
        }
        contents
    }

    /// I4: changes of several names become durable one after the other, and none without those before it. So a model that
    /// gets another name is at no time without one.
    fn check_order(&self, found: &Contents) -> Outcome<()> {
        let mut allowed = (0..=self.operation.changes.len()).map(|changes| self.contents_after(changes));
        match allowed.any(|contents| contents == *found) {
            true => Ok(()),
            false => Err(format!("I4: not the first changes and no others: {found:?}").into()),
        }
    }

    /// A source file is only gone if the model is stored.
    fn check_source(&self) -> Outcome<()> {
        let is_stored = || -> Outcome<bool> {
            let models = invariants::exported_models(&self.blobd())?;
            Ok(models.get("new").map(String::as_str) == self.fixture.digest("NEW"))
        };
        match self.fixture.copy_of_new().exists() || self.operation.is_move() && is_stored()? {
            true => Ok(()),
            false => Err("the source is deleted, and the model is not stored".into()),
        }
    }

    /// I3 and I4: a signature that was acknowledged is there. Otherwise `sign` has added it whole or not at all, and a model
    /// that comes with one has it as soon as it has a name.
    fn check_signature(&self, is_acknowledged: bool) -> Outcome<()> {
        let (name, must_exist) = match self.operation.signature() {
            Signature::Unchanged => return Ok(()),
            Signature::OfStored(name) => (name, is_acknowledged),
            Signature::OfArriving(name) => (name, true),
        };
        if !invariants::exported_models(&self.blobd())?.contains_key(name) {
            return Ok(());
        }
        let verify = |options: &[&str]| {
            let words = ["verify", "--signatures", name, "--json"];
            self.blobd().run(words.iter().chain(options))
        };
        let key = self.fixture.public_key();
        let keyed = verify(&["--key", &key.to_string_lossy()]);
        if keyed.code == 0 {
            return Ok(());
        }
        let state = verify(&[]).json()["models"][0]["state"].clone();
        match !must_exist && state == "unsigned" {
            true => Ok(()),
            false => Err(format!("I3/I4: the signature is {state}: {}", keyed.stderr.trim()).into()),
        }
    }

    /// Runs the command again without the fault, unless it has made its changes and can do so only once: it must succeed.
    fn check_again(&self) -> Outcome<()> {
        let (blobd, operation) = (self.blobd(), self.operation);
        let expected = self.contents_after(operation.changes.len());
        let is_done = invariants::exported_models(&blobd)? == expected;
        if is_done && operation.only_once {
            return Ok(());
        }
        let run = blobd.run(self.fixture.arguments(operation.command));
        let was_moved = operation.is_move() && !self.fixture.copy_of_new().exists();
        let is_completed = || operation.completed_by.is_some_and(|command| blobd.line(command).code == 0);
        if run.code != 0 && !was_moved && !is_completed() {
            return Err(format!("I7: again: exit code {}: {}", run.code, run.stderr.trim()).into());
        }
        let found = invariants::exported_models(&blobd)?;
        if found != expected {
            return Err(format!("I7: again: {found:?}, expected {expected:?}").into());
        }
        self.check_signature(true)
    }

    /// Every model that had a name or was in the trash is still in one of the two places. A full disk may empty the trash.
    fn check_nothing_lost(&self, fault: Fault) -> Outcome<()> {
        if self.operation.deletes || fault == Fault::Error("ENOSPC") {
            return Ok(());
        }
        let found = all_models(&self.blobd())?;
        match self.models.is_subset(&found) {
            true => Ok(()),
            false => Err(format!("I4: lost models: {:?}", self.models.difference(&found)).into()),
        }
    }
}

/// The SHA-256 of the file of every model that has a name or is in the trash. Those in the trash get names.
fn all_models(blobd: &Blobd) -> Outcome<BTreeSet<String>> {
    let trash = blobd.line("ls --trash --json").succeeds().json();
    let trashed = trash["models"].as_array().ok_or("ls --trash --json without models")?;
    for (number, model) in trashed.iter().enumerate() {
        let name = model["name"].as_str().ok_or("a model without a name")?;
        blobd.line(&format!("undelete {name} --name restored-{number}")).succeeds();
    }
    Ok(invariants::exported_models(blobd)?.into_values().collect())
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

/// Replaces a store by a copy of another one, or by nothing if that does not exist.
fn replace_tree(tree: &Path, by: &Path) -> Outcome<()> {
    if tree.exists() {
        fs::remove_dir_all(tree)?;
    }
    if by.exists() { copy_tree(by, tree) } else { Ok(()) }
}

/// Copies a store without its socket, and gives the copy to its owner if this process is root.
fn copy_tree(from: &Path, to: &Path) -> Outcome<()> {
    fs::create_dir(to)?;
    give_to_owner(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        let file_type = entry.file_type()?;
        if file_type.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else if file_type.is_file() {
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
