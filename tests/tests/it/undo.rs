//! `undo`: takes back the newest change of names of a user, or of one name.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::naming::UndoParams;
use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use serde_json::{Value as Json, json};

use super::access::{ADMIN, CONFIG, PULLER, READER, Shared, User, can_be_others};

const MODEL: &str = "application/vnd.ollama.image.model";

fn run(daemon: &TestDaemon, line: &str) -> Run {
    daemon.command().line(&format!("{line} --json"))
}

fn undo(daemon: &TestDaemon, line: &str) -> Json {
    run(daemon, line).succeeds().json()
}

fn import(daemon: &TestDaemon, seed: u64, name: &str) {
    let file = ModelFile::dense(seed).write_to(daemon.scratch(), &format!("model-{seed}.gguf"));
    daemon.command().run(["import", file.to_str().unwrap(), "--name", name, "--force"]).succeeds();
}

/// Each name with the digest of its model.
fn models(daemon: &TestDaemon) -> Vec<(String, String)> {
    let list = run(daemon, "ls").succeeds().json();
    let pair = |model: &Json| {
        (model["name"].as_str().unwrap().to_owned(), model["digest"].as_str().unwrap().to_owned())
    };
    list["models"].as_array().unwrap().iter().map(pair).collect()
}

fn trash(daemon: &TestDaemon) -> Vec<String> {
    let list = run(daemon, "ls --trash").succeeds().json();
    list["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["name"].as_str().unwrap().to_owned())
        .collect()
}

fn verbs(daemon: &TestDaemon, name: &str) -> Vec<String> {
    let history = run(daemon, &format!("history {name}")).succeeds().json();
    let verb = |change: &Json| change["verb"].as_str().unwrap_or("no record").to_owned();
    history["changes"].as_array().unwrap().iter().map(verb).collect()
}

/// The command that the answer names as the one that reverses the undo.
fn reversal(undone: &Json) -> String {
    let [command] = &undone["reversed_by"].as_array().unwrap()[..] else { panic!("one command: {undone}") };
    command.as_str().unwrap().strip_prefix("blobd ").unwrap().to_owned()
}

/// The command is taken back and what the answer names brings the change again, and after that too.
fn is_taken_back_and_reversed(daemon: &TestDaemon, line: &str) {
    let before = models(daemon);
    daemon.command().line(line).succeeds();
    let after = models(daemon);
    assert_ne!(before, after, "{line}");
    let planned = undo(daemon, "undo --dry-run");
    assert_eq!((models(daemon), &planned["dry_run"]), (after.clone(), &json!(true)), "{line}");
    let undone = undo(daemon, "undo");
    assert_eq!(undone["reversed_by"], planned["reversed_by"], "{line}");
    assert_eq!(undone["verb"], line.split(' ').next().unwrap(), "{line}");
    assert_eq!(models(daemon), before, "{line}: {undone}");
    daemon.command().line(&reversal(&undone)).succeeds();
    assert_eq!(models(daemon), after, "{line}: {undone}");
    undo(daemon, "undo");
    assert_eq!(models(daemon), before, "{line}");
}

#[test]
fn each_verb_that_changes_names_is_taken_back() {
    let daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    import(&daemon, 2, "n");
    let file = ModelFile::dense(3).write_to(daemon.scratch(), "model-3.gguf");
    let file = file.to_str().unwrap();
    for line in [
        "tag m o",
        "tag m n --force",
        "rename m o",
        "rm --keep 1d m",
        "rm --keep 1d m n",
        "edit m edited --set general.name=x",
        "edit m n --set general.name=y --force",
        &format!("import {file} --name new"),
        &format!("import {file} --name m --force"),
    ] {
        is_taken_back_and_reversed(&daemon, line);
    }
    daemon.command().line("verify").succeeds();
}

/// What a program has shown to its user by a dry run is taken back, and nothing newer.
#[test]
fn only_the_change_that_is_expected_is_taken_back() {
    let daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    daemon.command().line("tag m n").succeeds();
    let client = daemon.client();
    let planned = client.undo(&UndoParams { dry_run: true, ..UndoParams::default() }).unwrap();
    daemon.command().line("tag m o").succeeds();
    let before = models(&daemon);
    let expected = UndoParams { change: Some(planned.change.clone()), ..UndoParams::default() };
    for dry_run in [true, false] {
        let refused = client.undo(&UndoParams { dry_run, ..expected.clone() }).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Busy, "{refused}");
        assert!(refused.to_string().contains("a newer change now, by `tag`"), "{refused}");
    }
    assert_eq!(models(&daemon), before);
    undo(&daemon, "undo");
    assert_eq!(client.undo(&expected).unwrap().change, planned.change);
    assert_eq!(models(&daemon).len(), 1);
}

#[test]
fn renaming_that_replaced_a_model_gives_both_names_back() {
    let daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    import(&daemon, 2, "n");
    daemon.command().line("pin m").succeeds();
    let before = models(&daemon);
    daemon.command().line("rename m n --force").succeeds();
    let undone = undo(&daemon, "undo n");
    assert_eq!(models(&daemon), before, "{undone}");
    assert_eq!(
        (&undone["names"][0]["renamed_from"], &undone["names"][1]["name"]),
        (&json!("n:latest"), &json!("n:latest"))
    );
    assert_eq!(reversal(&undone), "rename m:latest n:latest --force");
    let list = run(&daemon, "ls").succeeds().json();
    assert_eq!(
        (&list["models"][0]["pinned"], &list["models"][1]["pinned"]),
        (&json!(true), &json!(false)),
        "{list}"
    );
}

#[test]
fn undo_takes_back_one_change_after_the_other_also_after_a_restart() {
    let mut daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    import(&daemon, 2, "m");
    daemon.command().line("tag m n").succeeds();
    daemon.command().line("rm --keep 1d n").succeeds();
    daemon.kill();
    daemon.restart();
    let verb = |daemon: &TestDaemon| undo(daemon, "undo")["verb"].as_str().unwrap().to_owned();
    assert_eq!([verb(&daemon), verb(&daemon)], ["rm", "tag"]);
    daemon.kill();
    daemon.restart();
    let [(_, second)] = &models(&daemon)[..] else { panic!("one model") };
    let second = second.clone();
    assert_eq!(verb(&daemon), "import");
    assert_eq!(verbs(&daemon, "m"), ["undo", "import", "import"]);
    assert_ne!(models(&daemon)[0].1, second);
    assert_eq!(verb(&daemon), "import");
    assert_eq!((models(&daemon), trash(&daemon)), (Vec::new(), vec!["m:latest".to_owned(); 2]));
    let error = run(&daemon, "undo").exits_with(3).error();
    assert!(error.message.contains("no change is recorded"), "{error}");
    // What is restored is a change again.
    daemon.command().line("undelete m").succeeds();
    assert_eq!(verb(&daemon), "undelete");
    assert_eq!(verbs(&daemon, "n"), ["undo", "undo", "rm", "tag"]);
}

#[test]
fn freed_data_does_not_come_back_and_the_error_says_how_to_get_it_again() {
    let registry = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(7).bytes();
    registry.add_model("acme/x:1", b"{}", &[(MODEL, &weights)]).unwrap();
    let daemon = TestDaemon::start();
    import(&daemon, 1, "kept");
    let source = registry.name("acme/x:1");
    daemon.command().run(["pull", &source]).succeeds();
    daemon.command().run(["rm", &source]).succeeds();
    let before = models(&daemon);
    for line in ["undo", "undo --dry-run"] {
        let error = run(&daemon, line).exits_with(3).error();
        assert!(error.message.contains("is no longer stored"), "{error}");
        let hint = error.hint.unwrap();
        assert!(hint.contains(&format!("`blobd pull {source}`")), "{hint}");
        let command = hint.split('`').nth(1).unwrap().strip_prefix("blobd ").unwrap();
        daemon.command().line(&format!("{command} --dry-run")).succeeds();
    }
    assert_eq!(models(&daemon), before);
    // Other names are not held up.
    undo(&daemon, "undo kept");
    assert_eq!(models(&daemon), []);
    // A pull stores it again, and that can be taken back.
    daemon.command().run(["pull", &source]).succeeds();
    assert_eq!(undo(&daemon, "undo")["verb"], "pull");
    // Now the trash has it.
    assert_eq!(undo(&daemon, "undo")["verb"], "rm");
    assert_eq!(models(&daemon).len(), 1);
}

#[test]
fn pull_that_replaced_a_version_is_taken_back_and_the_name_follows_its_source() {
    let registry = FakeRegistry::start().unwrap();
    let daemon = TestDaemon::start();
    let source = registry.name("acme/x:1");
    let pull = |seed: u64| {
        let weights = ModelFile::dense(seed).bytes();
        registry.add_model("acme/x:1", b"{}", &[(MODEL, &weights)]).unwrap();
        daemon.command().run(["pull", &source]).succeeds();
        models(&daemon)
    };
    let (first, second) = (pull(1), pull(2));
    assert_ne!(first, second);
    undo(&daemon, "undo");
    assert_eq!(models(&daemon), first);
    assert_eq!(
        run(&daemon, "ls").succeeds().json()["models"][0]["follows"],
        json!(registry.name("acme/x:1"))
    );
    daemon.command().run(["pull", &source]).succeeds();
    assert_eq!(models(&daemon), second, "the name is updated again");
    // A pull of what the name means makes it follow the source, and nothing else.
    import(&daemon, 3, "m");
    let weights = ModelFile::dense(3).bytes();
    registry.add_model("acme/y:1", b"{}", &[(MODEL, &weights)]).unwrap();
    let other = registry.name("acme/y:1");
    daemon.command().run(["pull", &other]).succeeds();
    daemon.command().run(["tag", &other, "copy"]).succeeds();
    daemon.command().run(["pull", &other, "--name", "copy"]).succeeds();
    let follows = || {
        let list = run(&daemon, "ls copy").succeeds().json();
        list["models"][0]["follows"].clone()
    };
    assert_eq!(follows(), json!(other));
    let undone = undo(&daemon, "undo");
    assert_eq!((follows(), &undone["verb"]), (Json::Null, &json!("pull")), "{undone}");
    assert_eq!(undo(&daemon, "undo")["verb"], "tag");
}

#[test]
fn change_of_several_names_is_taken_back_as_a_whole_or_not_at_all() {
    let daemon = TestDaemon::start();
    for (seed, name) in [(1, "a"), (2, "b"), (3, "c")] {
        import(&daemon, seed, name);
    }
    daemon.command().line("rm --keep 1d a b c").succeeds();
    import(&daemon, 4, "b");
    undo(&daemon, "undo b");
    import(&daemon, 4, "b");
    // The newest change is that import; `undo a` takes back a part of the removal.
    undo(&daemon, "undo a");
    daemon.command().line("rm --keep 1d a").succeeds();
    undo(&daemon, "undo");
    let before = models(&daemon);
    undo(&daemon, "undo");
    assert_eq!(models(&daemon).len() + 1, before.len(), "the import of b");
    assert_eq!(undo(&daemon, "undo")["names"].as_array().unwrap().len(), 2, "the rest of the removal");
    daemon.command().line("rm a b c").succeeds();
    import(&daemon, 1, "x");
    undo(&daemon, "undo x");
    let error = run(&daemon, "undo").exits_with(3).error();
    let hint = error.hint.unwrap();
    assert!(hint.contains("nothing was changed"), "{hint}");
    assert!(models(&daemon).is_empty());
}

#[test]
fn pinned_name_is_not_removed() {
    let daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    daemon.command().line("pin m").succeeds();
    let error = run(&daemon, "undo").exits_with(7).error();
    assert!(error.message.contains("unpin m:latest"), "{error}");
    daemon.command().line("unpin m").succeeds();
    undo(&daemon, "undo");
    assert_eq!(trash(&daemon), ["m:latest"]);
}

#[test]
fn output_says_what_is_taken_back_and_how_that_is_reversed() {
    let daemon = TestDaemon::start();
    import(&daemon, 1, "m");
    let id = models(&daemon)[0].1["sha256:".len()..][..12].to_owned();
    let text = |line: &str| daemon.command().line(line).succeeds().text();
    let planned = text("undo --dry-run");
    let expected = [
        "would take back `import` (just now)".to_owned(),
        format!("would remove m:latest {id}; the model goes to the trash"),
        "`blobd undelete m:latest` reverses this".to_owned(),
    ];
    assert_eq!(planned.lines().collect::<Vec<_>>(), expected);
    assert!(
        text("undo").starts_with(&format!(
            "took back `import` (just now)\nremoved m:latest {id}; in the trash until "
        ))
    );
    assert!(daemon.command().line("undelete m").succeeds().text().contains("restored"));
    assert_eq!(text("undo -q"), "");
}

/// Another user who may pull.
const OTHER: User = User { uid: 64005, groups: &[64005] };

/// Two users of one daemon.
struct Users(Shared);

impl Users {
    fn start() -> Option<Self> {
        can_be_others().then(|| Self(Shared::start(&CONFIG.replace("[64003]", "[64003, 64005]"))))
    }

    fn run(&self, user: User, line: &str) -> Run {
        self.0.run(user, &format!("{line} --json"))
    }

    fn import(&self, user: User, seed: u64, name: &str) {
        let path = ModelFile::dense(seed).write_to(self.0.folder.path(), &format!("{seed}.gguf"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        self.run(user, &format!("import {} --name {name}", path.display())).succeeds();
    }

    fn names(&self) -> Vec<String> {
        let models = self.0.daemon.client().models().unwrap().models;
        models.into_iter().map(|model| model.name).collect()
    }
}

#[test]
fn users_take_back_their_own_changes_and_administrators_all() {
    let Some(users) = Users::start() else { return };
    users.import(PULLER, 1, "m");
    users.import(OTHER, 2, "n");
    let error = users.run(READER, "undo").exits_with(7).error();
    assert!(error.message.contains("expected the right"), "{error}");
    let error = users.run(PULLER, "undo n").exits_with(7).error();
    let expected = format!("made by another user: expected uid {}, found uid {}", PULLER.uid, OTHER.uid);
    assert!(error.message.ends_with(&expected), "{error}");
    // Not the newest of all, but the newest of this user.
    let undone = users.run(PULLER, "undo").succeeds().json();
    assert_eq!((&undone["names"][0]["name"], &undone["uid"]), (&json!("m:latest"), &json!(PULLER.uid)));
    users.run(PULLER, "undo").exits_with(3);
    assert_eq!(users.names(), ["n:latest"]);
    let undone = users.run(ADMIN, "undo n").succeeds().json();
    assert_eq!(undone["uid"], json!(OTHER.uid), "{undone}");
    let history = users.run(READER, "history n").succeeds().json();
    assert_eq!(
        (&history["changes"][0]["verb"], &history["changes"][0]["uid"]),
        (&json!("undo"), &json!(ADMIN.uid))
    );
    // It stays the model of the user who had added it.
    users.run(OTHER, "undelete n").succeeds();
    users.run(OTHER, "rm --keep 1d n").succeeds();
    users.run(ADMIN, "undo n").succeeds();
    assert_eq!(users.0.daemon.client().models().unwrap().models[0].added_by, Some(OTHER.uid));
}

#[test]
fn name_that_another_user_has_changed_since_is_not_changed_back() {
    let Some(users) = Users::start() else { return };
    users.import(PULLER, 1, "a");
    users.import(PULLER, 2, "b");
    users.run(PULLER, "rm --keep 1d a b").succeeds();
    users.import(OTHER, 3, "a");
    let error = users.run(PULLER, "undo").exits_with(4).error();
    assert!(error.message.starts_with("model a:latest: `rm` cannot be taken back"), "{error}");
    assert!(error.message.contains(&format!("`import` by uid {}", OTHER.uid)), "{error}");
    let hint = error.hint.unwrap();
    assert!(hint.contains("nothing was changed; `blobd undo b:latest`"), "{hint}");
    assert_eq!(users.names(), ["a:latest"]);
    users.run(PULLER, "undo b:latest").succeeds();
    assert_eq!(users.names(), ["a:latest", "b:latest"]);
    users.run(ADMIN, "rename b c").succeeds();
    let error = users.run(PULLER, "undo b").exits_with(7).error();
    assert!(error.message.contains("(`rename`) was made by another user"), "{error}");
    users.run(ADMIN, "undo").succeeds();
    assert_eq!(users.names(), ["a:latest", "b:latest"]);
    // Administrators take back only their own changes without a name.
    users.run(ADMIN, "undo").exits_with(3);
}
