//! The attacks. Each is limited in connections and time, and uses only what every user who can connect may
//! do.

use crate::bounds::Check;
use crate::context::{AttackContext, Counts};
use crate::environment::Environment;
use crate::{ATTACKER_UID, CROWD, Outcome};

mod contention;
mod crawl;
mod flood;
mod leases;
mod lingering;
mod malformed;
mod resume;
mod routes;
mod tarpits;
mod together;
mod unread;

/// The prefix of the names of models that attackers import and root removes.
pub(crate) const REMOVABLE: &str = "attack/removable-";

/// Starts an attack. It may return while the attack's threads continue.
pub(crate) type Begin = Box<dyn FnOnce() -> Outcome<()>>;

/// One attack.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// The users who attack, each in a process of its own.
    pub(crate) users: &'static [u32],
    /// Whether it imports files that hang.
    pub(crate) takes_hanging_files: bool,
    /// Prepares the attack, before the baseline is measured.
    pub(crate) prepare: fn(&AttackContext) -> Outcome<Begin>,
    /// Root's requests in the middle of the attack.
    pub(crate) meanwhile: fn(&Environment) -> Vec<Check>,
    /// Checks the attacker's own counters.
    pub(crate) check_counts: fn(&Counts) -> Vec<Check>,
}

impl Attack {
    const fn new(
        name: &'static str,
        what: &'static str,
        prepare: fn(&AttackContext) -> Outcome<Begin>,
    ) -> Self {
        let takes_hanging_files = false;
        Self {
            name,
            what,
            users: &[ATTACKER_UID],
            takes_hanging_files,
            prepare,
            meanwhile: |_environment| Vec::new(),
            check_counts: |_counts| Vec::new(),
        }
    }
}

/// All attacks, in the order in which they run.
pub(crate) static ATTACKS: [Attack; 12] = [
    Attack::new("unread", "large responses that are not read", unread::prepare),
    Attack::new("routes", "every route, by clients of one user that read nothing or slowly", routes::prepare),
    Attack {
        users: &CROWD,
        ..Attack::new("crowd", "every route, by such clients of eight users", routes::prepare_each)
    },
    Attack::new("lingering", "descriptors whose last close blocks", lingering::prepare),
    Attack {
        takes_hanging_files: true,
        ..Attack::new("crawl", "pulls at 1 byte/s and imports of files that hang", crawl::prepare)
    },
    Attack::new("tarpits", "registries that do not respond, or ask to wait", tarpits::prepare),
    Attack::new("flood", "ls and show on 1,000 connections at once", flood::prepare),
    Attack::new("contention", "opens, imports and removals at once", contention::prepare),
    Attack::new("resume", "a pull of 16,384 tensors that is interrupted and resumed", resume::prepare),
    Attack::new("malformed", "sessions that break the protocol", malformed::prepare),
    Attack {
        meanwhile: leases::administer,
        check_counts: leases::check_counts,
        ..Attack::new("leases", "1,024 models held open", leases::prepare)
    },
    Attack { takes_hanging_files: true, ..Attack::new("together", "all of them at once", together::prepare) },
];

/// The attack with this name.
pub(crate) fn find(name: &str) -> Option<&'static Attack> {
    ATTACKS.iter().find(|attack| attack.name == name)
}
