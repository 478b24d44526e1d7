//! The sequence of a run: preparation, the baseline, one attack after the other, SIGTERM.

use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use blobd_client::protocol::request::GcParams;

use crate::attacker::Attacker;
use crate::attacks::{self, ATTACKS, Attack};
use crate::bounds::{self, ADMIN_BOUND, Check, RECOVERY_BOUND, UsagePhases};
use crate::cleanup::{self, PeriodicCleanup};
use crate::environment::Environment;
use crate::monitor::{ProcessorTime, Usage, UsageMonitor};
use crate::report::{Report, Round};
use crate::witness::Witness;
use crate::{Outcome, Setup, WITNESS_UID, stop};

/// The baseline is measured as long as an attack, and at least so long, for meaningful medians.
const MIN_BASELINE_TIME: Duration = Duration::from_secs(8);

/// The time limit of root's requests after an attack.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(120);
/// The time limit of root's removals during an attack.
const PERIODIC_CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Checks the name of an attack or of the last step.
///
/// # Errors
/// When there is none of this name.
pub(crate) fn checked_name(name: String) -> Outcome<String> {
    if name == stop::NAME || attacks::find(&name).is_some() {
        return Ok(name);
    }
    let names: Vec<_> = ATTACKS.iter().map(|attack| attack.name).chain([stop::NAME]).collect();
    Err(format!("--only: expected one of {}, found {name}", names.join(", ")).into())
}

/// Runs all attacks that the options select.
///
/// # Errors
/// When the run itself fails. A broken bound is not an error; it is in the report.
pub(crate) fn run(setup: &Setup, may_mount: bool, report: &mut Report) -> Outcome<()> {
    let mut scenario = Scenario::prepare()?;
    let is_wanted = |name: &str| setup.only.as_deref().is_none_or(|only| only == name);
    let attacks: Vec<_> = ATTACKS.iter().filter(|attack| is_wanted(attack.name)).collect();
    let mut attackers = Vec::new();
    for attack in &attacks {
        report.progress(&format!("{}: preparing", attack.name));
        attackers.push(Attacker::start(attack, &scenario.environment, may_mount)?);
    }
    let time = setup.duration / u32::try_from(attacks.len().max(1))?;
    report.progress("baseline");
    let before = scenario.measure_baseline(time.max(MIN_BASELINE_TIME), report)?;
    for (attack, attacker) in attacks.into_iter().zip(attackers) {
        report.progress(&format!("{}: {}", attack.name, attack.what));
        scenario.run_attack(attack, attacker, before, time, report)?;
    }
    if is_wanted(stop::NAME) {
        stop::run(&mut scenario.environment, may_mount, report)?;
    }
    Ok(())
}

/// The processes and threads that all attacks of a run share.
struct Scenario {
    witness: Witness,
    monitor: UsageMonitor,
    _cleanup: PeriodicCleanup,
    environment: Environment,
}

impl Scenario {
    fn prepare() -> Outcome<Self> {
        let environment = Environment::start()?;
        let witness = Witness::start(&environment.socket(), &environment.folder_of(WITNESS_UID))?;
        let monitor = UsageMonitor::start(environment.daemon.pid());
        let cleanup = PeriodicCleanup::start(environment.client(PERIODIC_CLEANUP_TIMEOUT));
        Ok(Self { witness, monitor, _cleanup: cleanup, environment })
    }

    /// Measures the witness's requests while the attackers are idle. Returns the daemon's peak usage in this
    /// time.
    fn measure_baseline(&mut self, time: Duration, report: &mut Report) -> Outcome<Usage> {
        // First, the daemon releases what the preparation of the attacks has used.
        sleep(RECOVERY_BOUND);
        self.monitor.reset();
        let phase = self.witness.begin_phase()?;
        sleep(time);
        self.witness.begin_phase()?;
        report.set_baseline(self.witness.report(phase)?);
        Ok(self.monitor.peak())
    }

    fn run_attack(
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
        self.monitor.reset();
        let phase = self.witness.begin_phase()?;
        attacker.begin()?;
        sleep(time / 2);
        report.add(self.administer(attack.name));
        report.add((attack.meanwhile)(&self.environment));
        while start.elapsed() < time && self.monitor.is_running() {
            sleep(Duration::from_millis(50));
        }
        let others_share = processors.others_share(&self.processes(&attacker))?;
        let attacked_for = start.elapsed();
        self.witness.begin_phase()?;
        let counts = attacker.end();
        let (usage, returned_after) = self.wait_until_returned(before);
        let mut log = self.log().split_off(lines_before);
        // Finished work that has changed the store is always logged: it costs its user more than the line.
        log.retain(|line| !line.contains(" uid="));
        let measured = self.witness.report(phase)?;
        report.add(bounds::of_witness(attack.name, report.baseline(), &measured));
        report.add(bounds::of_daemon(attack.name, &usage));
        let has_ended = !self.environment.daemon.is_running();
        report.add([
            bounds::of_log(attack.name, attack.users.len(), log.len(), attacked_for),
            Check::at_most(attack.name, "exits of the daemon", f64::from(u8::from(has_ended)), 0.0, "times"),
        ]);
        report.add((attack.check_counts)(&counts));
        let (attack, what) = (attack.name.to_owned(), attack.what.to_owned());
        report.add_round(Round { attack, what, measured, usage, returned_after, log, counts, others_share });
        if !usage.has_returned() || has_ended {
            self.restart(report)?;
        }
        self.clean_up()
    }

    /// Restarts the daemon, so that resources that one attack has leaked do not count for the next one.
    fn restart(&mut self, report: &mut Report) -> Outcome<()> {
        report.progress("the daemon has not returned to its former use of resources and is restarted");
        self.environment.restart()?;
        self.monitor = UsageMonitor::start(self.environment.daemon.pid());
        // The response comes when the index is complete. Building it takes time and memory.
        self.environment.client(CLEANUP_TIMEOUT).disk_usage()?;
        Ok(())
    }

    /// Removes the models that an attack has stored.
    fn clean_up(&self) -> Outcome<()> {
        let client = self.environment.client(CLEANUP_TIMEOUT);
        // Fails if the periodic cleanup has removed a model first.
        let _ = cleanup::remove(&client);
        client.gc(&GcParams { dry_run: false, ..GcParams::default() })?;
        Ok(())
    }

    /// Waits, with a time limit, until the daemon uses no more resources than before.
    fn wait_until_returned(&self, before: Usage) -> (UsagePhases, Duration) {
        let (start, peak) = (Instant::now(), self.monitor.peak());
        loop {
            let usage = UsagePhases { before, peak, after: self.monitor.now() };
            if usage.has_returned() || start.elapsed() >= RECOVERY_BOUND {
                return (usage, start.elapsed());
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Sends, as root and all at once, the requests that an administrator uses first in an incident.
    fn administer(&self, attack: &str) -> Vec<Check> {
        let client = self.environment.client(ADMIN_BOUND * 2);
        let check = |verb: &str, request: &(dyn Fn() -> bool + Sync)| {
            let start = Instant::now();
            let has_succeeded = request();
            let seconds = if has_succeeded { start.elapsed().as_secs_f64() } else { f64::NAN };
            Check::at_most(attack, &format!("{verb} of root"), seconds, ADMIN_BOUND.as_secs_f64(), "s")
        };
        let requests: [(&str, &(dyn Fn() -> bool + Sync)); 5] = [
            ("ps", &|| client.sessions().is_ok()),
            ("ls", &|| client.models().is_ok()),
            ("df", &|| client.disk_usage().is_ok()),
            ("doctor", &|| client.doctor().is_ok()),
            ("gc --dry-run", &|| client.gc(&GcParams { dry_run: true, ..GcParams::default() }).is_ok()),
        ];
        thread::scope(|scope| {
            let threads = requests.map(|(verb, request)| scope.spawn(move || check(verb, request)));
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        })
    }

    /// The daemon's log lines since its last start.
    fn log(&self) -> Vec<String> {
        self.environment.daemon.log().lines().map(str::to_owned).collect()
    }

    fn processes(&self, attacker: &Attacker) -> Vec<u32> {
        let own = [std::process::id(), self.environment.daemon.pid(), self.witness.pid()];
        own.into_iter().chain(attacker.pids()).collect()
    }
}
