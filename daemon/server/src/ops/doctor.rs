//! `doctor`: checks the setup and says how to correct it.
//!
//! [`Facts`] are gathered first; each check is a function from facts to a finding, so that it can be tested with facts
//! that no test machine has. Nothing is changed, except that a file is created, renamed and removed.

use blobd_client::protocol::upkeep::{Check, CheckStatus, DoctorReport};
use blobd_store::Store;

use super::OpError;

mod content;
mod disk;
mod facts;
mod machine;
mod owners;

pub use facts::DoctorContext;
use facts::Facts;

const CHECKS: [fn(&Facts) -> Check; 24] = [
    disk::writes,
    disk::file_system,
    disk::renames,
    disk::lower_stores,
    disk::mount,
    owners::directory,
    owners::ownership,
    owners::owner,
    owners::hard_links,
    disk::space,
    disk::inodes,
    disk::reserve,
    content::index,
    content::layout,
    content::content,
    content::scrub,
    content::metadata,
    content::audit,
    machine::descriptors,
    machine::maps,
    machine::huge_pages,
    machine::kernel,
    machine::clock,
    machine::names,
];

/// Runs all checks.
pub fn doctor(store: &Store, context: DoctorContext) -> Result<DoctorReport, OpError> {
    let facts = Facts::gather(store, context)?;
    Ok(DoctorReport { checks: CHECKS.iter().map(|check| check(&facts)).collect() })
}

fn ok(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Ok, detail)
}

fn note(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Note, detail)
}

fn warning(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Warning, detail)
}

fn failure(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Failure, detail)
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::new_store;

    use super::facts::healthy;
    use super::*;

    #[test]
    fn doctor_does_not_wait_for_a_collection() {
        let (_folder, store) = new_store();
        let metadata = || {
            let report = doctor(&store, DoctorContext::default()).unwrap();
            report.checks.into_iter().find(|check| check.name == "metadata").unwrap()
        };
        let collection = store.liveness().lock_collections();
        let check = std::thread::scope(|scope| scope.spawn(metadata).join().unwrap());
        assert!(check.detail.contains("a collection is running"), "{check:?}");
        assert_eq!(check.status, CheckStatus::Warning);
        drop(collection);
        assert_eq!(metadata().status, CheckStatus::Ok);
    }

    #[test]
    fn healthy_machine_has_no_finding_and_every_check_another_name() {
        let mut checks: Vec<_> = CHECKS.iter().map(|check| check(&healthy())).collect();
        assert!(checks.iter().all(|check| check.status == CheckStatus::Ok), "{checks:#?}");
        assert!(checks.iter().all(|check| check.hint.is_none() && check.command.is_none()));
        checks.sort_by(|a, b| a.name.cmp(&b.name));
        checks.dedup_by(|a, b| a.name == b.name);
        assert_eq!(checks.len(), CHECKS.len());
    }
}
