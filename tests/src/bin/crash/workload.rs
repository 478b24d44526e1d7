//! What clients do to a store while its machine is about to crash.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use blobd_tests::command::{Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;

use crate::Outcome;
use crate::history::History;
use crate::random::Random;

/// A model file that lies ready for import.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Where it lies.
    pub(crate) path: PathBuf,
    /// The SHA-256 of its bytes.
    pub(crate) digest: String,
}

/// What counts the events of a run: an import that was acknowledged at 17 must survive every crash
/// from 17 on.
pub(crate) type Clock = dyn Fn() -> u64 + Send + Sync;

/// A client that imports, tags, removes and collects, one after the other, with names of its own.
pub(crate) struct Worker {
    names: [String; 3],
    blobd: Blobd,
    samples: Arc<[Sample]>,
    history: Arc<History>,
    clock: Arc<Clock>,
    random: Random,
}

/// Writes the files that workers import: models that share all tensors but one, in two families
/// that share none.
///
/// # Errors
/// When there is no room for them.
pub(crate) fn write_samples(folder: &Path) -> Outcome<Arc<[Sample]>> {
    let mut samples = Vec::new();
    for family in 1..=2 {
        let original = ModelFile::dense(family);
        let relatives = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight"];
        let relatives = relatives.map(|tensor| original.clone().with_changed(tensor));
        samples.extend([original].into_iter().chain(relatives));
    }
    let write = |(number, model): (usize, &ModelFile)| write_sample(folder, &number.to_string(), model);
    samples.iter().enumerate().map(write).collect()
}

/// Writes one model's file.
///
/// # Errors
/// When there is no room for it.
pub(crate) fn write_sample(folder: &Path, name: &str, model: &ModelFile) -> Outcome<Sample> {
    let bytes = model.bytes();
    let path = folder.join(format!("sample-{name}.gguf"));
    std::fs::write(&path, &bytes)?;
    Ok(Sample { path, digest: sha256(&bytes) })
}

/// `blobd import`.
pub(crate) fn import(blobd: &Blobd, sample: &Sample, name: &str) -> Run {
    blobd.run(["import".as_ref(), sample.path.as_os_str(), "--name".as_ref(), name.as_ref()])
}

impl Worker {
    /// The worker with this number. It runs `blobd` and tells `history` what it asked and what it
    /// was answered, and when, by `clock`.
    pub(crate) fn new(
        number: usize,
        blobd: Blobd,
        samples: &Arc<[Sample]>,
        history: &Arc<History>,
        clock: &Arc<Clock>,
        random: Random,
    ) -> Self {
        let names = ["a", "b", "c"].map(|name| format!("w{number}-{name}"));
        let (samples, history, clock) = (Arc::clone(samples), Arc::clone(history), Arc::clone(clock));
        Self { names, blobd, samples, history, clock, random }
    }

    /// Works in a thread of its own until `is_over`, which is set just before the daemon is killed
    /// or cut off from its disk. Ends with what a command said that failed before that.
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

    /// Does one thing and waits until it is done.
    fn step(&mut self) -> Outcome<()> {
        let name = self.random.pick(&self.names).clone();
        let other = self.random.pick(&self.names).clone();
        match (self.random.below(8), self.history.latest(&name)) {
            (0, _) => succeeded(&self.blobd.line("gc")),
            (1 | 2, Some(_)) => self.change(&name, None, |worker| worker.blobd.line(&format!("rm {name}"))),
            (3, Some(content)) if other != name => self
                .change(&other, Some(&content), |worker| worker.blobd.line(&format!("tag {name} {other}"))),
            _ => {
                let sample = self.random.pick(&self.samples).clone();
                self.change(&name, Some(&sample.digest), |worker| import(&worker.blobd, &sample, &name))
            }
        }
    }

    /// Opens and reads one of the models, as an engine does; whether it is there does not matter.
    pub(crate) fn read(&mut self) {
        let name = self.random.pick(&self.names);
        let _whatever_it_says = self.blobd.line(&format!("export {name} -o -"));
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
