//! `sign`, and `verify --signatures`, in each state of a signature.

use std::fs;

use blobd_store_format::digest::Digest;
use blobd_store_format::signature::{Bundle, SignedFile, Statement};
use blobd_tests::registry::Fault;
use serde_json::{Value as Json, json};

use super::sample::Sample;
use super::session::Session;

const PRIVATE: &str = include_str!("../../../../daemon/keys/tests/p256.pem");
const PUBLIC: &str = include_str!("../../../../daemon/keys/tests/p256-public.pem");
const OTHER: &str = include_str!("../../../../daemon/keys/tests/ed25519-public.pem");

pub(super) fn signatures(session: &mut Session, sample: &Sample) {
    let [private, public, other] =
        [("site.pem", PRIVATE), ("site.pub", PUBLIC), ("other.pub", OTHER)].map(|(name, pem)| {
            let path = sample.path(name);
            fs::write(&path, pem).unwrap();
            path
        });
    let bundle = sample.path("base.sig");
    session.fails_after_output(
        "verify --signatures",
        ["verify", "base", "absent", "--signatures", "--key", &public],
        "not_found",
    );
    session.line("sign", &format!("base --key {private} -o {bundle} --force"));
    session.line("sign", &format!("base --signature {bundle}"));
    session.line("sign", &format!("base -o {bundle} -f"));
    session.line("verify --signatures", &format!("base --key {public} --key {other}"));
    session.fails_after_output(
        "verify --signatures",
        ["verify", "base", "--signatures", "--key", &other],
        "not_found",
    );
    let pushed = sample.registry.name("team/signed:1");
    sample.registry.add_fault("/team/signed/manifests/sha256", 1, Fault::Refusal(400, "no artifacts here"));
    for _refused_sent_present in 0..3 {
        session.ok("push", ["push", "base", &pushed]);
    }
    session.ok("transfer", ["transfer", &pushed, &sample.registry.name("team/moved:3")]);
    if !session.has_daemon {
        let rule = format!("[[trust]]\npattern = \"base\"\nkeys = [{public:?}]\nmode = \"enforce\"\n");
        let config = sample.config("trust.toml", &rule);
        session.line("verify --signatures", &format!("base --config {}", config.display()));
    }
    // The signature of another model.
    session.fails_after_output(
        "verify --signatures",
        ["verify", "other", "--signatures", "--key", &public, "--signature", &bundle],
        "corrupt",
    );
    session.fails("invalid_input", ["sign", "other", "--signature", &bundle]);
    // One that names no key, and lists a file that the model lacks.
    let files = session.ok("verify --signatures", ["verify", "base", "--signatures", "--key", &public]);
    let mut files: Vec<SignedFile> = serde_json::from_value(files["models"][0]["files"].clone()).unwrap();
    files.push(SignedFile { path: "README.md".to_owned(), digest: Digest::of(b"") });
    let payload = Statement::new("base", files).unwrap().to_json().unwrap();
    let mut unnamed: Json =
        serde_json::from_str(Bundle::compose("k", &payload, b"x").unwrap().text()).unwrap();
    unnamed["verificationMaterial"]["publicKey"] = json!({});
    fs::write(&bundle, unnamed.to_string()).unwrap();
    session.line("sign", &format!("base --signature {bundle}"));
    session.ok("push", ["push", "base", &pushed]);
    session.line("verify --signatures", &format!("base --key {public}"));
}
