//! Names with many parts, long parts, and parts that differ only in case, with every verb that takes a name.

use std::collections::BTreeSet;

use blobd_tests::command::Run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::check_empty;

use super::offer;

/// What registries and the hub accept: GitLab's groups, GitHub's packages, Harbor's proxies, the hub's longest names.
fn repositories() -> Vec<String> {
    vec![
        "model:1".to_owned(),
        "owner/repo:model".to_owned(),
        "owner/repo/model:1".to_owned(),
        "owner/repo.model:1".to_owned(),
        "owner.repo/model:1".to_owned(),
        "OWNER/REPO/sub/model:1".to_owned(),
        "group/sub.group/my__project/a--b/model_x:v1.0-rc.1".to_owned(),
        "proxy/hf.co/me/model:Q4_K_M".to_owned(),
        format!("{}/{}:{}", "u".repeat(96), "r".repeat(96), "t".repeat(128)),
        format!("g/{}/m:1", "n".repeat(251)),
    ]
}

fn names(run: &Run) -> BTreeSet<String> {
    let json = run.json();
    json["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn name_of_any_number_of_parts_works_with_every_verb() {
    let registry = FakeRegistry::start().unwrap();
    registry.require_token();
    let mut daemon = TestDaemon::start();
    let mut expected = BTreeSet::new();
    for (number, repository) in repositories().iter().enumerate() {
        let model = ModelFile::dense(number as u64);
        offer(&registry, repository, &model.bytes());
        let name = registry.name(repository).trim_start_matches("http://").to_owned();
        daemon.command().run(["pull", &name]).succeeds();
        assert!(
            daemon.command().run(["export", &name, "-o", "-"]).succeeds().stdout == model.bytes(),
            "{name}"
        );
        expected.insert(name);
    }
    daemon.stop();
    daemon.restart();
    let run = |line: &[&str]| daemon.command().run(line).succeeds();
    assert_eq!(names(&run(&["ls", "--json"])), expected);
    for name in &expected {
        for line in [
            &["show", name][..],
            &["history", name],
            &["pin", name],
            &["unpin", name],
            &["verify", name],
            &["fit", name],
            &["warm", name],
            &["tag", name, "copy"],
            &["diff", name, "copy"],
            &["rm", "copy"],
            &["rename", name, "other/a/b/c:d"],
            &["rename", "other/a/b/c:d", name],
            &["rm", name, "--keep", "1d"],
            &["undelete", name],
        ] {
            run(line);
        }
        assert_eq!(run(&["show", name, "--json"]).json()["name"], name.as_str());
        run(&["rm", name]);
    }
    assert!(names(&run(&["ls", "--json"])).is_empty());
    check_empty(daemon.root());
}

/// The tag `model` of `owner/repo` and the repository `owner/repo/model` would have the same path if each part were
/// a directory.
#[test]
fn tag_and_repository_of_one_path_are_two_models() {
    let daemon = TestDaemon::start();
    let all = [
        "h/owner/repo:model",
        "h/owner/repo/model:1",
        "h/owner/repo/model/1:1",
        "h/owner:repo",
        "owner/repo:1",
    ];
    for (number, name) in all.iter().enumerate() {
        let path = ModelFile::dense(number as u64).write_to(daemon.scratch(), "m.gguf");
        daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
    }
    for (number, name) in all.iter().enumerate() {
        let bytes = ModelFile::dense(number as u64).bytes();
        assert!(daemon.command().run(["export", name, "-o", "-"]).succeeds().stdout == bytes, "{name}");
    }
    let listed = daemon.command().line("ls --json");
    assert_eq!(names(&listed), all.iter().map(|name| (*name).to_owned()).collect());
}

/// On a file system that ignores case they could not both exist.
#[test]
fn names_that_differ_only_in_case_are_one_model_with_one_path() {
    let daemon = TestDaemon::start();
    let path = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    for name in ["ghcr.io/Owner/Repo/Model:V1", "ghcr.io/owner/repo/model:v1", "GHCR.io/owner/REPO/model:V1"]
    {
        daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        let listed = daemon.command().line("ls --json").json();
        assert_eq!(listed["models"].as_array().unwrap().len(), 1, "{name}: {listed}");
    }
    daemon.command().line("rm ghcr.io/OWNER/repo/MODEL:v1").succeeds();
    check_empty(daemon.root());
}
