//! The names that each manifest has, for the policy, which needs them at every open.
//!
//! The map is read from the tags, and read again when this process has changed a tag since, or when it is older than
//! [`MAX_AGE`]: manual changes and those of lower stores are seen then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use super::{Store, StoreError, lock};

/// How long a change that another program makes is not seen.
const MAX_AGE: Duration = Duration::from_secs(5);

type Names = BTreeMap<Digest, Vec<Reference>>;

#[derive(Debug, Default)]
pub(super) struct TagNames {
    /// How often a tag was set or removed.
    changes: AtomicU64,
    /// Locked while tags are read: a caller that waits needs the same map.
    known: Mutex<Option<Known>>,
}

#[derive(Debug)]
struct Known {
    changes: u64,
    since: Instant,
    names: Arc<Names>,
}

impl Store {
    /// The names that a manifest has in this store and in the lower ones, except for those of lower stores that an
    /// earlier one has too.
    pub fn names_of(&self, manifest: Digest) -> Result<Vec<Reference>, StoreError> {
        Ok(self.names_by_manifest()?.get(&manifest).cloned().unwrap_or_default())
    }

    /// A tag has been set or removed.
    pub(super) fn note_tag_changed(&self) {
        self.tag_names.changes.fetch_add(1, Ordering::AcqRel);
    }

    fn names_by_manifest(&self) -> Result<Arc<Names>, StoreError> {
        let mut known = lock(&self.tag_names.known);
        // Before the tags are read: a change in between must not be taken for one that was seen.
        let (changes, since) = (self.tag_names.changes.load(Ordering::Acquire), Instant::now());
        let is_current =
            |known: &&Known| known.changes == changes && since.duration_since(known.since) < MAX_AGE;
        if let Some(known) = known.as_ref().filter(is_current) {
            return Ok(Arc::clone(&known.names));
        }
        let mut names = Names::new();
        for tag in self.all_summaries()? {
            if let Ok(manifest) = &tag.manifest {
                names.entry(manifest.digest).or_default().push(tag.reference.clone());
            }
        }
        let names = Arc::new(names);
        *known = Some(Known { changes, since, names: Arc::clone(&names) });
        Ok(names)
    }
}
