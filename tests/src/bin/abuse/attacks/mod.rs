//! The attacks. Each is bounded in connections and time, and keeps to what any user may do who can connect.

use crate::Outcome;
use crate::arena::Arena;
use crate::bounds::Check;
use crate::ground::{Ground, Tally};

mod contention;
mod crawl;
mod flood;
mod leases;
mod lingering;
mod malformed;
mod resume;
mod tarpits;
mod together;
mod unread;

/// How the names of models begin that attackers import and root removes.
pub(crate) const REMOVABLE: &str = "attack/removable-";

/// What an attack does once it is told to begin. It may return while its threads go on.
pub(crate) type Begin = Box<dyn FnOnce() -> Outcome<()>>;

/// One attack.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// Whether it imports files that hang.
    pub(crate) takes_hanging_files: bool,
    /// What is done before the quiet time.
    pub(crate) prepare: fn(&Ground) -> Outcome<Begin>,
    /// What root does beside it, in the middle of its time.
    pub(crate) beside: fn(&Arena) -> Vec<Check>,
    /// Bounds on what the attackers themselves have seen.
    pub(crate) judge: fn(&Tally) -> Vec<Check>,
}

impl Attack {
    const fn new(name: &'static str, what: &'static str, prepare: fn(&Ground) -> Outcome<Begin>) -> Self {
        let takes_hanging_files = false;
        Self {
            name,
            what,
            takes_hanging_files,
            prepare,
            beside: |_arena| Vec::new(),
            judge: |_tally| Vec::new(),
        }
    }
}

/// All of them, in the order in which they are run.
pub(crate) static ATTACKS: [Attack; 10] = [
    Attack::new("unread", "large answers that nobody reads", unread::prepare),
    Attack::new("lingering", "descriptors whose last close blocks", lingering::prepare),
    Attack {
        takes_hanging_files: true,
        ..Attack::new("crawl", "pulls at 1 byte/s and imports of files that hang", crawl::prepare)
    },
    Attack::new("tarpits", "registries that do not answer, or ask to wait", tarpits::prepare),
    Attack::new("flood", "1,000 connections that ask ls and show at once", flood::prepare),
    Attack::new("contention", "opens, imports and removals at once", contention::prepare),
    Attack::new("resume", "a pull of 16,384 tensors that is given up and resumed", resume::prepare),
    Attack::new("malformed", "sessions that break the protocol", malformed::prepare),
    Attack {
        beside: leases::administer,
        judge: leases::judge,
        ..Attack::new("leases", "1,024 models held open", leases::prepare)
    },
    Attack { takes_hanging_files: true, ..Attack::new("together", "all of them at once", together::prepare) },
];

/// The attack of a name.
pub(crate) fn find(name: &str) -> Option<&'static Attack> {
    ATTACKS.iter().find(|attack| attack.name == name)
}
