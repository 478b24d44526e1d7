//! What the user of a connection may do.

use serde::{Deserialize, Serialize};

/// What a user may do. Each right includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// List and open models.
    Read,
    /// Add models, and remove, rename and pin those that the user has added.
    Pull,
    /// Do the same with the models of all users, and collect.
    Administer,
}

impl Right {
    /// All rights.
    pub const ALL: [Self; 3] = [Self::Read, Self::Pull, Self::Administer];

    /// Its name in the configuration and in the protocol.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Pull => "pull",
            Self::Administer => "admin",
        }
    }
}

/// Response to `Route::Access`: the caller as the daemon sees it, and its rights.
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
