//! `serve.upstream`: models that are requested and not stored are pulled, and sent while they arrive.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;

use blobd_store_format::digest::Digest;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::safetensors;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{BlobDelivery, FakeRegistry, Fault};
use blobd_tests::store_dir::check_blobs;
use blobd_tests::wait::{DEADLINE, eventually};
use serde_json::{Value as Json, json};

use super::{Answer, Site, layers};

/// Of some MB, so that it arrives in several pieces.
fn large(seed: u64) -> ModelFile {
    ModelFile::dense_of(seed, 4, 256)
}

/// A registry with this file as `library/tiny:latest`.
fn registry_with(file: &[u8]) -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    registry.set_blob_delivery(BlobDelivery::Direct);
    add(&registry, "tiny", file);
    registry
}

fn add(registry: &FakeRegistry, model: &str, file: &[u8]) {
    let layers = [("application/vnd.ollama.image.model", file)];
    registry.add_model(&format!("library/{model}"), b"{}", &layers).unwrap();
}

/// A machine that pulls from a registry in place of Ollama's.
fn site_of(url: &str, settings: &str) -> Site {
    Site::start_with(&format!(
        "upstream = [\"registry.ollama.ai\"]\n{settings}\n\
         [transfer]\nstall_timeout_seconds = 1\n[mirrors]\n\"registry.ollama.ai\" = \"{url}\"\n"
    ))
}

fn site(registry: &FakeRegistry) -> Site {
    site_of(&registry.url(), "")
}

/// The requests for files.
fn blobs_asked(registry: &FakeRegistry) -> usize {
    registry.requests().iter().filter(|request| request.path.contains("/blobs/")).count()
}

fn path_of(file: &[u8]) -> String {
    format!("/v2/library/tiny/blobs/{}", Digest::of(file))
}

/// Requests a file, and reads some bytes of it.
fn begin(site: &Site, path: &str, bytes: usize) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(site.address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", site.address).unwrap();
    let mut read = vec![0; bytes];
    stream.read_exact(&mut read).unwrap();
    (stream, read)
}

/// The rest of an answer, as far as it was sent.
fn finish((mut stream, mut read): (TcpStream, Vec<u8>)) -> Answer {
    // A connection that was cut may be an error or an end.
    let _ = stream.read_to_end(&mut read);
    Answer::parse(&read)
}

pub(super) fn is_stored(site: &Site, name: &str) -> bool {
    let models = site.daemon.client().models().unwrap().models;
    models.iter().any(|model| model.name == name || model.name == format!("{name}:latest"))
}

#[test]
fn first_client_reads_while_the_file_arrives_and_the_second_costs_nothing() {
    let file = large(1).bytes();
    let registry = registry_with(&file);
    let site = site(&registry);
    registry.add_fault(&Digest::of(&file).to_string(), usize::MAX, Fault::StallAfter(3 << 20, DEADLINE));
    let (manifest, digest) = site.manifest("library/tiny", "latest");
    assert_eq!(layers(&manifest), [Digest::of(&file).to_string()]);
    assert_eq!(site.head(&format!("/v2/tiny/manifests/{digest}")).status, 200);
    let config = manifest["config"]["digest"].as_str().unwrap();
    assert_eq!(site.get(&format!("/v2/tiny/blobs/{config}")).body, b"{}");
    let begun = begin(&site, &path_of(&file), 1 << 20);
    assert!(!is_stored(&site, "tiny"), "the registry has not sent all of it");
    // A range too, but not the end of the file.
    let part = site.get_with(&path_of(&file), "Range: bytes=1000-1999\r\n");
    assert!(part.status == 206 && part.body == file[1000..2000]);
    registry.clear_faults();
    let answer = finish(begun);
    assert_eq!(answer.header("docker-content-digest"), Some(&*Digest::of(&file).to_string()));
    assert!(answer.status == 200 && answer.body == file);
    eventually("the model has its name", || is_stored(&site, "tiny"));
    check_blobs(&site.folder.path().join("store"));
    let asked = registry.requests().len();
    assert_eq!(site.manifest("tiny", "latest"), (manifest, digest));
    assert!(site.get(&path_of(&file)).body == file);
    let part = site.get_with(&path_of(&file), "Range: bytes=100-\r\n");
    assert!(part.status == 206 && part.body == file[100..]);
    assert_eq!(registry.requests().len(), asked, "the second client costs the registry nothing");
    let log = site.daemon.command().run(["log", "--json"]).succeeds().stdout;
    let log = String::from_utf8(log).unwrap();
    let mut records = log.lines().map(|line| serde_json::from_str::<Json>(line).unwrap());
    let record = records.rfind(|record| record["verb"] == "pull").expect("a record of the pull");
    assert_eq!((&record["result"], &record["model"]), (&json!("ok"), &json!("tiny:latest")));
}

/// `push --tensors` publishes a manifest that only blobds read; other programs get the model behind it.
#[test]
fn model_with_a_layer_per_tensor_is_sent_in_its_own_form() {
    let registry = registry_with(b"unused");
    let publisher = TestDaemon::start();
    let path = large(1).write_to(publisher.scratch(), "tiny.gguf");
    publisher.command().run(["import", path.to_str().unwrap(), "--name", "tiny"]).succeeds();
    publisher.command().run(["push", "tiny", &registry.name("library/tiny:latest"), "--tensors"]).succeeds();
    let own = publisher.client().models().unwrap().models.remove(0).digest.to_string();
    let (site, file) = (site(&registry), large(1).bytes());
    let (manifest, digest) = site.manifest("library/tiny", "latest");
    assert_eq!((layers(&manifest), digest), (vec![Digest::of(&file).to_string()], own));
    assert!(site.get(&path_of(&file)).body == file);
    eventually("the model has its name", || is_stored(&site, "tiny"));
    check_blobs(&site.folder.path().join("store"));
}

#[test]
fn relative_of_a_stored_model_costs_its_own_tensors() {
    let base = large(1);
    let tuned = base.clone().with_changed("blk.1.attn_q.weight");
    let (base, tuned) = (base.bytes(), tuned.bytes());
    let registry = registry_with(&base);
    add(&registry, "tuned", &tuned);
    let site = site(&registry);
    site.manifest("tiny", "latest");
    assert!(site.get(&path_of(&base)).body == base);
    let before = registry.bytes_served();
    site.manifest("tuned", "latest");
    let path = format!("/v2/tuned/blobs/{}", Digest::of(&tuned));
    assert!(site.get(&path).body == tuned);
    let moved = registry.bytes_served() - before;
    assert!(moved < tuned.len() as u64 / 2, "{moved} of {}", tuned.len());
}

#[test]
fn clients_at_the_same_time_cost_one_download() {
    let file = large(2).bytes();
    let registry = registry_with(&file);
    let site = site(&registry);
    thread::scope(|scope| {
        for _client in 0..4 {
            scope.spawn(|| {
                site.manifest("tiny", "latest");
                assert!(site.get(&path_of(&file)).body == file);
            });
        }
    });
    let (moved, size) = (registry.bytes_served(), file.len() as u64);
    assert!(moved < size + size / 4, "{moved} of {size}");
}

#[test]
fn registry_that_dies_costs_no_bytes_that_have_arrived() {
    let file = large(3).bytes();
    let registry = registry_with(&file);
    let site = site(&registry);
    let digest = Digest::of(&file).to_string();
    registry.add_fault(&digest, 3, Fault::CutAfter(2 << 20));
    registry.add_fault(&digest, usize::MAX, Fault::Status(404));
    site.manifest("tiny", "latest");
    let cut = finish(begin(&site, &path_of(&file), 1 << 10));
    assert!(cut.status == 200 && cut.body.len() < file.len(), "{} bytes", cut.body.len());
    assert!(file.starts_with(&cut.body) && !is_stored(&site, "tiny"));
    let arrived = registry.bytes_served();
    assert!(arrived > 2 << 20, "{arrived}");
    registry.clear_faults();
    // After a failure, the registry is left alone for a moment.
    eventually("the file is pulled again", || site.get(&path_of(&file)).body == file);
    let moved = registry.bytes_served();
    assert!(moved < file.len() as u64 * 5 / 4, "{moved} of {}", file.len());
    eventually("the model has its name", || is_stored(&site, "tiny"));
}

#[test]
fn registry_that_lies_gives_no_client_a_whole_file() {
    let file = large(4).bytes();
    let registry = registry_with(&file);
    let site = site(&registry);
    let wrong = file.len() as u64 / 4;
    registry.add_fault("/blobs/", usize::MAX, Fault::FlipInFile(wrong));
    site.manifest("tiny", "latest");
    let cut = finish(begin(&site, &path_of(&file), 1 << 10));
    assert!(cut.body.len() < file.len(), "all {} bytes", cut.body.len());
    eventually("the pull has failed", || site.get(&path_of(&file)).status == 502);
    assert!(!is_stored(&site, "tiny"));
    registry.clear_faults();
    eventually("the right file", || site.get(&path_of(&file)).body == file);
    // Whoever continues gets all of it: the beginning may be wrong.
    let answer = site.get_with(&path_of(&file), &format!("Range: bytes={}-\r\n", cut.body.len()));
    assert!(answer.status == 200 && answer.body == file);
}

#[test]
fn client_that_goes_away_does_not_end_the_pull() {
    let file = large(5).bytes();
    let registry = registry_with(&file);
    let site = site(&registry);
    registry.add_fault(&Digest::of(&file).to_string(), usize::MAX, Fault::StallAfter(2 << 20, DEADLINE));
    site.manifest("tiny", "latest");
    drop(begin(&site, &path_of(&file), 1 << 10));
    registry.clear_faults();
    eventually("the model is stored", || is_stored(&site, "tiny"));
    let asked = blobs_asked(&registry);
    assert!(site.get(&path_of(&file)).body == file);
    assert_eq!(blobs_asked(&registry), asked);
}

#[test]
fn registry_is_asked_only_for_what_may_be_shown_and_was_not_made_here() {
    let file = ModelFile::dense(1).bytes();
    let registry = registry_with(&file);
    let site = site_of(&registry.url(), "models = [\"tiny\", \"own\", \"hf.co/*\"]");
    site.add(&ModelFile::dense(2), &["own:1"]);
    for path in [
        "/v2/secret/manifests/latest",
        "/v2/library/tiny2/manifests/latest",
        "/v2/hf.co/org/model/manifests/latest",
        "/v2/ghcr.io/library/tiny/manifests/latest",
        "/v2/tiny/manifests/latest?ns=ghcr.io",
        "/v2/tiny/tags/list",
        "/v2/tiny/manifests/..",
        &path_of(&file),
    ] {
        assert_eq!(site.get(path).status, 404, "{path}");
    }
    assert_eq!(site.get("/v2/own/manifests/1").status, 200);
    assert_eq!(registry.requests().len(), 0, "{:?}", registry.requests());
    assert_eq!(site.get("/v2/tiny/manifests/no-such-tag").status, 404);
    assert_eq!(site.get("/v2/tiny/manifests/latest?ns=registry.ollama.ai").status, 200);
    eventually("the pull has ended", || is_stored(&site, "tiny"));
    // A rule that denies it to some user denies it here too.
    let rule = "[[policy.rules]]\naction = \"deny\"\nname = \"tiny*\"\nusers = [4242]\nreason = \"a test\"";
    let (asked, site) = (registry.requests().len(), site_of(&registry.url(), rule));
    assert_eq!(site.get("/v2/tiny/manifests/latest").status, 404);
    assert_eq!(registry.requests().len(), asked);
}

#[test]
fn models_are_pulled_through_several_machines_but_not_in_a_circle() {
    let file = large(6).bytes();
    let registry = registry_with(&file);
    let far = site(&registry);
    let near = site_of(&format!("http://{}", far.address), "");
    let (_, digest) = near.manifest("tiny", "latest");
    assert!(near.get(&path_of(&file)).body == file);
    assert_eq!(far.manifest("tiny", "latest").1, digest);
    assert!(registry.bytes_served() < file.len() as u64 * 5 / 4);
    let requests = registry.requests();
    let via = requests.last().unwrap().header("via").expect("the machines in between").to_owned();
    assert_eq!(via.split(',').count(), 2, "{via}");
    let asked = requests.len();
    let circle = far.get_with("/v2/other/manifests/latest", &format!("Via: {via}\r\n"));
    assert_eq!(circle.refusal(), (404, "NAME_UNKNOWN".to_owned()));
    assert_eq!(registry.requests().len(), asked);
}

#[test]
fn stored_name_follows_its_registry_if_that_answers() {
    let (old, new) = (ModelFile::dense(1).bytes(), large(7).bytes());
    let registry = registry_with(&old);
    let site = site(&registry);
    site.daemon.command().run(["pull", "tiny"]).succeeds();
    add(&registry, "tiny", &new);
    let (manifest, digest) = site.manifest("tiny", "latest");
    assert_eq!(layers(&manifest), [Digest::of(&new).to_string()]);
    assert!(site.get(&path_of(&new)).body == new);
    eventually("the name means the new one", || {
        let shown = site.daemon.command().line("show tiny --json").succeeds().json();
        shown["digest"] == digest
    });
}

#[test]
fn stored_models_are_served_without_their_registry() {
    let file = ModelFile::dense(1).bytes();
    let registry = registry_with(&file);
    let site = site(&registry);
    site.daemon.command().run(["pull", "tiny"]).succeeds();
    drop(registry);
    site.manifest("tiny", "latest");
    assert!(site.get(&path_of(&file)).body == file);
    let refused = site.get("/v2/other/manifests/latest");
    assert_eq!(refused.refusal(), (502, "UNKNOWN".to_owned()));
}

const REPOSITORY: &str = "org/folder";

/// A hub with a model of safetensors, whose files are those of the list.
fn hub(files: &[(&str, &[u8])]) -> FakeRegistry {
    let hub = FakeRegistry::start().unwrap();
    hub.add_folder(REPOSITORY, "0123456789abcdef0123456789abcdef01234567", files);
    hub
}

/// A machine that pulls from a hub in place of Hugging Face.
pub(super) fn site_of_hub(hub: &FakeRegistry, settings: &str) -> Site {
    Site::start_with(&format!(
        "hub = true\nupstream = [\"hf.co\"]\n{settings}\n\
         [transfer]\nstall_timeout_seconds = 1\n[mirrors]\n\"hf.co\" = \"{}\"\n",
        hub.url()
    ))
}

#[test]
fn client_of_the_hub_gets_a_repository_that_is_not_stored() {
    let weights = safetensors(&[(1, "a"), (2, "b")]);
    let config = br#"{"architectures":["BertModel"],"model_type":"bert"}"#;
    let files: [(&str, &[u8]); 3] =
        [("README.md", b"# A model"), ("config.json", config), ("model.safetensors", &weights)];
    let hub = hub(&files);
    let site = site_of_hub(&hub, "");
    // The weights do not arrive yet.
    let digest = Digest::of(&weights).to_hex();
    hub.add_fault(&digest, usize::MAX, Fault::StallAfter(1000, DEADLINE));
    let model = site.get(&format!("/api/models/{REPOSITORY}/revision/main")).json();
    let commit = model["sha"].as_str().unwrap();
    let siblings: Vec<_> =
        model["siblings"].as_array().unwrap().iter().map(|file| &file["rfilename"]).collect();
    assert_eq!(siblings, ["README.md", "config.json", "model.safetensors"]);
    let tree = site.get(&format!("/api/models/{REPOSITORY}/tree/{commit}?recursive=true")).json();
    assert_eq!((&tree[2]["lfs"]["oid"], &tree[2]["size"]), (&json!(digest), &json!(weights.len())));
    let refs = site.get(&format!("/api/models/{REPOSITORY}/refs")).json();
    assert_eq!(refs["branches"][0]["targetCommit"], *commit);
    let path = |revision: &str, file: &str| format!("/{REPOSITORY}/resolve/{revision}/{file}");
    assert_eq!(site.get(&path(commit, "config.json")).body, config);
    let head = site.head(&path("main", "model.safetensors"));
    assert_eq!((head.status, head.header("x-repo-commit")), (200, Some(commit)));
    assert_eq!(head.header("etag"), Some(&*format!("\"{digest}\"")));
    for (path, code) in [
        (path(commit, "model.bin"), "EntryNotFound"),
        (path("v2", "config.json"), "RevisionNotFound"),
        ("/api/models/no/such/revision/main".to_owned(), "RepoNotFound"),
    ] {
        assert_eq!(site.get(&path).header("x-error-code"), Some(code), "{path}");
    }
    hub.clear_faults();
    for (name, bytes) in files {
        assert!(site.get(&path(commit, name)).body == bytes, "{name}");
    }
    eventually("the model has its name", || is_stored(&site, "hf.co/org/folder"));
    check_blobs(&site.folder.path().join("store"));
    let asked = hub.requests().len();
    assert_eq!(site.get(&format!("/api/models/{REPOSITORY}/revision/main")).json(), model);
    assert!(site.get(&path(commit, "model.safetensors")).body == weights);
    assert_eq!(hub.requests().len(), asked, "the second client costs the hub nothing");
    let hidden = site_of_hub(&hub, "models = [\"tiny\"]");
    assert_eq!(hidden.get(&format!("/api/models/{REPOSITORY}/revision/main")).status, 404);
    assert_eq!(hub.requests().len(), asked);
}

#[test]
fn pulls_are_those_of_a_user_who_may_pull() {
    let file = ModelFile::dense(1).bytes();
    let registry = registry_with(&file);
    let site = site_of(&registry.url(), "upstream_user = 4242\n[access]\npull = [4243]");
    assert_eq!(site.get("/v2/tiny/manifests/latest").status, 404);
    assert_eq!(registry.requests().len(), 0);
    let site = site_of(&registry.url(), "upstream_user = 4243\n[access]\npull = [4243]");
    site.manifest("tiny", "latest");
    eventually("the model has its name", || is_stored(&site, "tiny"));
    // The record is written after the name.
    eventually("the audit log has the pull", || {
        let log = site.daemon.command().run(["log", "--json", "--user", "4243"]).succeeds();
        String::from_utf8(log.stdout).unwrap().contains("tiny:latest")
    });
    // Its quota applies.
    let file = large(8).bytes();
    let quota = "upstream_user = 4243\n[quotas.users]\n\"4243\" = { hard = \"100 KiB\" }";
    let registry = registry_with(&file);
    let site = site_of(&registry.url(), quota);
    site.get("/v2/tiny/manifests/latest");
    eventually("the pull is refused", || site.get(&path_of(&file)).status == 502);
    assert!(registry.bytes_served() < 1 << 20 && !is_stored(&site, "tiny"));
}
