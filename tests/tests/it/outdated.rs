//! `outdated` and `pull --all`: stored models and what their sources name now.

use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

struct Fixture {
    daemon: TestDaemon,
    registry: FakeRegistry,
}

impl Fixture {
    /// With three tags pulled, one of them pinned, a copy of the first, and an imported model.
    fn new() -> Self {
        let fixture = Self { daemon: TestDaemon::start(), registry: FakeRegistry::start().unwrap() };
        for (tag, seed) in [("a", 1), ("b", 2), ("c", 3)] {
            fixture.publish(tag, seed);
            fixture.run(&["pull", &fixture.name(tag)]).succeeds();
        }
        fixture.run(&["pin", &fixture.name("c")]).succeeds();
        fixture.run(&["tag", &fixture.name("a"), "copy"]).succeeds();
        let path = ModelFile::dense(9).write_to(fixture.daemon.scratch(), "imported.gguf");
        fixture.run(&["import", path.to_str().unwrap(), "--name", "imported"]).succeeds();
        fixture
    }

    fn name(&self, tag: &str) -> String {
        self.registry.name(&format!("library/m:{tag}"))
    }

    fn publish(&self, tag: &str, seed: u64) {
        let weights = ModelFile::dense(seed).bytes();
        self.registry.add_model(&format!("library/m:{tag}"), b"{}", &[(MODEL, &weights)]).unwrap();
    }

    fn run(&self, line: &[&str]) -> Run {
        self.daemon.command().run(line)
    }

    /// The last letters of the names and their status, and the whole answer.
    fn compared(&self, code: i32) -> (Vec<(String, String)>, Json) {
        let report = self.run(&["outdated", "--json"]).exits_with(code).json();
        let text = |model: &Json, key: &str| model[key].as_str().unwrap().to_owned();
        let models = report["models"].as_array().unwrap().iter();
        let of = |model: &Json| {
            (text(model, "name").rsplit('/').next().unwrap().to_owned(), text(model, "status"))
        };
        (models.map(of).collect(), report)
    }
}

fn expect(compared: &[(String, String)], expected: &[(&str, &str)]) {
    let compared: Vec<_> = compared.iter().map(|(name, status)| (name.as_str(), status.as_str())).collect();
    assert_eq!(compared, expected);
}

#[test]
fn models_whose_tags_moved_are_listed_and_updated_but_pinned_ones_stay() {
    let fixture = Fixture::new();
    expect(&fixture.compared(0).0, &[("m:a", "current"), ("m:b", "current"), ("m:c", "current")]);
    fixture.publish("b", 12);
    fixture.publish("c", 13);
    let (compared, report) = fixture.compared(1);
    expect(&compared, &[("m:a", "current"), ("m:b", "outdated"), ("m:c", "outdated")]);
    assert_ne!(report["models"][1]["local"], report["models"][1]["remote"]);
    assert_eq!(report["models"][2]["pinned"], true);
    let text = fixture.run(&["outdated"]).exits_with(1).text();
    assert!(text.contains("m:b") && !text.contains("m:a"), "{text}");
    assert!(text.ends_with("1 current, 2 outdated, 0 not compared\n"), "{text}");
    let before = fixture.registry.bytes_served();
    let text = fixture.run(&["pull", "--all"]).succeeds().text();
    assert!(text.contains("m:c: pinned, not updated"), "{text}");
    assert!(fixture.registry.bytes_served() > before);
    expect(&fixture.compared(1).0, &[("m:a", "current"), ("m:b", "current"), ("m:c", "outdated")]);
    let weights = fixture.run(&["export", &fixture.name("b"), "-o", "-"]).succeeds().stdout;
    assert!(weights == ModelFile::dense(12).bytes());
    // A copy is a model of its own.
    let copy = fixture.run(&["export", "copy", "-o", "-"]).succeeds().stdout;
    assert!(copy == ModelFile::dense(1).bytes());
}

#[test]
fn comparison_fetches_manifests_alone_and_one_failure_does_not_stop_the_others() {
    let fixture = Fixture::new();
    let before = fixture.registry.bytes_served();
    fixture.compared(0);
    assert_eq!(fixture.registry.bytes_served(), before);
    // The source of one model is gone, and one server cannot be reached.
    let gone = FakeRegistry::start().unwrap();
    let weights = ModelFile::dense(5).bytes();
    gone.add_model("library/z:latest", b"{}", &[(MODEL, &weights)]).unwrap();
    let name = gone.name("library/z");
    fixture.run(&["pull", &name]).succeeds();
    gone.add_fault("/manifests/", 1000, blobd_tests::registry::Fault::Status(410));
    fixture.publish("b", 12);
    let (compared, report) = fixture.compared(1);
    assert_eq!(compared.iter().filter(|(_, status)| status == "failed").count(), 1, "{report}");
    assert_eq!(compared.iter().filter(|(_, status)| status == "outdated").count(), 1, "{report}");
    let run = fixture.run(&["pull", "--all"]).exits_with(1);
    assert!(run.stderr.contains("410"), "{}", run.stderr);
    let (compared, _) = fixture.compared(1);
    assert_eq!(compared.iter().filter(|(_, status)| status == "outdated").count(), 0);
    // Nothing is compared that the filter does not name.
    fixture.run(&["outdated", "m:a"]).succeeds();
}

#[test]
fn file_at_hugging_face_is_compared_with_its_branch() {
    let registry = FakeRegistry::start().unwrap();
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, format!("[mirrors]\n\"hf.co\" = \"{}\"\n", registry.url())).unwrap();
    let blobd = blobd_tests::command::Blobd::at_root(&folder.path().join("store"));
    let run = |line: &[&str]| {
        blobd.run(line.iter().copied().chain(["--config", config.to_str().unwrap(), "--json"]))
    };
    registry.add_repository("me/x", COMMIT, &[("x.gguf", &ModelFile::dense(1).bytes())]);
    run(&["pull", "hf.co/me/x/x.gguf"]).succeeds();
    run(&["outdated"]).succeeds();
    registry.add_repository("me/x", &"f".repeat(40), &[("x.gguf", &ModelFile::dense(2).bytes())]);
    let report = run(&["outdated"]).exits_with(1).json();
    assert_eq!(report["models"][0]["status"], "outdated", "{report}");
    run(&["pull", "--all"]).succeeds();
    run(&["outdated"]).succeeds();
}

/// Several names of one manifest, one of them given with `--name`.
#[test]
fn each_name_follows_its_own_source() {
    let fixture = Fixture { daemon: TestDaemon::start(), registry: FakeRegistry::start().unwrap() };
    for tag in ["8b", "latest"] {
        fixture.publish(tag, 1);
        fixture.run(&["pull", &fixture.name(tag)]).succeeds();
    }
    fixture.run(&["pull", &fixture.name("8b"), "--name", "mine"]).succeeds();
    let digest = |name: &str| fixture.run(&["show", name, "--json"]).succeeds().json()["digest"].clone();
    let first = digest("mine");
    assert_eq!(
        (digest(&fixture.name("8b")), digest(&fixture.name("latest"))),
        (first.clone(), first.clone())
    );
    fixture.publish("latest", 2);
    expect(
        &fixture.compared(1).0,
        &[("m:8b", "current"), ("m:latest", "outdated"), ("mine:latest", "current")],
    );
    fixture.run(&["pull", "--all"]).succeeds();
    assert_eq!((digest(&fixture.name("8b")), digest("mine")), (first.clone(), first.clone()));
    assert_ne!(digest(&fixture.name("latest")), first);
    fixture.publish("8b", 3);
    expect(
        &fixture.compared(1).0,
        &[("m:8b", "outdated"), ("m:latest", "current"), ("mine:latest", "outdated")],
    );
    fixture.run(&["pull", "--all"]).succeeds();
    assert_eq!(digest("mine"), digest(&fixture.name("8b")));
    assert_ne!(digest("mine"), first);
    // What the updates have replaced comes back, and is not updated under another name.
    fixture.run(&["undelete", "mine", "--name", "before"]).succeeds();
    assert_eq!(digest("before"), first);
    // An import that took the name is not updated, and not replaced by a pull.
    let path = ModelFile::dense(9).write_to(fixture.daemon.scratch(), "imported.gguf");
    fixture.run(&["import", path.to_str().unwrap(), "--name", "mine", "--force"]).succeeds();
    let refused = fixture.run(&["pull", &fixture.name("8b"), "--name", "mine"]).exits_with(4);
    assert!(refused.stderr.contains("from import imported.gguf"), "{}", refused.stderr);
    expect(&fixture.compared(0).0, &[("m:8b", "current"), ("m:latest", "current")]);
}
