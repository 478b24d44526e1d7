//! Pulls of models whose shards end within a group of experts: they store what an import of the same files stores.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::folders::ModelFolder;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{blob_path, check_blobs, check_empty, flip_byte, names, staged};
use serde_json::{Value as Json, json};

use super::files::{COMMIT, Commands};
use crate::import_folder::shared_experts::{folder, large, separate, stacked};

const REPOSITORY: &str = "org/mixture";
const NAME: &str = "hf.co/org/mixture";

fn publish(registry: &FakeRegistry, files: &ModelFolder) {
    let files: Vec<_> = files.0.iter().map(|(path, content)| (path.as_str(), content.as_slice())).collect();
    registry.add_folder(REPOSITORY, COMMIT, &files);
}

fn hub(files: &ModelFolder) -> (FakeRegistry, Commands) {
    let registry = FakeRegistry::start().unwrap();
    publish(&registry, files);
    let commands = Commands::with_hub(&registry);
    (registry, commands)
}

fn pull(commands: &Commands) -> Json {
    pulled(commands.run(&["pull", NAME]))
}

fn pulled(run: Run) -> Json {
    run.succeeds().json_lines().pop().unwrap()
}

fn import(commands: &Commands, files: &ModelFolder, name: &str) -> Json {
    let directory = files.write_to(commands.root().with_file_name(format!("{name}.source")));
    let imported = commands.run(&["import", directory.to_str().unwrap(), "--name", name]);
    imported.succeeds().json()["imported"][0].clone()
}

fn blobs(root: &Path) -> BTreeSet<String> {
    names(&root.join("blobs")).into_iter().collect()
}

/// The blobs of a store into which the files were imported.
fn imported_blobs(files: &ModelFolder) -> BTreeSet<String> {
    let commands = Commands::with("");
    import(&commands, files, "m");
    blobs(&commands.root())
}

/// Asserts that the files are stored as they are, in nothing but the blobs of an import.
fn check(commands: &Commands, files: &ModelFolder, what: &str) {
    assert_eq!(blobs(&commands.root()), imported_blobs(files), "{what}");
    check_files(commands, files, what);
}

fn check_files(commands: &Commands, files: &ModelFolder, what: &str) {
    let (root, out) = (commands.root(), commands.root().with_file_name("out"));
    let _ = fs::remove_dir_all(&out);
    commands.run(&["export", NAME, "-o", &format!("{}/", out.display())]).succeeds();
    assert!(ModelFolder::read(&out) == *files, "{what}");
    commands.run(&["verify"]).succeeds();
    check_blobs(&root);
    assert!(staged(&root).is_empty() && names(&root.join("partial")).is_empty(), "{what}");
    let collected = commands.run(&["gc", "--dry-run"]).succeeds().json();
    assert_eq!(collected["deleted"], json!([]), "{what}");
}

#[test]
fn pull_of_cut_experts_stores_the_blobs_of_an_import() {
    let tensors = separate();
    for cuts in [&[1][..], &[4], &[2, 4], &[1, 2, 3, 4, 5, 6]] {
        let files = folder(&tensors, cuts);
        let (_registry, commands) = hub(&files);
        let done = pull(&commands);
        assert_eq!(done["downloaded_bytes"], done["size"], "{done}");
        check(&commands, &files, &format!("{cuts:?}"));
        let again = pull(&commands);
        assert_eq!((&again["unchanged"], &again["downloaded_bytes"]), (&json!(true), &json!(0)), "{again}");
        check(&commands, &files, "again");
        commands.run(&["rm", NAME]).succeeds();
        check_empty(&commands.root());
    }
}

/// More than the bytes of all headers and small files.
const SMALL: u64 = 4096;

fn size_of_blobs(root: &Path) -> u64 {
    blobs(root).iter().map(|blob| fs::metadata(root.join("blobs").join(blob)).unwrap().len()).sum()
}

#[test]
fn pull_shares_cut_experts_with_one_file_and_with_stacks_and_they_with_it() {
    let cut = folder(&separate(), &[2, 4]);
    for other in [folder(&separate(), &[]), folder(&stacked(), &[])] {
        let (_registry, commands) = hub(&cut);
        import(&commands, &other, "other");
        let before = size_of_blobs(&commands.root());
        pull(&commands);
        assert!(size_of_blobs(&commands.root()) - before < SMALL, "only headers and small files are new");
        check_files(&commands, &cut, "pulled after the import");
        commands.run(&["rm", "other"]).succeeds();
        check(&commands, &cut, "alone");
        let imported = import(&commands, &other, "other");
        assert!(imported["new_bytes"].as_u64().unwrap() < SMALL, "{imported}");
    }
}

#[test]
fn experts_that_are_stored_in_one_blob_are_not_downloaded() {
    let cut = folder(&large(), &[5, 11]);
    let (registry, commands) = hub(&cut);
    import(&commands, &folder(&large(), &[]), "whole");
    let served = registry.bytes_served();
    let done = pull(&commands);
    // The heads of three files, and samples.
    assert!(registry.bytes_served() - served < 256 << 10, "{done}");
    assert!(done["downloaded_bytes"].as_u64().unwrap() < 256 << 10, "{done}");
    check_files(&commands, &cut, "with copied experts");
    commands.run(&["rm", "whole"]).succeeds();
    check(&commands, &cut, "alone");
}

#[test]
fn tensor_index_finds_experts_in_the_blobs_of_whole_groups() {
    let registry = FakeRegistry::start().unwrap();
    let cut = folder(&large(), &[5, 11]);
    let publisher = Commands::with("");
    import(&publisher, &cut, "m");
    let name = registry.name("team/mixture:1");
    let pushed = publisher.run(&["push", "m", &name]).succeeds().json_lines().pop().unwrap();
    assert_eq!(pushed["index"]["delivery"], "sent", "{pushed}");
    let mut changed = large();
    changed[7].2[300_001] ^= 1;
    // In the second case the index names the publisher's group, which the store lacks.
    for (stored, most) in [(large(), 256 << 10), (changed, u64::MAX)] {
        let commands = Commands::with("");
        import(&commands, &folder(&stored, &[]), "whole");
        let done = pulled(commands.run(&["pull", &name, "--name", NAME]));
        assert!(done["downloaded_bytes"].as_u64().unwrap() < most, "{done}");
        check_files(&commands, &cut, "with an index");
        assert_eq!(done["index"].is_object(), most < u64::MAX, "{done}");
        commands.run(&["rm", "whole"]).succeeds();
        assert_eq!(blobs(&commands.root()), imported_blobs(&cut));
    }
}

/// A byte that no sample sees differs.
#[test]
fn expert_that_differs_from_the_stored_one_is_downloaded() {
    let mut changed = large();
    changed[7].2[300_001] ^= 1;
    let cut = folder(&changed, &[5, 11]);
    let (_registry, commands) = hub(&cut);
    import(&commands, &folder(&large(), &[]), "whole");
    pull(&commands);
    check_files(&commands, &cut, "with another expert");
    commands.run(&["rm", "whole"]).succeeds();
    check(&commands, &cut, "alone");
}

#[test]
fn groups_that_lack_an_expert_or_mix_types_stay_in_pieces() {
    let mut missing = separate();
    missing.remove(1);
    let mut mixed = separate();
    mixed[3].1 = vec![64, 32];
    for tensors in [missing, mixed] {
        let files = folder(&tensors, &[3]);
        let (_registry, commands) = hub(&files);
        pull(&commands);
        check(&commands, &files, &tensors[1].0);
    }
}

#[test]
fn pull_that_goes_on_after_a_failure_and_files_that_are_stored_already_are_joined_too() {
    let files = folder(&separate(), &[2, 4]);
    let (registry, commands) = hub(&files);
    let last = "model-00003-of-00003.safetensors";
    registry.add_fault(&format!("/{last}"), usize::MAX, Fault::Status(404));
    commands.run(&["pull", NAME]).exits_with(3);
    assert_eq!(names(&commands.root().join("partial")).len(), 2);
    // The same files without the fault.
    let registry = FakeRegistry::start().unwrap();
    publish(&registry, &files);
    let config = format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url());
    fs::write(commands.config(), config).unwrap();
    let done = pull(&commands);
    assert!(done["already_stored_bytes"].as_u64().unwrap() > 8192, "{done}");
    check(&commands, &files, "resumed");
    commands.run(&["rm", NAME]).succeeds();
    // A model of one shard stores that in pieces.
    let first = "model-00001-of-00003.safetensors";
    commands.run(&["pull", NAME, "--include", first, "--exclude", "*0000[23]*", "--name", "part"]);
    pull(&commands);
    check_files(&commands, &files, "after a part");
}

#[test]
fn without_space_for_a_copy_the_pieces_stay_and_the_next_pull_joins_them() {
    let files = folder(&large(), &[5, 11]);
    let (registry, commands) = hub(&files);
    let hub = format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url());
    fs::write(commands.config(), format!("{hub}[space]\nquota = \"12 MiB\"\n")).unwrap();
    let done = pull(&commands);
    let note = done["notes"].to_string();
    assert!(note.contains("stored in pieces: expert groups that several shards have parts of: 1"), "{done}");
    check_files(&commands, &files, "in pieces");
    assert_ne!(blobs(&commands.root()), imported_blobs(&files));
    fs::write(commands.config(), hub).unwrap();
    let done = pull(&commands);
    assert_eq!((&done["downloaded_bytes"], &done["notes"]), (&json!(0), &Json::Null), "{done}");
    check(&commands, &files, "joined later");
}

/// Models that were pulled in pieces share the shard, and all have what they need.
#[test]
fn another_model_with_the_same_shard_keeps_its_file() {
    let files = folder(&separate(), &[4]);
    let (_registry, commands) = hub(&files);
    pull(&commands);
    let shard = commands.root().with_file_name("model-00001-of-00002.safetensors");
    fs::write(&shard, &files.0["model-00001-of-00002.safetensors"]).unwrap();
    commands.run(&["import", shard.to_str().unwrap(), "--name", "shard"]);
    pull(&commands);
    check_files(&commands, &files, "beside the shard");
    commands.run(&["rm", NAME]).succeeds();
    commands.run(&["gc"]).succeeds();
    commands.run(&["verify"]).succeeds();
}

#[test]
fn shards_of_gguf_are_joined_too() {
    let separate = ModelFile::separate_experts(1, 12);
    let registry = FakeRegistry::start().unwrap();
    let shards: Vec<_> = (1..)
        .zip(separate.shards(5))
        .map(|(number, shard)| (format!("mix-Q8_0-{number:05}-of-00005.gguf"), shard.bytes()))
        .collect();
    let listed: Vec<_> = shards.iter().map(|(path, bytes)| (path.as_str(), bytes.as_slice())).collect();
    registry.add_repository(REPOSITORY, COMMIT, &listed);
    let commands = Commands::with_hub(&registry);
    commands.run(&["pull", &format!("{NAME}:Q8_0")]).succeeds();
    let whole = separate.write_to(commands.root().parent().unwrap(), "whole.gguf");
    let imported = commands.run(&["import", whole.to_str().unwrap(), "--name", "whole"]).succeeds().json();
    let new = imported["imported"][0]["new_bytes"].as_u64().unwrap();
    assert!(new < 16 << 10, "all but the header is shared: {imported}");
    commands.run(&["verify"]).succeeds();
}

#[test]
fn pull_that_is_killed_while_it_joins_loses_nothing() {
    let files = folder(&large(), &[3, 5, 9, 10, 14]);
    let (_registry, commands) = hub(&files);
    for milliseconds in [150, 250, 350, 450, 600, 800] {
        let mut command = Blobd::at_root(&commands.root()).command();
        command.args(["pull", NAME, "--config", commands.config()]);
        let mut running = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(milliseconds));
        running.kill().unwrap();
        running.wait().unwrap();
        commands.run(&["verify"]).succeeds();
        commands.run(&["gc"]).succeeds();
    }
    pull(&commands);
    check(&commands, &files, "after kills");
}

#[test]
fn damaged_experts_are_not_joined() {
    let tensors = large();
    let files = folder(&tensors, &[5]);
    let (registry, commands) = hub(&files);
    let hub = format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url());
    fs::write(commands.config(), format!("{hub}[space]\nquota = \"12 MiB\"\n")).unwrap();
    pull(&commands);
    fs::write(commands.config(), hub).unwrap();
    let piece = format!("sha256:{}", sha256(&tensors[8].2));
    flip_byte(&blob_path(&commands.root(), &piece), 7);
    pull(&commands);
    let verified = commands.run(&["verify", "--repair"]).succeeds().json();
    assert_eq!(verified["corrupt"][0]["digest"], piece, "{verified}");
    assert_eq!(verified["corrupt"][0]["repaired"], json!(true), "{verified}");
    pull(&commands);
    check(&commands, &files, "joined after the repair");
}

#[test]
fn damaged_group_is_repaired_from_the_shards_that_have_its_parts() {
    let files = folder(&large(), &[5, 11]);
    let (registry, commands) = hub(&files);
    pull(&commands);
    let root = commands.root();
    let size = |blob: &String| fs::metadata(root.join("blobs").join(blob)).unwrap().len();
    let group = blobs(&root).into_iter().max_by_key(size).unwrap();
    flip_byte(&root.join("blobs").join(&group), 3_000_000);
    let served = registry.bytes_served();
    let verified = commands.run(&["verify", "--repair"]).succeeds().json();
    let repaired = &verified["corrupt"][0];
    assert_eq!(repaired["repaired"], json!(true), "{verified}");
    assert_eq!(repaired["fetched_bytes"].as_u64().unwrap(), 16 * (512 << 10), "{verified}");
    let served = registry.bytes_served() - served;
    assert!(served < 16 * (512 << 10) + (64 << 10), "{served} bytes for one blob");
    check(&commands, &files, "repaired");
    // The hub has other files now.
    flip_byte(&root.join("blobs").join(&group), 3_000_000);
    publish(&registry, &folder(&large(), &[4]));
    let verified = commands.run(&["verify", "--repair"]).exits_with(5).json();
    let reason = verified["corrupt"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("not found at its server"), "{reason}");
}
