//! Names keep their content, and what a commit displaces stays in the trash until space is needed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use proptest::prelude::*;

use super::*;
use crate::testing::{self, begin, name, new_store, new_store_with};
use crate::{Actor, Committed, Ingest, NameOrigin, NewName, SpacePolicy, Store, StoreOptions, Verb, gc};

const ANN: u32 = 1001;
const BOB: u32 = 1002;

/// A source as the store records it.
fn full(source: &str) -> String {
    name(source).to_string()
}

fn manifest(content: &[u8]) -> Manifest {
    testing::manifest(&[content])
}

fn rule(uid: u32) -> NameRule {
    NameRule { uid, ..NameRule::default() }
}

fn forced(uid: u32) -> NameRule {
    NameRule { replace: true, ..rule(uid) }
}

fn pulling(uid: u32, source: &str) -> NameRule {
    NameRule { update_from: Some(source.parse().unwrap()), ..rule(uid) }
}

fn ingest(store: &Arc<Store>, rule: NameRule, verb: Verb) -> Ingest {
    begin(store).on_behalf_of(Actor::new(rule.uid, verb)).may_take(rule)
}

/// Gives the name to a model of this content, as an import does.
fn give(
    store: &Arc<Store>,
    rule: NameRule,
    reference: &str,
    content: &[u8],
) -> Result<Committed, StoreError> {
    let mut ingest = ingest(store, rule, Verb::Import);
    ingest.admit(std::iter::once(content.len() as u64))?;
    ingest.add_bytes(content)?;
    ingest.commit(&name(reference), &manifest(content), Some("import x.gguf"))
}

/// Gives the name to what the source has, as a pull does.
fn pull(
    store: &Arc<Store>,
    rule: NameRule,
    reference: &str,
    content: &[u8],
) -> Result<Committed, StoreError> {
    let origin = rule.update_from.as_ref().map(ToString::to_string);
    let named = NameOrigin { origin: origin.clone(), source: origin.clone() };
    let mut ingest = ingest(store, rule, Verb::Pull).with_name_origin(named);
    ingest.add_bytes(content)?;
    ingest.commit(&name(reference), &manifest(content), origin.as_deref())
}

fn content_of(store: &Store, reference: &str) -> Option<Digest> {
    store.names.manifest(&name(reference)).ok().map(|manifest| manifest.digest())
}

fn trash(store: &Store) -> Vec<(String, Digest)> {
    let trash = store.names.trash().unwrap().into_iter();
    trash.map(|trashed| (trashed.reference.short(), trashed.manifest.digest())).collect()
}

#[test]
fn name_follows_a_source_in_whatever_form_it_is_given() {
    let updates = |new: &str, followed: &str| {
        let rule = NameRule { update_from: Some(new.parse().unwrap()), ..NameRule::default() };
        rule.updates(Some(followed))
    };
    let commit = "https://huggingface.co/me/x/resolve/0123456789abcdef0123456789abcdef01234567/x.gguf";
    let branch = "https://huggingface.co/me/x/resolve/v2/x.gguf";
    let fixed = "llama3:8b@sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";
    for (new, followed) in [
        ("llama3:8b", "registry.ollama.ai/library/llama3:8b"),
        ("OLLAMA.com/library/llama3:8b", "llama3:8b"),
        ("llama3:8b", fixed),
        ("hf.co/me/x/x.gguf", commit),
        ("hf.co/me/x/x.gguf", "https://huggingface.co/me/x/blob/main/x.gguf"),
        (branch, branch),
        ("https://a.example/m.gguf", "https://a.example/m.gguf"),
        ("hf.co/me/x:latest --no-projector", "hf.co/me/x:latest"),
        ("hf.co/me/x:latest --revision v1", "hf.co/me/x:latest --revision v1"),
    ] {
        assert!(updates(new, followed), "{new} {followed}");
    }
    for (new, followed) in [
        (fixed, "llama3:8b"),
        (commit, "hf.co/me/x/x.gguf"),
        (branch, "hf.co/me/x/x.gguf"),
        ("hf.co/me/x/x.gguf", branch),
        (branch, commit),
        ("LLAMA3:8b", "llama3:8b"),
        ("llama3:8B", "llama3:8b"),
        ("llama3:8b", "llama3:latest"),
        ("llama3:8b", "me/llama3:8b"),
        ("hf.co/me/x/y.gguf", commit),
        ("https://a.example/m.gguf", "https://b.example/m.gguf"),
        ("llama3:8b", "import llama3"),
        ("hf.co/me/x:latest --revision v1", "hf.co/me/x:latest --revision v2"),
        ("hf.co/me/x:latest --include a", "hf.co/me/x:latest"),
        ("hf.co/me/x:latest", "hf.co/me/x:latest --exclude a"),
    ] {
        assert!(!updates(new, followed), "{new} {followed}");
    }
    assert!(!NameRule::replacing_any().updates(Some("llama3:8b")));
}

#[test]
fn name_with_other_content_is_taken_only_with_force() {
    let (_folder, store) = new_store();
    give(&store, rule(ANN), "m", b"one").unwrap();
    give(&store, rule(ANN), "m", b"one").unwrap();
    for refused in [rule(ANN), pulling(ANN, "m"), pulling(ANN, "other:8b")] {
        let error = give(&store, refused, "M", b"two").unwrap_err();
        assert!(matches!(error, StoreError::NameTaken { .. }), "{error}");
        let id = manifest(b"one").digest().short();
        assert_eq!(
            error.to_string(),
            format!("model m:latest: exists already with other content: ID {id}, from import x.gguf")
        );
    }
    let error = give(&store, forced(BOB), "m", b"two").unwrap_err();
    assert!(matches!(error, StoreError::NameOfAnother { adder: Some(ANN), by: BOB, .. }), "{error}");
    store.names.pin(&name("m"), Pinner::Administrator).unwrap();
    let error = give(&store, forced(ANN), "m", b"two").unwrap_err();
    assert!(matches!(error, StoreError::Pinned { .. }), "{error}");
    assert_eq!(content_of(&store, "m"), Some(manifest(b"one").digest()));
    assert_eq!(trash(&store), []);
    give(&store, NameRule { replace_pinned: true, ..forced(ANN) }, "m", b"two").unwrap();
    assert_eq!(trash(&store), [("m:latest".to_owned(), manifest(b"one").digest())]);
    assert!(store.names.is_pinned(&name("m")), "the pin stays with the name");
}

fn user(uid: u32) -> NameUser {
    NameUser { uid, is_administrator: false }
}

const ADMINISTRATOR: NameUser = NameUser { uid: 0, is_administrator: true };

fn is_of_another(checked: &Result<(), StoreError>, adder: Option<u32>) -> bool {
    matches!(checked, Err(StoreError::NameOfAnother { adder: found, .. }) if *found == adder)
}

#[test]
fn only_the_user_who_added_a_name_and_administrators_change_it() {
    let (_folder, store) = new_store();
    give(&store, rule(ANN), "m", b"one").unwrap();
    ingest(&store, rule(BOB), Verb::Tag).commit(&name("tag"), &manifest(b"one"), None).unwrap();
    for (reference, adder, other) in [("m", ANN, BOB), ("tag", BOB, ANN)] {
        store.names.check_change(&name(reference), user(adder)).unwrap();
        store.names.check_change(&name(reference), ADMINISTRATOR).unwrap();
        assert!(
            is_of_another(&store.names.check_change(&name(reference), user(other)), Some(adder)),
            "{reference}"
        );
    }
    let error = store.names.check_change(&name("none"), user(ANN)).unwrap_err();
    assert!(error.is_no_such_model(), "{error}");
    let renamed = |uid, to: &str| {
        let renaming = ingest(&store, rule(uid), Verb::Rename).renaming(name("m"));
        renaming.commit(&name(to), &manifest(b"one"), None)
    };
    let error = renamed(BOB, "bob").unwrap_err();
    assert!(is_of_another(&Err(error), Some(ANN)));
    renamed(ANN, "ann").unwrap();
    store.names.check_change(&name("ann"), user(ANN)).unwrap();
    // A pull leaves a name to the user who added it, whether there is a new version or not.
    pull(&store, pulling(ANN, "x:8b"), "x:8b", b"two").unwrap();
    for content in [b"two".as_slice(), b"three"] {
        pull(&store, NameRule { is_own_name: true, ..pulling(BOB, "x:8b") }, "x:8b", content).unwrap();
        store.names.check_change(&name("x:8b"), user(ANN)).unwrap();
        assert!(is_of_another(&store.names.check_change(&name("x:8b"), user(BOB)), Some(ANN)));
    }
    let trashed = store.names.trash().unwrap().remove(0);
    trashed.check_own(user(ANN)).unwrap();
    assert!(is_of_another(&trashed.check_own(user(BOB)), Some(ANN)));
}

#[test]
fn name_without_a_record_of_who_added_it_belongs_to_administrators() {
    let (_folder, store) = new_store();
    give(&store, rule(ANN), "m", b"one").unwrap();
    for damage in [None, Some("{")] {
        let history = store.path(blobd_store_format::layout::history(&name("m")));
        match damage {
            None => std::fs::remove_file(&history).unwrap(),
            Some(content) => std::fs::write(&history, content).unwrap(),
        }
        assert!(is_of_another(&store.names.check_change(&name("m"), user(ANN)), None));
        assert!(is_of_another(&give(&store, forced(ANN), "m", b"two").map(drop), None));
        store.names.check_change(&name("m"), ADMINISTRATOR).unwrap();
    }
    give(&store, NameRule { replace_of_others: true, ..forced(BOB) }, "m", b"two").unwrap();
    store.names.check_change(&name("m"), user(BOB)).unwrap();
}

#[test]
fn pin_is_ended_by_the_user_who_set_it_and_by_administrators() {
    let (_folder, store) = new_store();
    give(&store, rule(ANN), "m", b"one").unwrap();
    store.names.pin(&name("m"), Pinner::User(ANN)).unwrap();
    assert_eq!(store.names.pinner_of(&name("m")), Some(Pinner::User(ANN)));
    store.names.check_change(&name("m"), user(ANN)).unwrap();
    let renaming = |from: &str, to: &str| {
        let renaming = ingest(&store, rule(ANN), Verb::Rename).renaming(name(from));
        renaming.commit(&name(to), &manifest(b"one"), None)
    };
    renaming("m", "n").unwrap();
    assert_eq!(
        (store.names.pinner_of(&name("m")), store.names.pinner_of(&name("n"))),
        (None, Some(Pinner::User(ANN)))
    );
    store.names.pin(&name("n"), Pinner::Administrator).unwrap();
    store.names.pin(&name("n"), Pinner::User(ANN)).unwrap();
    assert_eq!(store.names.pinner_of(&name("n")), Some(Pinner::Administrator), "it stays an administrator's");
    let refused = |checked| matches!(checked, Err(StoreError::PinOfAnother { .. }));
    assert!(refused(store.names.check_change(&name("n"), user(ANN))));
    assert!(refused(renaming("n", "o").map(drop)), "its name is what is pinned");
    store.names.check_own(&name("n"), user(ANN)).unwrap();
    store.names.check_change(&name("n"), ADMINISTRATOR).unwrap();
    assert!(store.names.unpin(&name("n")).unwrap());
    store.names.check_change(&name("n"), user(ANN)).unwrap();
    // An unreadable pin protects the name.
    store.names.pin(&name("n"), Pinner::User(ANN)).unwrap();
    std::fs::write(store.path(blobd_store_format::layout::pin(&name("n"))), "x").unwrap();
    assert!(refused(store.names.check_change(&name("n"), user(ANN))));
}

#[test]
fn pull_updates_only_names_that_follow_its_source() {
    let (_folder, store) = new_store();
    pull(&store, pulling(ANN, "x:8b"), "x:8b", b"one").unwrap();
    pull(&store, pulling(ANN, "x:latest"), "x:latest", b"one").unwrap();
    pull(&store, pulling(ANN, "x:8b"), "mine", b"one").unwrap();
    for (reference, source) in [("x:8b", "x:8b"), ("x:latest", "x:latest"), ("mine", "x:8b")] {
        let origin = store.names.name_origin(&name(reference), manifest(b"one").digest());
        assert_eq!(origin.source, Some(full(source)), "{reference}");
    }
    pull(&store, pulling(ANN, "x:latest"), "x:latest", b"two").unwrap();
    pull(&store, pulling(ANN, "registry.ollama.ai/library/x:8b"), "mine", b"two").unwrap();
    let error = pull(&store, pulling(ANN, "x:latest"), "x:8b", b"two").unwrap_err();
    assert!(matches!(error, StoreError::NameTaken { .. }), "{error}");
    // The name means what the source has, whoever pulls it, but only under the source's own name.
    let error = pull(&store, pulling(BOB, "x:8b"), "mine", b"three").unwrap_err();
    assert!(matches!(error, StoreError::NameOfAnother { .. }), "{error}");
    let own_name = NameRule { is_own_name: true, ..pulling(BOB, "x:8b") };
    pull(&store, own_name.clone(), "x:8b", b"three").unwrap();
    give(&store, rule(ANN), "imported", b"four").unwrap();
    let error = pull(&store, own_name, "imported", b"three").unwrap_err();
    assert!(matches!(error, StoreError::NameOfAnother { .. }), "{error}");
}

#[test]
fn name_that_was_pulled_by_its_digest_is_updated_by_a_pull_of_that_name_alone() {
    let (_folder, store) = new_store();
    let fixed = format!("x:8b@{}", manifest(b"one").digest());
    let named = NameOrigin { origin: Some(fixed.clone()), source: None };
    for reference in ["x:8b", "mine"] {
        let mut pulling = ingest(&store, pulling(ANN, &fixed), Verb::Pull).with_name_origin(named.clone());
        pulling.add_bytes(b"one").unwrap();
        pulling.commit(&name(reference), &manifest(b"one"), Some(&fixed)).unwrap();
    }
    let error = pull(&store, pulling(ANN, "x:8b"), "mine", b"two").unwrap_err();
    assert!(matches!(error, StoreError::NameTaken { .. }), "{error}");
    pull(&store, NameRule { is_own_name: true, ..pulling(ANN, "x:8b") }, "x:8b", b"two").unwrap();
}

#[test]
fn copy_is_updated_by_its_own_user_from_the_source_that_another_program_names() {
    let (_folder, store) = new_store();
    let copy = |reference: &str, origin: &str| {
        let mut ingest = ingest(&store, rule(ANN), Verb::Import);
        ingest.add_bytes(b"one").unwrap();
        ingest.commit(&name(reference), &manifest(b"one"), Some(origin)).unwrap();
    };
    copy("x:8b", "copy registry.ollama.ai/library/x:8b in ollama");
    copy("mine", "copy x:8b");
    let own_name = |uid| NameRule { is_own_name: true, ..pulling(uid, "x:8b") };
    let error = pull(&store, own_name(BOB), "x:8b", b"two").unwrap_err();
    assert!(matches!(error, StoreError::NameOfAnother { .. }), "anybody can claim a source: {error}");
    let error = pull(&store, pulling(ANN, "x:8b"), "mine", b"two").unwrap_err();
    assert!(matches!(error, StoreError::NameTaken { .. }), "{error}");
    let error =
        pull(&store, NameRule { is_own_name: true, ..pulling(ANN, "y") }, "x:8b", b"two").unwrap_err();
    assert!(matches!(error, StoreError::NameTaken { .. }), "{error}");
    pull(&store, own_name(ANN), "x:8b", b"two").unwrap();
    assert_eq!(trash(&store), [("x:8b".to_owned(), manifest(b"one").digest())]);
    pull(&store, own_name(ANN), "x:8b", b"three").unwrap();
}

#[test]
fn name_that_is_pulled_unchanged_follows_the_source_from_then_on() {
    let (_folder, store) = new_store();
    give(&store, rule(ANN), "x:8b", b"one").unwrap();
    pull(&store, pulling(BOB, "x:8b"), "x:8b", b"one").unwrap();
    let account = store.names.account_of(&name("x:8b"), manifest(b"one").digest()).unwrap();
    assert_eq!(account.uid, ANN, "nobody else pays for it");
    pull(&store, pulling(ANN, "x:8b"), "x:8b", b"two").unwrap();
}

#[test]
fn renamed_and_restored_models_follow_what_they_followed() {
    let (_folder, store) = new_store();
    pull(&store, pulling(ANN, "x:8b"), "x:8b", b"one").unwrap();
    let one = manifest(b"one");
    let renaming = ingest(&store, rule(ANN), Verb::Rename).renaming(name("x:8b"));
    renaming.commit(&name("y"), &one, None).unwrap();
    assert_eq!(store.names.name_origin(&name("y"), one.digest()).source, Some(full("x:8b")));
    give(&store, forced(ANN), "y", b"two").unwrap();
    let trashed = store.names.trash().unwrap().remove(0);
    assert!(trashed.displaced);
    let restoring = ingest(&store, forced(ANN), Verb::Undelete).with_name_origin(trashed.origin.clone());
    restoring.restore(&trashed.reference, &trashed.manifest).unwrap();
    assert_eq!(store.names.name_origin(&name("y"), one.digest()).source, Some(full("x:8b")));
}

#[test]
fn derived_name_is_the_one_that_has_the_model_or_a_free_one() {
    let (_folder, store) = new_store();
    let derived = |path: &str, content: &[u8]| {
        let names = DerivedName::from_path(path).unwrap().with_id(manifest(content).digest(), false);
        let mut ingest = ingest(&store, rule(ANN), Verb::Import);
        ingest.add_bytes(content).unwrap();
        let committed = ingest.commit_as(NewName::Derived(&names), &manifest(content), None).unwrap();
        committed.name.unwrap().short()
    };
    let by_id = format!("model-{}:latest", manifest(b"three").digest().short());
    let files: [(&str, &[u8], &str); 5] = [
        ("/a/model.gguf", b"one", "model:latest"),
        ("/b/model.gguf", b"two", "b-model:latest"),
        ("/b/model.gguf", b"three", &by_id),
        ("/a/b/model.gguf", b"four", "a-b-model:latest"),
        ("/c/model.gguf", b"one", "model:latest"),
    ];
    for _ in 0..2 {
        for (path, content, expected) in files {
            assert_eq!(derived(path, content), expected, "{path}");
        }
    }
    // A name that became free changes nothing for the models that have other names.
    store.names.remove_tag(&name("model"), Actor::new(ANN, Verb::Rm)).unwrap();
    assert_eq!(derived("/b/model.gguf", b"two"), "b-model:latest");
}

#[test]
fn displaced_models_are_deleted_first_when_space_is_needed() {
    let (_folder, store) = new_store();
    let content = |seed: u8| vec![seed; 100 << 10];
    give(&store, rule(ANN), "m", &content(1)).unwrap();
    give(&store, forced(ANN), "m", &content(2)).unwrap();
    give(&store, rule(ANN), "kept", &content(3)).unwrap();
    give(&store, forced(ANN), "kept", &content(4)).unwrap();
    assert_eq!(trash(&store).len(), 2);
    let quota_bytes = Some(store.ledger.used_bytes() + (150 << 10));
    store
        .ledger
        .set_space_policy(SpacePolicy { quota_bytes, min_free_bytes: Some(0), ..store.ledger.space_policy() })
        .unwrap();
    // Fits beside one of them: the older one goes.
    give(&store, rule(ANN), "new", &[9; 200 << 10]).unwrap();
    assert_eq!(trash(&store), [("kept:latest".to_owned(), manifest(&content(3)).digest())]);
    assert!(store.liveness.has_displaced().unwrap());
    let error = give(&store, rule(ANN), "large", &[8; 400 << 10]).unwrap_err();
    assert!(error.is_no_space(), "{error}");
    assert_eq!(trash(&store).len(), 1, "nothing is deleted in vain");
    give(&store, rule(ANN), "small", &[7; 60 << 10]).unwrap();
    assert_eq!(trash(&store), []);
    assert_eq!(content_of(&store, "m"), Some(manifest(&content(2)).digest()));
    assert_eq!(gc::collect(&store.liveness).unwrap(), 0, "their bytes are free");
}

#[test]
fn displaced_models_of_a_user_make_room_within_the_users_quota() {
    let (_folder, store) = new_store();
    let content = |seed: u8| vec![seed; 100 << 10];
    give(&store, rule(BOB), "bob", &content(5)).unwrap();
    give(&store, forced(BOB), "bob", &content(6)).unwrap();
    give(&store, rule(ANN), "m", &content(1)).unwrap();
    give(&store, forced(ANN), "m", &content(2)).unwrap();
    let limit = store.liveness.charged_bytes(ANN).unwrap() + (40 << 10);
    let within = |bytes: &[u8], reference: &str| {
        let mut ingest = ingest(&store, rule(ANN), Verb::Import).within_quota(Some(limit));
        ingest.admit(std::iter::once(bytes.len() as u64))?;
        ingest.add_bytes(bytes)?;
        ingest.commit(&name(reference), &manifest(bytes), None)
    };
    within(&content(3), "n").unwrap();
    assert_eq!(trash(&store), [("bob:latest".to_owned(), manifest(&content(5)).digest())], "of ANN nothing");
    let error = within(&content(4), "o").unwrap_err();
    assert!(matches!(error, StoreError::OverQuota { .. }), "{error}");
    assert_eq!(trash(&store).len(), 1, "BOB's stays");
}

#[test]
fn policy_of_zero_keeps_nothing() {
    let space = SpacePolicy { keep_displaced: Duration::ZERO, ..SpacePolicy::default() };
    let (_folder, store) = new_store_with(StoreOptions { space, ..StoreOptions::default() });
    give(&store, rule(ANN), "m", b"one").unwrap();
    let committed = give(&store, forced(ANN), "m", b"two").unwrap();
    assert_eq!(committed.displaced.unwrap().kept_until, None);
    assert_eq!(trash(&store), []);
}

#[test]
fn damaged_manifest_is_replaced_without_being_asked_for() {
    let (_folder, store) = new_store();
    give(&store, rule(ANN), "m", b"one").unwrap();
    let path = store.path(blobd_store_format::layout::manifest(&name("m")));
    std::fs::write(&path, "{").unwrap();
    give(&store, rule(ANN), "m", b"two").unwrap();
    assert_eq!(trash(&store), [], "nothing of it can be restored");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// After any sequence of changes, each name that had content has the same, unless it was forced, or was pulled from
    /// the source that it follows; and all that was displaced is in the trash.
    #[test]
    fn no_name_loses_its_content_unless_asked_to(
        steps in prop::collection::vec((0..7_u8, 0..3_u8, 0..3_u8, 0..4_u8, any::<bool>()), 1..20)
    ) {
        let (_folder, store) = new_store();
        let mut versions: BTreeMap<u8, u8> = BTreeMap::new();
        for (step, first, second, seed, force) in steps {
            let (one, two) = (format!("m:{first}"), format!("m:{second}"));
            let before: BTreeMap<u8, _> =
                (0..3).map(|tag| (tag, content_of(&store, &format!("m:{tag}")))).collect();
            let trash_before = trash(&store).len();
            let may = if force { forced(ANN) } else { rule(ANN) };
            let mut updated = false;
            match step {
                0 => drop(give(&store, may, &one, &[seed; 8])),
                1 => {
                    *versions.entry(second).or_default() += seed % 2;
                    let source = format!("m:{second}");
                    let follows = before[&first].and_then(|digest| store.names.name_origin(&name(&one), digest).source);
                    updated = follows.is_some_and(|follows| follows == full(&source));
                    let content = [100 + 10 * second + versions[&second]; 8];
                    drop(pull(&store, NameRule { replace: force, ..pulling(ANN, &source) }, &one, &content));
                }
                2 | 3 => {
                    if let Ok(model) = store.names.manifest(&name(&one)) {
                        let changing = ingest(&store, may, if step == 2 { Verb::Tag } else { Verb::Rename });
                        let origin = NameOrigin { source: None, ..store.names.name_origin(&name(&one), model.digest()) };
                        let changing = match step {
                            2 => changing.with_name_origin(origin),
                            _ => changing.renaming(name(&one)),
                        };
                        if one != two {
                            drop(changing.commit(&name(&two), &model, None));
                        }
                    }
                }
                4 => {
                    if let Some(trashed) = store.names.trash().unwrap().into_iter().next() {
                        let restoring = ingest(&store, may, Verb::Undelete).with_name_origin(trashed.origin);
                        if restoring.restore(&trashed.reference, &trashed.manifest).is_ok() {
                            store.names.remove_from_trash(trashed.record).unwrap();
                        }
                    }
                }
                5 => assert!(gc::collect(&store.liveness).is_ok()),
                _ => {
                    let names = DerivedName::from_path(&format!("/f{second}/m.{first}.gguf")).unwrap();
                    let content = [200 + seed; 8];
                    let mut deriving = ingest(&store, rule(ANN), Verb::Import);
                    deriving.add_bytes(&content).unwrap();
                    let names = names.with_id(manifest(&content).digest(), force);
                    deriving.commit_as(NewName::Derived(&names), &manifest(&content), None).unwrap();
                }
            }
            for (tag, digest) in before.iter().filter_map(|(tag, digest)| Some((tag, (*digest)?))) {
                let now = content_of(&store, &format!("m:{tag}"));
                let is_renamed = step == 3 && *tag == first;
                let is_asked_for = force || (updated && *tag == first) || is_renamed;
                prop_assert!(now == Some(digest) || is_asked_for, "m:{} lost its content by step {}", tag, step);
                if now.is_some_and(|now| now != digest) && !is_renamed {
                    let kept = trash(&store).contains(&(format!("m:{tag}"), digest));
                    prop_assert!(kept, "m:{} cannot be restored", tag);
                }
            }
            let may_shrink = step == 4;
            prop_assert!(may_shrink || trash(&store).len() >= trash_before);
            for trashed in store.names.trash().unwrap() {
                for file in trashed.manifest.files() {
                    prop_assert!(store.content.has_file(file).unwrap());
                }
            }
        }
    }
}
