//! Who is served, and which models are shown.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use blobd_tests::command::{Blobd, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{Site, section};

fn denied() -> (u16, String) {
    (403, "DENIED".to_owned())
}

#[test]
fn daemon_serves_no_other_machine_unless_it_is_told_to() {
    let daemon = TestDaemon::start();
    assert!(!daemon.log().contains("models for other machines"), "{}", daemon.log());
    let settings = daemon.command().run(["config", "show", "--json"]).succeeds().json();
    let listen =
        settings["settings"].as_array().unwrap().iter().find(|setting| setting["key"] == "serve.listen");
    assert_eq!(listen.unwrap()["value"], json!(null));
}

#[test]
fn requests_of_other_sites_are_refused() {
    let site = Site::start_with("hosts = [\"models.example\"]");
    let port = site.address.port();
    for host in ["evil.example", "10.0.0.1", &format!("evil.example:{port}"), "127.0.0.1.evil.example"] {
        assert_eq!(site.get_with("/v2/", &format!("Host: {host}\r\n")).refusal(), denied(), "{host}");
    }
    for host in ["localhost", "models.example", &format!("Models.Example:{port}"), "[::1]"] {
        assert_eq!(site.get_with("/v2/", &format!("Host: {host}\r\n")).status, 200, "{host}");
    }
    assert_eq!(site.get_with("/v2/", "Origin: http://evil.example\r\n").refusal(), denied());
}

#[test]
fn only_models_of_the_list_are_shown() {
    let site = Site::start_with("models = [\"tiny:1\", \"hf.co/org/*\"]");
    site.add(&ModelFile::dense(1), &["tiny:1", "tiny:2", "secret:1", "hf.co/Org/Model:Q4"]);
    assert_eq!(site.get("/v2/_catalog").json()["repositories"], json!(["hf.co/org/model", "library/tiny"]));
    assert_eq!(site.get("/v2/tiny/tags/list").json()["tags"], json!(["1"]));
    assert_eq!(site.get("/v2/secret/manifests/1").refusal(), (404, "NAME_UNKNOWN".to_owned()));
    assert_eq!(site.get("/v2/tiny/manifests/2").refusal(), (404, "MANIFEST_UNKNOWN".to_owned()));
    // The list is read again while the daemon runs.
    fs::write(site.config().join("config.toml"), section("models = [\"secret\"]")).unwrap();
    let pid = Pid::from_raw(site.daemon.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    eventually("the list has changed", || {
        site.get("/v2/_catalog").json()["repositories"] == json!(["library/secret"])
    });
}

#[test]
fn blobs_are_shown_only_as_parts_of_models_that_are_shown() {
    let site = Site::start_with("models = [\"shown\"]");
    site.add(&ModelFile::dense(1), &["shown:1"]);
    let hidden = ModelFile::dense(2);
    site.add(&hidden, &["hidden:1"]);
    let digest = blobd_store_format::digest::Digest::of(&hidden.bytes());
    for repository in ["shown", "hidden", "library/hidden"] {
        assert_eq!(site.get(&format!("/v2/{repository}/blobs/{digest}")).status, 404, "{repository}");
    }
}

#[test]
fn models_that_some_user_may_not_read_are_not_shown() {
    let rules =
        "[[policy.rules]]\naction = \"deny\"\nname = \"secret*\"\nusers = [4242]\nreason = \"a test\"";
    let site = Site::start_with(rules);
    site.add(&ModelFile::dense(1), &["tiny:1", "secret:1"]);
    // The model is one, so its other name tells of the denied one too.
    assert_eq!(site.get("/v2/_catalog").json()["repositories"], json!([]));
    site.add(&ModelFile::dense(2), &["open:1"]);
    assert_eq!(site.get("/v2/_catalog").json()["repositories"], json!(["library/open"]));
    assert_eq!(site.get("/v2/secret/manifests/1").status, 404);
    // A user who may read it sees it.
    let site = Site::start_with(&format!("user = 4243\n{rules}"));
    site.add(&ModelFile::dense(1), &["secret:1"]);
    assert_eq!(site.get("/v2/secret/manifests/1").status, 200);
    let site = Site::start_with(&format!("user = 4242\n{rules}"));
    site.add(&ModelFile::dense(1), &["secret:1"]);
    assert_eq!(site.get("/v2/secret/manifests/1").status, 404);
}

#[test]
fn nothing_is_shown_if_not_every_user_may_read() {
    let site = Site::start_with("[access]\nread = [4242]");
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    assert_eq!(site.get("/v2/").refusal(), denied());
    assert!(site.daemon.log().contains("serve: nothing is shown"), "{}", site.daemon.log());
    let site = Site::start_with("user = 4242\n[access]\nread = [4242]");
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    assert_eq!(site.get("/v2/tiny/manifests/1").status, 200);
}

/// A file with two tokens, and its folder.
fn tokens(mode: u32) -> (tempfile::TempDir, PathBuf) {
    let folder = tmpfs_directory();
    let path = folder.path().join("tokens");
    fs::write(&path, "ann:0123456789abcdef\nbob:fedcba9876543210\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    (folder, path)
}

#[test]
fn token_is_required_if_there_is_a_file_of_tokens() {
    let (_folder, path) = tokens(0o600);
    let site = Site::start_with(&format!("tokens = {path:?}"));
    site.add(&ModelFile::dense(1), &["tiny:1"]);
    let refused = site.get("/v2/");
    assert_eq!(refused.refusal(), (401, "UNAUTHORIZED".to_owned()));
    assert_eq!(refused.header("www-authenticate"), Some("Basic realm=\"blobd\", charset=\"UTF-8\""));
    let with = |authorization: &str| {
        let answer = site.get_with("/v2/tiny/manifests/1", &format!("Authorization: {authorization}\r\n"));
        answer.status
    };
    // ann:0123456789abcdef, and with the token of bob.
    assert_eq!(with("Basic YW5uOjAxMjM0NTY3ODlhYmNkZWY="), 200);
    assert_eq!(with("Bearer fedcba9876543210"), 200);
    assert_eq!(with("Basic YW5uOmZlZGNiYTk4NzY1NDMyMTA="), 401);
    assert_eq!(with("Bearer x"), 401);
    eventually("the log names the owner of the token", || {
        site.daemon.log().contains("(\"bob\"): GET \"/v2/tiny/manifests/1\": 200")
    });
    // Another blobd logs in, and pulls.
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "").unwrap();
    let other = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
    let password = folder.path().join("password");
    fs::write(&password, "0123456789abcdef").unwrap();
    let registry = site.address.to_string();
    let mut command = other.command().command();
    command.args(["login", &registry, "-u", "ann", "--password-stdin", "--config"]).arg(&config);
    run(command.stdin(fs::File::open(password).unwrap())).succeeds();
    other.command().run(["pull", &format!("{registry}/library/tiny:1"), "--name", "tiny"]).succeeds();
}

#[test]
fn file_of_tokens_that_others_can_read_is_refused() {
    let (folder, path) = tokens(0o644);
    let config = folder.path().join("config.toml");
    fs::write(&config, section(&format!("tokens = {path:?}"))).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
    let refused = blobd.line("serve").exits_with(2);
    assert!(refused.stderr.contains("can be read or changed by others"), "{}", refused.stderr);
    blobd.line("config show").exits_with(2);
}

#[test]
fn model_that_is_not_signed_as_it_must_be_is_not_there() {
    const KEYS: [(&str, &str); 2] = [
        ("site.pem", include_str!("../../../../daemon/keys/tests/p256.pem")),
        ("site.pub", include_str!("../../../../daemon/keys/tests/p256-public.pem")),
    ];
    let keys = tempfile::tempdir().unwrap();
    let [private, public] = KEYS.map(|(name, pem)| {
        let path = keys.path().join(name);
        fs::write(&path, pem).unwrap();
        path
    });
    let rule = format!("hub = true\n[[trust]]\npattern = \"*\"\nkeys = [{public:?}]\nmode = \"enforce\"\n");
    let site = Site::start_with(&rule);
    site.add(&ModelFile::dense(1), &["team/m:1"]);
    let digest = site.daemon.command().line("show team/m:1 --json").succeeds().json()["layers"][0]["digest"]
        .as_str()
        .unwrap()
        .to_owned();
    let paths = [
        "/v2/team/m/manifests/1".to_owned(),
        "/v2/team/m/tags/list".to_owned(),
        format!("/v2/team/m/blobs/{digest}"),
        "/api/models/team/m/revision/main".to_owned(),
    ];
    for path in &paths {
        assert_eq!(site.get(path).status, 404, "{path}");
    }
    site.daemon.command().run(["sign", "team/m:1", "--key", private.to_str().unwrap()]).succeeds();
    for path in &paths {
        assert_eq!(site.get(path).status, 200, "{path}");
    }
}
