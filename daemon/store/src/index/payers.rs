//! Counts over the catalog who pays for each blob and recipe.

use std::collections::{BTreeMap, HashMap, HashSet};

use blobd_store_format::digest::Digest;

use super::catalog::{Catalog, CatalogVersion, RowState};
use crate::node::Node;

/// What keeps data. The strongest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimKind {
    Tag,
    Trash,
    Download,
    Ingest,
    /// A name that means another model now.
    Displaced,
}

/// What one owner keeps, and who is charged. Of several claims to the same data, the strongest and oldest pays.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    pub kind: ClaimKind,
    /// Since when, in nanoseconds since 1970.
    pub since: u64,
    /// The user; `None` if that is not recorded.
    pub uid: Option<u32>,
    /// Blobs, and recipes with the blobs that they name.
    pub roots: Vec<Node>,
}

/// What is known of a claim after the count.
#[derive(Clone, Copy, Debug)]
struct PayingClaim {
    kind: ClaimKind,
    uid: Option<u32>,
    since: u64,
}

/// Which claim pays for which blob and recipe.
#[derive(Debug, Default)]
pub struct Payers {
    /// The number of the claim, from 1 on, for each row of the catalog; 0 for none. At the end may be fewer rows.
    rows: Vec<u32>,
    recipes: HashMap<Digest, u32>,
    claims: Vec<PayingClaim>,
    charged: BTreeMap<Option<u32>, u64>,
    /// The time of the latest claim of a tag.
    latest_tag: u64,
    /// [`Catalog::removals`] at the count.
    removals: u64,
    /// The catalog that lacked something which the claim of a tag keeps: another transaction may just be publishing it.
    incomplete_at: Option<CatalogVersion>,
}

impl Payers {
    pub fn count(catalog: &Catalog, claims: &[Claim]) -> Self {
        let mut sorted: Vec<&Claim> = claims.iter().collect();
        sorted.sort_unstable();
        let mut payers = Self { removals: catalog.removals(), ..Self::default() };
        sorted.into_iter().for_each(|claim| payers.add(catalog, claim, true));
        payers
    }

    /// Bytes on disk that a user pays for; of `None`, bytes of claims without a user.
    pub fn charged_to(&self, uid: Option<u32>) -> u64 {
        self.charged.get(&uid).copied().unwrap_or_default()
    }

    pub fn charged_to_users(&self) -> u64 {
        let of_users = self.charged.iter().filter(|(uid, _)| uid.is_some());
        of_users.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    pub(crate) fn users(&self) -> impl Iterator<Item = u32> {
        self.charged.keys().copied().flatten()
    }

    /// Whether the catalog has only grown since the count, and not by what the claim of a tag keeps: that claim may pay for
    /// it, and not the one that is added next.
    pub(crate) fn are_of(&self, catalog: &Catalog) -> bool {
        self.removals == catalog.removals()
            && self.incomplete_at.is_none_or(|version| version == catalog.version())
    }

    /// Adds the claim of a tag that was just set. Returns false, and changes nothing, if a clock was set back and an
    /// older claim has a later time.
    pub(crate) fn add_latest(&mut self, catalog: &Catalog, claim: &Claim) -> bool {
        if claim.kind != ClaimKind::Tag || claim.since <= self.latest_tag {
            return false;
        }
        self.add(catalog, claim, false);
        true
    }

    /// Bytes on disk that a name with this claim would be the first to pay for, without those that are charged to its
    /// user already and without `left_out`. The tag that `replaced` is about, a user and a time, pays for nothing then.
    pub(crate) fn unpaid_by_names(
        &self,
        catalog: &Catalog,
        claim: &Claim,
        left_out: &HashSet<Node>,
        replaced: Option<(u32, u64)>,
    ) -> u64 {
        let (mut sum, mut seen) = (0_u64, HashSet::new());
        each_part(catalog, &claim.roots, |part, bytes| {
            if !seen.insert(part) {
                return false;
            }
            let (payer, node) = match part {
                Part::Blob(row) => {
                    let digest = catalog.rows().get(row as usize).map(|row| row.digest);
                    (self.rows.get(row as usize), digest.map(Node::Blob))
                }
                Part::Recipe(file) => (self.recipes.get(&file), Some(Node::Recipe(file))),
            };
            let payer = payer.and_then(|number| self.claims.get(number.checked_sub(1)? as usize));
            let is_replaced = |payer: &PayingClaim| {
                replaced.is_some_and(|(uid, since)| (payer.uid, payer.since) == (Some(uid), since))
            };
            let pays = |payer: &PayingClaim| payer.kind == ClaimKind::Tag && !is_replaced(payer);
            let is_paid = payer.is_some_and(|payer| pays(payer) || payer.uid == claim.uid);
            if !is_paid && node.is_none_or(|node| !left_out.contains(&node)) {
                sum = sum.saturating_add(bytes);
            }
            true
        });
        sum
    }

    /// `is_whole` says that the catalog is the same for all claims so far.
    fn add(&mut self, catalog: &Catalog, claim: &Claim, is_whole: bool) {
        self.claims.push(PayingClaim { kind: claim.kind, uid: claim.uid, since: claim.since });
        let number = u32::try_from(self.claims.len()).unwrap_or(u32::MAX);
        if claim.kind == ClaimKind::Tag {
            self.latest_tag = self.latest_tag.max(claim.since);
            if self.incomplete_at.is_none() && lacks_any(catalog, &claim.roots) {
                self.incomplete_at = Some(catalog.version());
            }
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
            let Some(payer) = payer else { return false };
            let before = payer.checked_sub(1).and_then(|before| self.claims.get(before as usize));
            if before.is_some_and(|before| before.kind <= claim.kind) {
                // Blobs that a recipe names can have appeared since its claim was added.
                return !is_whole;
            }
            *payer = number;
            if let Some(sum) = before.and_then(|before| self.charged.get_mut(&before.uid)) {
                *sum = sum.saturating_sub(bytes);
            }
            let sum = self.charged.entry(claim.uid).or_default();
            *sum = sum.saturating_add(bytes);
            true
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

/// What the claims of each user keep; those without a user count as one more. With `only`, just this user's share.
pub fn user_shares(
    catalog: &Catalog,
    claims: &[Claim],
    only: Option<u32>,
) -> BTreeMap<Option<u32>, UserShare> {
    let is_wanted = |uid: Option<u32>| only.is_none() || only == uid;
    let mut of_users: BTreeMap<(bool, Option<u32>), Vec<&Claim>> = BTreeMap::new();
    for claim in claims {
        let user = if is_wanted(claim.uid) { (true, claim.uid) } else { (false, None) };
        of_users.entry(user).or_default().push(claim);
    }
    let mut keepers = Keepers::new(catalog, of_users.len());
    for (user, claims) in of_users.values().enumerate() {
        claims.iter().for_each(|claim| keepers.add(catalog, user, claim));
    }
    let shares = of_users.into_keys().zip(keepers.shares);
    shares.filter(|((is_wanted, _), _)| *is_wanted).map(|((_, uid), share)| (uid, share)).collect()
}

/// Who keeps each part, while the claims are added user by user. A user with the number `n` is `n + 1` here; 0 is none.
struct Keepers {
    /// By row: the only user that keeps it, or [`SEVERAL`], and the last one that was added.
    rows: Vec<Keeper>,
    recipes: HashMap<Digest, Keeper>,
    shares: Vec<UserShare>,
}

#[derive(Clone, Copy, Default)]
struct Keeper {
    only: u32,
    last: u32,
}

const SEVERAL: u32 = u32::MAX;

impl Keepers {
    fn new(catalog: &Catalog, users: usize) -> Self {
        let rows = vec![Keeper::default(); catalog.rows().len()];
        Self { rows, recipes: HashMap::new(), shares: vec![UserShare::default(); users] }
    }

    fn add(&mut self, catalog: &Catalog, user: usize, claim: &Claim) {
        let Self { rows, recipes, shares } = self;
        each_part(catalog, &claim.roots, |part, bytes| {
            let keeper = match part {
                Part::Blob(row) => rows.get_mut(row as usize),
                Part::Recipe(file) => Some(recipes.entry(file).or_default()),
            };
            // What a recipe names was added with it, so it is not looked at again for each model that has the file.
            keeper.is_some_and(|keeper| keeper.is_new_for(user, bytes, shares))
        });
    }
}

impl Keeper {
    /// Counts the part for a user, unless that is done. Returns whether it was not.
    fn is_new_for(&mut self, user: usize, bytes: u64, shares: &mut [UserShare]) -> bool {
        let number = u32::try_from(user.saturating_add(1)).unwrap_or(SEVERAL);
        if std::mem::replace(&mut self.last, number) == number {
            return false;
        }
        let mut add =
            |user: usize, change: &dyn Fn(&mut UserShare)| shares.get_mut(user).into_iter().for_each(change);
        match self.only {
            0 => {
                self.only = number;
                add(user, &|share| share.unique_bytes = share.unique_bytes.saturating_add(bytes));
            }
            only => {
                add(user, &|share| share.shared_bytes = share.shared_bytes.saturating_add(bytes));
                if only != SEVERAL {
                    self.only = SEVERAL;
                    add(only as usize - 1, &|share| {
                        share.unique_bytes = share.unique_bytes.saturating_sub(bytes);
                        share.shared_bytes = share.shared_bytes.saturating_add(bytes);
                    });
                }
            }
        }
        true
    }
}

/// A blob by its row in the catalog, or a recipe by its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Part {
    Blob(u32),
    Recipe(Digest),
}

/// Calls `visit` with what is present of the roots, and with its size on disk. It returns whether what a recipe names
/// is visited too. A recipe that cannot be read names no blobs.
pub(super) fn each_part(catalog: &Catalog, roots: &[Node], mut visit: impl FnMut(Part, u64) -> bool) {
    let visit_row = |number: u32, visit: &mut dyn FnMut(Part, u64) -> bool| {
        let row = catalog.rows().get(number as usize).filter(|row| row.state == RowState::Present);
        row.into_iter().for_each(|row| {
            visit(Part::Blob(number), row.bytes_on_disk);
        });
    };
    for root in roots {
        match *root {
            Node::Blob(digest) => {
                catalog.find(digest).into_iter().for_each(|number| visit_row(number, &mut visit));
            }
            Node::Recipe(file) => {
                let Some(recipe) = catalog.recipes().get(&file) else { continue };
                if visit(Part::Recipe(file), recipe.bytes_on_disk) {
                    recipe.needs.iter().flatten().for_each(|number| visit_row(*number, &mut visit));
                }
            }
        }
    }
}

/// Whether the catalog lacks something that these roots keep.
fn lacks_any(catalog: &Catalog, roots: &[Node]) -> bool {
    let is_present = |number: u32| {
        let row = catalog.rows().get(number as usize);
        row.is_some_and(|row| row.state == RowState::Present)
    };
    let has_blob = |digest| catalog.find(digest).is_some_and(is_present);
    roots.iter().any(|root| match *root {
        Node::Blob(digest) => !has_blob(digest) && !catalog.recipes().contains_key(&digest),
        Node::Recipe(file) => match catalog.recipes().get(&file) {
            Some(recipe) => recipe.needs.iter().flatten().any(|number| !is_present(*number)),
            None => !has_blob(file),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::catalog::{BlobFacts, RecipeFacts};

    fn blob(number: u32) -> Digest {
        Digest::of(&number.to_le_bytes())
    }

    fn file(number: u32) -> Digest {
        Digest::of(format!("file {number}").as_bytes())
    }

    /// Models of one file each: `blobs` blobs, half of them shared with the models of the same group.
    fn store(models: u32, blobs: u32, users: u32) -> (Catalog, Vec<Claim>) {
        let mut catalog = Catalog::default();
        let mut claims = Vec::new();
        for model in 0..models {
            let needs =
                |part| if part % 2 == 0 { part + 1000 * (model % 7) } else { 10_000 + model * blobs + part };
            let mut digests: Vec<Digest> = (0..blobs).map(|part| blob(needs(part))).collect();
            for digest in &digests {
                catalog.set_blob(*digest, Some(BlobFacts { length: 4096, bytes_on_disk: 4096 }));
            }
            digests.sort_unstable();
            digests.dedup();
            // Some models have the same file under another name.
            let name = file(model / 3 * 2);
            catalog.set_recipe(name, Some(RecipeFacts { bytes_on_disk: 512, needs: Some(digests) }));
            let uid = Some(model % users).filter(|user| *user > 0);
            let roots = vec![Node::Blob(name), Node::Recipe(name), Node::Blob(blob(needs(1)))];
            claims.push(Claim { kind: ClaimKind::Tag, since: model.into(), uid, roots });
        }
        (catalog, claims)
    }

    /// The result by the definition, computed with sets.
    fn expected(catalog: &Catalog, claims: &[Claim]) -> BTreeMap<Option<u32>, UserShare> {
        let mut of_users: BTreeMap<Option<u32>, HashMap<Part, u64>> = BTreeMap::new();
        for claim in claims {
            let parts = of_users.entry(claim.uid).or_default();
            each_part(catalog, &claim.roots, |part, bytes| {
                parts.insert(part, bytes);
                true
            });
        }
        let mut users: HashMap<Part, u32> = HashMap::new();
        of_users.values().flat_map(HashMap::keys).for_each(|part| *users.entry(*part).or_default() += 1);
        let share = |parts: &HashMap<Part, u64>| {
            let mut share = UserShare::default();
            for (part, bytes) in parts {
                *if users[part] > 1 { &mut share.shared_bytes } else { &mut share.unique_bytes } += bytes;
            }
            share
        };
        of_users.iter().map(|(uid, parts)| (*uid, share(parts))).collect()
    }

    #[test]
    fn claim_of_a_tag_is_added_if_it_is_the_latest() {
        let (catalog, mut claims) = store(4, 12, 3);
        let latest = claims.pop().unwrap();
        for (kind, since, is_added) in [
            (ClaimKind::Tag, latest.since, true),
            (ClaimKind::Tag, latest.since - 1, false),
            (ClaimKind::Trash, latest.since, false),
        ] {
            let mut payers = Payers::count(&catalog, &claims);
            let before = payers.charged_to_users();
            let claim = Claim { kind, since, uid: Some(77), roots: latest.roots.clone() };
            assert_eq!(payers.add_latest(&catalog, &claim), is_added, "{since}");
            assert_eq!(payers.charged_to(Some(77)) > 0, is_added, "{since}");
            assert_eq!(payers.charged_to_users() > before, is_added, "{since}");
        }
    }

    #[test]
    fn shares_are_those_of_the_definition_for_all_users_and_for_one() {
        for users in [1, 2, 5] {
            let (catalog, claims) = store(40, 12, users);
            let expected = expected(&catalog, &claims);
            assert_eq!(user_shares(&catalog, &claims, None), expected);
            for uid in 1..users {
                let only = user_shares(&catalog, &claims, Some(uid));
                assert_eq!(only, BTreeMap::from([(Some(uid), expected[&Some(uid)])]));
            }
            assert!(user_shares(&catalog, &claims, Some(99)).is_empty());
        }
    }
}
