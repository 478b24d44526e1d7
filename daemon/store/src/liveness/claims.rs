//! Lists what keeps data, with the users that it is charged to.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;

use crate::index::{Claim, ClaimKind};
use crate::ledger::charge_limit::{Account, unix_nanos};
use crate::liveness::Liveness;
use crate::liveness::gc::{Node, Owner, walk_beside_tags};
use crate::{OtherFiles, TagSummary};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    All,
    /// Those that no transaction in progress accounts for.
    AtRest,
}

pub(crate) fn add_to_user(sums: &mut BTreeMap<u32, u64>, uid: Option<u32>, bytes: u64) {
    if let Some(uid) = uid {
        let sum = sums.entry(uid).or_default();
        *sum = sum.saturating_add(bytes);
    }
}

impl Claim {
    pub(crate) fn is_tag(&self) -> bool {
        self.kind == ClaimKind::Tag
    }

    /// The claim of a model's files. Without a recorded account, the time says which claim is older.
    pub(crate) fn for_files<'f>(
        kind: ClaimKind,
        account: Option<Account>,
        time: SystemTime,
        files: impl IntoIterator<Item = &'f Digest>,
    ) -> Self {
        let since = account.map_or_else(|| unix_nanos(time), |account| account.since);
        let roots = files.into_iter().copied().flat_map(Node::both).collect();
        Self { kind, since, uid: account.map(|account| account.uid), roots }
    }
}

fn claims_of_tags(tags: &[Arc<TagSummary>]) -> Vec<Claim> {
    // What a damaged manifest needs is unknown.
    let claim = |tag: &Arc<TagSummary>| {
        let files = &tag.manifest.as_ref().ok()?.files;
        Some(Claim::for_files(ClaimKind::Tag, tag.account, tag.modified, &**files))
    };
    tags.iter().filter_map(claim).collect()
}

impl Liveness {
    /// Everything that keeps data, except sessions: what only they keep is charged to no user.
    pub(crate) fn claims(&self, scope: Scope, tags: &[Arc<TagSummary>]) -> Vec<Claim> {
        let mut claims = claims_of_tags(tags);
        let walked = walk_beside_tags(self, SystemTime::now(), &mut |owned| {
            match owned.owner {
                Owner::Trash(_) => {
                    let (kind, since) = (ClaimKind::Trash, owned.account.map_or(0, |account| account.since));
                    let uid = owned.account.map(|account| account.uid);
                    claims.push(Claim { kind, since, uid, roots: owned.roots });
                }
                Owner::Download(file) if scope == Scope::All || !self.ledger.is_downloading(file) => {
                    claims.push(self.claim_of_download(file, owned.roots));
                }
                _ => {}
            }
            Ok(())
        });
        // It also stops collections, which report it.
        if let Err(error) = walked {
            tracing::debug!("charges: what follows is charged to no user: {error}");
        }
        claims.extend(self.claims_of_displaced());
        if scope == Scope::All {
            claims.extend(self.claims_of_transactions());
        }
        claims
    }

    fn claim_of_download(&self, file: Digest, roots: Vec<Node>) -> Claim {
        let uid = self.content.download_about(file).map(|about| about.uid);
        Claim { kind: ClaimKind::Download, since: 0, uid, roots }
    }

    fn claims_of_transactions(&self) -> Vec<Claim> {
        let published = self.ledger.published_in_transactions().into_iter();
        published
            .map(|(uid, roots)| Claim { kind: ClaimKind::Ingest, since: 0, uid: Some(uid), roots })
            .collect()
    }

    /// The bytes of each user among the files that the catalog does not count.
    pub(crate) fn users_of(&self, others: &OtherFiles, tags: &[Arc<TagSummary>]) -> BTreeMap<u32, u64> {
        let mut users = BTreeMap::new();
        let mut add = |uid, bytes| add_to_user(&mut users, uid, bytes);
        for (file, bytes) in &others.downloads {
            add(self.content.download_about(*file).map(|about| about.uid), *bytes);
        }
        for (transaction, bytes) in &others.staging {
            add(transaction.to_str().and_then(|name| self.ledger.user_of_transaction(name)), *bytes);
        }
        for (record, uid) in self.users_of_trash() {
            add(uid, others.trash.get(&record).copied().unwrap_or_default());
        }
        for tag in tags {
            add(tag.account.map(|account| account.uid), tag.record_bytes);
        }
        users
    }

    /// The records in the trash that have not expired, with their users.
    pub(crate) fn users_of_trash(&self) -> Vec<(Digest, Option<u32>)> {
        let now = SystemTime::now();
        // A damaged record stops collections, which report it. Until then the trash is charged to no user.
        let trash = self.names.trash().unwrap_or_default();
        let kept = trash.into_iter().filter(|trashed| !trashed.is_expired(now));
        kept.map(|trashed| (trashed.record, trashed.account.map(|account| account.uid))).collect()
    }
}
