//! The report: tables for people, or one JSON document.

use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use crate::Setup;
use crate::bounds::{Check, UsagePhases, mib};
use crate::context::Counts;
use crate::timings::Timings;
use crate::witness::{CONTROL, Measured, VERBS};

/// All measurements of a run.
#[derive(Debug)]
pub(crate) struct Report {
    start: Instant,
    is_json: bool,
    baseline: Measured,
    rounds: Vec<Round>,
    checks: Vec<Check>,
    skipped: Vec<(String, String)>,
}

/// One attack.
#[derive(Clone, Debug, Default)]
pub(crate) struct Round {
    pub(crate) attack: String,
    pub(crate) what: String,
    pub(crate) measured: Measured,
    pub(crate) usage: UsagePhases,
    /// The time until the daemon had returned to its former use of resources, or until the wait ended.
    pub(crate) returned_after: Duration,
    /// The daemon's log lines.
    pub(crate) log: Vec<String>,
    pub(crate) counts: Counts,
    /// The share of processor time that unrelated programs used.
    pub(crate) others_share: f64,
}

impl Report {
    pub(crate) fn new(setup: &Setup) -> Self {
        let (baseline, rounds, checks, skipped) = Default::default();
        Self { start: Instant::now(), is_json: setup.is_json, baseline, rounds, checks, skipped }
    }

    /// Prints progress to standard error.
    pub(crate) fn progress(&self, text: &str) {
        eprintln!("abuse: {:>6.1} s: {text}", self.start.elapsed().as_secs_f64());
    }

    /// Reports that a part cannot run here.
    pub(crate) fn skip(&mut self, part: &str, reason: &str) {
        self.progress(&format!("{part}: skipped: {reason}"));
        self.skipped.push((part.to_owned(), reason.to_owned()));
    }

    pub(crate) fn set_baseline(&mut self, baseline: Measured) {
        self.baseline = baseline;
    }

    pub(crate) fn baseline(&self) -> &Measured {
        &self.baseline
    }

    pub(crate) fn add(&mut self, checks: impl IntoIterator<Item = Check>) {
        for check in checks {
            if !check.holds {
                let Check { attack, what, measured, bound, unit, .. } = &check;
                self.progress(&format!(
                    "VIOLATION: {attack}: {what}: {measured:.1} {unit}, at most {bound:.1}"
                ));
            }
            self.checks.push(check);
        }
    }

    pub(crate) fn add_round(&mut self, round: Round) {
        self.rounds.push(round);
    }

    /// Whether every bound held.
    pub(crate) fn all_hold(&self) -> bool {
        self.checks.iter().all(|check| check.holds)
    }

    pub(crate) fn print(&self) {
        if self.is_json {
            println!("{}", self.json());
            return;
        }
        self.print_witness();
        self.print_daemon();
        self.print_checks();
    }

    fn print_witness(&self) {
        println!("\nwitness, milliseconds: least / median / worst");
        println!("{:<12} {:<8} {:>24} {:>24} {:>7}", "attack", "verb", "baseline", "attacked", "ratio");
        for round in &self.rounds {
            for verb in VERBS.into_iter().chain([CONTROL]) {
                let (Some(baseline), Some(attacked)) = (self.baseline.get(verb), round.measured.get(verb))
                else {
                    continue;
                };
                let ratio = attacked.median() / baseline.median();
                let attack = &round.attack;
                println!(
                    "{attack:<12} {verb:<8} {:>24} {:>24} {ratio:>6.2}x",
                    spread(baseline),
                    spread(attacked)
                );
            }
        }
    }

    fn print_daemon(&self) {
        println!("\ndaemon: before / peak / after");
        let columns = ["memory in MiB", "threads", "descriptors", "returned", "log lines", "others"];
        let [memory, threads, descriptors, returned, lines, others] = columns;
        println!(
            "{:<12} {memory:>18} {threads:>16} {descriptors:>18} {returned:>9} {lines:>10} {others:>7}",
            "attack"
        );
        for round in &self.rounds {
            let UsagePhases { before, peak, after } = &round.usage;
            let memory = [before.resident_bytes, peak.peak_resident_bytes, after.resident_bytes];
            let memory = memory.map(|bytes| format!("{:.0}", mib(bytes))).join(" / ");
            let threads = format!("{} / {} / {}", before.threads, peak.threads, after.threads);
            let descriptors =
                format!("{} / {} / {}", before.descriptors, peak.descriptors, after.descriptors);
            let returned = format!("{:.1} s", round.returned_after.as_secs_f64());
            let others = format!("{:.0} %", round.others_share * 100.0);
            let (attack, lines) = (&round.attack, round.log.len());
            println!(
                "{attack:<12} {memory:>18} {threads:>16} {descriptors:>18} {returned:>9} {lines:>10} {others:>7}"
            );
        }
        println!("others: the share of processor time that unrelated programs used");
    }

    fn print_checks(&self) {
        println!("\n{:<12} {:<32} {:>10} {:>10}", "attack", "bound", "measured", "at most");
        for check in &self.checks {
            let Check { attack, what, measured, bound, unit, holds } = check;
            let result = if *holds { "ok" } else { "VIOLATED" };
            println!("{attack:<12} {what:<32} {measured:>10.1} {bound:>10.1} {unit:<8} {result}");
        }
        for (part, reason) in &self.skipped {
            println!("{part}: skipped: {reason}");
        }
        for round in &self.rounds {
            println!("{}: {}; {:?}", round.attack, round.what, round.counts);
            // The last line as an example.
            round.log.last().inspect(|line| println!("    log: {line}"));
        }
        let violated = self.checks.iter().filter(|check| !check.holds).count();
        println!("\n{} bounds, {violated} violated", self.checks.len());
    }

    fn json(&self) -> Json {
        json!({
            "holds": self.all_hold(),
            "baseline": summaries(&self.baseline),
            "attacks": self.rounds.iter().map(Round::json).collect::<Vec<_>>(),
            "checks": self.checks,
            "skipped": self.skipped,
        })
    }
}

impl Round {
    fn json(&self) -> Json {
        let UsagePhases { before, peak, after } = &self.usage;
        let three = |of: fn(&crate::monitor::Usage) -> u64| json!([of(before), of(peak), of(after)]);
        json!({
            "name": self.attack,
            "what": self.what,
            "witness": summaries(&self.measured),
            "resident_bytes": [before.resident_bytes, peak.peak_resident_bytes, after.resident_bytes],
            "threads": three(|usage| usage.threads),
            "descriptors": three(|usage| usage.descriptors),
            "returned_after_seconds": self.returned_after.as_secs_f64(),
            "log_lines": self.log.len(),
            "attacker": self.counts,
            "others_share": self.others_share,
        })
    }
}

fn summaries(measured: &Measured) -> Json {
    measured.iter().map(|(verb, timings)| (verb.clone(), timings.summary())).collect()
}

fn spread(timings: &Timings) -> String {
    format!("{:.2} / {:.2} / {:.1}", timings.min(), timings.median(), timings.max())
}
