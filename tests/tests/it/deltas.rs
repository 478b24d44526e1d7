//! `blobd inventory`, `blobd save --given` and `blobd load` of what that wrote.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use blobd_store_format::archive::TarReader;
use blobd_tests::command;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::names;
use serde_json::json;

fn base() -> ModelFile {
    ModelFile::dense_of(1, 4, 128)
}

/// A model that shares all but one tensor with [`base`], and most of the header.
fn tuned() -> ModelFile {
    base().with_changed("blk.1.attn_q.weight").with("general.name", "tuned")
}

fn import(daemon: &TestDaemon, model: &ModelFile, name: &str) {
    let path = model.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn has_tuned(daemon: &TestDaemon) {
    let file = daemon.scratch().join("exported.gguf");
    daemon.command().run(["export", "tuned:q4", "--force", "-o", text(&file)]).succeeds();
    assert!(fs::read(&file).unwrap() == tuned().bytes());
}

/// A daemon with both models, and one with the base alone.
fn here_and_there() -> (TestDaemon, TestDaemon) {
    let (here, there) = (TestDaemon::start(), TestDaemon::start());
    import(&here, &base(), "base:q4");
    import(&here, &tuned(), "tuned:q4");
    // Under another name.
    import(&there, &base(), "team/other:1");
    (here, there)
}

fn blobs(daemon: &TestDaemon) -> Vec<String> {
    names(&daemon.root().join("blobs"))
}

#[test]
fn delta_has_what_is_missing_and_becomes_the_same_model() {
    let (here, there) = here_and_there();
    let inventory = there.scratch().join("there.inventory");
    let written = there.command().run(["inventory", "-o", text(&inventory), "--json"]).succeeds().json();
    assert_eq!(written["models"], json!(1));
    assert_eq!(written["size"], json!(fs::metadata(&inventory).unwrap().len()));
    let piped = there.command().run(["inventory"]).succeeds();
    assert!(piped.stdout == fs::read(&inventory).unwrap());
    for given in ["base:q4", text(&inventory)] {
        let archive = here.scratch().join("delta.tar");
        let saved = ["save", "tuned:q4", "--given", given, "-o", text(&archive), "--force", "--json"];
        let saved = here.command().run(saved).succeeds().json();
        let (size, whole) = (saved["size"].as_u64().unwrap(), tuned().bytes().len() as u64);
        assert!(size * 20 < whole, "{size} of {whole} bytes");
        let listed = there.command().run(["load", text(&archive), "--list", "--json"]).succeeds().json();
        assert_eq!(listed["models"][0]["digest"], saved["saved"][0]["digest"]);
        there.command().run(["load", text(&archive)]).succeeds();
        has_tuned(&there);
        there.command().run(["rm", "tuned:q4"]).succeeds();
        // From a pipe, and from a folder.
        let mut load = there.command().command();
        load.args(["load", "-"]).stdin(fs::File::open(&archive).unwrap());
        let mut cat = Command::new("cat").arg(&archive).stdout(Stdio::piped()).spawn().unwrap();
        load.stdin(cat.stdout.take().unwrap());
        command::run(&mut load).succeeds();
        cat.wait().unwrap();
        has_tuned(&there);
        let folder = format!("{}/", here.scratch().join("delta").display());
        here.command().run(["save", "tuned:q4", "--given", given, "-o", &folder, "--force"]).succeeds();
        there.command().run(["load", &folder]).succeeds();
        let id = |daemon: &TestDaemon| daemon.command().run(["show", "tuned:q4", "--json"]).succeeds().json();
        assert_eq!(id(&there)["digest"], id(&here)["digest"]);
        there.command().run(["rm", "tuned:q4"]).succeeds();
    }
}

#[test]
fn delta_without_its_base_says_what_is_missing_and_stores_nothing() {
    let (here, _) = here_and_there();
    let archive = here.scratch().join("delta.tar");
    here.command().run(["save", "tuned:q4", "--given", "base:q4", "-o", text(&archive)]).succeeds();
    let empty = TestDaemon::start();
    let run = empty.command().run(["load", text(&archive)]).exits_with(3);
    assert!(run.stderr.contains("lacks") && run.stderr.contains("base:q4"), "{}", run.stderr);
    assert!(run.stderr.contains("sha256:"), "{}", run.stderr);
    assert!(blobs(&empty).is_empty());
    let error = here.command().run(["--json", "save", "tuned:q4", "--given", "absent:q4", "-o", "x.tar"]);
    assert!(error.exits_with(3).error().message.contains("absent:q4"));
    let wrong = here.scratch().join("wrong");
    fs::write(&wrong, "blobd inventory 2\n").unwrap();
    let error = here.command().run(["--json", "save", "tuned:q4", "--given", text(&wrong), "-o", "x.tar"]);
    assert!(error.exits_with(1).error().message.contains("wrong first line"));
}

#[test]
fn models_that_share_parts_and_whole_files_are_saved_together() {
    let (here, there) = here_and_there();
    here.command().run(["edit", "tuned:q4", "second:q4", "--template-layer", "{{ .Prompt }}"]).succeeds();
    let archive = here.scratch().join("delta.tar");
    let saved = ["save", "tuned:q4", "second:q4", "base:q4", "--given", "base:q4", "-o", text(&archive)];
    here.command().run(saved).succeeds();
    there.command().run(["load", text(&archive)]).succeeds();
    has_tuned(&there);
    for name in ["second:q4", "base:q4"] {
        let id = |daemon: &TestDaemon| daemon.command().run(["show", name, "--json"]).succeeds().json();
        assert_eq!(id(&there)["digest"], id(&here)["digest"]);
    }
    // A model that is there wholly is a manifest.
    let nothing = here.scratch().join("nothing.tar");
    here.command().run(["save", "base:q4", "--given", "base:q4", "-o", text(&nothing)]).succeeds();
    assert!(fs::metadata(&nothing).unwrap().len() < 16 << 10);
}

#[test]
fn truncated_or_changed_deltas_are_refused_and_leave_nothing() {
    let (here, there) = here_and_there();
    let (whole, broken) = (here.scratch().join("whole.tar"), here.scratch().join("broken.tar"));
    here.command().run(["save", "tuned:q4", "--given", "base:q4", "-o", text(&whole)]).succeeds();
    let (bytes, before) = (fs::read(&whole).unwrap(), blobs(&there));
    let refused = |bytes: &[u8], what: &str| {
        fs::write(&broken, bytes).unwrap();
        let run = there.command().run(["load", text(&broken)]);
        assert_ne!(run.code, 0, "{what}");
        assert!(run.stderr.contains("blobd: ") && !run.stderr.contains("panic"), "{what}: {}", run.stderr);
        assert_eq!(there.client().models().unwrap().models.len(), 1, "{what}");
    };
    for twentieth in 0..20 {
        refused(&bytes[..bytes.len() / 20 * twentieth], &format!("{twentieth} twentieths"));
    }
    let mut reader = TarReader::new(bytes.len() as u64);
    while let Some(wanted) = reader.wanted() {
        let range = usize::try_from(wanted.start).unwrap()..usize::try_from(wanted.end).unwrap();
        reader.push(&bytes[range]).unwrap();
    }
    for file in reader.files().iter().filter(|file| file.path != "oci-layout") {
        for place in
            [file.offset - 512, file.offset, file.offset + file.size / 2, file.offset + file.size - 1]
        {
            let mut changed = bytes.clone();
            changed[usize::try_from(place).unwrap()] ^= 4;
            refused(&changed, &format!("{} at {place}", file.path));
        }
    }
    assert_eq!(blobs(&there), before, "nothing is left of what was refused");
    assert!(names(&there.root().join("staging")).is_empty());
}

#[test]
fn load_of_a_delta_that_is_killed_leaves_nothing() {
    let (here, there) = here_and_there();
    let archive = here.scratch().join("delta.tar");
    here.command().run(["save", "tuned:q4", "--given", "base:q4", "-o", text(&archive)]).succeeds();
    for pause in 0..12 {
        let mut load = there.command().command();
        let load = load.args(["load", text(&archive)]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut load = load.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(pause * 4));
        load.kill().unwrap();
        load.wait().unwrap();
    }
    there.command().run(["load", text(&archive), "--force"]).succeeds();
    has_tuned(&there);
    there.command().run(["rm", "tuned:q4", "team/other:1"]).succeeds();
    there.command().run(["gc"]).succeeds();
    assert!(blobs(&there).is_empty() && names(&there.root().join("staging")).is_empty());
}
