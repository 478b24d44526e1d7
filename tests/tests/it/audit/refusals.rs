//! Each kind of refusal has a record that says who was refused what.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use blobd_tests::model::ModelFile;
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

use super::super::access::{Shared, User, can_be_others};
use super::records;

const USER: User = User { uid: 64401, groups: &[64401] };
const OPEN: &str = "socket_mode = \"0666\"\n[access]\nadmin = []\n";
const RULE: &str = "[[policy.rules]]\naction = \"deny\"\nreason = \"not reviewed\"\nname = \"acme/*\"\n";

/// A daemon with the models `acme/m`, which a rule denies, and `m`. The user may store 1000 bytes.
fn shared() -> Shared {
    let shared = Shared::start(OPEN);
    shared.import();
    shared.daemon.command().line("tag m acme/m").succeeds();
    shared.reload(&format!("{OPEN}{RULE}[quotas.users.{}]\nhard = '1000 B'\n", USER.uid));
    shared
}

/// The record of the only refused request with this verb.
fn refusal(shared: &Shared, verb: &str) -> Json {
    let (blobd, options) = (shared.daemon.command(), format!("--failed --verb {verb}"));
    eventually("the refusal is recorded", || records(&blobd, &options).len() == 1);
    records(&blobd, &options).remove(0)
}

fn check(record: &Json, model: &str, result: &str) {
    assert_eq!((&record["uid"], &record["result"]), (&USER.uid.into(), &result.into()), "{record}");
    assert_eq!(record["model"], model, "{record}");
    assert!(record["message"].is_string() && record["request"].is_string(), "{record}");
}

#[test]
fn refusal_by_right_is_recorded() {
    if !can_be_others() {
        return;
    }
    let shared = shared();
    // It is checked before the parameters are read.
    shared.run(USER, "gc").exits_with(7);
    let record = refusal(&shared, "gc");
    let message =
        format!("gc: not permitted for uid {}: expected the right \"admin\", found \"pull\"", USER.uid);
    assert_eq!((&record["message"], &record["result"]), (&message.into(), &"denied".into()), "{record}");
    shared.run(USER, "rm m").exits_with(7);
    let record = refusal(&shared, "rm");
    check(&record, "m:latest", "denied");
    assert!(record["message"].as_str().unwrap().contains("was added by another user"), "{record}");
}

#[test]
fn refusal_by_policy_is_recorded_also_of_requests_that_read() {
    if !can_be_others() {
        return;
    }
    let shared = shared();
    for (verb, request, model) in [
        ("heads", "GET /v1/heads/acme/m", "acme/m:latest"),
        ("fit", "GET /v1/fit/acme/m?context=512", "acme/m:latest"),
        ("resolve", "POST /v1/resolve {\"reference\":\"acme/x\"}", "acme/x:latest"),
        ("inspect", "POST /v1/inspect {\"reference\":\"acme/y\"}", "acme/y:latest"),
        (
            "edit",
            "POST /v1/edit {\"source\":\"acme/m\",\"target\":\"e\",\"template_layer\":\"t\"}",
            "e:latest",
        ),
    ] {
        let response = shared.request(USER, request).1;
        assert_eq!(response["error"]["code"], "denied_by_policy", "{request}: {response}");
        check(&refusal(&shared, verb), model, "denied_by_policy");
    }
    assert_eq!(refusal(&shared, "edit")["details"]["from"], "acme/m:latest");
}

#[test]
fn refusal_by_quota_is_recorded() {
    if !can_be_others() {
        return;
    }
    let shared = shared();
    let path = ModelFile::dense(2).write_to(shared.folder.path(), "q.gguf");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    shared.run(USER, &format!("import {} --name q", path.display())).exits_with(6);
    check(&refusal(&shared, "import"), "q:latest", "over_quota");
}
