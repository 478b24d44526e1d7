//! One system call after the other is the one at which a command is killed, or which fails.
//!
//! `strace` does it to the real binary. It counts the calls of each thread by name, so of two
//! threads that make the same call, the one that comes first to the given number is hit; commands
//! write to the disk from one thread at a time. Calls that are not about files must not fail
//! here, so `write` and `mkdir` are watched only where they touch certain paths.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::places::fast_folder;
use blobd_tests::programs;
use tempfile::TempDir;

use crate::history::{Contents, History};
use crate::report::Report;
use crate::workload::{Sample, import, write_sample};
use crate::{Outcome, Setup, invariants, needs};

/// The calls by which the store changes what is on disk. A name that this kernel's architecture
/// does not know is passed over.
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

const OPERATIONS: [Operation; 7] = [
    Operation { name: "first start", words: &["ls"], change: None },
    Operation { name: "import", words: &["import", "NEW", "--name", "new"], change: Some(("new", "NEW")) },
    Operation {
        name: "import of a relative",
        words: &["import", "RELATIVE", "--name", "new"],
        change: Some(("new", "RELATIVE")),
    },
    Operation {
        name: "import under a name that is taken",
        words: &["import", "RELATIVE", "--name", "kept"],
        change: Some(("kept", "RELATIVE")),
    },
    Operation { name: "tag", words: &["tag", "kept", "new"], change: Some(("new", "KEPT")) },
    Operation { name: "rm", words: &["rm", "kept"], change: Some(("kept", "")) },
    Operation { name: "gc", words: &["gc"], change: None },
];

/// A command that is to be disturbed.
struct Operation {
    name: &'static str,
    /// Its arguments; `NEW` and the like stand for the paths of models.
    words: &'static [&'static str],
    /// The name that it changes and which model that is afterwards, none if empty.
    change: Option<(&'static str, &'static str)>,
}

/// What happens to the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The process is killed instead.
    Kill,
    /// The call fails with this error and does nothing.
    Error(&'static str),
}

/// One call of a command.
#[derive(Clone, Copy, Debug)]
struct Point {
    call: &'static str,
    /// Counted from 1.
    ordinal: usize,
    fault: Fault,
}

/// Disturbs every command at every call.
///
/// # Errors
/// When the machine does not do its part; a violation is no error but is reported.
pub(crate) fn run(_setup: &Setup, report: &mut Report) -> Outcome<()> {
    if let Some(reason) = needs::program("strace", "strace").or_else(tracing_lack) {
        report.skip("sweep", &reason);
        return Ok(());
    }
    let stage = Stage::build()?;
    for operation in &OPERATIONS {
        let start = Instant::now();
        let (mut fault_count, mut violations) = (0, 0);
        for call in CALLS {
            sweep_call(&stage, operation, call, &mut |point, checked| {
                fault_count += 1;
                if let Err(violation) = checked {
                    violations += 1;
                    report.violation(&format!("sweep of {}, inject={point}: {violation}", operation.name));
                }
            })?;
        }
        report.done(&format!("sweep of {}", operation.name), fault_count, violations, start.elapsed());
    }
    Ok(())
}

/// Why no process can be traced; none if it can.
fn tracing_lack() -> Option<String> {
    let traced = Command::new("strace").args(["-D", "-f", "-o", "/dev/null", "true"]).output();
    let may_trace = traced.is_ok_and(|run| run.status.success());
    (!may_trace).then(|| "tracing a process is not allowed here".to_owned())
}

/// Disturbs a command at all calls of one name, with every fault.
fn sweep_call(
    stage: &Stage,
    operation: &Operation,
    call: &'static str,
    found: &mut dyn FnMut(Point, Outcome<()>),
) -> Outcome<()> {
    for fault in FAULTS {
        for ordinal in 1.. {
            let point = Point { call, ordinal, fault };
            match stage.disturb(operation, point)? {
                Some(checked) => found(point, checked),
                // A call that is never made cannot fail either.
                None if ordinal == 1 => return Ok(()),
                None => break,
            }
        }
    }
    Ok(())
}

/// The stores and models that every command starts from.
struct Stage {
    /// A store with a model named `kept`, and with blobs of another that no name needs.
    template: PathBuf,
    root: PathBuf,
    kept: Sample,
    relative: Sample,
    new: Sample,
    probe: Sample,
    folder: TempDir,
}

impl Stage {
    fn build() -> Outcome<Self> {
        let folder = fast_folder();
        let path = folder.path();
        let stage = Self {
            template: path.join("template"),
            root: path.join("store"),
            kept: write_sample(path, "kept", &small_model(1))?,
            relative: write_sample(path, "relative", &small_model(1).with_changed("t0"))?,
            new: write_sample(path, "new", &small_model(2))?,
            probe: write_sample(path, "probe", &small_model(3))?,
            folder,
        };
        let blobd = Blobd::at_root(&stage.template);
        import(&blobd, &stage.kept, "kept").succeeds();
        let garbage = write_sample(stage.folder.path(), "garbage", &small_model(4))?;
        import(&blobd, &garbage, "garbage").succeeds();
        fs::remove_dir_all(stage.template.join("manifests/registry.ollama.ai/library/garbage"))?;
        Ok(stage)
    }

    /// Runs a command on a fresh store with a fault, and checks the store and the answer; nothing
    /// if the command has made no such call.
    fn disturb(&self, operation: &Operation, point: Point) -> Outcome<Option<Outcome<()>>> {
        let is_first_start = operation.name == "first start";
        if self.root.exists() {
            fs::remove_dir_all(&self.root)?;
        }
        if !is_first_start {
            copy_tree(&self.template, &self.root)?;
        }
        let kept = ("kept".to_owned(), self.kept.digest.clone());
        let history = History::of(&Contents::from_iter((!is_first_start).then_some(kept)));
        let change = operation.change.map(|(name, content)| history.begin(name, self.digest(content), 1));
        let run = self.run(operation, point, is_first_start);
        let log = fs::read_to_string(self.log())?;
        if !["INJECTED", "killed by SIGKILL"].iter().any(|sign| log.contains(sign)) {
            return Ok(None);
        }
        if let Some(change) = change.filter(|_| run.code == 0) {
            history.acknowledge(&change, 2);
        }
        let check = || {
            check_answer(&run, point.fault)?;
            invariants::check(&self.root, &history, 2, &self.probe)?;
            self.check_again(operation)
        };
        Ok(Some(invariants::caught(check)))
    }

    /// Runs the command under `strace`. The daemonised tracer is a grandchild, so that the command
    /// keeps the number of the shell, by which its staging directory is called.
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
        command.arg(self.log()).arg(paths).arg(programs::blobd()).args(self.words(operation));
        Blobd::at_root(&self.root).prepare(&mut command);
        command::run(command.stdin(Stdio::null()))
    }

    /// What failed for a reason that is gone succeeds when it is asked for again.
    fn check_again(&self, operation: &Operation) -> Outcome<()> {
        let blobd = Blobd::at_root(&self.root);
        let run = blobd.run(self.words(operation));
        let was_removed = operation.name == "rm" && run.code == 3;
        if run.code != 0 && !was_removed {
            return Err(format!("I7: again: exit code {}: {}", run.code, run.stderr.trim()).into());
        }
        let Some((name, content)) = operation.change else { return Ok(()) };
        let found = invariants::exported_models(&blobd)?.get(name).cloned();
        if found.as_deref() != self.digest(content) {
            return Err(format!("I7: again: {name} is {found:?}").into());
        }
        Ok(())
    }

    fn words(&self, operation: &Operation) -> Vec<OsString> {
        let word =
            |word: &&str| self.sample(word).map_or_else(|| word.into(), |sample| sample.path.clone().into());
        operation.words.iter().map(word).collect()
    }

    fn digest(&self, placeholder: &str) -> Option<&str> {
        self.sample(placeholder).map(|sample| sample.digest.as_str())
    }

    fn sample(&self, placeholder: &str) -> Option<&Sample> {
        match placeholder {
            "NEW" => Some(&self.new),
            "RELATIVE" => Some(&self.relative),
            "KEPT" => Some(&self.kept),
            _ => None,
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("strace.log")
    }
}

/// A command that could not do its work says so, and never by a panic.
fn check_answer(run: &Run, fault: Fault) -> Outcome<()> {
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

/// Nine blobs and a configuration: enough of them for one `syncfs`.
fn small_model(seed: u64) -> ModelFile {
    let mut model = ModelFile::empty();
    for tensor in 0..8 {
        model.add_noise(seed, &format!("t{tensor}"), GgmlType::F32, &[256]);
    }
    model
}

fn copy_tree(from: &Path, to: &Path) -> Outcome<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

impl fmt::Display for Point {
    /// As `strace` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::Kill => write!(f, "{}:signal=KILL:when={}", self.call, self.ordinal),
            Fault::Error(error) => write!(f, "{}:error={error}:when={}", self.call, self.ordinal),
        }
    }
}
