//! Clients that change a store until it crashes.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blobd_tests::command::{Blobd, Run};

use crate::Outcome;
use crate::history::History;
use crate::random::Random;
use crate::samples::{Sample, Samples};

/// A logical clock that counts the events of a run: an import that was acknowledged at 17 must survive every
/// crash from 17 on.
pub(crate) type Clock = dyn Fn() -> u64 + Send + Sync;

/// A client that runs one operation after the other (import, move, pull, tag, remove, collect), with its own names.
pub(crate) struct Worker {
    names: [String; 3],
    blobd: Blobd,
    samples: Arc<Samples>,
    /// The model that only this client pulls.
    own: Sample,
    history: Arc<History>,
    clock: Arc<Clock>,
    random: Random,
}

/// `blobd import`, also of a name that another model has.
pub(crate) fn import(blobd: &Blobd, sample: &Sample, name: &str) -> Run {
    let words =
        ["import".as_ref(), sample.path.as_os_str(), "--force".as_ref(), "--name".as_ref(), name.as_ref()];
    blobd.run(words)
}

/// `blobd import --move`, also of a name that another model has.
fn move_into_store(blobd: &Blobd, file: &Path, name: &str) -> Run {
    let words =
        ["import".as_ref(), file.as_os_str(), "--move".as_ref(), "--force".as_ref(), "--name".as_ref()];
    blobd.run(words.into_iter().chain([name.as_ref()]))
}

/// `blobd pull`, also of a name that another model has.
pub(crate) fn pull(blobd: &Blobd, sample: &Sample, name: &str) -> Run {
    blobd.run(["pull", &sample.source, "--force", "--name", name])
}

impl Worker {
    /// The worker with this number. It runs `blobd`, and records in `history` its changes and their
    /// acknowledgements with the times of `clock`.
    pub(crate) fn new(
        number: usize,
        blobd: Blobd,
        samples: &Arc<Samples>,
        history: &Arc<History>,
        clock: &Arc<Clock>,
        random: Random,
    ) -> Self {
        let names = ["a", "b", "c"].map(|name| format!("w{number}-{name}"));
        let (samples, history, clock) = (Arc::clone(samples), Arc::clone(history), Arc::clone(clock));
        let own = samples.own[number % samples.own.len()].clone();
        Self { names, blobd, samples, own, history, clock, random }
    }

    /// Works on its own thread until `is_over`, which is set just before the daemon is killed or the power is
    /// cut. Returns the error of a command that failed before that.
    pub(crate) fn work_until(mut self, is_over: &Arc<AtomicBool>) -> JoinHandle<Result<(), String>> {
        let is_over = Arc::clone(is_over);
        thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                match self.step() {
                    Err(error) if !is_over.load(Ordering::SeqCst) => return Err(error.to_string()),
                    _ => {}
                }
            }
            Ok(())
        })
    }

    /// Runs one random operation.
    fn step(&mut self) -> Outcome<()> {
        let name = self.random.pick(&self.names).clone();
        let other = self.random.pick(&self.names).clone();
        match (self.random.below(13), self.history.latest(&name)) {
            (0, _) => succeeded(&self.blobd.line("gc")),
            (1 | 2, Some(_)) => self.change(&name, None, |worker| worker.blobd.line(&format!("rm {name}"))),
            (3, Some(content)) if other != name => self.change(&other, Some(&content), |worker| {
                worker.blobd.line(&format!("tag --force {name} {other}"))
            }),
            (4, Some(content)) => self.trash_and_undelete(&name, &content),
            (5 | 6, _) => self.pull_own(&name),
            (7..=9, _) => {
                let sample = self.any_shared();
                self.change(&name, Some(&sample.digest), |worker| pull(&worker.blobd, &sample, &name))
            }
            (10, _) => {
                let sample = self.any_shared();
                self.move_copy(&name, &sample)
            }
            _ => {
                let sample = self.any_shared();
                self.change(&name, Some(&sample.digest), |worker| import(&worker.blobd, &sample, &name))
            }
        }
    }

    /// A shared model; often the one that is related to the clients' own models.
    fn any_shared(&mut self) -> Sample {
        let shared = &self.samples.shared;
        match shared.last().filter(|_| self.random.one_in(4)) {
            Some(large) => large.clone(),
            None => self.random.pick(shared).clone(),
        }
    }

    /// Moves a model to the trash, and in half of the cases out of it again.
    fn trash_and_undelete(&mut self, name: &str, content: &str) -> Outcome<()> {
        self.change(name, None, |worker| worker.blobd.line(&format!("rm --keep 1h {name}")))?;
        if self.random.one_in(2) {
            return Ok(());
        }
        self.change(name, Some(content), |worker| worker.blobd.line(&format!("undelete {name}")))
    }

    /// Moves a copy of a model, which is on another file system, into the store. The deletion of the copy counts as the
    /// acknowledgement: from then on the store must have the model, also if the command has not ended.
    fn move_copy(&self, name: &str, sample: &Sample) -> Outcome<()> {
        let copy = sample.path.with_file_name(format!("{name}.gguf"));
        // Another process copies the file. If this one did, a child that another thread starts at that moment would have the
        // copy open too, and a move refuses a file that is in use.
        let copied = Command::new("cp").arg(&sample.path).arg(&copy).status()?;
        if !copied.success() {
            return Err(format!("{}: cannot be copied", copy.display()).into());
        }
        let change = self.history.begin(name, Some(&sample.digest), (self.clock)());
        let run = thread::scope(|scope| {
            let run = scope.spawn(|| move_into_store(&self.blobd, &copy, name));
            while copy.exists() && !run.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            if !copy.exists() {
                self.history.acknowledge(&change, (self.clock)());
            }
            run.join().map_err(|_panic| "the command panicked")
        })?;
        succeeded(&run)?;
        match copy.exists() {
            true => Err(format!("{}: still there after its move", copy.display()).into()),
            false => Ok(()),
        }
    }

    /// Pulls slowly, or with an interruption and a second attempt. If the daemon dies in between, the client
    /// of the next daemon resumes.
    fn pull_own(&mut self, name: &str) -> Outcome<()> {
        let (samples, own) = (Arc::clone(&self.samples), self.own.clone());
        match self.random.below(3) {
            0 => samples.registry().break_pull(&own, &mut self.random),
            1 => samples.registry().slow_down(&own),
            _ => {}
        }
        self.change(name, Some(&own.digest), |worker| {
            let first = pull(&worker.blobd, &own, name);
            samples.registry().clear_faults(&own);
            if first.code == 0 { first } else { pull(&worker.blobd, &own, name) }
        })
    }

    /// Opens and reads one of the models, as an engine does. The model need not exist.
    pub(crate) fn read(&mut self) {
        let name = self.random.pick(&self.names);
        let _ignored = self.blobd.line(&format!("export {name} -o -"));
    }

    fn change(&self, name: &str, becomes: Option<&str>, ask: impl FnOnce(&Self) -> Run) -> Outcome<()> {
        let change = self.history.begin(name, becomes, (self.clock)());
        succeeded(&ask(self))?;
        self.history.acknowledge(&change, (self.clock)());
        Ok(())
    }
}

fn succeeded(run: &Run) -> Outcome<()> {
    match run.code {
        0 => Ok(()),
        code => Err(format!("blobd {}: exit code {code}: {}", run.arguments, run.stderr.trim()).into()),
    }
}
