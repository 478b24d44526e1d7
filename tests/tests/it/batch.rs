//! Commands for several items: each of them is tried, and each failure is reported.

use std::fs;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::RemoveParams;
use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;
use tempfile::TempDir;

const MODEL: &str = "application/vnd.ollama.image.model";

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

    /// With the models `a` and `c`.
    fn with_models() -> Self {
        let fixture = Self::new();
        fixture.import(&["a.gguf", "c.gguf"], &[]).succeeds();
        fixture
    }

    /// Imports files: `broken.gguf` is no model, `missing.gguf` does not exist.
    fn import(&self, names: &[&str], options: &[&str]) -> Run {
        for (seed, name) in (1..).zip(["a.gguf", "c.gguf"]) {
            let _path = ModelFile::dense(seed).write_to(self.folder.path(), name);
        }
        fs::write(self.folder.path().join("broken.gguf"), "GGUF and nothing more").unwrap();
        let paths = names.iter().map(|name| self.folder.path().join(name));
        let words = std::iter::once("import".into()).chain(paths.map(Into::into));
        let options = options.iter().map(std::ffi::OsString::from);
        self.blobd.run(words.chain(options).collect::<Vec<std::ffi::OsString>>())
    }

    fn models(&self) -> usize {
        self.blobd.line("ls --json").succeeds().json()["models"].as_array().unwrap().len()
    }
}

fn count(json: &Json) -> usize {
    json.as_array().unwrap().len()
}

#[test]
fn import_continues_after_files_that_are_not_models_and_names_each() {
    let fixture = Fixture::new();
    let run = fixture.import(&["a.gguf", "broken.gguf", "missing.gguf", "c.gguf"], &[]).exits_with(1);
    assert_eq!(fixture.models(), 2);
    for name in ["broken.gguf", "missing.gguf"] {
        assert!(run.stderr.contains(name), "{}", run.stderr);
    }
    assert!(run.stderr.trim_end().ends_with("blobd: 2 of 4 files were not imported"), "{}", run.stderr);
    let text = run.text();
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.lines().last().unwrap().starts_with("2 models: "), "{text}");
}

#[test]
fn json_of_an_import_lists_imported_and_failed_files() {
    let fixture = Fixture::new();
    let run = fixture.import(&["a.gguf", "missing.gguf", "c.gguf"], &["--json"]).exits_with(3);
    let json = run.json();
    assert_eq!((count(&json["imported"]), count(&json["failed"])), (2, 1));
    assert_eq!(json["imported"][1]["name"], "c:latest");
    let failed = &json["failed"][0];
    assert!(failed["name"].as_str().unwrap().ends_with("/missing.gguf"), "{failed}");
    assert_eq!(failed["error"]["code"], "not_found");
    // All failures are of one kind, so the command's is too.
    assert_eq!(run.error().message, "1 of 3 files was not imported");
    assert!(fixture.import(&["a.gguf"], &["--json"]).succeeds().json().get("failed").is_none());
}

#[test]
fn pull_continues_after_a_model_that_does_not_exist() {
    let fixture = Fixture::new();
    let registry = FakeRegistry::start().unwrap();
    for name in ["library/a:latest", "library/c:latest"] {
        let bytes = ModelFile::dense(1).bytes();
        registry.add_model(name, b"{}", &[(MODEL, &bytes)]).unwrap();
    }
    let names = ["a", "b", "c"].map(|name| registry.name(&format!("library/{name}:latest")));
    let run = fixture.blobd.run(["pull", &names[0], &names[1], &names[2], "--json"]).exits_with(3);
    let lines = run.json_lines();
    let with = |status: &str| lines.iter().filter(|line| line["status"] == status).collect::<Vec<_>>();
    assert_eq!(with("success").len(), 2);
    let [failed] = with("failed")[..] else { panic!("{lines:?}") };
    assert_eq!(
        (&failed["error"]["code"], &failed["name"]),
        (&Json::from("not_found"), &Json::from(&*names[1]))
    );
    assert_eq!(run.error().message, "1 of 3 models was not pulled");
    let run = fixture.blobd.run(["pull", &names[1], &names[0], "--dry-run"]).exits_with(3);
    assert!(run.text().contains("library/a"), "{}", run.text());
}

#[test]
fn pin_unpin_and_undelete_continue_after_a_model_that_does_not_exist() {
    let fixture = Fixture::with_models();
    let run = fixture.blobd.line("pin a b c --json").exits_with(3);
    assert_eq!((count(&run.json()["pins"]), count(&run.json()["failed"])), (2, 1));
    let run = fixture.blobd.line("unpin a b c").exits_with(3);
    assert_eq!(run.text().lines().count(), 2, "{}", run.text());
    assert!(run.stderr.contains("1 of 3 models was not unpinned"), "{}", run.stderr);
    fixture.blobd.line("rm --keep 1h a c").succeeds();
    let run = fixture.blobd.line("undelete a b c --json").exits_with(3);
    assert_eq!(
        (count(&run.json()["undeleted"]), &run.json()["failed"][0]["name"]),
        (2, &Json::from("b:latest"))
    );
    assert_eq!(fixture.models(), 2);
}

#[test]
fn verify_of_several_models_continues_after_one_that_does_not_exist() {
    let fixture = Fixture::with_models();
    let both = fixture.blobd.line("verify a c --json").succeeds().json();
    let one = fixture.blobd.line("verify a --json").succeeds().json();
    assert!(both["checked_blobs"].as_u64() > one["checked_blobs"].as_u64(), "{both} {one}");
    let run = fixture.blobd.line("verify a b c --json").exits_with(3);
    assert_eq!(run.json()["checked_blobs"], both["checked_blobs"]);
    assert_eq!(
        (count(&run.json()["failed"]), &run.json()["failed"][0]["name"]),
        (1, &Json::from("b:latest"))
    );
}

#[test]
fn rm_continues_after_models_that_cannot_be_removed_and_reports_each() {
    let fixture = Fixture::with_models();
    fixture.blobd.line("pin c").succeeds();
    let planned = fixture.blobd.line("rm --dry-run a b c no-such-* --json").exits_with(1);
    assert_eq!((count(&planned.json()["removed"]), count(&planned.json()["failed"])), (1, 3));
    assert_eq!(fixture.models(), 2);
    let run = fixture.blobd.line("rm b a c").exits_with(1);
    assert!(run.text().starts_with("removed a:latest "), "{}", run.text());
    for part in
        ["model b:latest: not in the store", "model c:latest: is pinned", "2 of 3 models were not removed"]
    {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
    assert_eq!(fixture.models(), 1);
    let run = fixture.blobd.line("rm --keep 1h a b --json").exits_with(3);
    assert_eq!(
        (count(&run.json()["removed"]), &run.json()["failed"][0]["error"]["code"]),
        (0, &"not_found".into())
    );
    assert_eq!(run.error().message, "2 of 2 models were not removed");
    // The only name is the command's own failure.
    let run = fixture.blobd.line("rm c --json").exits_with(7);
    assert_eq!((run.stdout.len(), run.error().message.contains("blobd unpin c")), (0, true));
    fixture.blobd.line("unpin c").succeeds();
    assert_eq!(fixture.blobd.line("rm a c").exits_with(3).text().lines().count(), 2);
    assert_eq!(fixture.models(), 0);
}

#[test]
fn request_to_remove_several_models_removes_all_or_none_unless_go_on_is_set() {
    let daemon = TestDaemon::start();
    for (seed, name) in (1..).zip(["a", "c"]) {
        let path = ModelFile::dense(seed).write_to(daemon.scratch(), &format!("{name}.gguf"));
        daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    }
    let references = ["a", "b", "c"].map(|name| name.parse().unwrap()).to_vec();
    let mut request = RemoveParams { references, ..RemoveParams::default() };
    let error = daemon.client().remove(&request).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotFound);
    assert_eq!(daemon.client().models().unwrap().models.len(), 2);
    request.go_on = true;
    let removed = daemon.client().remove(&request).unwrap();
    assert_eq!((removed.removed.len(), removed.failed.len()), (2, 1));
    assert_eq!(removed.failed[0].name, "b:latest");
}
