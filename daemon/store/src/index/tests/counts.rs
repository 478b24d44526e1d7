//! Compares what is counted over the catalog with its definition: usage, sharing and who pays.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use blobd_store_format::digest::Digest;
use proptest::prelude::*;

use crate::index::catalog::{BlobFacts, Catalog, RecipeFacts};
use crate::index::{
    Claim, ClaimKind, ModelShare, Payers, SharedPart, Sharing, UnreadableRecipe, Usage, UsageCounter,
    UserShare, user_shares,
};
use crate::node::Node;

const BLOBS: u8 = 8;
/// The first of the blobs whose digests are those of files, too: a file can be stored in both forms.
const FILES: u8 = 4;

/// What is stored. Each size is another power of two, so a sum says which sizes are in it.
#[derive(Clone, Debug)]
struct Stored {
    blobs: Vec<bool>,
    /// For each file the blobs that its recipe names.
    recipes: Vec<Option<Vec<u8>>>,
}

fn digest(number: u8) -> Digest {
    Digest::of(&[number])
}

fn blob_bytes(number: u8) -> u64 {
    1 << number
}

fn recipe_bytes(number: u8) -> u64 {
    1 << (20 + number)
}

fn stored() -> impl Strategy<Value = Stored> {
    let needs = prop::option::of(prop::collection::vec(0..BLOBS, 0..5));
    let blobs = prop::collection::vec(any::<bool>(), usize::from(BLOBS));
    (blobs, prop::collection::vec(needs, usize::from(FILES)))
        .prop_map(|(blobs, recipes)| Stored { blobs, recipes })
}

fn files() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0..BLOBS, 0..4)
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let node = (any::<bool>(), 0..BLOBS).prop_map(|(is_blob, number)| {
        if is_blob { Node::Blob(digest(number)) } else { Node::Recipe(digest(number)) }
    });
    prop::collection::vec(node, 0..4)
}

impl Stored {
    fn catalog(&self) -> Catalog {
        let mut catalog = Catalog::default();
        for number in (0..BLOBS).filter(|number| self.blobs[usize::from(*number)]) {
            let bytes_on_disk = blob_bytes(number);
            catalog.set_blob(digest(number), Some(BlobFacts { length: 7, bytes_on_disk }));
        }
        for (number, needs) in (0..).zip(&self.recipes) {
            let facts = needs.as_ref().map(|needs| {
                let needs: BTreeSet<_> = needs.iter().map(|number| digest(*number)).collect();
                RecipeFacts { bytes_on_disk: recipe_bytes(number), needs: Some(needs.into_iter().collect()) }
            });
            catalog.set_recipe(digest(number), facts);
        }
        catalog
    }

    fn recipe(&self, number: u8) -> Option<&Vec<u8>> {
        self.recipes.get(usize::from(number))?.as_ref()
    }

    /// What is present of a node, with what a recipe names, and the sizes.
    fn parts(&self, node: Node) -> BTreeMap<Node, u64> {
        let number = (0..BLOBS).find(|number| digest(*number) == node.digest()).unwrap();
        let blob = |number: u8| {
            let is_present = self.blobs[usize::from(number)];
            is_present.then(|| (Node::Blob(digest(number)), blob_bytes(number)))
        };
        match (node, self.recipe(number)) {
            (Node::Blob(_), _) => blob(number).into_iter().collect(),
            (Node::Recipe(_), None) => BTreeMap::new(),
            (Node::Recipe(_), Some(needs)) => {
                let own = (node, recipe_bytes(number));
                needs.iter().filter_map(|number| blob(*number)).chain([own]).collect()
            }
        }
    }

    fn parts_of_all(&self, nodes: &[Node]) -> BTreeMap<Node, u64> {
        nodes.iter().flat_map(|node| self.parts(*node)).collect()
    }

    fn parts_of_model(&self, files: &[u8]) -> BTreeMap<Node, u64> {
        self.parts_of_all(&files.iter().flat_map(|file| Node::both(digest(*file))).collect::<Vec<_>>())
    }

    fn is_partial(&self, files: &[u8]) -> bool {
        let is_missing = |blob: &u8| !self.blobs[usize::from(*blob)];
        files
            .iter()
            .any(|file| self.recipe(*file).map_or(is_missing(file), |needs| needs.iter().any(is_missing)))
    }

    fn everything(&self) -> BTreeMap<Node, u64> {
        self.parts_of_model(&(0..BLOBS).collect::<Vec<_>>())
    }
}

fn sum<'p>(parts: impl IntoIterator<Item = (&'p Node, &'p u64)>) -> u64 {
    parts.into_iter().map(|(_, bytes)| *bytes).sum()
}

fn digests(files: &[u8]) -> Vec<Digest> {
    files.iter().map(|file| digest(*file)).collect()
}

/// Models, models in the trash, downloads, and what is kept for another reason.
#[derive(Clone, Debug)]
struct Users {
    models: Vec<Vec<u8>>,
    trashed: Vec<Vec<u8>>,
    downloads: Vec<Vec<Node>>,
    kept: Vec<u8>,
}

fn users() -> impl Strategy<Value = Users> {
    let many = || prop::collection::vec(files(), 0..4);
    (many(), many(), prop::collection::vec(nodes(), 0..3), files())
        .prop_map(|(models, trashed, downloads, kept)| Users { models, trashed, downloads, kept })
}

fn expected_usage(stored: &Stored, users: &Users) -> Usage {
    let models: Vec<_> = users.models.iter().map(|files| stored.parts_of_model(files)).collect();
    let trashed: BTreeMap<Node, u64> =
        users.trashed.iter().flat_map(|files| stored.parts_of_model(files)).collect();
    let downloads: Vec<_> = users.downloads.iter().map(|nodes| stored.parts_of_all(nodes)).collect();
    let kept: BTreeSet<Digest> = users.kept.iter().map(|number| digest(*number)).collect();
    let mut usage = Usage {
        models: users
            .models
            .iter()
            .map(|files| ModelShare { is_partial: stored.is_partial(files), ..ModelShare::default() })
            .collect(),
        download_bytes: vec![0; downloads.len()],
        ..Usage::default()
    };
    for (node, bytes) in stored.everything() {
        let owners: Vec<usize> =
            (0..models.len()).filter(|model| models[*model].contains_key(&node)).collect();
        let download = downloads.iter().position(|parts| parts.contains_key(&node));
        match (owners.as_slice(), trashed.contains_key(&node), download) {
            ([only], false, _) => usage.models[*only].unique_bytes += bytes,
            ([], true, _) => usage.trash_bytes += bytes,
            ([], false, Some(download)) => usage.download_bytes[download] += bytes,
            ([], false, None) if kept.contains(&node.digest()) => {
                usage.kept_bytes += bytes;
                usage.kept.insert(node.digest());
            }
            ([], false, None) => match node {
                Node::Blob(digest) => usage.unneeded_blobs.push(digest),
                Node::Recipe(file) => usage.unneeded_recipes.push(file),
            },
            _ => {
                usage.shared_bytes += bytes;
                owners.iter().for_each(|model| usage.models[*model].shared_bytes += bytes);
            }
        }
        usage.needed_bytes += if owners.is_empty() { 0 } else { bytes };
    }
    usage.unneeded_blobs.sort();
    usage.unneeded_recipes.sort();
    usage
}

fn claims() -> impl Strategy<Value = Vec<Claim>> {
    let kinds =
        [ClaimKind::Tag, ClaimKind::Trash, ClaimKind::Download, ClaimKind::Ingest, ClaimKind::Displaced];
    let claim = (prop::sample::select(kinds.to_vec()), 0_u64..4, prop::option::of(0_u32..3), nodes())
        .prop_map(|(kind, since, uid, roots)| Claim { kind, since, uid, roots });
    prop::collection::vec(claim, 0..6)
}

/// The claim that pays for each part: the strongest and oldest.
fn payers<'c>(stored: &Stored, claims: &'c [Claim]) -> BTreeMap<Node, &'c Claim> {
    let mut sorted: Vec<&Claim> = claims.iter().collect();
    sorted.sort();
    let mut payers = BTreeMap::new();
    for claim in sorted {
        for node in stored.parts_of_all(&claim.roots).into_keys() {
            payers.entry(node).or_insert(claim);
        }
    }
    payers
}

fn charged(stored: &Stored, claims: &[Claim]) -> BTreeMap<Option<u32>, u64> {
    let (all, mut charged) = (stored.everything(), BTreeMap::new());
    for (node, payer) in payers(stored, claims) {
        *charged.entry(payer.uid).or_default() += all[&node];
    }
    charged
}

fn check_charges(counted: &Payers, stored: &Stored, claims: &[Claim]) {
    let expected = charged(stored, claims);
    for uid in [None, Some(0), Some(1), Some(2), Some(3)] {
        assert_eq!(counted.charged_to(uid), expected.get(&uid).copied().unwrap_or_default(), "{uid:?}");
    }
    let of_users: BTreeMap<u32, u64> =
        expected.iter().filter_map(|(uid, bytes)| Some(((*uid)?, *bytes))).collect();
    assert_eq!(counted.charged_to_users(), of_users.values().sum::<u64>());
    assert!(of_users.keys().all(|uid| counted.users().any(|user| user == *uid)));
}

proptest! {
    #[test]
    fn usage_is_that_of_the_definition(stored in stored(), users in users(), keeps_first in any::<bool>()) {
        let catalog = stored.catalog();
        let mut counter = UsageCounter::new(&catalog);
        if keeps_first {
            counter.keep(digests(&users.kept));
        }
        users.models.iter().for_each(|files| counter.add(&digests(files)).unwrap());
        users.trashed.iter().for_each(|files| counter.add_trashed(&digests(files)).unwrap());
        users.downloads.iter().for_each(|needs| counter.add_download(needs));
        counter.keep(digests(&users.kept));
        let mut usage = counter.finish();
        usage.unneeded_blobs.sort();
        usage.unneeded_recipes.sort();
        prop_assert_eq!(usage, expected_usage(&stored, &users));
    }

    #[test]
    fn sharing_is_that_of_the_definition(stored in stored(), own in files(), others in prop::collection::vec(files(), 0..4)) {
        let catalog = stored.catalog();
        let (files, other_files) = (digests(&own), others.iter().map(|files| digests(files)).collect::<Vec<_>>());
        let slices: Vec<&[Digest]> = other_files.iter().map(Vec::as_slice).collect();
        let parts = stored.parts_of_model(&own);
        let others: Vec<_> = others.iter().map(|files| stored.parts_of_model(files)).collect();
        let is_shared = |node: &Node| others.iter().any(|other| other.contains_key(node));
        let expected = Sharing {
            unique_bytes: sum(parts.iter().filter(|(node, _)| !is_shared(node))),
            shared_bytes: sum(parts.iter().filter(|(node, _)| is_shared(node))),
            with_others: others.iter().map(|other| sum(parts.iter().filter(|(node, _)| other.contains_key(node)))).collect(),
        };
        prop_assert_eq!(Sharing::count(&catalog, &files, &slices).unwrap(), expected);
    }

    #[test]
    fn shared_parts_are_those_of_the_definition(stored in stored(), models in prop::collection::vec(files(), 0..5)) {
        let catalog = stored.catalog();
        let all: Vec<_> = models.iter().map(|files| digests(files)).collect();
        let slices: Vec<&[Digest]> = all.iter().map(Vec::as_slice).collect();
        let parts: Vec<_> = models.iter().map(|files| stored.parts_of_model(files)).collect();
        let mut expected: BTreeMap<Vec<usize>, u64> = BTreeMap::new();
        for (node, bytes) in stored.everything() {
            let owners: Vec<usize> = (0..parts.len()).filter(|model| parts[*model].contains_key(&node)).collect();
            if owners.len() > 1 {
                *expected.entry(owners).or_default() += bytes;
            }
        }
        let found = SharedPart::count(&catalog, &slices).unwrap();
        prop_assert!(found.windows(2).all(|pair| pair[0].bytes >= pair[1].bytes));
        let found: Vec<_> = found.into_iter().map(|part| (part.models, part.bytes)).collect();
        prop_assert_eq!(found.len(), expected.len());
        prop_assert_eq!(found.into_iter().collect::<BTreeMap<_, _>>(), expected);
    }

    #[test]
    fn payers_are_those_of_the_definition(stored in stored(), claims in claims(), latest in nodes()) {
        let catalog = stored.catalog();
        let mut counted = Payers::count(&catalog, &claims);
        check_charges(&counted, &stored, &claims);
        let latest = Claim { kind: ClaimKind::Tag, since: 99, uid: Some(3), roots: latest };
        prop_assert!(counted.add_latest(&catalog, &latest));
        check_charges(&counted, &stored, &claims.iter().cloned().chain([latest]).collect::<Vec<_>>());
    }

    #[test]
    fn unpaid_bytes_are_those_of_the_definition(
        stored in stored(),
        claims in claims(),
        roots in nodes(),
        left_out in nodes(),
        replaced in prop::option::of((0_u32..3, 0_u64..4)),
    ) {
        let catalog = stored.catalog();
        let claim = Claim { kind: ClaimKind::Ingest, since: 0, uid: Some(1), roots };
        let left_out: HashSet<Node> = left_out.into_iter().collect();
        let payers = payers(&stored, &claims);
        let is_paid = |node: &Node| payers.get(node).is_some_and(|payer| {
            let is_replaced = replaced.is_some_and(|(uid, since)| (payer.uid, payer.since) == (Some(uid), since));
            payer.uid == Some(1) || payer.kind == ClaimKind::Tag && !is_replaced
        });
        let parts = stored.parts_of_all(&claim.roots);
        let expected = sum(parts.iter().filter(|(node, _)| !is_paid(node) && !left_out.contains(node)));
        let counted = Payers::count(&catalog, &claims);
        prop_assert_eq!(counted.unpaid_by_names(&catalog, &claim, &left_out, replaced), expected);
    }

    #[test]
    fn shares_of_users_are_those_of_the_definition(stored in stored(), claims in claims()) {
        let mut of_users: BTreeMap<Option<u32>, BTreeMap<Node, u64>> = BTreeMap::new();
        for claim in &claims {
            of_users.entry(claim.uid).or_default().extend(stored.parts_of_all(&claim.roots));
        }
        let share = |uid: &Option<u32>| {
            let is_shared = |node: &Node| of_users.iter().any(|(other, parts)| other != uid && parts.contains_key(node));
            UserShare {
                unique_bytes: sum(of_users[uid].iter().filter(|(node, _)| !is_shared(node))),
                shared_bytes: sum(of_users[uid].iter().filter(|(node, _)| is_shared(node))),
            }
        };
        let expected: BTreeMap<_, _> = of_users.keys().map(|uid| (*uid, share(uid))).collect();
        let catalog = stored.catalog();
        for uid in of_users.keys().filter(|uid| uid.is_some()) {
            prop_assert_eq!(user_shares(&catalog, &claims, *uid), [(*uid, expected[uid])].into());
        }
        prop_assert_eq!(user_shares(&catalog, &claims, None), expected);
    }
}

#[test]
fn counts_that_need_an_unreadable_recipe_are_refused() {
    let mut catalog = Catalog::default();
    let file = digest(1);
    catalog.set_recipe(file, Some(RecipeFacts { bytes_on_disk: 512, needs: None }));
    let unreadable = UnreadableRecipe { file };
    let models: [&[Digest]; 2] = [&[digest(0)], &[digest(0), file]];
    assert_eq!(UsageCounter::new(&catalog).add(models[1]), Err(unreadable));
    assert_eq!(UsageCounter::new(&catalog).add_trashed(models[1]), Err(unreadable));
    assert_eq!(UsageCounter::new(&catalog).add(models[0]), Ok(()));
    assert_eq!(Sharing::count(&catalog, models[1], &models[..1]), Err(unreadable));
    assert_eq!(Sharing::count(&catalog, models[0], &models[1..]), Err(unreadable));
    assert!(Sharing::count(&catalog, models[0], &models[..1]).is_ok());
    assert_eq!(SharedPart::count(&catalog, &models), Err(unreadable));
    assert!(SharedPart::count(&catalog, &models[..1]).is_ok());
    // A claim of it has the recipe itself.
    let claim = Claim { kind: ClaimKind::Tag, since: 1, uid: Some(7), roots: vec![Node::Recipe(file)] };
    assert_eq!(Payers::count(&catalog, &[claim]).charged_to(Some(7)), 512);
}

/// A tag may be set when what another transaction has published for it is on the disk and not in the catalog yet: the tag
/// pays for that, and not the next one.
#[test]
fn growth_of_what_a_tag_keeps_needs_a_new_count() {
    let (file, blob, other) = (digest(0), digest(1), digest(2));
    let facts = || Some(BlobFacts { length: 4, bytes_on_disk: 4096 });
    let recipe = || Some(RecipeFacts { bytes_on_disk: 512, needs: Some(vec![blob]) });
    let claim = |since, uid| Claim {
        kind: ClaimKind::Tag,
        since,
        uid: Some(uid),
        roots: Node::both(file).into_iter().collect(),
    };
    let mut catalog = Catalog::default();
    catalog.set_blob(other, facts());
    let mut payers = Payers::default();
    assert!(payers.add_latest(&catalog, &claim(1, 7)));
    assert!(payers.are_of(&catalog), "nothing is missing that has appeared");
    catalog.set_recipe(file, recipe());
    assert!(!payers.are_of(&catalog), "the recipe has appeared");
    payers = Payers::count(&catalog, &[claim(1, 7)]);
    catalog.set_blob(blob, facts());
    assert!(!payers.are_of(&catalog), "the blob has appeared");
    payers = Payers::count(&catalog, &[claim(1, 7)]);
    catalog.set_blob(digest(3), facts());
    assert!(payers.are_of(&catalog), "it has only grown by what nothing keeps");
    assert!(payers.add_latest(&catalog, &claim(2, 8)));
    assert_eq!((payers.charged_to(Some(7)), payers.charged_to(Some(8))), (512 + 4096, 0));
    catalog.set_blob(blob, None);
    assert!(!payers.are_of(&catalog));
}
