//! Users change the names that they have added, and no others.

use std::fs;

use blobd_tests::command::Run;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use serde_json::json;

use super::access::{ADMIN, CONFIG, PULLER, READER, STRANGER, Shared, User, can_be_others};

/// Another user who may pull.
const OTHER: User = User { uid: 64005, groups: &[64005] };

struct Names(Shared);

impl Names {
    fn start() -> Option<Self> {
        can_be_others().then(|| Self(Shared::start(&CONFIG.replace("[64003]", "[64003, 64005]"))))
    }

    fn run(&self, user: User, line: &str) -> Run {
        self.0.run(user, &format!("{line} --json"))
    }

    fn import(&self, user: User, seed: u64, name: &str) {
        let path = ModelFile::dense(seed).write_to(self.0.folder.path(), &format!("{seed}.gguf"));
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        self.run(user, &format!("import {} --name {name}", path.display())).succeeds();
    }

    fn names(&self) -> Vec<String> {
        let models = self.0.daemon.client().models().unwrap().models;
        models.into_iter().map(|model| model.name).collect()
    }

    /// Asserts that the request is refused because the name is another user's.
    fn is_refused(&self, user: User, line: &str, adder: User) {
        let error = self.run(user, line).exits_with(7).error();
        let reason = format!(
            "was added by another user: expected uid {} or an administrator, found uid {}",
            adder.uid, user.uid
        );
        assert!(error.message.ends_with(&reason), "{line}: {error}");
        assert!(error.hint.unwrap().contains("ask that user or an administrator"), "{line}");
    }
}

#[test]
fn names_are_changed_by_the_user_who_added_them_and_by_administrators() {
    let Some(names) = Names::start() else { return };
    names.import(PULLER, 1, "m");
    names.run(OTHER, "tag m other").succeeds();
    for line in ["rm m", "rm m --keep 1d", "rm m --dry-run", "rename m x", "pin m", "unpin m"] {
        names.is_refused(OTHER, line, PULLER);
    }
    names.is_refused(PULLER, "rm other", OTHER);
    assert_eq!(names.names(), ["m:latest", "other:latest"]);
    for user in [READER, STRANGER] {
        for line in ["rm m", "tag m x", "rename m x", "pin m", "undelete m"] {
            let error = names.run(user, line).exits_with(7).error();
            assert!(error.message.contains("expected the right"), "{line}: {error}");
        }
    }
    names.run(PULLER, "pin m").succeeds();
    assert!(names.run(PULLER, "rm m").exits_with(7).error().message.contains("unpin"));
    names.run(PULLER, "rename m mine").succeeds();
    names.run(PULLER, "unpin mine").succeeds();
    let removed = names.run(OTHER, "rm other").succeeds().json();
    assert_eq!(removed["freed_bytes"], json!(0), "{removed}");
    names.run(ADMIN, "rename mine renamed").succeeds();
    assert!(names.run(PULLER, "rm renamed").succeeds().json()["freed_bytes"].as_u64() > Some(0));
    assert!(names.names().is_empty());
    // Each removal has a record of who did it.
    let history = names.run(READER, "history renamed").succeeds().json();
    assert_eq!(
        (&history["changes"][0]["uid"], &history["changes"][0]["verb"]),
        (&json!(PULLER.uid), &json!("rm"))
    );
}

#[test]
fn pin_of_an_administrator_also_holds_for_the_user_who_added_the_name() {
    let Some(names) = Names::start() else { return };
    names.import(PULLER, 1, "m");
    names.run(PULLER, "pin m").succeeds();
    names.run(ADMIN, "pin m").succeeds();
    for line in ["unpin m", "rename m x", "rm m"] {
        let error = names.run(PULLER, line).exits_with(7).error();
        assert!(
            error.message.contains("was pinned by another user: expected an administrator"),
            "{line}: {error}"
        );
    }
    names.run(PULLER, "pin m").succeeds();
    names.run(ADMIN, "unpin m").succeeds();
    names.run(PULLER, "rm m").succeeds();
}

#[test]
fn patterns_select_own_names_and_report_skipped_ones() {
    let Some(names) = Names::start() else { return };
    for (user, seed, name) in [(PULLER, 1, "x:1"), (PULLER, 2, "x:2"), (OTHER, 3, "x:3"), (ADMIN, 4, "y:1")] {
        names.import(user, seed, name);
    }
    let planned = names.run(PULLER, "rm x:* --dry-run").succeeds().json();
    assert_eq!(planned["removed"], json!(["x:1", "x:2"]), "{planned}");
    assert_eq!(planned["spared"], json!([{ "name": "x:3", "reason": "added by another user" }]), "{planned}");
    let text = names.0.run(PULLER, "rm x:*").succeeds();
    assert!(text.text().contains("not removed: x:3: added by another user"), "{}", text.text());
    let unused = names.run(OTHER, "rm --unused").succeeds().json();
    assert_eq!(
        (&unused["removed"], &unused["spared"][0]["name"]),
        (&json!(["x:3"]), &json!("y:1")),
        "{unused}"
    );
    let left = names.run(OTHER, "rm *").succeeds().json();
    assert_eq!((&left["removed"], left["spared"].as_array().map(Vec::len)), (&json!([]), Some(1)), "{left}");
    let run = names.run(PULLER, "rm y:1 none").exits_with(1);
    assert!(
        run.text().contains("added by another user") && run.text().contains("not in the store"),
        "{}",
        run.text()
    );
    assert_eq!(names.names(), ["y:1"]);
    assert_eq!(names.run(ADMIN, "rm *").succeeds().json()["removed"], json!(["y:1"]));
}

#[test]
fn users_restore_what_they_had_added() {
    let Some(names) = Names::start() else { return };
    names.import(PULLER, 1, "m");
    names.run(PULLER, "rm m --keep 1d").succeeds();
    let trash = names.run(READER, "ls --trash").succeeds().json();
    assert_eq!(trash["models"][0]["added_by"], json!(PULLER.uid), "{trash}");
    names.is_refused(OTHER, "undelete m", PULLER);
    names.is_refused(OTHER, "undelete m --name other", PULLER);
    // The name is another user's by now: each restores what had been that user's.
    names.import(OTHER, 2, "m");
    names.is_refused(PULLER, "undelete m --force", OTHER);
    names.run(PULLER, "undelete m --name back").succeeds();
    assert_eq!(names.names(), ["back:latest", "m:latest"]);
    names.run(ADMIN, "rm back --keep 1d").succeeds();
    names.run(PULLER, "undelete back").succeeds();
    let models = names.run(READER, "ls").succeeds().json();
    let adders: Vec<_> =
        models["models"].as_array().unwrap().iter().map(|model| &model["added_by"]).collect();
    assert_eq!(adders, [&json!(PULLER.uid), &json!(OTHER.uid)], "{models}");
}

#[test]
fn name_without_a_history_belongs_to_administrators() {
    let Some(names) = Names::start() else { return };
    names.import(PULLER, 1, "m");
    let history = names.0.folder.path().join("store/history");
    fs::remove_dir_all(&history).unwrap();
    fs::create_dir(&history).unwrap();
    let file = names.0.folder.path().join("1.gguf").display().to_string();
    names.import(PULLER, 2, "other");
    for line in ["rm m", "rename m x", "pin m", "edit other m --set a=b --force"] {
        let error = names.run(PULLER, line).exits_with(7).error();
        assert!(
            error.message.contains("has no record of who added it: expected an administrator"),
            "{line}: {error}"
        );
    }
    // Adding the same content again removes nothing and changes no owner.
    names.run(PULLER, &format!("import {file} --name m")).succeeds();
    names.run(PULLER, "rm m").exits_with(7);
    names.run(ADMIN, "rm m").succeeds();
}

/// Otherwise whoever pulls a newer version first takes the name away from the user who added it.
#[test]
fn update_by_another_user_leaves_the_name_to_the_user_who_added_it() {
    let Some(names) = Names::start() else { return };
    let registry = FakeRegistry::start().unwrap();
    let publish = |seed| {
        let content = ModelFile::dense(seed).bytes();
        registry
            .add_model("library/m:latest", b"{}", &[("application/vnd.ollama.image.model", &content)])
            .unwrap();
    };
    let (source, added_by) = (registry.name("library/m"), |names: &Names| {
        let models = names.run(READER, "ls").succeeds().json();
        models["models"][0]["added_by"].clone()
    });
    publish(1);
    names.0.run(PULLER, &format!("pull {source}")).succeeds();
    for (seed, user) in [(2, OTHER), (3, ADMIN), (4, OTHER)] {
        publish(seed);
        let before = names.run(READER, "ls").succeeds().json()["models"][0]["digest"].clone();
        names.0.run(user, &format!("pull {source}")).succeeds();
        assert_ne!(names.run(READER, "ls").succeeds().json()["models"][0]["digest"], before, "{seed}");
        assert_eq!(added_by(&names), json!(PULLER.uid), "{seed}");
    }
    for line in ["rm", "pin", "unpin", "rm --keep 1d"] {
        names.is_refused(OTHER, &format!("{line} {source}"), PULLER);
    }
    names.run(PULLER, &format!("pin {source}")).succeeds();
    names.run(PULLER, &format!("unpin {source}")).succeeds();
    names.run(PULLER, &format!("rm {source} --keep 1d")).succeeds();
    names.is_refused(OTHER, &format!("undelete {source}"), PULLER);
    names.run(PULLER, &format!("undelete {source}")).succeeds();
    assert_eq!(added_by(&names), json!(PULLER.uid));
    names.run(PULLER, &format!("rename {source} mine")).succeeds();
    names.run(PULLER, "rm mine").succeeds();
}
