//! Counts over the catalog who pays for each blob and recipe.

use std::collections::{BTreeMap, HashMap, HashSet};

use blobd_store_format::digest::Digest;

use super::catalog::{Catalog, RowState};
use crate::node::Node;

/// What keeps data. The strongest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimKind {
    /// A model with a tag.
    Tag,
    /// A model in the trash.
    Trash,
    /// An unfinished download.
    Download,
    /// A transaction in progress.
    Ingest,
}

/// What one owner keeps, and whom that is charged to. Of several claims to the same data the first in order pays: of
/// the strongest kind the oldest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// What keeps the data.
    pub kind: ClaimKind,
    /// Since when, in nanoseconds since 1970.
    pub since: u64,
    /// The user; `None` if that is not recorded.
    pub uid: Option<u32>,
    /// Blobs, and recipes with the blobs that they name.
    pub roots: Vec<Node>,
}

/// Which claim pays for which blob and recipe.
#[derive(Debug, Default)]
pub struct Payers {
    /// The number of the claim, from 1 on, for each row of the catalog; 0 for none. At the end may be fewer rows.
    rows: Vec<u32>,
    recipes: HashMap<Digest, u32>,
    claims: Vec<(ClaimKind, Option<u32>)>,
    charged: BTreeMap<Option<u32>, u64>,
    /// The time of the latest claim of a tag.
    latest_tag: u64,
    /// [`Catalog::removals`] at the count.
    removals: u64,
}

impl Payers {
    /// Counts anew.
    #[must_use]
    pub fn count(catalog: &Catalog, claims: &[Claim]) -> Self {
        let mut sorted: Vec<&Claim> = claims.iter().collect();
        sorted.sort_unstable();
        let mut payers = Self { removals: catalog.removals(), ..Self::default() };
        sorted.into_iter().for_each(|claim| payers.add(catalog, claim));
        payers
    }

    /// Bytes on disk that a user pays for; of `None`, bytes of claims without a user.
    #[must_use]
    pub fn charged_to(&self, uid: Option<u32>) -> u64 {
        self.charged.get(&uid).copied().unwrap_or_default()
    }

    /// The sum of what users pay for.
    #[must_use]
    pub fn charged_to_users(&self) -> u64 {
        let of_users = self.charged.iter().filter(|(uid, _)| uid.is_some());
        of_users.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    /// Whether the catalog has only grown since the count.
    pub(crate) fn are_of(&self, catalog: &Catalog) -> bool {
        self.removals == catalog.removals()
    }

    /// Adds the claim of a tag that was just set. Returns false, and changes nothing, if an older claim is not older
    /// by its time, because a clock was set back: then the order of the claims differs.
    pub(crate) fn add_latest(&mut self, catalog: &Catalog, claim: &Claim) -> bool {
        if claim.kind != ClaimKind::Tag || claim.since <= self.latest_tag {
            return false;
        }
        self.add(catalog, claim);
        true
    }

    /// Bytes on disk that a name with this claim would be the first to pay for, without those that are charged to its
    /// user already and without `left_out`.
    pub(crate) fn unpaid_by_names(&self, catalog: &Catalog, claim: &Claim, left_out: &HashSet<Node>) -> u64 {
        let mut sum = 0_u64;
        each_once(catalog, &[claim], |part, bytes| {
            let (payer, node) = match part {
                Part::Blob(row) => {
                    let digest = catalog.rows().get(row as usize).map(|row| row.digest);
                    (self.rows.get(row as usize), digest.map(Node::Blob))
                }
                Part::Recipe(file) => (self.recipes.get(&file), Some(Node::Recipe(file))),
            };
            let payer = payer.and_then(|number| self.claims.get(number.checked_sub(1)? as usize));
            let is_paid = payer.is_some_and(|(kind, uid)| *kind == ClaimKind::Tag || *uid == claim.uid);
            if !is_paid && node.is_none_or(|node| !left_out.contains(&node)) {
                sum = sum.saturating_add(bytes);
            }
        });
        sum
    }

    fn add(&mut self, catalog: &Catalog, claim: &Claim) {
        self.claims.push((claim.kind, claim.uid));
        let number = u32::try_from(self.claims.len()).unwrap_or(u32::MAX);
        if claim.kind == ClaimKind::Tag {
            self.latest_tag = self.latest_tag.max(claim.since);
        }
        each_part(catalog, &claim.roots, |part, bytes| {
            let payer = match part {
                Part::Blob(row) => {
                    let row = row as usize;
                    if self.rows.len() <= row {
                        self.rows.resize(row.saturating_add(1), 0);
                    }
                    self.rows.get_mut(row)
                }
                Part::Recipe(file) => Some(self.recipes.entry(file).or_default()),
            };
            let Some(payer) = payer else { return };
            let before = payer.checked_sub(1).and_then(|before| self.claims.get(before as usize));
            if before.is_some_and(|(kind, _)| *kind <= claim.kind) {
                return;
            }
            *payer = number;
            if let Some(sum) = before.and_then(|(_, uid)| self.charged.get_mut(uid)) {
                *sum = sum.saturating_sub(bytes);
            }
            let sum = self.charged.entry(claim.uid).or_default();
            *sum = sum.saturating_add(bytes);
        });
    }
}

/// What a user's claims keep, whoever pays for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserShare {
    /// Bytes on disk that no other user's claims keep.
    pub unique_bytes: u64,
    /// Bytes on disk that other users' claims keep too.
    pub shared_bytes: u64,
}

/// What the claims of each user keep. Those without a user count as of one more user.
#[must_use]
pub fn user_shares(catalog: &Catalog, claims: &[Claim]) -> BTreeMap<Option<u32>, UserShare> {
    let mut of_users: BTreeMap<Option<u32>, Vec<&Claim>> = BTreeMap::new();
    claims.iter().for_each(|claim| of_users.entry(claim.uid).or_default().push(claim));
    let mut keepers = Keepers::default();
    for (user, claims) in (1..).zip(of_users.values()) {
        each_once(catalog, claims, |part, _| keepers.add(part, user));
    }
    let share = |claims: &Vec<&Claim>| {
        let mut share = UserShare::default();
        each_once(catalog, claims, |part, bytes| {
            let sum =
                if keepers.has_several(part) { &mut share.shared_bytes } else { &mut share.unique_bytes };
            *sum = sum.saturating_add(bytes);
        });
        share
    };
    of_users.iter().map(|(uid, claims)| (*uid, share(claims))).collect()
}

/// The only user that keeps each part, by number, or [`SEVERAL`].
#[derive(Default)]
struct Keepers(HashMap<Part, u32>);

const SEVERAL: u32 = u32::MAX;

impl Keepers {
    fn add(&mut self, part: Part, user: u32) {
        let keeper = self.0.entry(part).or_insert(user);
        if *keeper != user {
            *keeper = SEVERAL;
        }
    }

    fn has_several(&self, part: Part) -> bool {
        self.0.get(&part) == Some(&SEVERAL)
    }
}

/// A blob by its row in the catalog, or a recipe by its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    Blob(u32),
    Recipe(Digest),
}

/// Calls `visit` once with each part that these claims keep.
fn each_once(catalog: &Catalog, claims: &[&Claim], mut visit: impl FnMut(Part, u64)) {
    let mut seen = HashSet::new();
    for claim in claims {
        each_part(catalog, &claim.roots, |part, bytes| {
            if seen.insert(part) {
                visit(part, bytes);
            }
        });
    }
}

/// Calls `visit` with what is present of the roots, and with its size on disk. A recipe that cannot be read names no
/// blobs.
fn each_part(catalog: &Catalog, roots: &[Node], mut visit: impl FnMut(Part, u64)) {
    let visit_row = |number: u32, visit: &mut dyn FnMut(Part, u64)| {
        let row = catalog.rows().get(number as usize).filter(|row| row.state == RowState::Present);
        row.into_iter().for_each(|row| visit(Part::Blob(number), row.bytes_on_disk));
    };
    for root in roots {
        match *root {
            Node::Blob(digest) => {
                catalog.find(digest).into_iter().for_each(|number| visit_row(number, &mut visit));
            }
            Node::Recipe(file) => {
                let Some(recipe) = catalog.recipes().get(&file) else { continue };
                visit(Part::Recipe(file), recipe.bytes_on_disk);
                recipe.needs.iter().flatten().for_each(|number| visit_row(*number, &mut visit));
            }
        }
    }
}
