//! Tests on the real kernel that a store survives crashes: `just crash`.
//!
//! There are four parts. Three end with the same checks ([`invariants`]): `states` records the writes of a
//! working daemon and mounts the disk states that a power cut could have left, `shutdown` shuts file systems
//! down under load, `sweep` kills commands, or makes their system calls fail, at one call after the other. `moves`
//! kills `import --move` and its daemon at random moments, and looks for every model on both sides.
//! Parts that cannot run on this machine are skipped, with the reason. `docs/RELIABILITY.md` lists the
//! guarantees.

use std::error::Error;
use std::process::ExitCode;

mod crash_image;
mod durability;
mod file_system;
mod history;
mod invariants;
mod moves;
mod power_cut;
mod random;
mod recorder;
mod report;
mod requirements;
mod samples;
mod shutdown;
mod states;
mod sweep;
mod workload;

use blobd_tests::moves::Layout;
use durability::Durability;
use file_system::Kind;
use report::Report;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Command-line options.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The parts to run; all if there are none.
    parts: Vec<String>,
    /// The seed of every random choice.
    seed: u64,
    /// The modes of `durability` to test.
    durabilities: Vec<Durability>,
    /// The file systems to test on.
    file_systems: Vec<Kind>,
    /// Crash states per file system and durability.
    states: usize,
    /// Power cuts per file system and durability.
    cycles: usize,
    /// Kills of moves per layout.
    kills: usize,
    /// The layouts whose moves are killed; all if there are none.
    layouts: Vec<Layout>,
    /// The swept operations; all if there are none.
    operations: Vec<String>,
}

impl Setup {
    /// Every file system with every durability.
    fn combinations(&self) -> impl Iterator<Item = (Kind, Durability)> {
        let durabilities = |kind| self.durabilities.iter().map(move |durability| (kind, *durability));
        self.file_systems.iter().flat_map(move |kind| durabilities(*kind))
    }

    fn layouts(&self) -> impl Iterator<Item = Layout> {
        Layout::ALL.into_iter().filter(|layout| self.layouts.is_empty() || self.layouts.contains(layout))
    }
}

struct Part {
    name: &'static str,
    takes_mounts: bool,
    run: fn(&Setup, &mut Report) -> Outcome<()>,
}

const PARTS: [Part; 4] = [
    Part { name: "states", takes_mounts: true, run: states::run },
    Part { name: "shutdown", takes_mounts: true, run: shutdown::run },
    Part { name: "sweep", takes_mounts: false, run: sweep::run },
    Part { name: "moves", takes_mounts: false, run: moves::run },
];

const USAGE: &str = "states, shutdown, sweep, moves, --durability auto|fsync|syncfs, --file-system ext4|xfs|btrfs, \
                     --seed N, --states N, --cycles N, --kills N, --layout LAYOUT or --operation NAME";

fn main() -> ExitCode {
    let mut report = Report::default();
    match Setup::from_args(std::env::args().skip(1)).and_then(|setup| run(&setup, &mut report)) {
        Ok(()) if report.is_clean() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("crash: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(setup: &Setup, report: &mut Report) -> Outcome<()> {
    let parts =
        || PARTS.iter().filter(|part| setup.parts.is_empty() || setup.parts.contains(&part.name.into()));
    // Comes first because it may restart this program in a private mount namespace.
    let no_mounts = if parts().any(|part| part.takes_mounts) { requirements::mounts() } else { None };
    println!("crash tests, seed {}, Linux {}", setup.seed, kernel_release());
    for part in parts() {
        match &no_mounts {
            Some(reason) if part.takes_mounts => report.skip(part.name, reason),
            _ => (part.run)(setup, report)?,
        }
    }
    Ok(())
}

fn kernel_release() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    release.map(|release| release.trim().to_owned()).unwrap_or_default()
}

impl Setup {
    fn from_args(arguments: impl Iterator<Item = String>) -> Outcome<Self> {
        let (durabilities, file_systems) = (Vec::new(), Vec::new());
        let mut setup = Self {
            parts: Vec::new(),
            seed: 1,
            durabilities,
            file_systems,
            states: 300,
            cycles: 50,
            kills: 200,
            layouts: Vec::new(),
            operations: Vec::new(),
        };
        // `--seed=7` and `--seed 7` are the same.
        let mut words =
            arguments.flat_map(|argument| argument.splitn(2, '=').map(str::to_owned).collect::<Vec<_>>());
        while let Some(word) = words.next() {
            if PARTS.iter().any(|part| part.name == word) {
                setup.parts.push(word);
                continue;
            }
            let value = words.next().ok_or_else(|| format!("{word}: has no value: expected {USAGE}"))?;
            let number = || value.parse::<usize>().map_err(|error| format!("{word} {value}: {error}"));
            let unknown = || format!("{word} {value}: unknown option or value: expected {USAGE}");
            match word.as_str() {
                "--seed" => setup.seed = u64::try_from(number()?)?,
                "--states" => setup.states = number()?,
                "--cycles" => setup.cycles = number()?,
                "--kills" => setup.kills = number()?,
                "--layout" => {
                    let known = Layout::ALL.into_iter().find(|layout| layout.name() == value);
                    setup.layouts.push(known.ok_or_else(unknown)?);
                }
                "--operation" => setup.operations.push(value),
                "--durability" => {
                    let known = Durability::ALL.into_iter().find(|durability| durability.name() == value);
                    setup.durabilities.push(known.ok_or_else(unknown)?);
                }
                "--file-system" => {
                    let known = Kind::ALL.into_iter().find(|kind| kind.name() == value);
                    setup.file_systems.push(known.ok_or_else(unknown)?);
                }
                _ => return Err(unknown().into()),
            }
        }
        if setup.durabilities.is_empty() {
            setup.durabilities = Durability::ALL.to_vec();
        }
        if setup.file_systems.is_empty() {
            setup.file_systems = Kind::ALL.to_vec();
        }
        Ok(setup)
    }
}
