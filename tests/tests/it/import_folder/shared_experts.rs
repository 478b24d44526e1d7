//! Experts that are in several files of a model share their bytes with the same experts in one file, or in one tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorCode;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::{ModelFile, noise};
use blobd_tests::store_dir::{blob_path, check_blobs, check_empty, flip_byte, staged};
use serde_json::{Value as Json, json};

use super::{import_listed, listing, opened};

/// Name, shape and content of each tensor.
pub(crate) type Tensors = Vec<(String, Vec<u64>, Vec<u8>)>;

const EXPERTS: usize = 3;
const EXPERT_BYTES: usize = 4096;
const MATRICES: [&str; 2] = ["down_proj", "up_proj"];

/// Sorted by expert, so that the end of a shard cuts the groups of both matrices.
pub(crate) fn separate() -> Tensors {
    let mut tensors = vec![norm()];
    for expert in 0..EXPERTS {
        tensors.extend(MATRICES.map(|matrix| {
            let name = format!("model.layers.0.mlp.experts.{expert}.{matrix}.weight");
            (name, vec![32, 64], expert_bytes(matrix, expert))
        }));
    }
    tensors
}

pub(crate) fn stacked() -> Tensors {
    let stack = |matrix: &str| {
        let content = (0..EXPERTS).flat_map(|expert| expert_bytes(matrix, expert)).collect();
        (format!("model.layers.0.mlp.experts.{matrix}"), vec![EXPERTS as u64, 32, 64], content)
    };
    [vec![norm()], MATRICES.map(stack).to_vec()].concat()
}

fn norm() -> (String, Vec<u64>, Vec<u8>) {
    ("model.norm.weight".to_owned(), vec![64], noise(1, "norm", 128))
}

fn expert_bytes(matrix: &str, expert: usize) -> Vec<u8> {
    noise(expert as u64, matrix, EXPERT_BYTES)
}

fn file_of(tensors: &[(String, Vec<u64>, Vec<u8>)]) -> Vec<u8> {
    let mut writer = HeaderWriter::new();
    for (name, shape, _) in tensors {
        writer.tensor(name, Dtype::BF16, shape).unwrap();
    }
    let data = tensors.iter().flat_map(|(_, _, content)| content);
    writer.header().unwrap().iter().chain(data).copied().collect()
}

/// A folder of these tensors, with shards that end before the tensors of these numbers.
pub(crate) fn folder(tensors: &Tensors, cuts: &[usize]) -> ModelFolder {
    let mut folder = ModelFolder::default();
    folder.add("config.json", json!({ "model_type": "mixtral" }).to_string());
    if cuts.is_empty() {
        folder.add("model.safetensors", file_of(tensors));
        return folder;
    }
    let ends = cuts.iter().copied().chain([tensors.len()]);
    let (mut start, mut map) = (0, serde_json::Map::new());
    for (number, end) in (1..).zip(ends) {
        let name = format!("model-{number:05}-of-{:05}.safetensors", cuts.len() + 1);
        let own = &tensors[start..end];
        map.extend(own.iter().map(|(tensor, _, _)| (tensor.clone(), name.clone().into())));
        folder.add(&name, file_of(own));
        start = end;
    }
    folder.add("model.safetensors.index.json", json!({ "metadata": {}, "weight_map": map }).to_string());
    folder
}

fn import(blobd: &Blobd, path: &Path, name: &str) -> Json {
    let words = ["import", path.to_str().unwrap(), "--name", name, "--json"];
    blobd.run(words).succeeds().json()["imported"][0].clone()
}

/// Digest, offset and size of each tensor.
fn places(blobd: &Blobd, name: &str) -> BTreeMap<String, Json> {
    let shown = blobd.run(["show", name, "--json"]).succeeds().json();
    let place = |tensor: &Json| {
        let place = json!([tensor["digest"], tensor["offset"], tensor["size"]]);
        (tensor["name"].as_str().unwrap().to_owned(), place)
    };
    shown["tensors"].as_array().unwrap().iter().map(place).collect()
}

fn exported(blobd: &Blobd, name: &str, to: &Path) -> ModelFolder {
    blobd.run(["export", name, "-o", &format!("{}/", to.display())]).succeeds();
    ModelFolder::read(to)
}

#[test]
fn shards_that_end_anywhere_share_their_experts_with_all_other_forms() {
    let daemon = TestDaemon::start();
    let (blobd, tensors) = (daemon.command(), separate());
    let mut models =
        vec![("whole".to_owned(), folder(&tensors, &[])), ("stacked".to_owned(), folder(&stacked(), &[]))];
    models.extend((1..tensors.len()).map(|cut| (format!("cut-{cut}"), folder(&tensors, &[cut]))));
    models.push(("each".to_owned(), folder(&tensors, &(1..tensors.len()).collect::<Vec<_>>())));
    let backwards: Tensors = tensors.iter().rev().cloned().collect();
    models.push(("backwards".to_owned(), folder(&backwards, &[2, 4])));
    // The first one has shards: those after it find what it has stored.
    models.rotate_left(4);
    for (number, (name, files)) in models.iter().enumerate() {
        let imported = import(&blobd, &files.write_to(daemon.scratch().join(name)), name);
        let new = imported["new_bytes"].as_u64().unwrap();
        assert!(number == 0 || new < 4096, "{name}: only headers and small files are new: {imported}");
        assert!(exported(&blobd, name, &daemon.scratch().join(format!("{name}.out"))) == *files, "{name}");
    }
    let expected = places(&blobd, "whole");
    let groups: Vec<_> = places(&blobd, "stacked").into_values().collect();
    for matrix in MATRICES {
        let first = &expected[&format!("model.layers.0.mlp.experts.0.{matrix}.weight")];
        let stack = json!([first[0], 0, EXPERTS * EXPERT_BYTES]);
        assert!(groups.contains(&stack), "{matrix}: {stack} in {groups:?}");
    }
    for (name, _) in models.iter().filter(|(name, _)| name != "stacked") {
        assert_eq!(places(&blobd, name), expected, "{name}");
    }
    assert!(staged(daemon.root()).is_empty());
    blobd.line("verify").succeeds();
    check_removal(&blobd, daemon.root(), &models);
}

/// Each shard keeps the blobs that it has parts of, until the last one is removed.
fn check_removal(blobd: &Blobd, root: &Path, models: &[(String, ModelFolder)]) {
    let place = tempfile::tempdir().unwrap();
    for (number, (name, _)) in models.iter().enumerate() {
        blobd.run(["rm", name]).succeeds();
        blobd.line("gc").succeeds();
        if let Some((next, files)) = models.get(number + 1) {
            assert!(exported(blobd, next, &place.path().join(next)) == *files, "{next} after {name}");
        }
    }
    check_empty(root);
}

#[test]
fn shards_of_gguf_share_their_experts_with_one_file_and_with_stacks() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let write = |name: &str, file: &ModelFile| fs::write(daemon.scratch().join(name), file.bytes()).unwrap();
    let separate = ModelFile::separate_experts(1, 12);
    write("stacked.gguf", &ModelFile::stacked_experts(1, 12));
    write("whole.gguf", &separate);
    for count in [2_u32, 3, 5, 38] {
        for (number, shard) in (1..).zip(separate.shards(count)) {
            write(&format!("cut{count}-{number:05}-of-{count:05}.gguf"), &shard);
        }
    }
    import(&blobd, &daemon.scratch().join("stacked.gguf"), "stacked");
    let tensors = import(&blobd, &daemon.scratch().join("whole.gguf"), "whole")["reused_bytes"].clone();
    let expected = places(&blobd, "whole");
    for count in [2_u32, 3, 5, 38] {
        let name = format!("cut{count}");
        let imported =
            import(&blobd, &daemon.scratch().join(format!("{name}-00001-of-{count:05}.gguf")), &name);
        assert_eq!(places(&blobd, &name), expected, "{name}");
        assert_eq!(imported["reused_bytes"], tensors, "all but headers: {imported}");
        let out = exported(&blobd, &name, &daemon.scratch().join(format!("{name}.out")));
        assert_eq!(out.0.len(), count as usize);
        assert!(
            out.0.iter().all(|(path, content)| fs::read(daemon.scratch().join(path)).unwrap() == *content)
        );
    }
    blobd.line("verify").succeeds();
    check_blobs(daemon.root());
}

/// The daemon has read the header of the first shard when it wants the descriptor of the seventeenth file.
#[test]
fn shard_that_changes_after_its_header_was_read_is_refused() {
    let daemon = TestDaemon::start();
    let tensors: Tensors = (0..18)
        .map(|expert| (format!("m.mlp.experts.{expert}.w1.weight"), vec![32, 64], expert_bytes("w1", expert)))
        .collect();
    let files = folder(&tensors, &(1..tensors.len()).collect::<Vec<_>>());
    let directory = files.write_to(daemon.scratch().join("m"));
    let params = listing("m", files.0.iter().map(|(path, content)| (path.as_str(), content.len() as u64)));
    let first = "model-00001-of-00018.safetensors";
    let import = |changes: bool| {
        let open = |number: usize| {
            if changes && number == 16 {
                let mut other = tensors[0].clone();
                other.0 = other.0.replace(".0.", ".9.");
                fs::write(directory.join(first), file_of(&[other])).unwrap();
            }
            opened(&directory.join(&params.files[number].path))
        };
        daemon.client().import_listed(&params, open, |_| ())
    };
    let Err(ClientError::Daemon(error)) = import(true) else { panic!("was accepted") };
    assert_eq!(error.code, ErrorCode::InvalidInput, "{error}");
    let changed = format!("{first}: changed while it was imported");
    assert!(error.message.starts_with(&changed), "{error}");
    check_empty(daemon.root());
    files.write_to(&directory);
    import(false).unwrap();
    let group = places(&daemon.command(), "m");
    assert_eq!(group.values().map(|place| place[0].as_str().unwrap()).collect::<BTreeSet<_>>().len(), 1);
}

#[test]
fn damage_of_a_blob_that_shards_share_is_found_and_names_the_model() {
    let daemon = TestDaemon::start();
    let (blobd, files) = (daemon.command(), folder(&separate(), &[4]));
    import(&blobd, &files.write_to(daemon.scratch().join("m")), "m");
    let place = &places(&blobd, "m")["model.layers.0.mlp.experts.2.up_proj.weight"];
    let digest = place[0].as_str().unwrap();
    flip_byte(&blob_path(daemon.root(), digest), 7);
    let verified = blobd.line("verify --repair --json").exits_with(5).json();
    assert_eq!(verified["corrupt"][0]["digest"], *digest, "{verified}");
    assert_eq!(verified["corrupt"][0]["repaired"], json!(false), "{verified}");
    let reason = verified["corrupt"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("not repaired: import m again"), "{reason}");
    // The import of the same files stores the blob again.
    import(&blobd, &daemon.scratch().join("m"), "m");
    blobd.line("verify").succeeds();
    assert!(exported(&blobd, "m", &daemon.scratch().join("out")) == files);
}

/// Half a MiB for each expert, so that most kills come while shards are read.
pub(crate) fn large() -> Tensors {
    let expert = |number: u64| {
        let name = format!("model.layers.0.mlp.experts.{number}.up_proj.weight");
        (name, vec![256, 1024], noise(number, "large", 512 << 10))
    };
    (0..16).map(expert).collect()
}

#[test]
fn daemon_that_is_killed_between_shards_leaves_a_whole_model_or_nothing() {
    let mut daemon = TestDaemon::start();
    let files = folder(&large(), &[3, 5, 9, 10, 14]);
    let directory = files.write_to(daemon.scratch().join("m"));
    let params = listing("m", files.0.iter().map(|(path, content)| (path.as_str(), content.len() as u64)));
    for milliseconds in [5, 20, 40, 70, 120] {
        let (client, params, directory) = (daemon.client(), params.clone(), directory.clone());
        let import = thread::spawn(move || drop(import_listed(&client, &directory, &params)));
        thread::sleep(Duration::from_millis(milliseconds));
        daemon.kill();
        import.join().unwrap();
        daemon.restart();
        let blobd = daemon.command();
        blobd.line("verify").succeeds();
        if blobd.run(["show", "m"]).code == 0 {
            let out = daemon.scratch().join(format!("out-{milliseconds}"));
            assert!(exported(&blobd, "m", &out) == files);
            blobd.line("rm m").succeeds();
        }
        blobd.line("gc").succeeds();
        check_empty(daemon.root());
    }
    import_listed(&daemon.client(), &directory, &params).unwrap();
    assert!(exported(&daemon.command(), "m", &daemon.scratch().join("out")) == files);
}

/// Space for a second copy of the experts is not there, and not needed.
#[test]
fn shards_of_stored_experts_need_space_for_their_headers_only() {
    let place = tempfile::tempdir().unwrap();
    let config = place.path().join("config.toml");
    fs::write(&config, "[space]\nquota = \"12 MiB\"\n").unwrap();
    let daemon = TestDaemon::start_at(&place.path().join("store"), Some(&config));
    let blobd = daemon.command();
    import(&blobd, &folder(&large(), &[]).write_to(place.path().join("whole")), "whole");
    blobd.line("pin whole").succeeds();
    let cut = folder(&large(), &[5, 11]);
    let imported = import(&blobd, &cut.write_to(place.path().join("cut")), "cut");
    assert!(imported["new_bytes"].as_u64().unwrap() < 16 << 10, "{imported}");
    assert!(exported(&blobd, "cut", &place.path().join("out")) == cut);
    let mut other = large();
    other[7].2[100] ^= 1;
    let refused = folder(&other, &[5, 11]).write_to(place.path().join("other"));
    blobd.run(["import", refused.to_str().unwrap(), "--name", "other"]).exits_with(6);
    assert!(staged(daemon.root()).is_empty());
    blobd.line("verify").succeeds();
}
