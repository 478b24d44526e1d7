//! Errors for lack of space: they say what is needed, what is available, and what could be freed.

use std::fs;
use std::path::{Path, PathBuf};

use blobd_tests::command::{Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{blob_path, check_blobs, flip_byte};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;
use tempfile::TempDir;

const MODEL: &str = "application/vnd.ollama.image.model";

/// A store whose commands open it themselves, with a quota that each command may set.
struct Fixture {
    folder: TempDir,
    blobd: Blobd,
}

impl Fixture {
    fn new() -> Self {
        let folder = tmpfs_directory();
        let blobd = Blobd::at_root(&folder.path().join("store"));
        Self { folder, blobd }
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Runs a command with this `[space]` section.
    fn run_with(&self, space: &str, words: &[&str]) -> Run {
        let config = self.folder.path().join("config.toml");
        fs::write(&config, format!("[space]\n{space}\n")).unwrap();
        self.blobd.run([words, &["--config", config.to_str().unwrap()]].concat())
    }

    /// Runs a command with a quota of so many bytes above what is used now.
    fn run_with_spare(&self, spare: u64, words: &[&str]) -> Run {
        self.run_with(&format!("quota = \"{} B\"", self.used() + spare), words)
    }

    fn used(&self) -> u64 {
        self.blobd.line("df --json").succeeds().json()["used_bytes"].as_u64().unwrap()
    }

    fn file(&self, model: &ModelFile) -> String {
        model.write_to(self.folder.path(), "file.gguf").to_str().unwrap().to_owned()
    }

    fn import(&self, model: &ModelFile, name: &str) {
        self.blobd.run(["import", "--name", name, &self.file(model)]).succeeds();
    }

    /// Imports a model, and replaces it by another, so that its blobs are garbage.
    fn leave_garbage(&self) -> u64 {
        self.import(&ModelFile::dense(1), "m");
        self.blobd.line("rm m --keep 0s").succeeds();
        self.import(&ModelFile::dense(2), "m");
        let freed = self.blobd.line("gc --dry-run --json").succeeds().json()["freed_bytes"].as_u64().unwrap();
        assert!(freed > 0);
        freed
    }
}

/// What `blobd gc` frees, as hints print it.
fn freed_by_gc(bytes: u64) -> String {
    format!("`blobd gc` would free {}", human(bytes))
}

fn human(bytes: u64) -> String {
    blobd_store_format::size::human_bytes(bytes)
}

fn hint(run: Run) -> String {
    run.exits_with(6).error().hint.unwrap()
}

fn tensor_blob(root: &Path, shown: &Json) -> PathBuf {
    blob_path(root, shown["tensors"][0]["digest"].as_str().unwrap())
}

#[test]
fn import_that_does_not_fit_says_what_a_collection_would_free() {
    let fixture = Fixture::new();
    let freed = fixture.leave_garbage();
    let file = fixture.file(&ModelFile::dense(3));
    let hint = hint(fixture.run_with_spare(0, &["import", "--json", &file]));
    for part in [&*freed_by_gc(freed), "`blobd rm`", "larger quota", "nothing was stored"] {
        assert!(hint.contains(part), "{part}: {hint}");
    }
}

#[test]
fn edit_and_tag_that_do_not_fit_say_what_a_collection_would_free() {
    let fixture = Fixture::new();
    let freed = fixture.leave_garbage();
    for words in [&["edit", "m", "n", "--set", "general.name=x", "--json"][..], &["tag", "m", "n", "--json"]]
    {
        let hint = hint(fixture.run_with_spare(0, words));
        assert!(hint.contains(&freed_by_gc(freed)), "{words:?}: {hint}");
    }
}

#[test]
fn repair_that_does_not_fit_says_what_a_collection_would_free() {
    let fixture = Fixture::new();
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/m:latest", b"{}", &[(MODEL, &ModelFile::dense(4).bytes())]).unwrap();
    let name = registry.name("library/m");
    fixture.blobd.run(["pull", &name]).succeeds();
    let freed = fixture.leave_garbage();
    let shown = fixture.blobd.run(["show", &name, "--json"]).succeeds().json();
    flip_byte(&tensor_blob(&fixture.root(), &shown), 3);
    let run = fixture.run_with_spare(0, &["verify", &name, "--repair", "--json"]);
    let reason = run.exits_with(5).json()["corrupt"][0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains(": its quota is ") && reason.contains(&freed_by_gc(freed)), "{reason}");
}

#[test]
fn import_that_eviction_cannot_help_says_what_that_would_free() {
    let fixture = Fixture::new();
    fixture.import(&ModelFile::dense(1), "m");
    fixture.blobd.line("pin m").succeeds();
    let file = fixture.file(&ModelFile::dense(3));
    let space = format!("quota = \"{} B\"\nevict = \"all\"", fixture.used());
    let hint = hint(fixture.run_with(&space, &["import", "--json", "--name", "n", &file]));
    assert!(hint.contains("evicting models nothing"), "{hint}");
}

#[test]
fn dry_run_of_a_pull_says_whether_there_is_enough_space() {
    let fixture = Fixture::new();
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::dense_of(4, 3, 128);
    registry.add_model("library/new:latest", b"{}", &[(MODEL, &model.bytes())]).unwrap();
    let name = registry.name("library/new");
    let freed = fixture.leave_garbage();
    let plan =
        |space: &str| fixture.run_with(space, &["pull", "--dry-run", &name, "--json"]).succeeds().json();
    let fits = plan("");
    assert_eq!((&fits["enough_space"], &fits["space"]["missing_bytes"]), (&true.into(), &0.into()));
    let needed = fits["space"]["needed_bytes"].as_u64().unwrap();
    let size = model.bytes().len() as u64;
    assert!((size..size + (1 << 20)).contains(&needed), "{needed} for {size}");
    let used = fixture.used();
    let short = plan(&format!("quota = \"{} B\"", used + 4096));
    assert_eq!(short["enough_space"], false);
    let space = &short["space"];
    assert_eq!((&space["limit"], &space["available_bytes"]), (&"quota".into(), &4096.into()));
    assert_eq!(space["missing_bytes"].as_u64(), Some(needed - 4096));
    assert_eq!(space["reclaimable_bytes"].as_u64(), Some(freed));
    // The pull fails as announced, and succeeds with the bytes that were announced.
    fixture.run_with(&format!("quota = \"{} B\"", used + 4096), &["pull", &name]).exits_with(6);
    let text =
        fixture.run_with(&format!("quota = \"{used} B\""), &["pull", "--dry-run", &name]).succeeds().text();
    let expected = format!("not enough space: {} of space needed, 0 B available of the quota", human(needed));
    assert!(text.contains(&expected) && text.contains(&freed_by_gc(freed)), "{text}");
    let evicting = plan(&format!("quota = \"{used} B\"\nevict = \"all\""));
    assert_eq!(evicting["enough_space"], fixture.used().ge(&needed));
    fixture.run_with(&format!("quota = \"{} B\"", used + needed + (64 << 10)), &["pull", &name]).succeeds();
}

/// Space for a few records, but for no tensor.
const RECORDS: u64 = 64 << 10;

#[test]
fn file_that_is_stored_already_is_imported_into_a_full_store() {
    for model in [ModelFile::dense_of(1, 3, 128), ModelFile::separate_experts(1, 12)] {
        let fixture = Fixture::new();
        fixture.import(&model, "m");
        let (before, file) = (check_blobs(&fixture.root()), fixture.file(&model));
        let done =
            fixture.run_with_spare(24 << 10, &["import", "--json", "--name", "n", &file]).succeeds().json();
        let done = &done["imported"][0];
        assert_eq!((&done["new_bytes"], &done["new_blob_count"]), (&0.into(), &0.into()), "{done}");
        assert!(done["reused_bytes"].as_u64() >= done["size"].as_u64(), "{done}");
        assert_eq!(check_blobs(&fixture.root()), before);
        // Another header over the same tensors needs itself.
        let other = model.clone().with("general.name", "other");
        let file = fixture.file(&other);
        fixture.run_with_spare(RECORDS, &["import", "--name", "o", &file]).succeeds();
        assert!(fixture.blobd.line("export o -o -").succeeds().stdout == other.bytes());
    }
}

#[test]
fn file_that_is_half_stored_needs_the_other_half() {
    let fixture = Fixture::new();
    let model = ModelFile::dense_of(1, 6, 128);
    fixture.import(&model, "m");
    let (mut other, mut changed) = (model.clone(), 0);
    for tensor in &model.tensors {
        if changed < model.bytes().len() / 2 {
            changed += tensor.bytes().len();
            other = other.with_changed(&tensor.name);
        }
    }
    let file = fixture.file(&other);
    let error =
        fixture.run_with_spare(4096, &["import", "--json", "--name", "n", &file]).exits_with(6).error();
    let (_, needed) = error.message.split_once("; this needs ").unwrap();
    let needed: f64 = needed.split(" MiB, 4.00 KiB are left").next().unwrap().parse().unwrap();
    let (least, most) = (changed as f64 / 1048576.0, (changed as u64 + (256 << 10)) as f64 / 1048576.0);
    assert!(least - 0.01 <= needed && needed <= most, "{least} {most}: {}", error.message);
    fixture.run_with_spare(changed as u64 + (256 << 10), &["import", "--name", "n", &file]).succeeds();
    assert!(fixture.blobd.line("export n -o -").succeeds().stdout == other.bytes());
}

/// Only what is missing is evicted, and not what the file shares with a model that may be evicted.
#[test]
fn import_of_a_file_that_is_stored_evicts_nothing() {
    let fixture = Fixture::new();
    fixture.import(&ModelFile::dense_of(1, 3, 128), "m");
    fixture.import(&ModelFile::dense_of(2, 3, 128), "other");
    let file = fixture.file(&ModelFile::dense_of(1, 3, 128));
    let space = format!("quota = \"{} B\"\nevict = \"all\"", fixture.used() + RECORDS);
    let done = fixture.run_with(&space, &["import", "--json", "--name", "n", &file]).succeeds().json();
    assert_eq!(done["imported"][0].get("evicted"), None, "{done}");
    let count = fixture.blobd.line("ls --json").succeeds().json()["models"].as_array().unwrap().len();
    assert_eq!(count, 3);
}
