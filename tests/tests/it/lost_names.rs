//! Models that lose their names: pins, `--force`, and what commands print and log about removed, evicted and replaced
//! models.

use std::fs;
use std::path::PathBuf;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";

/// A daemon, and a registry to pull from.
struct Fixture {
    daemon: TestDaemon,
    registry: FakeRegistry,
}

impl Fixture {
    fn new() -> Self {
        Self { daemon: TestDaemon::start(), registry: FakeRegistry::start().unwrap() }
    }

    fn blobd(&self) -> Blobd {
        self.daemon.command()
    }

    fn line(&self, line: &str) -> Run {
        self.blobd().line(line)
    }

    fn file(&self, seed: u64) -> PathBuf {
        ModelFile::dense(seed).write_to(self.daemon.scratch(), &format!("model-{seed}.gguf"))
    }

    fn import(&self, seed: u64, name: &str) -> Run {
        self.blobd().run(["import", self.file(seed).to_str().unwrap(), "--name", name])
    }

    /// Has the registry offer a model.
    fn offer(&self, seed: u64, name: &str) -> String {
        let name = format!("library/{name}:latest");
        self.registry.add_model(&name, b"{}", &[(MODEL, &ModelFile::dense(seed).bytes())]).unwrap();
        self.registry.name(&name)
    }

    fn digest(&self, name: &str) -> String {
        self.line(&format!("show {name} --json")).succeeds().json()["digest"].as_str().unwrap().to_owned()
    }

    /// The lines of the log about a verb.
    fn log(&self, verb: &str) -> Vec<String> {
        let log = self.daemon.log();
        let about = |line: &&str| line.contains(&format!(" {verb} uid="));
        log.lines().filter(about).map(ToOwned::to_owned).collect()
    }
}

#[test]
fn pinned_name_is_moved_by_no_verb_without_force() {
    let fixture = Fixture::new();
    fixture.import(1, "mine").succeeds();
    let pinned = fixture.digest("mine");
    fixture.line("pin mine").succeeds();
    fixture.import(2, "other").succeeds();
    fixture.line("tag other copy").succeeds();
    let source = fixture.offer(3, "remote");
    let file = fixture.file(4);
    let commands = [
        "tag other mine".to_owned(),
        format!("pull {source} --name mine"),
        format!("import {} --name mine", file.display()),
        "edit other mine --set general.name=x".to_owned(),
        "rename copy mine".to_owned(),
    ];
    for command in &commands {
        let run = fixture.line(command).exits_with(7);
        assert!(run.stderr.contains("model mine:latest: is pinned"), "{}", run.stderr);
        assert!(run.stderr.contains("--force"), "{}", run.stderr);
        assert_eq!(fixture.digest("mine"), pinned, "{command}");
    }
    for command in commands {
        let before = fixture.digest("mine");
        let run = fixture.line(&format!("{command} --force")).succeeds();
        assert!(run.text().contains("replaced mine:latest "), "{}", run.text());
        assert_ne!(fixture.digest("mine"), before, "{command}");
        // The pin stays with the name.
        assert!(fixture.line("rm mine").exits_with(7).stderr.contains("is pinned"));
    }
}

/// The registry counts its requests: nothing but the manifest is needed for the refusal.
#[test]
fn pull_onto_a_pinned_name_is_refused_before_anything_is_downloaded() {
    let fixture = Fixture::new();
    let source = fixture.offer(1, "remote");
    fixture.line(&format!("pull {source}")).succeeds();
    fixture.line(&format!("pin {source}")).succeeds();
    fixture.line(&format!("pull {source}")).succeeds();
    fixture.offer(2, "remote");
    let before = fixture.line("df --json").json();
    let error = fixture.line(&format!("pull {source} --json")).exits_with(7);
    assert!(!error.text().contains("\"completed\""), "{}", error.text());
    let after = fixture.line("df --json").json();
    assert_eq!(before["physical_bytes"], after["physical_bytes"]);
    assert_eq!(after["partial_bytes"], 0);
}

#[test]
fn undelete_replaces_another_model_only_with_force() {
    let fixture = Fixture::new();
    fixture.import(1, "m").succeeds();
    let first = fixture.digest("m");
    fixture.line("rm m --keep 1h").succeeds();
    fixture.import(2, "m").succeeds();
    fixture.line("pin m").succeeds();
    let refused = fixture.line("undelete m").exits_with(7);
    assert!(refused.stderr.contains("is pinned"), "{}", refused.stderr);
    fixture.line("unpin m").succeeds();
    let refused = fixture.line("undelete m").exits_with(4);
    assert!(refused.stderr.contains("--force"), "{}", refused.stderr);
    let done = fixture.line("undelete m --force --json").succeeds().json();
    let displaced = &done["undeleted"][0]["displaced"][0];
    assert_eq!(displaced["name"], "m:latest");
    assert!(displaced["kept_until"].is_string(), "{displaced}");
    assert_eq!(fixture.digest("m"), first);
}

#[test]
fn log_has_a_line_for_each_change_with_user_and_model() {
    let fixture = Fixture::new();
    let (uid, me) = (rustix::process::geteuid().as_raw(), std::process::id());
    let client = fixture.daemon.client();
    fixture.import(1, "a").succeeds();
    let first = fixture.digest("a");
    let source = fixture.offer(2, "remote");
    fixture.line(&format!("pull {source} --name b")).succeeds();
    client
        .tag(&blobd_client::protocol::request::TagParams {
            source: "b".parse().unwrap(),
            target: "a".parse().unwrap(),
            force: true,
            origin: None,
        })
        .unwrap();
    for line in
        ["pin b", "unpin b", "edit b c --set general.name=x", "rm --keep 1h c", "undelete c", "rm a b c"]
    {
        fixture.line(line).succeeds();
    }
    fixture.line("limit 20MB").succeeds();
    fixture.line("gc").succeeds();
    let has = |verb: &str, parts: &[&str]| {
        let lines = fixture.log(verb);
        let found = lines.iter().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found, "{verb}: {parts:?} in {lines:?} of {}", fixture.daemon.log());
    };
    let user = format!("uid={uid} ");
    has("import", &[&user, "pid=", "model=a:latest", &format!("digest={first}"), "new_bytes="]);
    has("pull", &[&user, "model=b:latest", "digest=sha256:", "downloaded_bytes="]);
    has("tag", &[&user, &format!("pid={me} "), "model=a:latest"]);
    has("displace", &[&user, "model=a:latest", &format!("digest={first}"), "cause=\"tag\"", "kept_until="]);
    has("pin", &[&user, "model=b:latest"]);
    has("unpin", &[&user, "model=b:latest"]);
    has("edit", &[&user, "model=c:latest"]);
    has("rm", &[&user, "model=c:latest", "in the trash until"]);
    has("undelete", &[&user, "model=c:latest"]);
    has("rm", &[&user, "model=b:latest", "freed_bytes=", "kept_by="]);
    has("limit", &[&user, "bytes_per_second=20000000"]);
    has("gc", &[&user, "freed_bytes="]);
}

#[test]
fn removal_prints_each_model_and_truncates_long_lists_of_sharers() {
    let fixture = Fixture::new();
    fixture.import(1, "shared").succeeds();
    for number in 0..20 {
        fixture.line(&format!("tag shared copy-number-{number}")).succeeds();
    }
    let removed = fixture.line("rm shared").succeeds();
    let text = removed.text();
    assert!(text.starts_with("removed shared:latest "), "{text}");
    let kept = text.lines().find(|line| line.starts_with("kept ")).unwrap();
    assert!(kept.contains("needed by copy-number-0:latest, ") && kept.ends_with(" more"), "{kept}");
    assert!(kept.chars().count() <= 100, "{kept}");
    let json: Json = fixture.line("rm copy-number-0 --json").succeeds().json();
    assert_eq!(json["kept"][0]["by"].as_array().unwrap().len(), 19, "JSON has all: {json}");
}

#[test]
fn models_are_removed_by_pattern_and_rule_but_not_pinned_or_open_ones() {
    let fixture = Fixture::new();
    for (seed, name) in [(1, "llama:a"), (2, "llama:b"), (3, "llama:pinned"), (4, "other"), (5, "open")] {
        fixture.import(seed, name).succeeds();
    }
    fixture.line("pin llama:pinned").succeeds();
    let planned = fixture.line("rm llama:* --dry-run").succeeds().text();
    assert!(
        planned.contains("would remove llama:a ") && planned.contains("would remove llama:b "),
        "{planned}"
    );
    assert!(planned.contains("not removed: llama:pinned: pinned\n"), "{planned}");
    assert!(planned.contains("would free "), "{planned}");
    let removed = fixture.line("rm llama:* --json").succeeds().json();
    assert_eq!(removed["removed"], serde_json::json!(["llama:a", "llama:b"]));
    assert_eq!(removed["spared"][0]["name"], "llama:pinned");
    fixture.line("rm nothing-like-*").exits_with(3);
    // A time without records counts as a use.
    let recent = fixture.line("rm --older-than 30d").succeeds().text();
    assert!(recent.starts_with("no model to remove\nfreed 0 B\n"), "{recent}");
    let _reader = blobd_tests::reader::Reader::open(&fixture.daemon.socket(), "open");
    let rule = fixture.line("rm --older-than 0s --unused --json").succeeds().json();
    assert_eq!(rule["removed"], serde_json::json!(["other:latest"]), "{rule}");
    let reasons: Vec<_> = rule["spared"].as_array().unwrap().iter().map(|spared| &spared["reason"]).collect();
    assert_eq!(reasons, ["pinned", "open"]);
    fixture.line("rm").exits_with(2);
}

/// Without a daemon nothing is known about uses, so no model counts as unused.
#[test]
fn command_without_records_of_use_removes_nothing_by_age_or_use() {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", path.to_str().unwrap()]).succeeds();
    let text = blobd.line("rm --older-than 0s").succeeds().text();
    assert!(
        text.contains("not removed: m:latest: when it was last used is known only to a daemon"),
        "{text}"
    );
    assert!(blobd.line("ls").text().contains("m:latest"));
}

#[test]
fn open_session_of_a_renamed_model_has_the_new_name() {
    let fixture = Fixture::new();
    fixture.import(1, "old").succeeds();
    let mut reader = blobd_tests::reader::Reader::open(&fixture.daemon.socket(), "old");
    fixture.line("rename OLD new").succeeds();
    let sessions = fixture.line("ps --json").json();
    assert_eq!(sessions["sessions"][0]["model"], "new:latest", "{sessions}");
    reader.touch();
    let usage = fixture.line("df --json").json();
    assert!(usage["models"][0]["last_opened"].is_string(), "{usage}");
    fixture.line("release new").succeeds();
    assert_eq!(fixture.log("rename").len(), 1);
}

#[test]
fn collection_reports_which_models_the_data_belonged_to() {
    let fixture = Fixture::new();
    fixture.import(1, "m").succeeds();
    fixture.line("edit m named --set general.name=Replaced").succeeds();
    // As if the name had been given to another model by a version that kept nothing of the first one.
    fs::remove_dir_all(fixture.daemon.root().join("manifests/registry.ollama.ai/library/named")).unwrap();
    fixture.import(2, "old").succeeds();
    fixture.line("rm old --keep 0s").succeeds();
    let planned = fixture.line("gc --dry-run --json").succeeds().json();
    let of = |part: &str| {
        let deleted = planned["deleted"].as_array().unwrap();
        deleted.iter().filter(|item| item["of"].as_str().is_some_and(|of| of.starts_with(part))).count()
    };
    assert!(of("Replaced") >= 2, "recipe and header: {planned}");
    assert!(of("old:latest") >= 3, "record, recipe and tensors: {planned}");
    let text = fixture.line("gc").succeeds().text();
    assert!(text.contains("Replaced") && text.contains("no model needs it"), "{text}");
    assert!(text.contains("old:latest") && text.contains("expired in the trash"), "{text}");
}
