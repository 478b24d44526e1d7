//! What the user of a connection may do.

use serde::{Deserialize, Serialize};

/// Response to `GET /v1/access`: the caller as the daemon sees it, and its rights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnAccess {
    /// The caller's user.
    pub uid: u32,
    /// The name of that user, if the daemon knows it.
    pub user: Option<String>,
    /// The groups of the process when it connected.
    pub groups: Vec<u32>,
    /// `read`, `pull` and `admin`, as far as the user has them.
    pub rights: Vec<String>,
}
