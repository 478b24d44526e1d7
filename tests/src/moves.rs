//! `import --move` that is killed: models in the layouts of several programs, and whether each of them is whole in its
//! program's folder or in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use blobd_store_format::reference::Reference;
use serde_json::{Value as Json, json};

use crate::daemon::TestDaemon;
use crate::folders::{ModelFolder, safetensors};
use crate::model::ModelFile;
use crate::oracle::sha256;
use crate::store_dir::check_blobs;

const COMMIT: &str = "0123456789012345678901234567890123456789";

/// How the models lie in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A folder of GGUF files.
    Gguf,
    /// Folders of safetensors files.
    Safetensors,
    /// Ollama's manifests and blobs.
    Ollama,
    /// The cache of Hugging Face's libraries, with files that repositories share.
    Hub,
    /// `PUBLISHER/REPOSITORY/FILE`.
    LmStudio,
    /// llama.cpp's own downloads, with a projector that models share.
    LlamaCpp,
    /// A folder of GGUF files in several shards.
    Shards,
}

/// A model in such a folder.
#[derive(Debug)]
pub struct MovedModel {
    /// The name that an import gives it.
    pub name: String,
    /// What its program needs to find and read it: paths, which may lead through links, and the SHA-256 of each.
    pub paths: BTreeMap<PathBuf, String>,
    /// The SHA-256 of each of its files.
    pub files: BTreeSet<String>,
}

/// Which process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The command.
    Client,
    /// The daemon, which is started again.
    Daemon,
    /// First the command, then the daemon.
    Both,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Client, Self::Daemon, Self::Both];
}

impl Layout {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Gguf,
        Self::Safetensors,
        Self::Ollama,
        Self::Hub,
        Self::LmStudio,
        Self::LlamaCpp,
        Self::Shards,
    ];

    /// As in the name of a part of the crash tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
            Self::Ollama => "ollama",
            Self::Hub => "hub",
            Self::LmStudio => "lmstudio",
            Self::LlamaCpp => "llama.cpp",
            Self::Shards => "shards",
        }
    }

    /// Writes models that share tensors, and some of which share files.
    ///
    /// # Panics
    /// When they cannot be written.
    #[must_use]
    pub fn write(self, folder: &Path) -> Vec<MovedModel> {
        let mut store = Written { folder, models: Vec::new() };
        match self {
            Self::Gguf => store.gguf(""),
            Self::Safetensors => {
                for seed in [1, 2] {
                    store.transformers(&format!("st{seed}"), &format!("st{seed}:latest"), seed);
                }
            }
            Self::Ollama => store.ollama(),
            Self::Hub => store.hub(),
            Self::LmStudio => {
                store.gguf("ann/tiny/");
                store.transformers("ben/mlx", "lmstudio/ben/mlx:latest", 3);
            }
            Self::LlamaCpp => store.llama_cpp(),
            Self::Shards => store.shards(),
        }
        store.models
    }

    /// The arguments of the import. Paths that do not exist any more are left out; `None` if there are no others.
    #[must_use]
    pub fn import(self, folder: &Path) -> Option<Vec<String>> {
        let from = |program: &str, key: &str| {
            folder.join(key).exists().then(|| vec![format!("--from-{program}={}", folder.display())])
        };
        let arguments = match self {
            Self::Gguf | Self::Shards => {
                fs::read_dir(folder).ok()?.next().map(|_| vec![folder.display().to_string()])
            }
            Self::Safetensors => {
                let folders = ["st1", "st2"].map(|name| folder.join(name));
                let left = folders.iter().filter(|path| path.exists()).map(|path| path.display().to_string());
                Some(left.collect::<Vec<_>>()).filter(|left| !left.is_empty())
            }
            Self::Ollama => from("ollama", "blobs").filter(|_| has_files(folder)),
            Self::Hub => from("hf", "").filter(|_| {
                fs::read_dir(folder)
                    .unwrap()
                    .flatten()
                    .any(|entry| entry.file_name().to_str().unwrap().starts_with("models--"))
            }),
            Self::LmStudio => from("lmstudio", "").filter(|_| has_files(folder)),
            Self::LlamaCpp => from("llama.cpp", "").filter(|_| has_files(folder)),
        };
        Some(["import", "--move"].map(str::to_owned).into_iter().chain(arguments?).collect())
    }
}

fn has_files(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| !path.is_dir() || has_files(&path))
}

/// The models that are written to a folder.
struct Written<'f> {
    folder: &'f Path,
    models: Vec<MovedModel>,
}

impl Written<'_> {
    fn put(&self, path: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn model(&mut self, name: &str, files: impl IntoIterator<Item = (PathBuf, String)>) {
        let paths: BTreeMap<PathBuf, String> = files.into_iter().collect();
        let files = paths.values().cloned().collect();
        self.models.push(MovedModel { name: name.to_owned(), paths, files });
    }

    /// Two models that share all tensors but one.
    fn gguf(&mut self, place: &str) {
        let first = ModelFile::dense(1);
        let second = first.clone().with_changed("output.weight");
        for (tag, model) in [("Q8_0", first), ("Q4_K_M", second)] {
            let bytes = model.bytes();
            let path = self.put(&format!("{place}tiny-{tag}.gguf"), &bytes);
            let prefix = if place.is_empty() { "tiny" } else { "lmstudio/ann/tiny" };
            self.model(&format!("{prefix}:{tag}"), [(path, sha256(&bytes))]);
        }
    }

    /// Two models of three shards each that share all tensors but one.
    fn shards(&mut self) {
        let first = ModelFile::dense(1);
        let second = first.clone().with_changed("output.weight");
        for (tag, model) in [("Q8_0", first), ("Q4_K_M", second)] {
            let shards = (1..).zip(model.shards(3)).map(|(number, shard)| {
                let bytes = shard.bytes();
                (self.put(&format!("wide-{tag}-{number:05}-of-00003.gguf"), &bytes), sha256(&bytes))
            });
            let shards: Vec<_> = shards.collect();
            self.model(&format!("wide:{tag}"), shards);
        }
    }

    fn llama_cpp(&mut self) {
        let first = ModelFile::dense(1);
        let second = first.clone().with_changed("output.weight");
        let projector = ModelFile::dense(2).bytes();
        for (tag, model) in [("Q8_0", first), ("Q4_K_M", second)] {
            let (file, bytes) = (format!("tiny-{tag}.gguf"), model.bytes());
            let files = [
                (self.put(&format!("ann_tiny_{file}"), &bytes), sha256(&bytes)),
                (self.put("ann_tiny_mmproj-F16.gguf", &projector), sha256(&projector)),
            ];
            self.put(&format!("ann_tiny_{file}.etag"), b"etag");
            let manifest = json!({ "ggufFile": { "rfilename": file }, "mmprojFile": { "rfilename": "mmproj-F16.gguf" } });
            let manifest = manifest.to_string();
            let path = self.put(&format!("manifest=ann=tiny={tag}.json"), manifest.as_bytes());
            let digests = files.iter().map(|(_, digest)| digest.clone()).collect();
            let paths = files.into_iter().chain([(path, sha256(manifest.as_bytes()))]).collect();
            self.models.push(MovedModel { name: format!("hf.co/ann/tiny:{tag}"), paths, files: digests });
        }
    }

    fn transformers(&mut self, place: &str, name: &str, seed: u64) {
        let folder = ModelFolder::transformers(seed);
        let path = folder.write_to(self.folder.join(place));
        let files = folder.0.iter().map(|(file, bytes)| (path.join(file), sha256(bytes)));
        self.model(name, files.collect::<Vec<_>>());
    }

    fn ollama(&mut self) {
        let config = self.ollama_blob("docker.container.image.v1+json", br#"{"model_format":"gguf"}"#);
        let template = self.ollama_blob("ollama.image.template", b"{{ .Prompt }}");
        let first = ModelFile::dense(1);
        let second = first.clone().with_changed("output.weight");
        for (name, model) in [("one", first), ("two", second)] {
            let model = self.ollama_blob("ollama.image.model", &model.bytes());
            let layers = [model, template.clone()];
            let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers });
            let bytes = serde_json::to_vec(&manifest).unwrap();
            let place = format!("manifests/registry.ollama.ai/library/{name}/latest");
            let path = self.put(&place, &bytes);
            let digest = |layer: &Json| layer["digest"].as_str().unwrap()["sha256:".len()..].to_owned();
            let files: BTreeSet<String> = layers.iter().chain([&config]).map(digest).collect();
            let blobs =
                files.iter().map(|hex| (self.folder.join(format!("blobs/sha256-{hex}")), hex.clone()));
            let paths = blobs.chain([(path, sha256(&bytes))]).collect();
            self.models.push(MovedModel { name: format!("{name}:latest"), paths, files });
        }
    }

    fn ollama_blob(&self, kind: &str, bytes: &[u8]) -> Json {
        let digest = sha256(bytes);
        self.put(&format!("blobs/sha256-{digest}"), bytes);
        let media_type = format!("application/vnd.{kind}");
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() })
    }

    /// A repository of GGUF files, and two with a file that they share in `blobs/` of the cache.
    fn hub(&mut self) {
        let first = ModelFile::dense(1);
        let second = first.clone().with_changed("output.weight");
        for (tag, model) in [("Q8_0", first), ("Q4_K_M", second)] {
            let file = self.hub_file("ann/tiny", &format!("tiny-{tag}.gguf"), &model.bytes(), None);
            self.model(&format!("hf.co/ann/tiny:{tag}"), [file]);
        }
        let weights = safetensors(&[(1, "a"), (2, "b")]);
        self.put("blobs/.huggingface-shared-blobs", b"1\n");
        for name in ["ben/folder", "cy/copy"] {
            let shared = format!("a9/a9{}", "0".repeat(62));
            let config = format!("{{\"name\":\"{name}\"}}");
            let files = [
                self.hub_file(name, "model.safetensors", &weights, Some(&shared)),
                self.hub_file(name, "config.json", config.as_bytes(), None),
            ];
            self.model(&format!("hf.co/{name}:latest"), files);
        }
    }

    fn hub_file(&self, name: &str, path: &str, bytes: &[u8], shared: Option<&str>) -> (PathBuf, String) {
        let repository = format!("models--{}", name.replace('/', "--"));
        let digest = sha256(bytes);
        self.put(&format!("{repository}/refs/main"), COMMIT.as_bytes());
        self.put(&format!("{repository}/.no_exist/{COMMIT}/absent.json"), b"");
        self.put(&format!(".locks/{repository}/{digest}.lock"), b"");
        let blob = self.folder.join(format!("{repository}/blobs/{digest}"));
        fs::create_dir_all(blob.parent().unwrap()).unwrap();
        match shared {
            Some(shared) => {
                self.put(&format!("blobs/{shared}"), bytes);
                link(&format!("../../blobs/{shared}"), &blob);
            }
            None => drop(self.put(&format!("{repository}/blobs/{digest}"), bytes)),
        }
        let place = self.folder.join(format!("{repository}/snapshots/{COMMIT}/{path}"));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        link(&format!("../../blobs/{digest}"), &place);
        (place, digest)
    }
}

fn link(target: &str, path: &Path) {
    let _ = fs::remove_file(path);
    symlink(target, path).unwrap();
}

impl MovedModel {
    fn is_at_source(&self) -> bool {
        self.paths.iter().all(|(path, digest)| fs::read(path).is_ok_and(|bytes| sha256(&bytes) == *digest))
    }

    fn is_gone(&self) -> bool {
        self.paths.keys().all(|path| path.symlink_metadata().is_err())
    }

    /// Whether the store has the model, whole.
    ///
    /// # Errors
    /// Why not.
    fn check_stored(&self, daemon: &TestDaemon) -> Result<(), String> {
        let reference: Reference = self.name.parse().unwrap();
        let manifest = daemon.client().manifest(&reference).map_err(|error| error.to_string())?;
        let stored: BTreeSet<String> =
            manifest.files().map(|file| file.digest.to_hex().to_string()).collect();
        if !self.files.is_subset(&stored) {
            return Err(format!("the stored model has the files {stored:?}: expected {:?}", self.files));
        }
        let run = daemon.command().run(["verify", self.name.as_str()]);
        if run.code == 0 { Ok(()) } else { Err(format!("verify exits with {}: {}", run.code, run.stderr)) }
    }
}

/// A daemon, and a folder whose models are moved into its store again and again.
#[derive(Debug)]
pub struct KilledMoves {
    layout: Layout,
    daemon: TestDaemon,
    folder: PathBuf,
    /// How long a move takes that is not killed.
    duration: Duration,
}

impl KilledMoves {
    /// Moves the models once to measure how long that takes.
    ///
    /// # Errors
    /// When the import fails, or leaves something.
    pub fn new(layout: Layout, daemon: TestDaemon) -> Result<Self, String> {
        let folder = daemon.scratch().join(layout.name());
        let mut moves = Self { layout, daemon, folder, duration: Duration::ZERO };
        let models = layout.write(&moves.folder);
        let start = Instant::now();
        moves.finish(&models)?;
        moves.duration = start.elapsed();
        moves.clear(&models)?;
        Ok(moves)
    }

    /// Kills a move after a part of its time, in thousandths, and checks all models; then the same command must move the
    /// rest.
    ///
    /// # Errors
    /// What is wrong.
    ///
    /// # Panics
    /// When a process cannot be started.
    pub fn kill(&mut self, thousandths: u32, victim: Victim) -> Result<(), String> {
        let models = self.layout.write(&self.folder);
        let arguments = self.layout.import(&self.folder).ok_or("nothing to move")?;
        let mut command = self.daemon.command().command();
        let mut client = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(self.duration * thousandths / 1000);
        if victim != Victim::Daemon {
            client.kill().unwrap();
        }
        if victim != Victim::Client {
            self.daemon.kill();
        }
        client.wait().unwrap();
        if victim != Victim::Client {
            self.daemon.restart();
        }
        for model in &models {
            if model.is_at_source() {
                continue;
            }
            let stored = model.check_stored(&self.daemon);
            stored.map_err(|reason| {
                format!("{}: neither whole at its source nor stored: {reason}", model.name)
            })?;
        }
        self.finish(&models)?;
        self.clear(&models)
    }

    /// Runs the command without a kill: then everything is in the store, and nothing is left.
    fn finish(&self, models: &[MovedModel]) -> Result<(), String> {
        if let Some(arguments) = self.layout.import(&self.folder) {
            let run = self.daemon.command().run(arguments);
            if run.code != 0 {
                return Err(format!("the import fails with {}: {}", run.code, run.stderr));
            }
        }
        for model in models {
            let stored = model.check_stored(&self.daemon);
            stored.map_err(|reason| format!("{}: not stored in the end: {reason}", model.name))?;
            if !model.is_gone() {
                return Err(format!("{}: not deleted in the end", model.name));
            }
        }
        if has_files(&self.folder) && self.layout != Layout::Hub {
            return Err(format!("files are left in {}", self.folder.display()));
        }
        Ok(())
    }

    fn clear(&self, models: &[MovedModel]) -> Result<(), String> {
        check_blobs(self.daemon.root());
        let names = models.iter().map(|model| model.name.as_str());
        let run = self.daemon.command().run(["rm"].into_iter().chain(names));
        if run.code == 0 { Ok(()) } else { Err(format!("rm fails: {}", run.stderr)) }
    }
}
