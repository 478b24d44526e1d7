//! `pulls`: lists the pulls in progress.

use blobd_client::protocol::response::{RunningPull, RunningPulls};

use super::rfc3339;
use crate::names::Names;
use crate::running_pulls::PullState;

/// Describes pulls. Asks for the names of users.
pub(crate) fn pulls(running: &[PullState]) -> RunningPulls {
    let users = Names::system();
    let row = |pull: &PullState| RunningPull {
        model: pull.model.clone(),
        source: pull.source.clone(),
        pid: pull.requester.pid(),
        uid: pull.requester.uid(),
        user: users.name_of(pull.requester.uid()),
        since: rfc3339(pull.since),
        status: pull.status.clone(),
        state: pull.state,
        phase: pull.phase,
        total_bytes: pull.total_bytes,
        completed_bytes: pull.completed_bytes(),
        bytes_per_second: pull.bytes_per_second(),
    };
    RunningPulls { pulls: running.iter().map(row).collect() }
}
