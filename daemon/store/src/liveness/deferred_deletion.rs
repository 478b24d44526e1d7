//! The deferred-deletion queue: blobs and recipes that no tag is likely to need, but that could not be
//! collected yet, such as those of a removed model that is still open, or of a failed transaction.

use crate::index::Claim;
use crate::index::ClaimKind;
use crate::node::Node;
use std::collections::BTreeMap;
use std::collections::BTreeSet;

use blobd_store_format::digest::Digest;
use tracing_mutex::stdsync::Mutex;

use crate::liveness::Liveness;
use crate::lock;

/// Only a hint: the collection checks whether anything needs a digest.
#[derive(Debug, Default)]
pub(crate) struct DeferredDeletion(Mutex<BTreeSet<Digest>>);

impl Liveness {
    /// Queues digests to be collected if nothing needs them: see [`crate::liveness::gc::collect_condemned`].
    pub fn condemn(&self, digests: impl IntoIterator<Item = Digest>) {
        lock(&self.deferred_deletion.0).extend(digests);
    }

    /// Whether the queue has any digest.
    pub fn has_condemned(&self) -> bool {
        !lock(&self.deferred_deletion.0).is_empty()
    }

    pub(crate) fn is_condemned(&self, digest: Digest) -> bool {
        lock(&self.deferred_deletion.0).contains(&digest)
    }

    pub(crate) fn take_condemned(&self) -> BTreeSet<Digest> {
        std::mem::take(&mut *lock(&self.deferred_deletion.0))
    }

    /// Has what a name kept before charged to the user who has given the name to another model, as far as nothing else
    /// keeps it.
    pub fn charge_displaced(&self, uid: u32, nodes: impl IntoIterator<Item = Node>) {
        lock(&self.displaced.0).extend(nodes.into_iter().map(|node| (node, uid)));
        self.ledger.note_charges_changed();
    }

    /// The claims to what is not deleted yet.
    pub(crate) fn claims_of_displaced(&self) -> Vec<Claim> {
        let is_stored = |node: Node| self.content.bytes_on_disk(node).is_ok_and(|bytes| bytes.is_some());
        let known = lock(&self.displaced.0).clone();
        let (stored, deleted): (BTreeMap<Node, u32>, BTreeMap<Node, u32>) =
            known.into_iter().partition(|(node, _)| is_stored(*node));
        let mut of_users: BTreeMap<u32, Vec<Node>> = BTreeMap::new();
        stored.into_iter().for_each(|(node, uid)| of_users.entry(uid).or_default().push(node));
        lock(&self.displaced.0).retain(|node, _| !deleted.contains_key(node));
        let claim = |(uid, roots)| Claim { kind: ClaimKind::Displaced, since: 0, uid: Some(uid), roots };
        of_users.into_iter().map(claim).collect()
    }

    /// Removes the unfinished downloads of these files, except those that another lease protects.
    pub fn forget_partials(&self, files: impl IntoIterator<Item = Digest>) {
        for file in files.into_iter().filter(|file| !self.leases().is_leased(*file)) {
            if let Err(error) = self.ledger.remove_partial(file) {
                tracing::warn!("{error}; `blobd gc` removes it after a week");
            }
        }
    }
}

/// The users who pay for such data. Lost when the process ends, with the queue of what is to be deleted.
#[derive(Debug, Default)]
pub(crate) struct DisplacedData(Mutex<BTreeMap<Node, u32>>);
