//! Results of checks.

use blobd_client::protocol::upkeep::{Check, CheckStatus};

pub(super) fn ok(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Ok, detail)
}

pub(super) fn note(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Note, detail)
}

pub(super) fn warning(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Warning, detail)
}

pub(super) fn failure(name: &str, detail: impl Into<String>) -> Check {
    Check::new(name, CheckStatus::Failure, detail)
}
