//! Data of models whose names a user has given to other models. It is charged to that user until it is deleted:
//! otherwise new versions of one name could fill the disk whatever the user's quota is.

use std::collections::BTreeMap;

use tracing_mutex::stdsync::Mutex;

use crate::gc::Node;
use crate::index::{Claim, ClaimKind};
use crate::{Store, lock};

/// The users who pay for such data. Lost when the process ends, with the queue of what is to be deleted.
#[derive(Debug, Default)]
pub(crate) struct DisplacedData(Mutex<BTreeMap<Node, u32>>);

impl Store {
    /// Has what a name kept before charged to the user who has given the name to another model, as far as nothing else
    /// keeps it.
    pub fn charge_displaced(&self, uid: u32, nodes: impl IntoIterator<Item = Node>) {
        lock(&self.displaced.0).extend(nodes.into_iter().map(|node| (node, uid)));
        self.note_charges_changed();
    }

    /// The claims to what is not deleted yet.
    pub(super) fn claims_of_displaced(&self) -> Vec<Claim> {
        let is_stored = |node: Node| node.bytes_on_disk(self).is_ok_and(|bytes| bytes.is_some());
        let known = lock(&self.displaced.0).clone();
        let (stored, deleted): (BTreeMap<Node, u32>, BTreeMap<Node, u32>) =
            known.into_iter().partition(|(node, _)| is_stored(*node));
        let mut of_users: BTreeMap<u32, Vec<Node>> = BTreeMap::new();
        stored.into_iter().for_each(|(node, uid)| of_users.entry(uid).or_default().push(node));
        lock(&self.displaced.0).retain(|node, _| !deleted.contains_key(node));
        let claim = |(uid, roots)| Claim { kind: ClaimKind::Displaced, since: 0, uid: Some(uid), roots };
        of_users.into_iter().map(claim).collect()
    }
}
