//! Models that lose their names: pins, `--force`, and what commands print and log about removed, evicted and replaced
//! models.

use std::path::PathBuf;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";

/// A daemon, and a registry to pull from.
struct Place {
    daemon: TestDaemon,
    registry: FakeRegistry,
}

impl Place {
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
    let place = Place::new();
    place.import(1, "mine").succeeds();
    let pinned = place.digest("mine");
    place.line("pin mine").succeeds();
    place.import(2, "other").succeeds();
    let source = place.offer(3, "remote");
    let file = place.file(4);
    let commands = [
        "tag other mine".to_owned(),
        format!("pull {source} --name mine"),
        format!("import {} --name mine", file.display()),
    ];
    for command in &commands {
        let run = place.line(command).exits_with(7);
        assert!(run.stderr.contains("model mine:latest: is pinned"), "{}", run.stderr);
        assert!(run.stderr.contains("--force"), "{}", run.stderr);
        assert_eq!(place.digest("mine"), pinned, "{command}");
    }
    place.line("edit other mine --set general.name=x").exits_with(4);
    for command in commands.into_iter().chain(["edit other mine --set general.name=x".to_owned()]) {
        let before = place.digest("mine");
        let run = place.line(&format!("{command} --force")).succeeds();
        assert!(run.text().contains("replaced mine:latest "), "{}", run.text());
        assert_ne!(place.digest("mine"), before, "{command}");
        // The pin stays with the name.
        assert!(place.line("rm mine").exits_with(7).stderr.contains("is pinned"));
    }
}

/// The registry counts its requests: nothing but the manifest is needed for the refusal.
#[test]
fn pull_onto_a_pinned_name_is_refused_before_anything_is_downloaded() {
    let place = Place::new();
    let source = place.offer(1, "remote");
    place.line(&format!("pull {source}")).succeeds();
    place.line(&format!("pin {source}")).succeeds();
    place.line(&format!("pull {source}")).succeeds();
    place.offer(2, "remote");
    let before = place.line("df --json").json();
    let error = place.line(&format!("pull {source} --json")).exits_with(7);
    assert!(!error.text().contains("\"completed\""), "{}", error.text());
    let after = place.line("df --json").json();
    assert_eq!(before["physical_bytes"], after["physical_bytes"]);
    assert_eq!(after["partial_bytes"], 0);
}

#[test]
fn undelete_replaces_another_model_only_with_force() {
    let place = Place::new();
    place.import(1, "m").succeeds();
    let first = place.digest("m");
    place.line("rm m --keep 1h").succeeds();
    place.import(2, "m").succeeds();
    place.line("pin m").succeeds();
    let refused = place.line("undelete m").exits_with(4);
    assert!(refused.stderr.contains("--force"), "{}", refused.stderr);
    let done = place.line("undelete m --force --json").succeeds().json();
    let displaced = &done["undeleted"][0]["displaced"][0];
    assert_eq!(displaced["name"], "m:latest");
    assert!(displaced["reclaimable_bytes"].as_u64().unwrap() > 0, "{displaced}");
    assert_eq!(place.digest("m"), first);
}

#[test]
fn log_has_a_line_for_each_change_with_user_and_model() {
    let place = Place::new();
    let (uid, me) = (rustix::process::geteuid().as_raw(), std::process::id());
    let client = place.daemon.client();
    place.import(1, "a").succeeds();
    let first = place.digest("a");
    let source = place.offer(2, "remote");
    place.line(&format!("pull {source} --name b")).succeeds();
    client
        .tag(&blobd_client::protocol::request::TagParams {
            source: "b".parse().unwrap(),
            target: "a".parse().unwrap(),
            force: false,
        })
        .unwrap();
    for line in
        ["pin b", "unpin b", "edit b c --set general.name=x", "rm --keep 1h c", "undelete c", "rm a b c"]
    {
        place.line(line).succeeds();
    }
    place.line("limit 20MB").succeeds();
    place.line("gc").succeeds();
    let has = |verb: &str, parts: &[&str]| {
        let lines = place.log(verb);
        let found = lines.iter().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found, "{verb}: {parts:?} in {lines:?} of {}", place.daemon.log());
    };
    let user = format!("uid={uid} ");
    has("import", &[&user, "pid=", "model=a:latest", &format!("digest={first}"), "new_bytes="]);
    has("pull", &[&user, "model=b:latest", "digest=sha256:", "downloaded_bytes="]);
    has("tag", &[&user, &format!("pid={me} "), "model=a:latest"]);
    has(
        "displace",
        &[&user, "model=a:latest", &format!("digest={first}"), "cause=\"tag\"", "reclaimable_bytes="],
    );
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
fn removal_prints_each_model_and_cuts_long_lists_of_sharers() {
    let place = Place::new();
    place.import(1, "shared").succeeds();
    for number in 0..20 {
        place.line(&format!("tag shared copy-number-{number}")).succeeds();
    }
    let removed = place.line("rm shared").succeeds();
    let text = removed.text();
    assert!(text.starts_with("removed shared:latest "), "{text}");
    let kept = text.lines().find(|line| line.starts_with("kept ")).unwrap();
    assert!(kept.contains("needed by copy-number-0:latest, ") && kept.ends_with(" more"), "{kept}");
    assert!(kept.chars().count() <= 100, "{kept}");
    let json: Json = place.line("rm copy-number-0 --json").succeeds().json();
    assert_eq!(json["kept"][0]["by"].as_array().unwrap().len(), 19, "JSON has all: {json}");
}
