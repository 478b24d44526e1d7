//! Quota and eviction: which models are evicted if something does not fit, which are never evicted, and that
//! the store never exceeds its quota.

mod limits;

use std::fs;
use std::path::PathBuf;

use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{check_blobs, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, Verbs};
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";

/// A daemon with a quota, and a registry to pull from.
struct Limited {
    daemon: TestDaemon,
    registry: FakeRegistry,
}

impl Limited {
    /// A daemon with a quota of so many tenths of a model ([`unit`] bytes), and with this additional line of
    /// configuration.
    fn start(tenths: u64, line: &str) -> Self {
        let quota = unit() * tenths / 10;
        let folder = tmpfs_directory();
        let config = folder.path().join("config.toml");
        fs::write(&config, format!("[space]\nquota = \"{quota} B\"\nmin_free = 0\n{line}\n")).unwrap();
        let variable = format!("BLOBD_CONFIG={}", config.display());
        let daemon = TestDaemon::start_under(&["env", &variable], folder);
        Self { daemon, registry: FakeRegistry::start().unwrap() }
    }

    fn offer(&self, name: &str, model: &ModelFile) -> String {
        let name = format!("library/{name}:latest");
        self.registry.add_model(&name, b"{}", &[(MODEL, &model.bytes())]).unwrap();
        self.registry.name(&name)
    }

    fn try_pull(&self, name: &str, model: &ModelFile) -> Run {
        self.daemon.command().run(["pull", &self.offer(name, model), "--json"])
    }

    fn pull(&self, name: &str, seed: u64) -> String {
        self.try_pull(name, &model(seed)).succeeds();
        self.registry.name(&format!("library/{name}:latest"))
    }

    fn try_import(&self, name: &str, model: &ModelFile) -> Run {
        let path = model.write_to(self.daemon.scratch(), &format!("{name}.gguf"));
        self.daemon.command().run(["import", "--json", "--name", name, path.to_str().unwrap()])
    }

    /// The models by the last part of their names.
    fn models(&self) -> Vec<String> {
        let models = self.daemon.client().models().unwrap().models;
        let mut names: Vec<_> = models.iter().map(|model| last_part(&model.name)).collect();
        names.sort();
        names
    }

    fn plan(&self, bytes: u64) -> Json {
        self.daemon.command().line(&format!("gc --plan-eviction={bytes}B --json")).succeeds().json()
    }

    fn check_whole(&self, name: &str, seed: u64) {
        let exported = self.daemon.command().run(["export", name, "-o", "-"]).succeeds();
        assert!(exported.stdout == model(seed).bytes(), "{name}");
    }
}

/// A model of some 130 KiB on disk; those of different seeds share nothing.
fn model(seed: u64) -> ModelFile {
    ModelFile::dense(seed)
}

/// The size of such a model on the tests' disk.
fn unit() -> u64 {
    let folder = tmpfs_directory();
    let verbs = InProcess::open(&folder.path().join("store"));
    let path = model(1).write_to(folder.path(), "m.gguf");
    verbs.import(&path, Some("m")).unwrap();
    // Manifest and origin count, too.
    verbs.eviction_plan(None).unwrap().used_bytes
}

fn last_part(name: &str) -> String {
    let name = name.strip_suffix(":latest").unwrap_or(name);
    name.rsplit('/').next().unwrap_or(name).to_owned()
}

fn names_of(plan: &Json, list: &str) -> Vec<String> {
    let models = plan[list].as_array().unwrap();
    models.iter().map(|model| last_part(model["name"].as_str().unwrap())).collect()
}

/// The used space of a store, counted without blobd.
fn bytes_on_disk(daemon: &TestDaemon) -> u64 {
    let places = ["blobs", "recipes", "manifests", "origins", "history", "trash", "staging"];
    let paths: Vec<PathBuf> = places.map(|name| daemon.root().join(name)).into();
    let files = paths.iter().filter(|path| path.exists()).flat_map(|path| snapshot(path).into_keys());
    let blocks = |path: PathBuf| fs::metadata(path).ok().filter(fs::Metadata::is_file);
    files.filter_map(blocks).map(|file| std::os::unix::fs::MetadataExt::blocks(&file) * 512).sum()
}

#[test]
fn least_recently_used_model_is_evicted_first_and_as_planned() {
    let limited = Limited::start(36, "evict = \"pullable\"\nlow_watermark = 95");
    let [a, _b, c] = [("a", 1), ("b", 2), ("c", 3)].map(|(name, seed)| limited.pull(name, seed));
    Reader::open(&limited.daemon.socket(), &a).kill();
    eventually("the session ends", || limited.daemon.client().sessions().unwrap().sessions.is_empty());
    let plan = limited.plan(unit() / 2);
    assert_eq!(names_of(&plan, "evicted"), ["b"], "{plan}");
    assert_eq!(limited.models(), ["a", "b", "c"], "a plan deletes nothing");
    limited.pull("d", 4);
    assert_eq!(limited.models(), ["a", "c", "d"]);
    // An export is a use.
    limited.check_whole(&a, 1);
    limited.check_whole(&c, 3);
    let plan = limited.plan(unit() * 3 / 2);
    assert_eq!(names_of(&plan, "evicted"), ["d", "a"], "{plan}");
    limited.try_pull("large", &ModelFile::dense_of(9, 4, 32)).succeeds();
    assert_eq!(limited.models(), ["c", "large"]);
    check_blobs(limited.daemon.root());
}

/// What made space is in the response, as an event and in the last line, on screen, and in the log.
#[test]
fn pulls_and_imports_report_the_models_that_they_evict() {
    let limited = Limited::start(25, "evict = \"all\"");
    limited.pull("a", 1);
    limited.pull("b", 2);
    let run = limited.try_pull("c", &model(3)).succeeds();
    let lines = run.json_lines();
    let evicted = |line: &Json| names_of(line, "evicted");
    let event = lines.iter().find(|line| line["status"].as_str().is_some_and(|s| s.starts_with("evicted ")));
    assert_eq!(evicted(event.expect("an event")), ["a"]);
    let last = lines.last().unwrap();
    assert_eq!((evicted(last), last["status"].as_str()), (vec!["a".to_owned()], Some("success")));
    let lost = &last["evicted"][0];
    assert!(lost["freed_bytes"].as_u64().unwrap() > 0 && lost["kept"].is_array(), "{lost}");
    assert!(lost["digest"].as_str().unwrap().starts_with("sha256:"), "{lost}");
    let imported = limited.try_import("d", &model(4)).succeeds().json();
    assert_eq!(evicted(&imported["imported"][0]), ["b"], "{imported}");
    let path = model(5).write_to(limited.daemon.scratch(), "e.gguf");
    let screen = limited.daemon.command().run(["import", path.to_str().unwrap()]).succeeds().text();
    assert!(screen.contains("\nevicted ") && screen.contains(" freed"), "{screen}");
    let uid = rustix::process::geteuid().as_raw();
    let log = limited.daemon.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains(&format!(" evict uid={uid} "))).collect();
    assert_eq!(lines.len(), 3, "{log}");
    assert!(lines[0].contains("/library/a:latest digest=sha256:"), "{log}");
    assert!(
        lines[0].contains("cause=\"pull of ") && lines[1].contains("cause=\"import of d.gguf\""),
        "{log}"
    );
}

#[test]
fn models_in_use_or_not_pullable_are_not_evicted() {
    let limited = Limited::start(65, "evict = \"pullable\"");
    let [pinned, open, mapped, trashed] = [("pinned", 1), ("open", 2), ("mapped", 3), ("trashed", 4)]
        .map(|(name, seed)| limited.pull(name, seed));
    let command = limited.daemon.command();
    command.run(["pin", &pinned]).succeeds();
    let _open = Reader::open(&limited.daemon.socket(), &open);
    let mut reader = Reader::open(&limited.daemon.socket(), &mapped);
    reader.close();
    command.run(["rm", "--keep", "1h", &trashed]).succeeds();
    limited.try_import("imported", &model(5)).succeeds();
    limited.pull("victim", 6);
    let plan = limited.plan(1);
    let reason = |name: &str| {
        let spared = plan["spared"].as_array().unwrap();
        let model = spared.iter().find(|model| last_part(model["name"].as_str().unwrap()) == name);
        model.unwrap_or_else(|| panic!("{name}: {plan}"))["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(reason("pinned"), "pinned");
    assert_eq!(reason("open"), "open");
    assert_eq!(reason("mapped"), "mapped by a running program");
    assert_eq!(reason("imported"), "cannot be pulled again");
    limited.pull("new", 7);
    assert_eq!(limited.models(), ["imported", "mapped", "new", "open", "pinned"]);
    reader.touch();
    command.run(["undelete", &trashed]).succeeds();
    for (name, seed) in [(&pinned, 1), (&open, 2), (&mapped, 3), (&trashed, 4)] {
        limited.check_whole(name, seed);
    }
    limited.check_whole("imported", 5);
}

#[test]
fn imported_models_are_evicted_with_policy_all() {
    let limited = Limited::start(25, "evict = \"all\"");
    limited.try_import("first", &model(1)).succeeds();
    limited.try_import("second", &model(2)).succeeds();
    limited.try_import("third", &model(3)).succeeds();
    assert_eq!(limited.models(), ["second", "third"]);
    limited.check_whole("third", 3);
}

#[test]
fn nothing_is_evicted_if_evicting_everything_is_not_enough() {
    let limited = Limited::start(35, "evict = \"pullable\"");
    limited.try_import("kept", &model(1)).succeeds();
    limited.pull("a", 2);
    limited.pull("b", 3);
    let before = snapshot(&limited.daemon.root().join("blobs"));
    // Half of it would fit if everything was evicted.
    let large = ModelFile::dense_of(9, 8, 32);
    for refused in [limited.try_pull("large", &large), limited.try_import("large", &large)] {
        let text = String::from_utf8_lossy(&refused.stdout).into_owned() + &refused.stderr;
        assert!(text.contains("its quota is ") && text.contains(" are used; this needs "), "{text}");
        assert!(text.contains("blobd rm") && text.contains("quota"), "{text}");
        refused.exits_with(6);
        assert_eq!(limited.models(), ["a", "b", "kept"]);
        assert_eq!(snapshot(&limited.daemon.root().join("blobs")), before);
    }
}

/// Of two quantisations or fine-tunes of one model, evicting one frees only its unique bytes.
#[test]
fn shared_bytes_are_not_counted_as_freed() {
    let limited = Limited::start(35, "evict = \"pullable\"");
    limited.pull("base", 1);
    limited.try_pull("sibling", &model(1).with_changed("blk.0.ffn_up.weight")).succeeds();
    let usage = limited.daemon.client().disk_usage().unwrap();
    let base = usage.models.iter().find(|model| model.name.contains("base")).unwrap();
    let plan = limited.plan(1);
    assert_eq!(names_of(&plan, "evicted"), ["base"]);
    assert_eq!(plan["freed_bytes"].as_u64(), Some(base.unique_bytes));
    let plan = limited.plan(base.unique_bytes + 1);
    assert_eq!(names_of(&plan, "evicted"), ["base", "sibling"]);
    assert_eq!(plan["freed_bytes"].as_u64(), Some(usage.physical_bytes));
    let plan = limited.plan(usage.physical_bytes + 1);
    assert_eq!((names_of(&plan, "evicted").len(), plan["freed_bytes"].as_u64()), (0, Some(0)));
}

/// An imported sibling reuses the stored tensors of a model: evicting that model would free next to nothing.
#[test]
fn model_whose_tensors_an_import_reuses_is_not_evicted() {
    let limited = Limited::start(14, "evict = \"pullable\"");
    limited.pull("base", 1);
    // All but the last tensors are shared, and those do not fit.
    let mut sibling = model(1).with_changed("output.weight");
    sibling.add_noise(7, "extra.weight", blobd_store_format::gguf::GgmlType::F32, &[32, 1024]);
    let run = limited.try_import("sibling", &sibling);
    assert_eq!(run.code, 6, "{}", run.stderr);
    assert_eq!(limited.models(), ["base"]);
    limited.check_whole(&limited.registry.name("library/base:latest"), 1);
}
