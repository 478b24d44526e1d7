//! Repeated pulls of files at URLs: their versions at the server are compared before anything is fetched.

use std::fs;
use std::path::PathBuf;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::check_blobs;
use blobd_tests::temp_dirs::tmpfs_directory;
use serde_json::Value as Json;
use tempfile::TempDir;

const ALWAYS: usize = usize::MAX;
const LONG_AGO: &str = "Mon, 04 Jan 2021 10:00:00 GMT";
const NOW: &str = "Tue, 05 Jan 2021 10:00:00 GMT";

/// A store, and a server with one file.
struct Case {
    folder: TempDir,
    registry: FakeRegistry,
    config: Option<PathBuf>,
}

impl Case {
    fn with(model: &ModelFile, headers: &[(&'static str, &str)]) -> Self {
        let case = Self { folder: tmpfs_directory(), registry: FakeRegistry::start().unwrap(), config: None };
        case.offer(model, headers);
        case
    }

    fn offer(&self, model: &ModelFile, headers: &[(&'static str, &str)]) {
        self.registry.add_page("/m/x.gguf", &model.bytes(), headers);
    }

    fn blobd(&self) -> Blobd {
        let blobd = Blobd::at_root(&self.folder.path().join("store"));
        match &self.config {
            Some(config) => blobd.configured_by(config),
            None => blobd,
        }
    }

    fn url(&self) -> String {
        format!("{}/m/x.gguf", self.registry.url())
    }

    fn run(&self, name: &str) -> Run {
        self.blobd().run(["pull", &self.url(), "--name", name, "--json"])
    }

    /// Pulls the file. Returns the last line and the number of requests, and checks the result.
    fn pull(&self, name: &str, model: &ModelFile) -> (Json, usize) {
        let before = self.registry.requests().len();
        let done = self.run(name).succeeds().json_lines().pop().unwrap();
        assert!(self.blobd().run(["export", name, "-o", "-"]).succeeds().stdout == model.bytes());
        (done, self.registry.requests().len() - before)
    }

    /// Asserts that a repeated pull costs one request.
    fn check_unchanged(&self, name: &str, model: &ModelFile) {
        let (done, requests) = self.pull(name, model);
        assert_eq!((&done["downloaded_bytes"], requests), (&Json::from(0), 1), "{done}");
    }

    /// Asserts that a repeated pull fetches the file.
    fn check_fetched(&self, name: &str, model: &ModelFile) {
        let (done, requests) = self.pull(name, model);
        assert!(requests > 1 && done["unchanged"].is_null(), "{requests} requests, {done}");
    }
}

#[test]
fn unchanged_file_costs_one_request() {
    let model = ModelFile::dense(1);
    let dated: &[(&'static str, &str)] = &[("Last-Modified", LONG_AGO), ("Date", NOW)];
    for headers in [&[("ETag", "\"1\"")][..], dated] {
        let case = Case::with(&model, headers);
        case.check_fetched("m", &model);
        case.check_unchanged("m", &model);
        assert_eq!(case.run("m").succeeds().json_lines().pop().unwrap()["unchanged"], true);
        let text = case.blobd().run(["pull", &case.url(), "--name", "m"]).succeeds().stdout;
        assert!(String::from_utf8(text).unwrap().contains("unchanged"));
        // The file is known, whatever the model is called.
        case.check_unchanged("other", &model);
        let plan = case.blobd().run(["pull", &case.url(), "--dry-run", "--json"]).succeeds().json();
        assert_eq!(plan["download_bytes"], 0, "{plan}");
    }
}

#[test]
fn changed_file_is_fetched_and_its_version_replaces_the_older_one() {
    let (old, new) = (ModelFile::dense(1), ModelFile::dense(2));
    let case = Case::with(&old, &[("ETag", "\"1\"")]);
    case.check_fetched("m", &old);
    case.offer(&new, &[("ETag", "\"2\"")]);
    case.check_fetched("m", &new);
    case.check_unchanged("m", &new);
    // The same bytes under another version: fetched once more, then known.
    case.offer(&new, &[("ETag", "\"3\"")]);
    let (_, requests) = case.pull("m", &new);
    assert!(requests > 1);
    case.check_unchanged("m", &new);
}

#[test]
fn server_that_ignores_the_condition_is_recognised_by_its_validators() {
    let model = ModelFile::dense(1);
    let case = Case::with(&model, &[("ETag", "\"1\"")]);
    case.check_fetched("m", &model);
    case.registry.add_fault("/m/", ALWAYS, Fault::IgnoreCondition);
    case.check_unchanged("m", &model);
}

/// They do not say that the bytes are the same.
#[test]
fn weak_missing_and_recent_validators_are_not_trusted() {
    let model = ModelFile::dense(1);
    for headers in [&[("ETag", "W/\"1\"")][..], &[], &[("Last-Modified", NOW), ("Date", NOW)]] {
        let case = Case::with(&model, headers);
        case.check_fetched("m", &model);
        let (_, requests) = case.pull("m", &model);
        assert!(requests > 1, "{headers:?}");
    }
}

/// A server may use one version for two contents. What is stored decides.
#[test]
fn incomplete_file_is_fetched_although_its_version_is_unchanged() {
    let (old, new) = (ModelFile::dense(1), ModelFile::dense(2));
    let case = Case::with(&old, &[("ETag", "\"1\"")]);
    case.check_fetched("m", &old);
    case.offer(&new, &[("ETag", "\"1\"")]);
    let shown = case.blobd().run(["show", "m", "--json"]).succeeds().json();
    let digest = shown["tensors"][0]["digest"].as_str().unwrap().replace(':', "-");
    fs::remove_file(case.folder.path().join("store/blobs").join(digest)).unwrap();
    case.check_fetched("n", &new);
    check_blobs(&case.folder.path().join("store"));
}

#[test]
fn hugging_faces_digest_in_a_redirect_is_used() {
    let model = ModelFile::dense(1);
    let digest = format!("\"{}\"", sha256(&model.bytes()));
    let mut case = Case::with(&model, &[("X-Linked-ETag", &digest)]);
    let config = case.folder.path().join("config.toml");
    fs::write(&config, format!("[mirrors]\n\"hf.co\" = \"{}\"\n", case.registry.url())).unwrap();
    case.config = Some(config);
    case.check_fetched("m", &model);
    case.check_unchanged("n", &model);
}

/// It could name a file that it does not have.
#[test]
fn digest_of_another_server_is_not_used() {
    let (offered, named) = (ModelFile::dense(1), ModelFile::dense(2));
    let digest = format!("\"{}\"", sha256(&named.bytes()));
    let case = Case::with(&named, &[]);
    case.check_fetched("m", &named);
    case.offer(&offered, &[("X-Linked-ETag", &digest)]);
    case.check_fetched("n", &offered);
}

#[test]
fn interrupted_pull_is_resumed_on_the_condition_of_the_same_version() {
    let model = ModelFile::dense_of(1, 2, 256);
    let case = Case::with(&model, &[("ETag", "\"1\"")]);
    case.registry.add_fault("/m/", 2, Fault::CutAfter(300_000));
    case.registry.add_fault("/m/", ALWAYS, Fault::Status(410));
    case.run("m").exits_with(1);
    case.registry.clear_faults();
    let before = case.registry.requests().len();
    let (done, _) = case.pull("m", &model);
    assert!(done["already_stored_bytes"].as_u64().unwrap() > 0, "{done}");
    let requests = case.registry.requests();
    let ranges = requests.iter().skip(before + 1).filter(|request| request.header("range").is_some());
    assert!(ranges.clone().count() > 0);
    assert!(ranges.into_iter().all(|request| request.header("if-range") == Some("\"1\"")));
}
