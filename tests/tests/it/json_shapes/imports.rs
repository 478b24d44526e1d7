//! Imports of folders, and of the models of other programs; pushes.

use std::fs;
use std::path::Path;

use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use serde_json::json;

use super::sample::Sample;
use super::session::Session;

pub(super) fn run_all(session: &mut Session, sample: &Sample) {
    folders(session, sample);
    tensors(session, sample);
    other_programs(session, sample);
}

/// The path and the content of a file.
type File<'f> = (&'f str, &'f [u8]);

/// Lists folders of every kind, and imports one.
fn folders(session: &mut Session, sample: &Sample) {
    let weights = safetensors();
    let quantized = br#"{"quantization":{"group_size":64,"bits":4}}"#;
    let pipeline = br#"{"_class_name":"Pipeline","unet":["diffusers","UNet"]}"#;
    let index =
        br#"{"metadata":{"total_size":8},"weight_map":{"t":"model.safetensors","u":"absent.safetensors"}}"#;
    let folders: [(&str, &[File<'_>]); 7] = [
        (
            "transformers",
            &[("config.json", b"{}"), ("model.safetensors", &weights), ("model.bin", b"pickle")],
        ),
        ("mlx", &[("config.json", quantized), ("model.safetensors", &weights)]),
        ("mistral", &[("params.json", b"{}"), ("consolidated.safetensors", &weights)]),
        ("diffusers", &[("model_index.json", pipeline), ("unet/model.safetensors", &weights)]),
        ("adapter", &[("adapter_config.json", b"{}"), ("adapter_model.safetensors", &weights)]),
        ("weights", &[("model.safetensors", &weights)]),
        ("incomplete", &[("model.safetensors.index.json", index), ("model.safetensors", &weights)]),
    ];
    let paths = folders.map(|(name, files)| {
        let folder = sample.path(name);
        for (path, bytes) in files {
            let place = Path::new(&folder).join(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, bytes).unwrap();
        }
        folder
    });
    let arguments = ["import", "--list"].into_iter().map(str::to_owned).chain(paths.iter().cloned());
    let arguments = arguments.chain([sample.path("base.gguf")]);
    session.ok("import --list", arguments.collect::<Vec<_>>());
    session.fails_after_output("import --list", ["import", "--list", &paths[0], "/absent"], "not_found");
    session.ok("import --list", ["import", "--list", "--move", &paths[0]]);
    session.ok("import --list", ["import", "--list", &paths[0], "--name", "named"]);
    session.ok("import --list", ["import", "--list", &paths[0], &paths[0]]);
    session.fails("invalid_input", ["import", &paths[6]]);
    session.ok("import", ["import", &paths[0], "--name", "folder", "--exclude", "*.json"]);
    session.ok(
        "import",
        [
            "import",
            &paths[0],
            "--name",
            "folder",
            "--force",
            "--include",
            "*.json",
            "--include",
            "*.safetensors",
        ],
    );
    session.line("edit", "folder edited --file config.json=[] --file new.json={}");
    session.line("edit", "edited edited --remove-file new.json --force");
    session.line("rm", "folder edited");
    let moved = sample.path("moved");
    fs::create_dir_all(&moved).unwrap();
    fs::write(Path::new(&moved).join("model.safetensors"), &weights).unwrap();
    session.ok("import", ["import", "--move", &moved]);
    session.line("rm", "moved");
    pulled_folder(session, sample);
}

/// Shows the tensors of safetensors files, and compares two that have one content under different names.
fn tensors(session: &mut Session, sample: &Sample) {
    for (model, name) in [("first", "a"), ("second", "b")] {
        let header = format!(
            r#"{{"__metadata__":{{"format":"pt"}},"{name}":{{"dtype":"C64","shape":[16],"data_offsets":[0,128]}}}}"#
        );
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 128]].concat();
        let path = sample.path(&format!("{model}.safetensors"));
        fs::write(&path, file).unwrap();
        session.ok("import", ["import", &path, "--name", model]);
    }
    session.line("show --full", "first");
    session.line("tensor --values", "0..2 first a");
    session.line("diff", "first second");
    session.line("diff --values", "first second");
    session.line("rm", "first second");
}

/// Pulls a folder from a hub.
fn pulled_folder(session: &mut Session, sample: &Sample) {
    // A daemon has its own configuration, without a mirror of the hub.
    if session.has_daemon {
        return;
    }
    let registry = FakeRegistry::start().unwrap();
    let commit = "c".repeat(40);
    let files: [File<'_>; 3] =
        [("config.json", b"{}"), ("model.safetensors", &safetensors()), ("notes.md", b"Notes")];
    registry.add_folder("org/folder", &commit, &files);
    let config = sample.config("folders.toml", &format!("[mirrors]\n\"hf.co\" = \"{}\"", registry.url()));
    let config = ["--config", config.to_str().unwrap()];
    let pull = ["pull", "hf.co/org/folder", "--include", "*.*", "--exclude", "*.md", "--revision", &commit];
    session.ok("pull", pull.into_iter().chain(config));
    session.line("rm", &format!("hf.co/org/folder:{commit}"));
}

/// A file with one tensor.
fn safetensors() -> Vec<u8> {
    let header = br#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    [&(header.len() as u64).to_le_bytes(), &header[..], &1_f32.to_le_bytes()].concat()
}

/// Imports from an Ollama store with a model and a damaged manifest, and from a cache of Hugging Face.
fn other_programs(session: &mut Session, sample: &Sample) {
    let place = if session.has_daemon { "served" } else { "embedded" };
    let ollama = sample.path(&format!("ollama-{place}"));
    write_ollama(Path::new(&ollama), &fs::read(sample.path("base.gguf")).unwrap());
    let from = format!("--from-ollama={ollama}");
    session.ok("import --from --list", ["import", &from, "--list"]);
    session.fails_after_output("import", ["import", &from], "invalid_input");
    session.ok("import --from --list", ["import", &from, "--list"]);
    let hub = sample.path(&format!("hub-{place}"));
    write_hub(Path::new(&hub), &sample.path("base.gguf"));
    let from = format!("--from-hf={hub}");
    session.ok("import --from --list", ["import", &from, "--list"]);
    session.ok("import", ["import", &from]);
    session.line("rm", "from-ollama hf.co/ann/tiny:Q8_0 hf.co/ann/partial");
    let models = sample.path(&format!("lmstudio-{place}"));
    let folder = Path::new(&models).join("ann/tiny");
    fs::create_dir_all(&folder).unwrap();
    fs::copy(sample.path("base.gguf"), folder.join("tiny-Q8_0.gguf")).unwrap();
    let from = format!("--from-lmstudio={models}");
    session.ok("import --from --list", ["import", &from, "--list", "--follow"]);
    session.ok("import --from --list", ["import", &from, "--list", "--move"]);
    let from = format!("--from-llama.cpp={}", folder.display());
    session.ok("import --from --list", ["import", &from, "--list"]);
}

fn write_ollama(folder: &Path, weights: &[u8]) {
    let manifests = folder.join("manifests/registry.ollama.ai/library/from-ollama");
    let blobs = folder.join("blobs");
    fs::create_dir_all(&manifests).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    let blob = |media_type: &str, bytes: &[u8]| {
        fs::write(blobs.join(format!("sha256-{}", sha256(bytes))), bytes).unwrap();
        json!({ "mediaType": media_type, "digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len() })
    };
    let config = blob("application/vnd.docker.container.image.v1+json", b"{}");
    let model = blob("application/vnd.ollama.image.model", weights);
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [model] });
    fs::write(manifests.join("latest"), manifest.to_string()).unwrap();
    fs::write(manifests.join("damaged"), "{").unwrap();
}

fn write_hub(folder: &Path, weights: &str) {
    let repository = folder.join("models--ann--tiny");
    let snapshot = repository.join("snapshots").join("0".repeat(40));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), "0".repeat(40)).unwrap();
    fs::copy(weights, snapshot.join("tiny-Q8_0.gguf")).unwrap();
    // A model without one of its files.
    let repository = folder.join("models--ann--partial");
    let snapshot = repository.join("snapshots").join("0".repeat(40));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("trees")).unwrap();
    fs::write(snapshot.join("model.safetensors"), safetensors()).unwrap();
    let files = json!({ "model.safetensors": { "size": safetensors().len() }, "config.json": { "size": 2 } });
    let tree = json!({ "format_version": 1, "files": files });
    fs::write(repository.join("trees").join(format!("{}.json", "0".repeat(40))), tree.to_string()).unwrap();
    // A repository without weights that are taken.
    let snapshot = folder.join("models--ann--pickle/snapshots").join("0".repeat(40));
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("pytorch_model.bin"), "a pickle").unwrap();
}

/// Pushes to a repository that has none of the files, of models from another one and from files.
pub(super) fn pushes(session: &mut Session, sample: &Sample) {
    let pushed = sample.registry.name("team/copy:1");
    sample.registry.separate_repository("team/copy");
    session.ok("push --dry-run", ["push", "base", &pushed, "--dry-run", "--insecure"]);
    session.ok("push", ["push", &sample.registry.name("me/chat:1"), &pushed]);
    for _ in 0..2 {
        session.ok("push", ["push", "base", &pushed, "--limit-rate", "1GB", "--no-index"]);
    }
    session.ok("push --dry-run", ["push", "large", &pushed, "--tensors", "--dry-run"]);
    for form in ["original", "modelpack", "docker", "image"] {
        session.ok("push --dry-run", ["push", "large", &pushed, "--as", form, "--dry-run"]);
    }
    let moved = sample.registry.name("team/moved:1");
    let chat = sample.registry.name("me/chat:1");
    session.ok("transfer --dry-run", ["transfer", &chat, &moved, "--dry-run", "--insecure"]);
    for _sent_present in 0..2 {
        session.ok("transfer", ["transfer", &chat, &moved, "--limit-rate", "1GB"]);
    }
    session.ok("transfer", ["transfer", &sample.registry.name("me/chat:1"), &pushed]);
    let indexed = sample.registry.name("team/large:1");
    sample.registry.add_fault("/team/large/manifests/sha256", 1, Fault::Refusal(400, "no artifacts here"));
    for _refused_sent_present in 0..3 {
        session.ok("push", ["push", "large", &indexed]);
    }
    session.ok("transfer", ["transfer", &indexed, &sample.registry.name("team/moved:2")]);
}
