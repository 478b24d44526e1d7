//! What could free disk space when something does not fit.

use blobd_store::{Store, gc};
use blobd_store_format::size::human_bytes;

use super::measure;

/// What a verb keeps when it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// Nothing.
    Nothing,
    /// What has been downloaded, for the next pull.
    Downloads,
}

/// What could free disk space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relief {
    /// The bytes that `gc` would free, if known.
    reclaimable_bytes: Option<u64>,
    /// The bytes that eviction could free at most after that. `None` if it is off, or if a collection would be refused.
    evictable_bytes: Option<u64>,
}

impl Relief {
    pub(super) fn of(store: &Store) -> Self {
        let evictable_bytes =
            store.ledger().can_make_space().then(|| gc::evictable_bytes(store.liveness()).ok()).flatten();
        Self { reclaimable_bytes: measure::reclaimable_bytes(store), evictable_bytes }
    }

    /// The commands that free space, and how much.
    pub(super) fn hint(self, is_over_quota: bool) -> String {
        let collection = match self.reclaimable_bytes {
            None => "`blobd gc --dry-run` shows what could be freed".to_owned(),
            Some(0) => "`blobd gc` would free nothing".to_owned(),
            Some(bytes) => format!("`blobd gc` would free {}", human_bytes(bytes)),
        };
        let eviction = match self.evictable_bytes {
            None => String::new(),
            Some(0) => ", evicting models nothing".to_owned(),
            Some(bytes) => format!(", evicting models at most {}", human_bytes(bytes)),
        };
        let quota = if is_over_quota { ", or set a larger quota" } else { "" };
        format!("{collection}{eviction}; `blobd rm` frees models{quota}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_says_what_collection_and_eviction_would_free() {
        let hint = |reclaimable_bytes, evictable_bytes| {
            Relief { reclaimable_bytes, evictable_bytes }.hint(evictable_bytes.is_some())
        };
        assert_eq!(hint(Some(2 << 20), None), "`blobd gc` would free 2.00 MiB; `blobd rm` frees models");
        assert_eq!(
            hint(Some(0), Some(3 << 20)),
            "`blobd gc` would free nothing, evicting models at most 3.00 MiB; `blobd rm` frees models, or set a larger quota"
        );
        assert_eq!(
            hint(None, None),
            "`blobd gc --dry-run` shows what could be freed; `blobd rm` frees models"
        );
    }
}
