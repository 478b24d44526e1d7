//! The policy: which models are allowed to whom.

use std::fs;

use blobd_store_format::manifest::Manifest;
use blobd_tests::command::Run;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::names;
use serde_json::{Value as Json, json};

use super::access::{Shared, User, documented_table};
use super::multi_user::can_be_others;

mod reuse;

const MODEL: &str = "application/vnd.ollama.image.model";
const LICENSE: &str = "application/vnd.ollama.image.license";
const STUDENTS: u32 = 64300;
const STUDENT: User = User { uid: 64011, groups: &[64011, STUDENTS] };
const TEACHER: User = User { uid: 64012, groups: &[64012, STUDENTS, 64301] };
const STAFF: User = User { uid: 64013, groups: &[64013] };
const SOCKET: &str = "socket_mode = \"0666\"\n[access]\nadmin = [\"*\"]\n";

fn denying(conditions: &str) -> String {
    format!("{SOCKET}[[policy.rules]]\naction = \"deny\"\nreason = \"not reviewed\"\n{conditions}\n")
}

/// A daemon with a model of each of these names.
fn with_models(names: &[&str]) -> Shared {
    let shared = Shared::start(SOCKET);
    names.iter().for_each(|name| import(&shared, name, &[]));
    shared
}

fn import(shared: &Shared, name: &str, metadata: &[(&str, &str)]) {
    let model = ModelFile::dense(1).with("general.name", name);
    let model = metadata.iter().fold(model, |model, (key, value)| model.with(key, *value));
    let path = model.write_to(shared.folder.path(), "m.gguf");
    shared.daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

fn is_denied(response: &Json) -> bool {
    response["error"]["code"] == "denied_by_policy"
}

/// Runs a command of the daemon's own user, which the rule denies.
fn denied(shared: &Shared, line: &str) -> String {
    let error = shared.daemon.command().line(line).exits_with(7).error();
    assert_eq!(error.code.name(), "denied_by_policy", "{line}: {error}");
    assert!(error.message.contains("by rule 1 of the policy: not reviewed"), "{line}: {error}");
    let place = format!("{}:4", shared.config.display());
    assert!(error.hint.as_ref().unwrap().contains(&place), "{line}: {error}");
    error.message
}

#[test]
fn every_request_that_reads_or_adds_a_denied_model_is_refused() {
    let registry = FakeRegistry::start().unwrap();
    let shared = with_models(&["acme/m", "acme/trashed", "plain"]);
    shared.daemon.command().line("rm acme/trashed --keep 7d").succeeds();
    shared.reload(&denying("name = \"acme/*\""));
    let source = registry.name("acme/x:1");
    let client = shared.daemon.client();
    let socket = shared.daemon.socket();
    let curl = |method: &str, path: &str, body: &str| match method {
        "GET" => http::get(&socket, path).body,
        _ => http::post(&socket, path, body).body,
    };
    for (request, checked) in documented_table("2.3 Policy") {
        let by_source = format!("{{\"reference\":\"{source}\"}}");
        let transfer = format!("{{\"source\":\"{source}\",\"destination\":\"127.0.0.1:1/a/b\"}}");
        let pair = "{\"source\":\"acme/m\",\"target\":\"n\"}";
        let body = match request.as_str() {
            _ if checked == "nothing" => continue,
            "GET /v1/heads/{reference}" | "GET /v1/fit/{reference}" => "",
            "POST /v1/promote" | "POST /v1/signatures" => "{\"reference\":\"acme/m\"}",
            "POST /v1/sign" => "{\"reference\":\"acme/m\",\"bundle\":\"{}\"}",
            "POST /v1/push" => "{\"reference\":\"acme/m\",\"destination\":\"127.0.0.1:1/a/b\"}",
            "POST /v1/pull" | "POST /v1/pull/plan" | "POST /v1/resolve" | "POST /v1/inspect" => &by_source,
            "POST /v1/transfer" => &transfer,
            "POST /v1/tag" | "POST /v1/rename" => pair,
            "POST /v1/edit" => {
                "{\"source\":\"acme/m\",\"target\":\"n\",\"keys\":[{\"key\":\"general.name\",\"value\":\"n\"}]}"
            }
            "POST /v1/undelete" | "POST /v1/undo" => "{\"reference\":\"acme/trashed\"}",
            "POST /v1/open" => {
                denied(&shared, "export acme/m -o - --json");
                continue;
            }
            "POST /v1/import" => {
                let path = shared.folder.path().join("m.gguf");
                denied(&shared, &format!("import {} --name acme/n --json", path.display()));
                continue;
            }
            other => panic!("{other}: how is this request denied?"),
        };
        let (method, path) = request.split_once(' ').unwrap();
        let response = curl(method, &path.replace("{reference}", "acme/m"), body);
        assert!(response.contains("\"denied_by_policy\""), "{request}: {response}");
    }
    // A new name is checked too.
    for path in ["/v1/tag", "/v1/rename"] {
        let response = curl("POST", path, "{\"source\":\"plain\",\"target\":\"acme/n\"}");
        assert!(response.contains("\"denied_by_policy\""), "{path}: {response}");
    }
    assert!(registry.requests().is_empty(), "no server is contacted");
    assert_eq!(client.models().unwrap().models.len(), 2);
    assert!(names(&shared.daemon.root().join("staging")).is_empty());
    shared.daemon.command().line("export plain -o -").succeeds();
    shared.daemon.command().line("rm acme/m").succeeds();
}

#[test]
fn show_tells_the_decision_and_its_rule() {
    let shared = with_models(&["acme/m", "plain"]);
    shared.reload(&denying("name = \"acme/*\""));
    let show = |line: &str| shared.daemon.command().line(line).succeeds();
    let denied = show("show acme/m --json").json();
    let place = format!("{}:4", shared.config.display());
    assert_eq!(
        denied["policy"],
        json!({ "allowed": false, "rule": 1, "reason": "not reviewed", "found": "name acme/m:latest", "place": place })
    );
    assert_eq!(denied["metadata"], json!({}));
    assert!(show("show acme/m").text().contains("denied by rule 1"));
    assert_eq!(show("show plain --json").json()["policy"], json!({ "allowed": true }));
    assert!(!show("show plain").text().contains("policy"));
    shared.daemon.command().line("show acme/m --template").exits_with(7);
}

#[test]
fn another_name_or_an_edit_does_not_bypass_a_rule() {
    let registry = FakeRegistry::start().unwrap();
    let file = ModelFile::dense(1).bytes();
    registry.add_model("acme/x:1", b"{}", &[(MODEL, &file)]).unwrap();
    let shared = Shared::start(SOCKET);
    let command = || shared.daemon.command();
    command().run(["pull", &registry.name("acme/x:1"), "--name", "mine"]).succeeds();
    command().line("tag mine also-mine").succeeds();
    command().line("edit mine edited --set general.name=other").succeeds();
    for conditions in ["registry = \"127.0.0.1\"", "name = \"acme/x\"", "name = \"also-mine\""] {
        shared.reload(&denying(conditions));
        for name in ["mine", "also-mine", "edited"] {
            denied(&shared, &format!("export {name} -o - --json"));
        }
    }
    shared.reload(&denying("registry = \"local\""));
    command().line("export edited -o -").succeeds();
}

/// A store with a model of the registry `evil`, which a rule denies from now on, and another registry.
struct Denied {
    evil: FakeRegistry,
    other: FakeRegistry,
    shared: Shared,
    weights: Vec<u8>,
    manifest: Manifest,
}

impl Denied {
    fn start() -> Self {
        let [evil, other] = [(); 2].map(|()| FakeRegistry::start().unwrap());
        let weights = ModelFile::dense_of(1, 2, 256).bytes();
        let manifest = evil.add_model("acme/x:1", b"{}", &[(MODEL, &weights)]).unwrap();
        let shared = Shared::start(SOCKET);
        shared.daemon.command().run(["pull", &evil.name("acme/x:1"), "--name", "mine"]).succeeds();
        shared.reload(&denying(&format!("registry = \"{}\"", host(&evil))));
        denied(&shared, "export mine -o - --json");
        Self { evil, other, shared, weights, manifest }
    }

    fn pull(&self, source: &str, name: &str) -> Run {
        self.shared.daemon.command().run(["pull", source, "--name", name, "--json"])
    }

    fn blobs(&self) -> Vec<String> {
        let mut blobs = names(&self.shared.daemon.root().join("blobs"));
        blobs.sort();
        blobs
    }
}

fn fails(run: Run) -> Run {
    assert_ne!(run.code, 0, "{}", run.stderr);
    run
}

fn host(registry: &FakeRegistry) -> String {
    registry.url().trim_start_matches("http://").to_owned()
}

#[test]
fn manifest_that_names_files_of_a_denied_model_does_not_give_access_to_them() {
    let case = Denied::start();
    let raw = [case.manifest.raw(), b" "].concat();
    case.other.add_manifest("x/y:1", &raw);
    let (source, before) = (case.other.name("x/y:1"), case.blobs());
    fails(case.pull(&source, "stolen"));
    case.shared.daemon.command().line("export stolen -o -").exits_with(3);
    // The head of the file is requested.
    fails(case.shared.daemon.command().run(["pull", &source, "--dry-run", "--json"]));
    // Whoever has the files may store them, and the store keeps one copy.
    case.other.add_blob(case.weights.as_slice());
    case.other.add_blob(b"{}".as_slice());
    case.pull(&source, "own").succeeds();
    assert!(case.other.bytes_served() >= case.weights.len() as u64, "all of it is requested");
    assert_eq!(case.blobs(), before);
    let exported = case.shared.daemon.command().line("export own -o -").succeeds();
    assert!(exported.stdout == case.weights);
    denied(&case.shared, "export mine -o - --json");
    // Now a model with these files may be read.
    let requests = case.other.requests().len();
    case.other.add_manifest("x/z:1", &[case.manifest.raw(), b"  "].concat());
    case.pull(&case.other.name("x/z:1"), "again").succeeds();
    assert_eq!(case.other.requests().len(), requests + 1, "only the manifest");
    assert!(case.evil.requests().len() > 1);
}

#[test]
fn tensor_of_a_denied_model_cannot_be_named_as_a_layer() {
    let case = Denied::start();
    let shown = case.shared.daemon.command().line("show mine --json").succeeds().json();
    let tensor = &shown["tensors"][0];
    let (digest, size) = (tensor["digest"].as_str().unwrap(), tensor["size"].as_u64().unwrap());
    let config = case.other.add_blob(b"{}".as_slice());
    let raw = json!({ "schemaVersion": 2,
        "config": { "mediaType": "application/vnd.docker.container.image.v1+json", "digest": config, "size": 2 },
        "layers": [{ "mediaType": LICENSE, "digest": digest, "size": size }] });
    case.other.add_manifest("x/y:1", raw.to_string().as_bytes());
    fails(case.pull(&case.other.name("x/y:1"), "stolen"));
}

#[test]
fn digest_in_a_response_header_does_not_give_access_to_a_denied_model() {
    let case = Denied::start();
    let file = ModelFile::dense(3).bytes();
    let digest = format!("\"{}\"", sha256(&case.weights));
    case.other.add_page("/x/y.gguf", &file, &[("X-Linked-ETag", &digest)]);
    case.pull(&format!("{}/x/y.gguf", case.other.url()), "own").succeeds();
    assert!(case.shared.daemon.command().line("export own -o -").succeeds().stdout == file);
}

/// Another user's download has all bytes of a file, but its model is not complete.
#[test]
fn unfinished_download_of_a_denied_model_is_not_continued_from_another_source() {
    if !can_be_others() {
        return;
    }
    let [evil, other] = [(); 2].map(|()| FakeRegistry::start().unwrap());
    let weights = ModelFile::dense_of(1, 2, 256).bytes();
    let license = vec![b'x'; 300 << 10];
    evil.add_model("acme/x:1", b"{}", &[(MODEL, &weights), (LICENSE, &license)]).unwrap();
    let path = format!("/blobs/sha256:{}", sha256(&license));
    evil.add_fault(&path, usize::MAX, Fault::Status(410));
    let shared =
        Shared::start(&denying(&format!("registry = \"{}\"\nusers = [{}]", host(&evil), STUDENT.uid)));
    fails(shared.daemon.command().run(["pull", &evil.name("acme/x:1")]));
    assert!(!names(&shared.daemon.root().join("partial")).is_empty());
    let own = other.add_model("x/y:1", b"{}", &[(MODEL, &weights)]).unwrap();
    other.add_fault(&format!("/blobs/{}", own.layers()[0].digest), usize::MAX, Fault::Status(410));
    let pull = format!("pull {} --json", other.name("x/y:1"));
    fails(shared.run(STUDENT, &pull));
    other.clear_faults();
    shared.run(STUDENT, &pull).succeeds();
    assert!(other.bytes_served() >= weights.len() as u64);
}

#[test]
fn edited_model_keeps_its_origin_when_another_gets_the_name_of_its_source() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("acme/x:1", b"{}", &[(MODEL, &ModelFile::dense(1).bytes())]).unwrap();
    let shared = Shared::start(SOCKET);
    let command = || shared.daemon.command();
    command().run(["pull", &registry.name("acme/x:1"), "--name", "mine"]).succeeds();
    command().line("tag mine kept").succeeds();
    command().line("edit mine edited --set general.name=other").succeeds();
    let listed = command().line("ls --json").succeeds().json();
    let model = |name: &str| {
        let models = listed["models"].as_array().unwrap();
        models.iter().find(|model| model["name"] == name).unwrap().clone()
    };
    let origin = format!("edit mine:latest@{}", model("mine:latest")["digest"].as_str().unwrap());
    assert_eq!(model("edited:latest")["origin"], origin);
    let table = command().line("ls --verbose").succeeds().text().to_owned();
    assert!(table.contains("edit mine:latest") && !table.contains("edit mine:latest@"), "{table}");
    let path = ModelFile::dense(2).write_to(shared.folder.path(), "m.gguf");
    command().run(["import", path.to_str().unwrap(), "--name", "mine", "--force"]).succeeds();
    for conditions in ["registry = \"127.0.0.1\"", "name = \"acme/x\"", "name = \"kept\"", "name = \"mine\""]
    {
        shared.reload(&denying(conditions));
        denied(&shared, "export edited -o - --json");
    }
    shared.reload(&denying("registry = \"local\""));
    command().line("export edited -o -").succeeds();
    // A record of an earlier version has no digest, and the name is followed.
    let digest = model("edited:latest")["digest"].as_str().unwrap().replace(':', "-");
    let record = shared.daemon.root().join(format!("origins/{digest}.json"));
    fs::write(&record, "{\"origin\":\"edit mine:latest\"}").unwrap();
    fs::remove_dir_all(shared.daemon.root().join("history")).unwrap();
    denied(&shared, "export edited -o - --json");
}

#[test]
fn without_a_record_of_its_origin_a_model_comes_from_the_hosts_in_its_names() {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("acme/x:1", b"{}", &[(MODEL, &ModelFile::dense(1).bytes())]).unwrap();
    let shared = Shared::start(SOCKET);
    let name = registry.name("acme/x:1");
    shared.daemon.command().run(["pull", &name]).succeeds();
    shared.daemon.command().run(["tag", &name, "copy"]).succeeds();
    shared.reload(&denying(&format!("registry = \"{}\"", host(&registry))));
    denied(&shared, "export copy -o - --json");
    let origins = shared.daemon.root().join("origins");
    let record = origins.join(&names(&origins)[0]);
    fs::write(&record, "{").unwrap();
    let error = fails(shared.daemon.command().line("export copy -o - --json")).error();
    assert!(error.message.contains("cannot parse"), "{error}");
    fs::remove_file(&record).unwrap();
    denied(&shared, "export copy -o - --json");
}

#[test]
fn license_and_format_are_checked_before_weights_are_downloaded() {
    let registry = FakeRegistry::start().unwrap();
    let publish = |name: &str, model: &ModelFile, license: &str| {
        let file = model.bytes();
        registry.add_model(name, b"{}", &[(MODEL, &file), (LICENSE, license.as_bytes())]).unwrap();
        (registry.name(name), file.len() as u64)
    };
    let large = || ModelFile::dense_of(1, 4, 512);
    let (by_text, size) = publish("me/text:1", &large(), "Attribution-NonCommercial 4.0 International");
    let (by_key, _) = publish("me/key:1", &large().with("general.license", "cc-by-nc-4.0"), "MIT License");
    let (free, _) = publish("me/free:1", &large().with("general.license", "mit"), "MIT License");
    let shared = Shared::start(&denying("license = \"cc-by-nc-*\""));
    for name in [&by_text, &by_key] {
        for line in [format!("pull {name} --json"), format!("pull {name} --dry-run --json")] {
            denied(&shared, &line);
        }
    }
    assert!(registry.bytes_served() < size, "{} bytes served", registry.bytes_served());
    assert!(names(&shared.daemon.root().join("partial")).is_empty());
    shared.daemon.command().run(["pull", &free]).succeeds();
    shared.daemon.command().run(["export", &free, "-o", "-"]).succeeds();
    let path = large().with("general.license", "CC-BY-NC-4.0").write_to(shared.folder.path(), "nc.gguf");
    denied(&shared, &format!("import {} --json", path.display()));
    shared.reload(&denying("license = \"mit\""));
    denied(&shared, &format!("export {free} -o - --json"));
    shared.reload(&denying("format = \"gguf\""));
    denied(&shared, &format!("export {free} -o - --json"));
    shared.reload(&denying("license = \"unknown\"\nformat = \"safetensors\""));
    shared.daemon.command().run(["export", &free, "-o", "-"]).succeeds();
}

#[test]
fn only_what_a_rule_allows_is_allowed_if_the_default_denies() {
    let shared = with_models(&["acme/m", "plain"]);
    shared.reload(&format!(
        "{SOCKET}[policy]\ndefault = \"deny\"\n[[policy.rules]]\naction = \"allow\"\nname = \"acme/*\"\n"
    ));
    shared.daemon.command().line("export acme/m -o -").succeeds();
    let error = shared.daemon.command().line("export plain -o - --json").exits_with(7).error();
    assert!(error.message.contains("allows only what a rule allows"), "{error}");
    assert!(error.hint.unwrap().contains("policy.default in "));
}

#[test]
fn rules_are_for_users_and_groups_and_change_without_a_restart() {
    if !can_be_others() {
        return;
    }
    let shared = with_models(&["acme/m"]);
    let heads = "GET /v1/heads/acme/m";
    let decisions = || [STUDENT, TEACHER, STAFF].map(|user| is_denied(&shared.request(user, heads).1));
    assert_eq!(decisions(), [false; 3]);
    shared.reload(&denying("users = [\"@64300\"]\nexcept = [\"@64301\"]"));
    assert_eq!(decisions(), [true, false, false]);
    let (status, response) = shared.request(STUDENT, heads);
    assert_eq!(status, 403);
    let message = response["error"]["message"].as_str().unwrap();
    assert!(message.contains("denied to uid 64011 by rule 1"), "{message}");
    shared.run(STUDENT, "export acme/m -o -").exits_with(7);
    shared.run(STAFF, "export acme/m -o -").succeeds();
    shared.reload(&denying("users = [64013]"));
    assert_eq!(decisions(), [false, false, true]);
}

#[test]
fn commands_without_a_daemon_obey_the_policy() {
    let folder = blobd_tests::temp_dirs::tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "").unwrap();
    let blobd = blobd_tests::command::Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    blobd.run(["import", path.to_str().unwrap(), "--name", "acme/m"]).succeeds();
    fs::write(&config, denying("name = \"acme/*\"")).unwrap();
    let error = blobd.line("export acme/m -o - --json").exits_with(7).error();
    assert_eq!(error.code.name(), "denied_by_policy");
}
