//! The sequence of a run: preparation, a quiet period, one attack after the other, SIGTERM.

use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use blobd_client::protocol::request::GcParams;

use crate::arena::Arena;
use crate::attacker::Attacker;
use crate::attacks::{self, ATTACKS, Attack};
use crate::bounds::{self, ADMINISTERING, Check, Held, RETURNING};
use crate::janitor::{self, Janitor};
use crate::report::{Report, Round};
use crate::watch::{ProcessorTime, Usage, Watch};
use crate::witness::Witness;
use crate::{Outcome, Setup, stop};

/// The quiet time: as long as an attack, but long enough for medians.
const LEAST_QUIET: Duration = Duration::from_secs(8);

/// How long root waits when it cleans up after an attack.
const CLEANING: Duration = Duration::from_secs(120);
/// How long it waits when it removes models meanwhile.
const JANITOR_PATIENCE: Duration = Duration::from_secs(5);

/// Checks the name of an attack or of the last step.
///
/// # Errors
/// When there is none of this name.
pub(crate) fn checked_name(name: String) -> Outcome<String> {
    if name == stop::NAME || attacks::find(&name).is_some() {
        return Ok(name);
    }
    let names: Vec<_> = ATTACKS.iter().map(|attack| attack.name).chain([stop::NAME]).collect();
    Err(format!("--only {name}: one of {} expected", names.join(", ")).into())
}

/// Plays everything that is asked for.
///
/// # Errors
/// When the machine does not do its part; a bound that does not hold is no error but is reported.
pub(crate) fn run(setup: &Setup, may_mount: bool, report: &mut Report) -> Outcome<()> {
    let mut stage = Stage::set()?;
    let is_wanted = |name: &str| setup.only.as_deref().is_none_or(|only| only == name);
    let attacks: Vec<_> = ATTACKS.iter().filter(|attack| is_wanted(attack.name)).collect();
    let mut attackers = Vec::new();
    for attack in &attacks {
        report.progress(&format!("{}: prepares", attack.name));
        let attacker = Attacker::start(attack, &stage.arena, may_mount)?;
        attacker.wait_until_ready()?;
        attackers.push(attacker);
    }
    let time = setup.duration / u32::try_from(attacks.len().max(1))?;
    report.progress("quiet");
    let before = stage.measure_quiet(time.max(LEAST_QUIET), report)?;
    for (attack, attacker) in attacks.into_iter().zip(attackers) {
        report.progress(&format!("{}: {}", attack.name, attack.what));
        stage.play(attack, attacker, before, time, report)?;
    }
    if is_wanted(stop::NAME) {
        stop::run(&mut stage.arena, may_mount, report)?;
    }
    Ok(())
}

/// What all attacks of a run share.
struct Stage {
    witness: Witness,
    watch: Watch,
    _janitor: Janitor,
    arena: Arena,
}

impl Stage {
    fn set() -> Outcome<Self> {
        let arena = Arena::start()?;
        let witness = Witness::start(&arena.socket(), &arena.folder("witness"))?;
        let watch = Watch::start(arena.daemon.pid());
        let janitor = Janitor::start(arena.client(JANITOR_PATIENCE));
        Ok(Self { witness, watch, _janitor: janitor, arena })
    }

    /// What the witness measures while the attackers are idle, and the most that the daemon uses then.
    fn measure_quiet(&mut self, time: Duration, report: &mut Report) -> Outcome<Usage> {
        // What preparing the attacks has left behind goes first.
        sleep(RETURNING);
        self.watch.reset();
        let phase = self.witness.begin_phase()?;
        sleep(time);
        self.witness.begin_phase()?;
        report.set_quiet(self.witness.report(phase)?);
        Ok(self.watch.peak())
    }

    fn play(
        &mut self,
        attack: &Attack,
        mut attacker: Attacker,
        before: Usage,
        time: Duration,
        report: &mut Report,
    ) -> Outcome<()> {
        let start = Instant::now();
        let lines_before = self.log().len();
        let processors = ProcessorTime::now(&self.processes(&attacker))?;
        self.watch.reset();
        let phase = self.witness.begin_phase()?;
        attacker.begin()?;
        sleep(time / 2);
        report.add(self.administer(attack.name));
        report.add((attack.beside)(&self.arena));
        while start.elapsed() < time && self.watch.is_running() {
            sleep(Duration::from_millis(50));
        }
        let others_share = processors.others_share(&self.processes(&attacker))?;
        let attacked_for = start.elapsed();
        self.witness.begin_phase()?;
        let tally = attacker.end();
        let (held, returned_after) = self.wait_until_returned(before);
        let log = self.log().split_off(lines_before);
        let measured = self.witness.report(phase)?;
        report.add(bounds::of_witness(attack.name, report.quiet(), &measured));
        report.add(bounds::of_daemon(attack.name, &held));
        let has_ended = !self.arena.daemon.is_running();
        report.add([
            bounds::of_log(attack.name, log.len(), attacked_for),
            Check::at_most(attack.name, "ends of the daemon", f64::from(u8::from(has_ended)), 0.0, "times"),
        ]);
        report.add((attack.judge)(&tally));
        let (attack, what) = (attack.name.to_owned(), attack.what.to_owned());
        report.add_round(Round { attack, what, measured, held, returned_after, log, tally, others_share });
        if !held.has_returned() || has_ended {
            self.restart(report)?;
        }
        self.clean_up()
    }

    /// Starts the daemon anew, so that what an attack has left behind does not count for the next one.
    fn restart(&mut self, report: &mut Report) -> Outcome<()> {
        report.progress("the daemon has not come back to where it was, and is started anew");
        self.arena.restart()?;
        self.watch = Watch::start(self.arena.daemon.pid());
        // Answered when the index is complete, which takes a while and memory.
        self.arena.client(CLEANING).disk_usage()?;
        Ok(())
    }

    /// Removes what an attack has stored.
    fn clean_up(&self) -> Outcome<()> {
        let client = self.arena.client(CLEANING);
        // Else the janitor has been faster.
        let _ = janitor::remove(&client);
        client.gc(&GcParams { dry_run: false })?;
        Ok(())
    }

    /// Waits until the daemon uses no more than before, but not for ever.
    fn wait_until_returned(&self, before: Usage) -> (Held, Duration) {
        let (start, peak) = (Instant::now(), self.watch.peak());
        loop {
            let held = Held { before, peak, after: self.watch.now() };
            if held.has_returned() || start.elapsed() >= RETURNING {
                return (held, start.elapsed());
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Root asks everything that an administrator asks first, at once.
    fn administer(&self, attack: &str) -> Vec<Check> {
        let client = self.arena.client(ADMINISTERING * 2);
        let check = |verb: &str, ask: &(dyn Fn() -> bool + Sync)| {
            let start = Instant::now();
            let is_answered = ask();
            let seconds = if is_answered { start.elapsed().as_secs_f64() } else { f64::NAN };
            Check::at_most(attack, &format!("{verb} of root"), seconds, ADMINISTERING.as_secs_f64(), "s")
        };
        let questions: [(&str, &(dyn Fn() -> bool + Sync)); 5] = [
            ("ps", &|| client.sessions().is_ok()),
            ("ls", &|| client.models().is_ok()),
            ("df", &|| client.disk_usage().is_ok()),
            ("doctor", &|| client.doctor().is_ok()),
            ("gc --dry-run", &|| client.gc(&GcParams { dry_run: true }).is_ok()),
        ];
        thread::scope(|scope| {
            let asked = questions.map(|(verb, ask)| scope.spawn(move || check(verb, ask)));
            asked.into_iter().filter_map(|thread| thread.join().ok()).collect()
        })
    }

    /// What the daemon has logged since it was last started.
    fn log(&self) -> Vec<String> {
        self.arena.daemon.log().lines().map(str::to_owned).collect()
    }

    fn processes(&self, attacker: &Attacker) -> [u32; 4] {
        [std::process::id(), self.arena.daemon.pid(), self.witness.pid(), attacker.pid()]
    }
}
