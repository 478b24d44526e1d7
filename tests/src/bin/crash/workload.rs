//! What clients do to a store while its machine is about to crash.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use blobd_tests::command::{Blobd, Run};

use crate::Outcome;
use crate::history::History;
use crate::random::Random;
use crate::stock::{Sample, Stock};

/// What counts the events of a run: an import that was acknowledged at 17 must survive every crash
/// from 17 on.
pub(crate) type Clock = dyn Fn() -> u64 + Send + Sync;

/// A client that imports, pulls, tags, removes and collects, one after the other, with names of its
/// own.
pub(crate) struct Worker {
    names: [String; 3],
    blobd: Blobd,
    stock: Arc<Stock>,
    /// What nobody else pulls.
    own: Sample,
    history: Arc<History>,
    clock: Arc<Clock>,
    random: Random,
}

/// `blobd import`.
pub(crate) fn import(blobd: &Blobd, sample: &Sample, name: &str) -> Run {
    blobd.run(["import".as_ref(), sample.path.as_os_str(), "--name".as_ref(), name.as_ref()])
}

/// `blobd pull`.
pub(crate) fn pull(blobd: &Blobd, sample: &Sample, name: &str) -> Run {
    blobd.run(["pull", &sample.source, "--name", name])
}

impl Worker {
    /// The worker with this number. It runs `blobd` and tells `history` what it asked and what it
    /// was answered, and when, by `clock`.
    pub(crate) fn new(
        number: usize,
        blobd: Blobd,
        stock: &Arc<Stock>,
        history: &Arc<History>,
        clock: &Arc<Clock>,
        random: Random,
    ) -> Self {
        let names = ["a", "b", "c"].map(|name| format!("w{number}-{name}"));
        let (stock, history, clock) = (Arc::clone(stock), Arc::clone(history), Arc::clone(clock));
        let own = stock.own[number % stock.own.len()].clone();
        Self { names, blobd, stock, own, history, clock, random }
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
        match (self.random.below(12), self.history.latest(&name)) {
            (0, _) => succeeded(&self.blobd.line("gc")),
            (1 | 2, Some(_)) => self.change(&name, None, |worker| worker.blobd.line(&format!("rm {name}"))),
            (3, Some(content)) if other != name => self
                .change(&other, Some(&content), |worker| worker.blobd.line(&format!("tag {name} {other}"))),
            (4, Some(content)) => self.put_aside_and_back(&name, &content),
            (5 | 6, _) => self.pull_own(&name),
            (7..=9, _) => {
                let sample = self.any_shared();
                self.change(&name, Some(&sample.digest), |worker| pull(&worker.blobd, &sample, &name))
            }
            _ => {
                let sample = self.any_shared();
                self.change(&name, Some(&sample.digest), |worker| import(&worker.blobd, &sample, &name))
            }
        }
    }

    /// Often the relative of those that clients have for themselves.
    fn any_shared(&mut self) -> Sample {
        let shared = &self.stock.shared;
        match shared.last().filter(|_| self.random.one_in(4)) {
            Some(large) => large.clone(),
            None => self.random.pick(shared).clone(),
        }
    }

    /// Into the trash, and in half of the cases out of it again.
    fn put_aside_and_back(&mut self, name: &str, content: &str) -> Outcome<()> {
        self.change(name, None, |worker| worker.blobd.line(&format!("rm --keep 1h {name}")))?;
        if self.random.one_in(2) {
            return Ok(());
        }
        self.change(name, Some(content), |worker| worker.blobd.line(&format!("undelete {name}")))
    }

    /// A pull that is slow or breaks, and then goes on. If the daemon dies meanwhile, this client's
    /// successor goes on.
    fn pull_own(&mut self, name: &str) -> Outcome<()> {
        let (stock, own) = (Arc::clone(&self.stock), self.own.clone());
        match self.random.below(3) {
            0 => stock.shelf().break_pull(&own, &mut self.random),
            1 => stock.shelf().slow_down(&own),
            _ => {}
        }
        self.change(name, Some(&own.digest), |worker| {
            let first = pull(&worker.blobd, &own, name);
            stock.shelf().mend(&own);
            if first.code == 0 { first } else { pull(&worker.blobd, &own, name) }
        })
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
