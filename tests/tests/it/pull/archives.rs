//! Weights in tar archives, as KitOps and CNCF ModelPack publish them.

use std::fs;
use std::process::Command;

use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, check_empty};

use super::artifacts::{layer, publish};

const KIT_MODEL: &str = "application/vnd.kitops.modelkit.model.v1.tar";
const KIT_CONFIG: &str = "application/vnd.kitops.modelkit.config.v1+json";
const PACK_WEIGHTS: &str = "application/vnd.cncf.model.weight.v1.tar";

/// A tar archive with these files.
fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, content) in files {
        let mut header = vec![0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
        header[156] = b'0';
        header[257..263].copy_from_slice(b"ustar\0");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        archive.extend(header);
        archive.extend(*content);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

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
    let safetensors = [&16_u64.to_le_bytes()[..], br#"{"__metadata__":}"#, &[7; 100_000]].concat();
    let files: [(&str, &[u8]); 4] = [
        ("m/big-00001-of-00002.gguf", &shards[0]),
        ("m/config.json", b"{}"),
        ("m/big-00002-of-00002.gguf", &shards[1]),
        ("m/more.safetensors", &safetensors),
    ];
    kit.offer(PACK_WEIGHTS, &tar(&files));
    kit.pull().succeeds();
    let open = kit.daemon.client().open(&kit.name.parse().unwrap()).unwrap();
    assert_eq!(open.tensors().len(), model.tensors.len());
    let names: Vec<_> = open.layers().iter().map(|layer| layer.name.clone().unwrap_or_default()).collect();
    assert_eq!(names[1..], files.map(|(name, _)| name.to_owned()));
    for (index, (name, content)) in files.iter().enumerate() {
        let folder = kit.daemon.scratch().join(format!("out-{index}"));
        fs::create_dir(&folder).unwrap();
        let component = if name.ends_with(".json") { "weight.config" } else { "model" };
        let path = folder.to_str().unwrap();
        kit.run(&["export", &kit.name, "-o", path, "--component", component]).succeeds();
        let written = fs::read_dir(&folder).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        assert!(written.into_iter().any(|written| written == *content), "{name}");
    }
    // A shard is missing.
    kit.run(&["rm", &kit.name]).succeeds();
    kit.offer(PACK_WEIGHTS, &tar(&files[..2]));
    let error = kit.pull().exits_with(1).error();
    assert!(error.message.contains("1 of 2 shards"), "{error}");
}

#[test]
fn archives_of_the_tar_program_are_read_in_every_format() {
    if !Command::new("tar").arg("--version").output().is_ok_and(|run| run.status.success()) {
        println!("skipped: there is no tar");
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

#[test]
fn hostile_archives_are_refused_and_leave_nothing() {
    let weights = ModelFile::dense(1).bytes();
    let mut cut = tar(&[("tiny.gguf", &weights)]);
    cut.truncate(cut.len() / 2);
    for (archive, what) in [
        (tar(&[("../tiny.gguf", &weights)]), "relative path"),
        (tar(&[("tiny.gguf", &weights), ("tiny.gguf", &weights)]), "two files"),
        (cut, "ends after the archive"),
        (weights.clone(), "no tar header"),
        (tar(&[("tiny.gguf", &weights[..weights.len() / 2])]), "tiny"),
    ] {
        let kit = Kit::new();
        kit.offer(KIT_MODEL, &archive);
        let error = kit.pull().exits_with(1).error();
        assert!(error.message.contains(what) || what == "tiny", "{error}");
        check_empty(kit.daemon.root());
    }
    // The headers are far apart, so all of the archive would be downloaded to find them.
    let kit = Kit::new();
    let archive = tar(&[("tiny.gguf", &weights)]);
    kit.offer(KIT_MODEL, &archive);
    kit.registry.add_fault(&format!("/cdn/sha256:{}", sha256(&archive)), 1000, Fault::IgnoreRange);
    assert!(kit.pull().exits_with(1).error().message.contains("no parts of files"));
}
