//! Tensor indexes: published by a push beside the model, used by a pull, and forged.

use blobd_registry::PackedRecipe;
use blobd_store_format::artifact::Referrers;
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::tensor_index::TensorIndex;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault, Request};
use blobd_tests::tensor_indexes::{IndexedModel, descriptor, forged, recipe_of};
use serde_json::Value as Json;

use crate::pull::third_party::{Access, ThirdPartyRegistry};

/// A daemon that has a model with this file.
fn with_model(model: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    daemon
}

fn push(daemon: &TestDaemon, destination: &str, more: &[&str]) -> Json {
    let mut arguments = vec!["push", "m", destination, "--json"];
    arguments.extend(more);
    daemon.command().run(arguments).succeeds().json_lines().pop().unwrap()
}

/// A model of 1.8 MB.
fn model() -> ModelFile {
    ModelFile::dense_of(1, 4, 128)
}

/// The digest of the manifest of a pushed model.
fn digest(pushed: &Json) -> Digest {
    pushed["digest"].as_str().unwrap().parse().unwrap()
}

/// The tensor indexes that the registry keeps in a repository, by their paths.
fn puts(registry: &FakeRegistry) -> Vec<Request> {
    let is_put = |request: &Request| request.method == "PUT" && request.path.contains("/manifests/");
    registry.requests().into_iter().filter(is_put).collect()
}

#[test]
fn push_publishes_an_index_and_keeps_the_digest_of_the_model() {
    let daemon = with_model(&model());
    for lists_referrers in [true, false] {
        let registry = FakeRegistry::start().unwrap();
        if lists_referrers {
            registry.list_referrers();
        }
        let name = registry.name("team/m:1");
        let planned = push(&daemon, &name, &["--dry-run"]);
        assert_eq!(planned["index"]["delivery"], "sent");
        assert!(registry.requests().iter().all(|request| request.method == "HEAD"));
        let pushed = push(&daemon, &name, &[]);
        assert_eq!(pushed["index"], planned["index"]);
        assert_eq!(pushed["digest"], daemon.client().models().unwrap().models[0].digest.to_string());
        let tag = Referrers::fallback_tag(digest(&pushed));
        let list = registry.manifest(&format!("/v2/team/m/manifests/{tag}"));
        assert_eq!(list.is_none(), lists_referrers);
        let puts = puts(&registry);
        assert_eq!(puts.len(), if lists_referrers { 2 } else { 3 }, "the model, the index, the list");
        let index = TensorIndex::parse(&puts[1].body, digest(&pushed)).unwrap();
        let file: Digest = pushed["files"][0]["digest"].as_str().unwrap().parse().unwrap();
        let recipe = index.recipe(file).unwrap();
        let size = puts[1].body.len() as u64 + recipe.size;
        assert_eq!(pushed["index"]["size"], size);
        assert_eq!(registry.bytes_uploaded(), pushed["size"].as_u64().unwrap() + recipe.size + 2);
        // A second time it is there.
        assert_eq!(push(&daemon, &name, &[])["index"]["delivery"], "present");
        assert_eq!(push(&daemon, &name, &["--dry-run"])["index"]["delivery"], "present");
    }
}

#[test]
fn index_is_left_out_on_request_and_of_small_files() {
    let registry = FakeRegistry::start().unwrap();
    let pushed = push(&with_model(&model()), &registry.name("team/m:1"), &["--no-index"]);
    assert_eq!(pushed["index"], Json::Null);
    let pushed = push(&with_model(&ModelFile::dense(1)), &registry.name("team/small:1"), &[]);
    assert_eq!(pushed["index"], Json::Null);
    assert_eq!(puts(&registry).len(), 2);
}

#[test]
fn registry_that_refuses_the_index_has_the_model_nevertheless() {
    let registry = FakeRegistry::start().unwrap();
    let daemon = with_model(&model());
    let name = registry.name("team/m:1");
    registry.add_fault("/manifests/sha256", 9, Fault::Refusal(400, "subject is not supported"));
    let pushed = push(&daemon, &name, &[]);
    let index = &pushed["index"];
    assert_eq!(index["delivery"], "refused");
    assert!(index["reason"].as_str().unwrap().contains("400"), "{index}");
    let text = daemon.command().run(["push", "m", &name]).succeeds().text();
    assert!(text.contains("\n  without a tensor index: "), "{text}");
    registry.clear_faults();
    let text = daemon.command().run(["push", "m", &name]).succeeds().text();
    assert!(text.contains("\n  with a tensor index of "), "{text}");
    TestDaemon::start().command().run(["pull", &name]).succeeds();
}

/// A file of noise whose tensors are not followed by each other at once: there is padding between them.
fn noise(tensors: usize, bytes: u64) -> ModelFile {
    let mut file = ModelFile::empty();
    for number in 0..tensors {
        file.add_noise(1, &format!("blk.{number}.ffn_up.weight"), GgmlType::I8, &[bytes - 4]);
    }
    file
}

/// The file with every sixth tensor changed, all renamed, and in the reverse order.
fn sibling(file: &ModelFile) -> (ModelFile, u64) {
    let changed: Vec<String> = file.tensors.iter().step_by(6).map(|tensor| tensor.name.clone()).collect();
    let mut sibling = changed.iter().fold(file.clone(), |file, name| file.with_changed(name));
    sibling.tensors.reverse();
    for tensor in &mut sibling.tensors {
        tensor.name = tensor.name.replace("ffn_up", "ffn_gate");
    }
    let header = sibling.header().unwrap().len() as u64;
    let changed = changed.len() as u64 * sibling.tensors[0].size_bytes();
    (sibling, changed + header)
}

/// A daemon with a model `base`.
fn with_base(file: &ModelFile) -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = file.write_to(daemon.scratch(), "base.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "base"]).succeeds();
    daemon
}

pub(super) fn direct_registry() -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    registry.set_blob_delivery(BlobDelivery::Direct);
    registry.keep_connections();
    registry
}

/// What a pull prints, and how many bytes and requests it needed.
pub(super) fn pull(daemon: &TestDaemon, registry: &FakeRegistry, name: &str) -> (Json, u64, usize) {
    let (bytes, requests) = (registry.bytes_served(), registry.requests().len());
    let done = daemon.command().run(["pull", name, "--json"]).succeeds().json_lines().pop().unwrap();
    (done, registry.bytes_served() - bytes, registry.requests().len() - requests)
}

fn check_weights(daemon: &TestDaemon, name: &str, weights: &[u8]) {
    assert!(daemon.command().run(["export", name, "-o", "-"]).stdout == weights, "{name}: other weights");
}

#[test]
fn pull_moves_only_what_changed_wherever_it_is_and_whatever_its_name() {
    let base = noise(600, 64 << 10);
    let (changed, changed_bytes) = sibling(&base);
    let weights = changed.bytes();
    let source = with_model(&changed);
    for lists_referrers in [true, false] {
        let (registry, store) = (direct_registry(), with_base(&base));
        if lists_referrers {
            registry.list_referrers();
        }
        let name = registry.name("team/m:1");
        let index = push(&source, &name, &[])["index"].clone();
        let planned = ["pull", &name, "--dry-run", "--json"];
        let requests = registry.requests().len();
        let plan = store.command().run(planned).succeeds().json();
        assert!(registry.requests().len() - requests < 10, "no samples");
        let (done, bytes, requests) = pull(&store, &registry, &name);
        eprintln!("{bytes} bytes in {requests} requests, {changed_bytes} changed; index {index}");
        assert!(bytes * 100 <= changed_bytes * 102, "{bytes} bytes, {changed_bytes} changed");
        assert!(requests <= 120, "{requests} requests");
        // Bytes between tensors are reused too.
        let used = &done["index"];
        assert!(used["size"].as_u64().unwrap() < index["size"].as_u64().unwrap());
        assert_eq!(used["spared_bytes"], plan["files"][0]["similar_bytes"]);
        let [spared, reused] =
            [&used["spared_bytes"], &done["reused_bytes"]].map(|bytes| bytes.as_u64().unwrap());
        assert!((spared..=spared + 4 * 600).contains(&reused), "{reused} reused, {spared} spared");
        check_weights(&store, &name, &weights);
        store.command().run(["verify"]).succeeds();
    }
}

#[test]
fn real_registry_keeps_the_index() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let base = noise(40, 64 << 10);
    let (changed, _) = sibling(&base);
    let name = registry.name("team/m:1");
    assert_eq!(push(&with_model(&changed), &name, &[])["index"]["delivery"], "sent");
    let store = with_base(&base);
    let done = store.command().run(["pull", &name, "--json"]).succeeds().json_lines().pop().unwrap();
    assert!(done["index"]["spared_bytes"].as_u64() > Some(2_000_000), "{done}");
    check_weights(&store, &name, &changed.bytes());
}

#[test]
fn index_is_small() {
    // Tensors of a megabyte, as in the smallest models that are in use.
    let file = noise(24, 1 << 20);
    let registry = direct_registry();
    let pushed = push(&with_model(&file), &registry.name("team/m:1"), &[]);
    let [index, size] = [&pushed["index"]["size"], &pushed["size"]].map(|number| number.as_u64().unwrap());
    assert!(index * 2000 < size, "{index} of {size}");
}

/// Forges an index, or a part of it.
type Forgery = fn(&IndexedModel<'_>, &Recipe);

/// Publishes a recipe with changed pieces.
fn publish_forged(model: &IndexedModel<'_>, recipe: &Recipe, change: impl FnOnce(&mut Vec<Piece>)) {
    model.publish(&forged(recipe, change));
}

/// The tensors of a recipe.
fn tensors(pieces: &mut [Piece]) -> Vec<&mut Piece> {
    pieces.iter_mut().skip(1).filter(|piece| matches!(piece, Piece::Blob { .. })).collect()
}

/// A zstd frame that compresses each block of 128 KiB of spaces to four bytes.
fn bomb(blocks: u32) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0x58];
    for block in 1..=blocks {
        let head = (128 << 10 << 3) | 2 | u32::from(block == blocks);
        frame.extend(&head.to_le_bytes()[..3]);
        frame.push(b' ');
    }
    frame
}

const FORGERIES: &[(&str, Forgery)] = &[
    ("digests of other tensors that are stored", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            let mut tensors = tensors(pieces);
            let first = tensors[1].clone();
            (1..tensors.len() - 1).for_each(|place| *tensors[place] = tensors[place + 1].clone());
            *tensors[39] = first;
        });
    }),
    ("digests of nothing", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            for (number, piece) in tensors(pieces).into_iter().enumerate() {
                if let Piece::Blob { blob, .. } = piece {
                    *blob = Digest::of(&number.to_le_bytes());
                }
            }
        });
    }),
    ("wrong sizes", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            for (number, piece) in tensors(pieces).into_iter().enumerate() {
                if let Piece::Blob { length, .. } = piece {
                    *length = if number % 2 == 0 { *length - 1 } else { *length + 1 };
                }
            }
        });
    }),
    ("wrong offsets in blobs", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            for piece in tensors(pieces) {
                if let Piece::Blob { offset, .. } = piece {
                    *offset = 32;
                }
            }
        });
    }),
    ("wrong padding", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            for piece in pieces {
                if let Piece::Zeros { zeros } = piece {
                    *piece = Piece::Literal { literal: vec![7; usize::try_from(*zeros).unwrap()] };
                }
            }
        });
    }),
    ("a header that is not the file's", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            if let Some(Piece::Blob { blob, .. }) = pieces.first_mut() {
                *blob = Digest::of(b"another header");
            }
        });
    }),
    ("a header that is nearly all of the file", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            let all: u64 = pieces.iter().map(Piece::length).sum();
            pieces.clear();
            pieces.push(Piece::Blob { blob: Digest::of(b"header"), offset: 0, length: all - 1 });
            pieces.push(Piece::Zeros { zeros: 1 });
        });
    }),
    ("very many pieces", |model, recipe| {
        publish_forged(model, recipe, |pieces| {
            let (padding, tensor) = (pieces.pop().unwrap(), pieces.pop().unwrap());
            pieces.extend((0..padding.length() + tensor.length()).map(|_| Piece::Zeros { zeros: 1 }));
        });
    }),
    ("the recipe of another file", |model, _| {
        model.publish(&recipe_of(&noise(40, 64 << 10).bytes()));
    }),
    ("a recipe of no size", |model, recipe| publish_forged(model, recipe, |pieces| pieces.truncate(1))),
    ("bytes that are not compressed", |model, recipe| model.publish_bytes(&recipe.to_json()[..9000])),
    ("half of a recipe", |model, recipe| {
        let packed = PackedRecipe::new(recipe).unwrap();
        model.publish_bytes(&packed.bytes()[..packed.bytes().len() / 2]);
    }),
    ("a recipe that is decompressed without end", |model, _| model.publish_bytes(&bomb(16_000))),
    ("a recipe of another length", |model, recipe| {
        let packed = PackedRecipe::new(recipe).unwrap();
        model.registry.add_blob(packed.bytes().to_vec());
        let mut descriptor = packed.descriptor();
        descriptor.size -= 7;
        model.publish_index(model.manifest.digest(), descriptor);
    }),
    ("a recipe that is as long as the file", |model, _| {
        let long = vec![7; 2 << 20];
        model.registry.add_blob(&*long);
        model.publish_index(model.manifest.digest(), descriptor(&long, TensorIndex::RECIPE_TYPE));
    }),
    ("a recipe that is not there", |model, _| {
        model.publish_index(model.manifest.digest(), descriptor(b"lost", TensorIndex::RECIPE_TYPE));
    }),
    ("the index of another model", |model, recipe| {
        let packed = PackedRecipe::new(recipe).unwrap();
        model.registry.add_blob(packed.bytes().to_vec());
        model.publish_index(Digest::of(b"another model"), packed.descriptor());
    }),
];

#[test]
fn forged_index_costs_bytes_and_never_content() {
    let base = noise(40, 64 << 10);
    let (changed, _) = sibling(&base);
    let weights = changed.bytes();
    let recipe = recipe_of(&weights);
    for (what, forge) in FORGERIES {
        let (registry, store) = (direct_registry(), with_base(&base));
        let model = IndexedModel::new(&registry, ("team/m", "1"), &weights);
        forge(&model, &recipe);
        let (done, bytes, requests) = pull(&store, &registry, &model.reference());
        eprintln!("{what}: {bytes} bytes of {} in {requests} requests; {}", weights.len(), done["index"]);
        assert!(bytes * 2 <= weights.len() as u64 * 3, "{what}: {bytes} bytes");
        check_weights(&store, &model.reference(), &weights);
        store.command().run(["verify"]).succeeds();
    }
}

#[test]
fn tensor_that_is_damaged_on_its_way_is_downloaded_again_alone() {
    let base = noise(40, 64 << 10);
    let (changed, changed_bytes) = sibling(&base);
    let weights = changed.bytes();
    let (recipe, stored) = (recipe_of(&weights), recipe_of(&base.bytes()).digests());
    let mut offset = 0;
    let new = recipe.pieces().iter().skip(1).find_map(|piece| {
        offset += piece.length();
        match piece {
            Piece::Blob { blob, length, .. } if !stored.contains(blob) => Some(offset - length / 2),
            _ => None,
        }
    });
    let header = recipe.header().unwrap().1;
    let registry = direct_registry();
    let model = IndexedModel::new(&registry, ("team/m", "1"), &weights);
    model.publish(&recipe);
    registry.add_fault("/blobs/", 1, Fault::FlipInFile(header + new.unwrap()));
    let store = with_base(&base);
    let (done, bytes, _) = pull(&store, &registry, &model.reference());
    assert!(bytes < changed_bytes + (80 << 10), "{bytes} bytes, {changed_bytes} changed: {done}");
    check_weights(&store, &model.reference(), &weights);
}

#[test]
fn index_is_looked_up_only_where_it_may_help() {
    let base = noise(40, 64 << 10);
    let weights = sibling(&base).0.bytes();
    let registry = direct_registry();
    let model = IndexedModel::new(&registry, ("team/m", "1"), &weights);
    let other = IndexedModel::new(&registry, ("team/m", "2"), &noise(41, 64 << 10).bytes());
    let look_ups = |since: usize| {
        let requests = registry.requests();
        let paths = requests[since..].iter().map(|request| &request.path);
        paths.filter(|path| path.contains("/referrers/") || path.contains("/manifests/sha256-")).count()
    };
    // An empty store has no tensors.
    pull(&TestDaemon::start(), &registry, &model.reference());
    assert_eq!(look_ups(0), 0);
    let store = with_base(&base);
    let before = registry.requests().len();
    let (done, ..) = pull(&store, &registry, &model.reference());
    assert_eq!((&done["index"], look_ups(before)), (&Json::Null, 2));
    // From then on it is known that this registry has no list of referrers.
    let before = registry.requests().len();
    pull(&store, &registry, &other.reference());
    assert_eq!(look_ups(before), 1);
    // What is stored needs none.
    let before = registry.requests().len();
    pull(&store, &registry, &model.reference());
    assert_eq!(look_ups(before), 0);
}
