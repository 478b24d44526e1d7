//! A store above a read-only one: as root an image on a loop device, mounted read-only.

mod roots;
mod site;

use std::fs;
use std::path::Path;

use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{blob_path, check_blobs, flip_byte, names};
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::{Value as Json, json};
use site::{Site, import_into};

const MODEL: &str = "application/vnd.ollama.image.model";

/// Its tensors are large enough to be compared by samples.
fn base() -> ModelFile {
    ModelFile::dense_of(1, 2, 256)
}

/// Shares all tensors but one with [`base`].
fn sibling() -> ModelFile {
    base().with_changed("output.weight")
}

fn blobs(root: &Path) -> Vec<String> {
    names(&root.join("blobs"))
}

/// The digest of a tensor of a model.
fn tensor(site: &Site, model: &str, tensor: &str) -> String {
    let shown = site.json(&format!("show {model} --json"));
    let tensors = shown["tensors"].as_array().unwrap();
    let found = tensors.iter().find(|entry| entry["name"] == tensor).unwrap();
    found["digest"].as_str().unwrap().to_owned()
}

/// What a program that maps the model reads.
fn mapped(site: &Site, model: &str) -> String {
    Reader::open(&site.daemon.socket(), model).touch()
}

#[test]
fn model_of_a_lower_store_is_used_like_any_other_and_the_store_is_not_changed() {
    let site = Site::with(&base());
    let before = site.content();
    let listed = site.json("ls --json");
    assert_eq!(listed["models"][0]["name"], "site:latest");
    assert_eq!(listed["models"][0]["store"], site.lower().to_str().unwrap());
    let text = site.line("ls").succeeds().text();
    assert!(text.contains("STORE") && text.contains(site.lower().to_str().unwrap()), "{text}");
    assert_eq!(site.json("show site --json")["name"], "site:latest");
    assert!(site.export("site") == base().bytes());
    let (lower, own) = (mapped(&site, "site"), {
        site.import(&base().with("general.name", "own"), "own").succeeds();
        mapped(&site, "own")
    });
    assert_eq!(lower, own, "the same tensors");
    site.line("verify site").succeeds();
    assert_eq!(site.json("df --json")["models"].as_array().unwrap().len(), 1, "df counts the store itself");
    assert_eq!(site.content(), before);
}

#[test]
fn import_and_pull_store_only_what_no_store_has() {
    let site = Site::with(&base());
    // Its header differs too, since it has another name there.
    let imported = site.import(&sibling(), "mine").succeeds().json();
    assert!(imported["imported"][0]["new_bytes"].as_u64().unwrap() < 64 * 1024, "{imported}");
    let own = blobs(&site.upper());
    assert!(own.len() < 5, "{own:?}");
    assert!(site.export("mine") == sibling().bytes());
    let registry = FakeRegistry::start().unwrap();
    let remote = base().with_changed("blk.0.attn_q.weight").with("general.name", "remote");
    registry.add_model("library/m:latest", b"{}", &[(MODEL, &remote.bytes())]).unwrap();
    let name = registry.name("library/m");
    let lines = site.line(&format!("pull {name} --json")).succeeds().json_lines();
    let last = lines.last().unwrap();
    let size = remote.bytes().len() as u64;
    assert!(last["reused_bytes"].as_u64().unwrap() > size / 2, "{last}");
    assert!(registry.bytes_served() < size / 2, "{} of {size}", registry.bytes_served());
    assert!(site.export(&name) == remote.bytes());
    let shared = tensor(&site, "site", "blk.1.attn_q.weight");
    assert!(!blob_path(&site.upper(), &shared).exists(), "stored again");
    check_blobs(&site.upper());
}

#[test]
fn pull_of_a_model_that_a_lower_store_has_downloads_no_weights() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/m:latest", b"{}", &[(MODEL, &base().bytes())]).unwrap();
    let site = Site::with(&base());
    let before = registry.bytes_served();
    let lines = site.line(&format!("pull {} --json", registry.name("library/m"))).succeeds().json_lines();
    assert_eq!(lines.last().unwrap()["status"], "success");
    assert!(registry.bytes_served() - before < 4096, "the manifest and the configuration");
    assert!(site.export(&registry.name("library/m")) == base().bytes());
}

#[test]
fn names_in_a_lower_store_cannot_be_changed_but_can_be_hidden() {
    let site = Site::with(&base());
    for line in ["rm site", "rename site other", "pin site", "rm site --keep 7d"] {
        let error = site.line(&format!("{line} --json")).exits_with(7).error();
        assert!(error.message.contains("in the lower store"), "{line}: {error}");
        assert!(error.hint.is_some(), "{line}: {error}");
    }
    site.line("tag site mine").succeeds();
    assert_eq!(blobs(&site.upper()), [""; 0], "a name copies nothing");
    assert!(site.export("mine") == base().bytes());
    // A model of one's own hides the one below, and its removal shows that again.
    site.import(&sibling(), "site").exits_with(4);
    site.import(&sibling(), "hiding").succeeds();
    site.line("tag hiding site --force").succeeds();
    assert!(site.export("site") == sibling().bytes());
    site.line("rm site").succeeds();
    assert!(site.export("site") == base().bytes());
}

#[test]
fn removal_and_collection_free_nothing_in_a_lower_store_and_say_so() {
    let site = Site::with(&base());
    site.line("tag site alias").succeeds();
    site.import(&sibling(), "mine").succeeds();
    let removed = site.json("rm alias --json");
    assert!(removed["freed_bytes"].as_u64().unwrap() < 64 * 1024, "{removed}");
    let collected = site.json("gc --json");
    assert_eq!(collected["deleted"], json!([]), "{collected}");
    assert_eq!(collected["lower_stores"], json!([site.lower()]));
    let text = site.line("gc").succeeds().text();
    assert!(text.contains("lower stores are not collected"), "{text}");
    let before = site.json("df --json")["physical_bytes"].as_u64().unwrap();
    let freed = site.json("rm mine --json")["freed_bytes"].as_u64().unwrap();
    assert_eq!(before - site.json("df --json")["physical_bytes"].as_u64().unwrap(), freed);
    assert_eq!(blobs(&site.upper()), [""; 0]);
    assert!(site.export("site") == base().bytes());
}

#[test]
fn damage_in_a_lower_store_is_reported_and_not_changed() {
    let mut damaged = String::new();
    let site = Site::start(|lower| {
        import_into(lower, &base(), "site");
        let largest = blobs(lower)
            .into_iter()
            .max_by_key(|name| fs::metadata(lower.join("blobs").join(name)).unwrap().len());
        damaged = largest.unwrap().replace("sha256-", "sha256:");
        flip_byte(&blob_path(lower, &damaged), 3);
    });
    let before = site.content();
    for options in ["", " --repair"] {
        let report = site.line(&format!("verify site{options} --json")).exits_with(5).json();
        let corrupt = report["corrupt"].as_array().unwrap();
        assert_eq!((corrupt.len(), corrupt[0]["digest"].as_str()), (1, Some(damaged.as_str())), "{report}");
    }
    // What is copied is verified.
    let error = site.line("promote site --json").exits_with(5).error();
    assert!(error.message.contains(&damaged), "{error}");
    assert_eq!(blobs(&site.upper()), [""; 0]);
    assert_eq!(site.content(), before);
}

/// All that is known about models while the lower store is not there.
fn check_hidden(site: &Site) {
    let listed = site.line("ls --json").succeeds().json();
    assert!(listed["lower_stores"][0]["problem"].as_str().unwrap().contains("store.json"), "{listed}");
    let names: Vec<_> = listed["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["alias:latest", "mine:latest", "own:latest"]);
    let run = site.line("ls");
    assert!(run.stderr.contains("a lower store is left out"), "{}", run.stderr);
    let error = site.line("export mine -o - --json").exits_with(3).error();
    assert!(error.message.contains("a lower store is left out"), "{error}");
    assert!(error.hint.unwrap().contains("mount"));
    let error = site.line("export site -o - --json").exits_with(3).error();
    let directory = site.lower().display().to_string();
    assert!(error.message.starts_with("model site:latest: not in the store, and the lower store"), "{error}");
    assert!(error.hint.unwrap().contains(&format!("the lower store {directory}, which is not available")));
    let doctor = site.line("doctor --json").json();
    let check =
        doctor["checks"].as_array().unwrap().iter().find(|check| check["name"] == "lower stores").unwrap();
    assert_eq!(check["status"], "warning", "{check}");
    assert!(site.export("own") == ModelFile::dense_of(7, 1, 32).bytes(), "a model that needs it not");
}

#[test]
fn missing_mount_of_a_lower_store_hides_models_and_deletes_nothing() {
    let site = Site::with(&base());
    site.line("tag site alias").succeeds();
    site.import(&sibling(), "mine").succeeds();
    site.import(&ModelFile::dense_of(7, 1, 32), "own").succeeds();
    let mut reader = Reader::open(&site.daemon.socket(), "mine");
    let tensors = reader.touch();
    let stored = (blobs(&site.upper()), names(&site.upper().join("recipes")));
    site.unmount();
    check_hidden(&site);
    for line in ["gc --json", "gc --dry-run --json"] {
        assert_eq!(site.json(line)["deleted"], json!([]), "{line}");
    }
    assert_eq!((blobs(&site.upper()), names(&site.upper().join("recipes"))), stored);
    assert_eq!(reader.touch(), tensors, "maps stay valid");
    // Names can still be removed, which frees what is stored above.
    site.line("tag own other").succeeds();
    site.line("rm other").succeeds();
    // Verification says what is missing, and calls nothing damaged that is only not there.
    let verified = site.line("verify --json");
    assert!([3, 5].contains(&verified.code), "{verified:?}");
    site.mount();
    let listed: Json = site.json("ls --json");
    assert_eq!(listed["models"].as_array().unwrap().len(), 4, "{listed}");
    for (name, model) in [("site", base()), ("alias", base()), ("mine", sibling())] {
        assert!(site.export(name) == model.bytes(), "{name}");
    }
    site.line("verify").succeeds();
    let log = site.daemon.log();
    assert!(log.contains("lower store left out") && log.contains("available again"), "{log}");
}

#[test]
fn promoted_model_does_not_need_the_lower_store() {
    let site = Site::with(&base());
    site.import(&sibling(), "mine").succeeds();
    let planned = site.json("promote site --dry-run --json");
    assert!(planned["copied_bytes"].as_u64().unwrap() > 0 && planned["dry_run"] == true, "{planned}");
    let promoted = site.json("promote site --json");
    assert_eq!(promoted["copied_bytes"], planned["copied_bytes"]);
    assert_eq!(promoted["from"], site.lower().to_str().unwrap());
    assert_eq!(site.json("promote site --json")["copied_bytes"], 0, "it is done");
    let text = site.line("promote mine").succeeds().text();
    assert!(text.contains("whole in the writable store already"), "{text}");
    site.unmount();
    assert!(site.export("site") == base().bytes());
    // It used the same blobs.
    assert!(site.export("mine") == sibling().bytes());
    site.line("verify").succeeds();
    check_blobs(&site.upper());
    site.line("rm site mine").succeeds();
    assert_eq!(blobs(&site.upper()), [""; 0]);
}

#[test]
fn shells_complete_names_of_lower_stores_without_a_daemon() {
    let folder = tmpfs_directory();
    let [upper, lower] = ["upper", "lower"].map(|name| folder.path().join(name));
    import_into(&upper, &ModelFile::dense(1), "own");
    import_into(&lower, &ModelFile::dense(2), "site");
    let config = folder.path().join("config.toml");
    fs::write(&config, format!("root = {upper:?}\nlower = [{lower:?}]\n")).unwrap();
    let blobd = Blobd::at_root(&upper).configured_by(&config);
    let text = blobd.run(["__suggest", "models", "--", "blobd", "promote", ""]).succeeds().text();
    assert!(text.contains("own") && text.contains("site"), "{text}");
}
