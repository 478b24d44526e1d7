//! Weights in tar archives, as KitOps and CNCF ModelPack publish them.

use std::fs;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::archives::{gzip, tar};
use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, noise};
use blobd_tests::mount::TestMount;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{blob_path, check_blobs, check_empty};

use super::artifacts::{layer, publish};

const KIT_MODEL: &str = "application/vnd.kitops.modelkit.model.v1.tar";
const KIT_CONFIG: &str = "application/vnd.kitops.modelkit.config.v1+json";
const KIT_GZIP: &str = "application/vnd.kitops.modelkit.model.v1.tar+gzip";
const PACK_WEIGHTS: &str = "application/vnd.cncf.model.weight.v1.tar";

struct Kit {
    daemon: TestDaemon,
    registry: FakeRegistry,
    name: String,
}

impl Kit {
    fn new() -> Self {
        let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
        let name = registry.name("kit/tiny");
        Self { daemon, registry, name }
    }

    /// Publishes the archive as the model; returns the digest of the manifest.
    fn offer(&self, media_type: &str, archive: &[u8]) -> String {
        let layers = [layer(&self.registry, media_type, archive, None)];
        format!("sha256:{}", sha256(&publish(&self.registry, "kit/tiny:latest", KIT_CONFIG, &layers)))
    }

    fn run(&self, line: &[&str]) -> Run {
        self.daemon.command().run(line)
    }

    fn pull(&self) -> Run {
        self.run(&["pull", &self.name, "--json"])
    }
}

#[test]
fn weights_in_an_archive_are_read_in_place() {
    let model = ModelFile::dense_of(1, 2, 256);
    let weights = model.bytes();
    let archive = tar(&[("./README.md", b"# Tiny"), ("models/tiny.gguf", &weights)]);
    for media_type in [KIT_MODEL, PACK_WEIGHTS, "application/vnd.docker.ai.dir.tar"] {
        let kit = Kit::new();
        let manifest = kit.offer(media_type, &archive);
        let seen = kit.run(&["show", &kit.name, "--json"]).succeeds().json();
        assert_eq!(seen["architecture"], "llama", "before the pull");
        kit.pull().succeeds();
        let shown = kit.run(&["show", &kit.name, "--json"]).succeeds().json();
        assert_eq!((&shown["digest"], &shown["architecture"]), (&manifest.into(), &"llama".into()));
        let layers = shown["layers"].as_array().unwrap();
        assert_eq!(layers[2]["name"], "models/tiny.gguf");
        assert_eq!(layers[2]["digest"], format!("sha256:{}", sha256(&weights)));
        kit.run(&["fit", &kit.name]).succeeds();
        assert!(kit.run(&["export", &kit.name, "-o", "-"]).succeeds().stdout == weights);
        let open = kit.daemon.client().open(&kit.name.parse().unwrap()).unwrap();
        for tensor in &model.tensors {
            assert_eq!(&*open.map(&tensor.name).unwrap(), &tensor.bytes()[..], "{}", tensor.name);
        }
        kit.run(&["verify"]).succeeds();
        check_blobs(kit.daemon.root());
        // The tensors are shared with the plain file.
        let path = model.write_to(kit.daemon.scratch(), "plain.gguf");
        let before = kit.run(&["df", "--json"]).json()["physical_bytes"].as_u64().unwrap();
        kit.run(&["import", path.to_str().unwrap(), "--name", "plain"]).succeeds();
        let after = kit.run(&["df", "--json"]).json()["physical_bytes"].as_u64().unwrap();
        assert!(after - before < 100_000, "{before} {after}");
        // A second pull has nothing to do, and a removal leaves the shared tensors.
        let served = kit.registry.bytes_served();
        kit.pull().succeeds();
        assert_eq!(kit.registry.bytes_served(), served);
        kit.run(&["rm", &kit.name]).succeeds();
        assert!(kit.run(&["export", "plain", "-o", "-"]).succeeds().stdout == weights);
    }
}

#[test]
fn shards_and_other_files_in_an_archive_are_files_of_the_model() {
    let kit = Kit::new();
    let model = ModelFile::dense(1);
    let shards: Vec<Vec<u8>> = model.shards(2).iter().map(ModelFile::bytes).collect();
    let header = br#"{"a":{"dtype":"U8","shape":[100000],"data_offsets":[0,100000]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes(), &header[..], &[7; 100_000]].concat();
    let files: [(&str, &[u8]); 4] = [
        ("m/big-00001-of-00002.gguf", &shards[0]),
        ("m/config.json", b"{}"),
        ("m/big-00002-of-00002.gguf", &shards[1]),
        ("m/more.safetensors", &safetensors),
    ];
    kit.offer(PACK_WEIGHTS, &tar(&files));
    kit.pull().succeeds();
    let open = kit.daemon.client().open(&kit.name.parse().unwrap()).unwrap();
    assert_eq!(open.tensors().len(), model.tensors.len() + 1);
    let names: Vec<_> = open.layers().iter().map(|layer| layer.name.clone().unwrap_or_default()).collect();
    assert_eq!(names[1..], files.map(|(name, _)| name.to_owned()));
    for (index, (name, content)) in files.iter().enumerate() {
        let folder = kit.daemon.scratch().join(format!("out-{index}"));
        fs::create_dir(&folder).unwrap();
        let component = if name.ends_with(".json") { "weight.config" } else { "model" };
        let path = folder.to_str().unwrap();
        kit.run(&["export", &kit.name, "-o", path, "--component", component]).succeeds();
        assert!(fs::read(folder.join(name)).unwrap() == *content, "{name}");
    }
    // A shard is missing.
    kit.run(&["rm", &kit.name]).succeeds();
    kit.offer(PACK_WEIGHTS, &tar(&files[..2]));
    let error = kit.pull().exits_with(1).error();
    assert!(error.message.contains(" of 2 is missing"), "{error}");
}

#[test]
fn archives_of_the_tar_program_are_read_in_every_format() {
    if !Command::new("tar").arg("--version").output().is_ok_and(|run| run.status.success()) {
        skipped("there is no tar");
        return;
    }
    let weights = ModelFile::dense(1).bytes();
    for format in ["v7", "ustar", "gnu", "pax"] {
        let kit = Kit::new();
        // Longer than the field for names, except in the old format.
        let depth = if format == "v7" { 1 } else { 12 };
        let folder = kit.daemon.scratch().join("a long directory/".repeat(depth));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("tiny.gguf"), &weights).unwrap();
        let archive = kit.daemon.scratch().join("archive.tar");
        let run = Command::new("tar")
            .args(["--format", format, "-cf"])
            .arg(&archive)
            .arg("-C")
            .arg(kit.daemon.scratch())
            .arg("a long directory")
            .status();
        assert!(run.unwrap().success());
        kit.offer(KIT_MODEL, &fs::read(&archive).unwrap());
        kit.pull().succeeds();
        assert!(kit.run(&["export", &kit.name, "-o", "-"]).succeeds().stdout == weights, "{format}");
    }
}

#[test]
fn interrupted_archive_is_resumed_and_shared_tensors_are_not_downloaded() {
    let kit = Kit::new();
    let model = ModelFile::dense_of(1, 2, 512);
    let archive = tar(&[("tiny.gguf", &model.bytes())]);
    kit.offer(KIT_MODEL, &archive);
    let digest = format!("/cdn/sha256:{}", sha256(&archive));
    // The headers at both ends, and a part of the rest.
    kit.registry.add_fault(&digest, 2, Fault::CutAfter(1 << 30));
    kit.registry.add_fault(&digest, 1, Fault::CutAfter(1 << 20));
    kit.registry.add_fault(&digest, 1000, Fault::Status(410));
    kit.pull().exits_with(1);
    kit.registry.clear_faults();
    let served = kit.registry.bytes_served();
    let done = kit.pull().succeeds().json_lines().pop().unwrap();
    let (again, size) = (kit.registry.bytes_served() - served, archive.len() as u64);
    assert!(again < size - (1 << 19), "{served} {again} of {size}: {done}");
    assert!(kit.run(&["export", &kit.name, "-o", "-"]).succeeds().stdout == model.bytes());
    // Another archive with the same weights.
    kit.offer(KIT_MODEL, &tar(&[("LICENSE", b"free"), ("renamed.gguf", &model.bytes())]));
    let served = kit.registry.bytes_served();
    kit.pull().succeeds();
    assert!(kit.registry.bytes_served() - served < 4 << 20);
}

/// Archives that are refused, and a part of the message.
fn hostile() -> Vec<(Vec<u8>, &'static str)> {
    let weights = ModelFile::dense(1).bytes();
    let mut cut = tar(&[("tiny.gguf", &weights)]);
    cut.truncate(cut.len() / 2);
    vec![
        (tar(&[("../tiny.gguf", &weights)]), "relative path"),
        (tar(&[("tiny.gguf", &weights), ("tiny.gguf", &weights)]), "two files"),
        (cut, "ends after the archive"),
        (weights.clone(), "no tar header"),
        (tar(&[("tiny.gguf", &weights[..weights.len() / 2])]), "data section"),
    ]
}

#[test]
fn hostile_archives_are_refused_and_leave_nothing() {
    for (archive, what) in hostile() {
        let kit = Kit::new();
        kit.offer(KIT_MODEL, &archive);
        let error = kit.pull().exits_with(1).error();
        assert!(error.message.contains(what), "{error}");
        check_empty(kit.daemon.root());
    }
}

impl Kit {
    /// The server sends whole files only, from the given request for an archive on.
    fn without_ranges(&self, archive: &[u8]) {
        self.registry.add_fault(&cdn(archive), usize::MAX, Fault::IgnoreRange);
    }

    /// The recipe of a stored archive.
    fn recipe(&self, archive: &[u8]) -> String {
        let name = format!("recipes/sha256-{}.json", sha256(archive));
        fs::read_to_string(self.daemon.root().join(name)).unwrap()
    }
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256(bytes))
}

/// Where the registry has the archive.
fn cdn(archive: &[u8]) -> String {
    format!("/cdn/{}", digest(archive))
}

/// Archives with a model: small and large other files, long padding, several models, experts in any order.
fn archives() -> Vec<Vec<u8>> {
    let (dense, experts) =
        (ModelFile::dense_of(1, 2, 256).bytes(), ModelFile::separate_experts(1, 4).bytes());
    let noise = noise(1, "other", 200_000);
    let mut padded = tar(&[("tiny.gguf", &dense)]);
    padded.resize(padded.len() + (1 << 20), 0);
    let mut unpadded = tar(&[("tiny.gguf", &dense)]);
    unpadded.truncate(512 + dense.len());
    vec![
        tar(&[("README.md", b"# Tiny"), ("m/tiny.gguf", &dense), ("LICENSE", &noise[..9000])]),
        tar(&[("noise.bin", &noise), ("m/experts.gguf", &experts), ("m/empty", b"")]),
        padded,
        unpadded,
    ]
}

#[test]
fn archive_of_a_server_without_ranges_is_stored_as_with_ranges() {
    for archive in archives() {
        let (with, without) = (Kit::new(), Kit::new());
        for kit in [&with, &without] {
            kit.offer(KIT_MODEL, &archive);
        }
        without.without_ranges(&archive);
        let plan = without.run(&["pull", &without.name, "--dry-run", "--json"]).succeeds().json();
        assert!(plan["download_bytes"].as_u64().unwrap() >= archive.len() as u64, "{plan}");
        let done = [&with, &without].map(|kit| kit.pull().succeeds().json_lines().pop().unwrap());
        assert_eq!(done[0]["size"], done[1]["size"]);
        assert_eq!(done[1]["downloaded_bytes"], done[1]["size"]);
        assert_eq!(with.recipe(&archive), without.recipe(&archive));
        let exports = [&with, &without].map(|kit| kit.run(&["export", &kit.name, "-o", "-"]).stdout);
        assert!(exports[0] == exports[1]);
        without.run(&["verify"]).succeeds();
        check_blobs(without.daemon.root());
        let served = without.registry.bytes_served();
        without.pull().succeeds();
        assert_eq!(without.registry.bytes_served(), served);
    }
}

#[test]
fn broken_stream_of_an_archive_starts_again_and_a_wrong_one_leaves_nothing() {
    let kit = Kit::new();
    let weights = ModelFile::dense_of(1, 2, 256).bytes();
    let archive = tar(&[("tiny.gguf", &weights)]);
    kit.offer(KIT_MODEL, &archive);
    kit.registry.add_fault(&cdn(&archive), 1, Fault::IgnoreRange);
    for length in [600, weights.len() / 2] {
        kit.registry.add_fault(&cdn(&archive), 1, Fault::CutAfter(length));
    }
    kit.without_ranges(&archive);
    kit.pull().succeeds();
    assert!(kit.run(&["export", &kit.name, "-o", "-"]).succeeds().stdout == weights);
    // The bytes of another archive.
    let kit = Kit::new();
    kit.offer(KIT_MODEL, &archive);
    let mut wrong = archive.clone();
    wrong[1000 + weights.len() / 2] ^= 1;
    kit.registry.add_fault(&cdn(&archive), usize::MAX, Fault::Body(wrong));
    let error = kit.pull().exits_with(1).error();
    assert!(error.message.contains("expected"), "{error}");
    check_empty(kit.daemon.root());
}

#[test]
fn hint_after_a_broken_stream_of_an_archive_says_that_the_next_pull_starts_again() {
    let weights = ModelFile::dense_of(1, 2, 256).bytes();
    let packed = gzip(&tar(&[("tiny.gguf", &weights)]));
    let kit = Kit::new();
    kit.offer(KIT_GZIP, &packed);
    kit.registry.add_fault(&cdn(&packed), usize::MAX, Fault::CutAfter(packed.len() / 2));
    let failed = kit.pull().exits_with(1);
    assert!(failed.json_lines().iter().any(|line| line["restarts"] == true), "{}", failed.text());
    let hint = failed.error().hint.unwrap();
    assert!(hint.contains("downloads this archive from its start"), "{hint}");
}

#[test]
fn hostile_archives_of_a_server_without_ranges_are_refused_and_leave_nothing() {
    for (archive, what) in hostile() {
        let kit = Kit::new();
        kit.offer(KIT_MODEL, &archive);
        kit.without_ranges(&archive);
        let error = kit.pull().exits_with(1).error();
        assert!(error.message.contains(what), "{error}");
        check_empty(kit.daemon.root());
    }
}

/// The archive compressed in every way, with a media type for each.
fn compressed(archive: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut all = vec![
        (KIT_GZIP, gzip(archive)),
        ("application/vnd.kitops.modelkit.modelpart.v1.tar.gz", gzip(archive)),
        // As parallel compressors write it.
        ("application/vnd.cncf.model.weight.v1.tar+gzip", archive.chunks(700_001).flat_map(gzip).collect()),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("archive.tar");
    fs::write(&path, archive).unwrap();
    if let Ok(run) = Command::new("zstd").arg("-qc").arg(&path).output() {
        all.push(("application/vnd.cnai.model.weight.v1.tar+zstd", run.stdout));
    }
    all
}

#[test]
fn weights_in_a_compressed_archive_are_stored_unpacked() {
    let model = ModelFile::dense_of(1, 2, 256);
    let weights = model.bytes();
    let archive = tar(&[("./README.md", b"# Tiny"), ("models/tiny.gguf", &weights)]);
    for (media_type, packed) in compressed(&archive) {
        let kit = Kit::new();
        let manifest = kit.offer(media_type, &packed);
        let error = kit.run(&["show", &kit.name, "--json"]).exits_with(1).error();
        assert!(error.message.contains("known when it has been pulled"), "{error}");
        let plan = kit.run(&["pull", &kit.name, "--dry-run", "--json"]).succeeds().json();
        assert!(plan["download_bytes"].as_u64().unwrap() >= packed.len() as u64, "{plan}");
        let done = kit.pull().succeeds().json_lines().pop().unwrap();
        assert_eq!(done["downloaded_bytes"], done["size"]);
        let shown = kit.run(&["show", &kit.name, "--json"]).succeeds().json();
        assert_eq!((&shown["digest"], &shown["architecture"]), (&manifest.into(), &"llama".into()));
        let layer = &shown["layers"][2];
        assert_eq!(layer["digest"], format!("sha256:{}", sha256(&weights)));
        assert_eq!(layer["unpacked_from"], format!("sha256:{}", sha256(&packed)));
        assert!(kit.run(&["export", &kit.name, "-o", "-"]).succeeds().stdout == weights);
        let open = kit.daemon.client().open(&kit.name.parse().unwrap()).unwrap();
        for tensor in &model.tensors {
            assert_eq!(&*open.map(&tensor.name).unwrap(), &tensor.bytes()[..], "{}", tensor.name);
        }
        drop(open);
        // The compressed file is not there, and nothing is downloaded again, collected or damaged.
        assert!(!blob_path(kit.daemon.root(), &digest(&packed)).exists());
        let served = kit.registry.bytes_served();
        kit.pull().succeeds();
        assert_eq!(kit.registry.bytes_served(), served);
        let collected = kit.run(&["gc", "--json"]).succeeds().json();
        assert_eq!(collected["deleted"], serde_json::json!([]));
        kit.run(&["verify"]).succeeds();
        check_blobs(kit.daemon.root());
        // The tensors are shared with the plain file, which keeps them.
        let path = model.write_to(kit.daemon.scratch(), "plain.gguf");
        kit.run(&["import", path.to_str().unwrap(), "--name", "plain"]).succeeds();
        kit.run(&["rm", &kit.name]).succeeds();
        assert!(kit.run(&["export", "plain", "-o", "-"]).succeeds().stdout == weights);
        kit.run(&["rm", "plain"]).succeeds();
        check_empty(kit.daemon.root());
    }
}

#[test]
fn damaged_model_of_a_compressed_archive_is_repaired_by_another_pull() {
    let kit = Kit::new();
    let model = ModelFile::dense_of(1, 2, 256);
    kit.offer(KIT_GZIP, &gzip(&tar(&[("tiny.gguf", &model.bytes())])));
    kit.pull().succeeds();
    let largest = model.tensors.iter().max_by_key(|tensor| tensor.bytes().len()).unwrap();
    fs::remove_file(blob_path(kit.daemon.root(), &digest(&largest.bytes()))).unwrap();
    let run = kit.run(&["verify", "--repair", "--json"]).exits_with(5);
    assert!(run.text().contains("is compressed and is not received in part"), "{}", run.text());
    kit.pull().succeeds();
    kit.run(&["verify"]).succeeds();
    assert!(kit.run(&["export", &kit.name, "-o", "-"]).succeeds().stdout == model.bytes());
}

#[test]
fn finished_archive_is_kept_while_another_file_of_the_model_is_missing() {
    let kit = Kit::new();
    let packed = gzip(&tar(&[("tiny.gguf", &ModelFile::dense(1).bytes())]));
    let text = noise(3, "text", 300_000);
    let layers = [
        layer(&kit.registry, KIT_GZIP, &packed, None),
        layer(&kit.registry, "application/vnd.kitops.modelkit.docs.v1.tar", &text, None),
    ];
    publish(&kit.registry, "kit/tiny:latest", KIT_CONFIG, &layers);
    kit.registry.add_fault(&cdn(&text), usize::MAX, Fault::Status(410));
    kit.pull().exits_with(1);
    kit.run(&["gc"]).succeeds();
    kit.registry.clear_faults();
    let served = kit.registry.bytes_served();
    kit.pull().succeeds();
    assert!(kit.registry.bytes_served() - served < 300_000 + packed.len() as u64);
    check_blobs(kit.daemon.root());
}

#[test]
fn hostile_compressed_archives_are_refused_and_leave_nothing() {
    let weights = ModelFile::dense(1).bytes();
    let good = tar(&[("tiny.gguf", &weights)]);
    let packed = gzip(&good);
    let truncated = packed[..packed.len() / 2].to_vec();
    let with_garbage = [&packed[..], b"garbage"].concat();
    let bomb = gzip(&tar(&[("zeros.bin", &vec![0; 80 << 20])]));
    let long_tail = gzip(&[&good[..], &vec![0; 20 << 20]].concat());
    let mut all: Vec<(Vec<u8>, &str)> = hostile()
        .into_iter()
        .map(|(archive, what)| {
            (gzip(&archive), if what == "ends after the archive" { "ends at byte" } else { what })
        })
        .collect();
    all.extend([
        (truncated, "archive"),
        (with_garbage, "compressed data is damaged"),
        (good.clone(), "compressed data is damaged"),
        (gzip(b""), "contains no files"),
        (gzip(&[0; 1024]), "contains no files"),
        (bomb, "unpacks to more than"),
        (long_tail, "between two of its files"),
    ]);
    for (packed, what) in all {
        let kit = Kit::new();
        kit.offer(KIT_GZIP, &packed);
        let error = kit.pull().exits_with(1).error();
        assert!(error.message.contains(what), "{what}: {error}");
        check_empty(kit.daemon.root());
    }
    // Other bytes than those that the manifest names.
    let kit = Kit::new();
    kit.offer(KIT_GZIP, &packed);
    let mut other = weights.clone();
    let last = other.len() - 1;
    other[last] ^= 1;
    let mut other = gzip(&tar(&[("tiny.gguf", &other)]));
    other.resize(packed.len(), 0);
    kit.registry.add_fault(&cdn(&packed), usize::MAX, Fault::Body(other));
    kit.pull().exits_with(1);
    check_empty(kit.daemon.root());
}

#[test]
fn archive_is_mounted_and_executed_as_its_file() {
    let weights = ModelFile::dense_of(1, 2, 256).bytes();
    let archive = tar(&[("README.md", b"# Tiny"), ("models/tiny.gguf", &weights)]);
    for (media_type, layer) in [(KIT_MODEL, archive.clone()), (KIT_GZIP, gzip(&archive))] {
        let kit = Kit::new();
        kit.offer(media_type, &layer);
        kit.run(&["pull", &kit.name, "--name", "tiny"]).succeeds();
        // Programs see the same file as of a model that was imported.
        let path = kit.daemon.scratch().join("plain.gguf");
        fs::write(&path, &weights).unwrap();
        kit.run(&["import", path.to_str().unwrap(), "--name", "plain"]).succeeds();
        let printed = ["tiny", "plain"]
            .map(|name| kit.run(&["exec", "--", "cat", &format!("/blobd/{name}.gguf")]).succeeds());
        assert!(
            printed[0].stdout.len() > weights.len() / 2 && printed[0].stdout == printed[1].stdout,
            "{media_type}"
        );
        let Some(mount) = TestMount::start(&kit.daemon) else { continue };
        assert!(fs::read(mount.path("tiny/latest.gguf")).unwrap() == weights, "{media_type}");
    }
}
