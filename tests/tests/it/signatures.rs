//! Signatures: `sign`, `verify --signatures`, and OpenSSF's own program as the other side.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_client::protocol::error::ErrorCode;
use blobd_store_format::signature::Bundle;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::wait::eventually;
use serde_json::{Value as Json, json};

mod model_signing;
mod policy;
mod pull_through;
mod saved;
mod transport;

const P256: [&str; 2] = [
    include_str!("../../../daemon/keys/tests/p256.pem"),
    include_str!("../../../daemon/keys/tests/p256-public.pem"),
];
const P384: [&str; 2] = [
    include_str!("../../../daemon/keys/tests/p384.pem"),
    include_str!("../../../daemon/keys/tests/p384-public.pem"),
];
const ED25519: [&str; 2] = [
    include_str!("../../../daemon/keys/tests/ed25519.pem"),
    include_str!("../../../daemon/keys/tests/ed25519-public.pem"),
];

/// A private key and its public key in files.
struct KeyFiles {
    private: PathBuf,
    public: PathBuf,
}

fn key_files(folder: &Path, name: &str, [private, public]: [&str; 2]) -> KeyFiles {
    let files =
        KeyFiles { private: folder.join(format!("{name}.pem")), public: folder.join(format!("{name}.pub")) };
    fs::write(&files.private, private).unwrap();
    fs::write(&files.public, public).unwrap();
    files
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A folder of safetensors files as its publisher has it.
fn publish(folder: &Path) -> PathBuf {
    let folder = folder.join("acme");
    fs::create_dir_all(folder.join("extra")).unwrap();
    let header = br#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes(), header.as_slice(), &[1; 16]].concat();
    fs::write(folder.join("model.safetensors"), weights).unwrap();
    fs::write(folder.join("config.json"), r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama"}"#)
        .unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    fs::write(folder.join("extra/generation_config.json"), "{}").unwrap();
    folder
}

fn import(blobd: &Blobd, folder: &Path) {
    blobd.run(["import", text(folder)]).succeeds();
}

/// The state of a model by these keys, with the name of the key and the reason.
fn state(blobd: &Blobd, model: &str, arguments: &[&str]) -> (String, Json, Json) {
    let run = blobd.run([&["verify", model, "--signatures", "--json"], arguments].concat());
    let document: Json = serde_json::from_str(run.text().lines().next().unwrap()).unwrap();
    let report = &document["models"][0];
    let expected = match report["state"].as_str().unwrap() {
        "signed" => 0,
        "wrong" => 5,
        _ => 3,
    };
    let run = run.exits_with(expected);
    drop(run);
    let reason = report["signatures"][0]["reason"].clone();
    (report["state"].as_str().unwrap().to_owned(), report["key"].clone(), reason)
}

#[test]
fn each_kind_of_key_signs_and_other_keys_do_not_verify_it() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let keys: Vec<_> = [("p256", P256), ("p384", P384), ("ed25519", ED25519)]
        .map(|(name, pair)| key_files(daemon.scratch(), name, pair))
        .into();
    for (number, signer) in (1..).zip(&keys) {
        let name = format!("m{number}");
        let file = ModelFile::dense(number).write_to(daemon.scratch(), &format!("{name}.gguf"));
        blobd.run(["import", text(&file)]).succeeds();
        for key in &keys {
            assert_eq!(state(&blobd, &name, &["--key", text(&key.public)]).0, "unsigned");
        }
        let signed = blobd.run(["sign", &name, "--key", text(&signer.private), "--json"]).succeeds().json();
        assert_eq!((&signed["files"], &signed["unchanged"]), (&json!(1), &Json::Null), "{signed}");
        for key in &keys {
            let is_signer = key.public == signer.public;
            let (found, by, _) = state(&blobd, &name, &["--key", text(&key.public)]);
            assert_eq!(found, if is_signer { "signed" } else { "unknown_key" });
            assert_eq!(by.is_null(), !is_signer, "{by}");
        }
        // The signature is the model's under all its names.
        blobd.run(["tag", &name, &format!("other{number}")]).succeeds();
        let of_other = state(&blobd, &format!("other{number}"), &["--key", text(&signer.public)]);
        assert_eq!(of_other.0, "signed");
    }
}

#[test]
fn signature_is_kept_until_its_model_is_collected() {
    let mut daemon = TestDaemon::start();
    let blobd = daemon.command();
    let key = key_files(daemon.scratch(), "site", P256);
    import(&blobd, &publish(daemon.scratch()));
    blobd.run(["sign", "acme", "--key", text(&key.private)]).succeeds();
    let signatures = daemon.root().join("signatures");
    let count = || fs::read_dir(&signatures).unwrap().count();
    assert_eq!(count(), 1);
    blobd.line("gc").succeeds();
    daemon.stop();
    daemon.restart();
    assert_eq!(state(&blobd, "acme", &["--key", text(&key.public)]).0, "signed");
    blobd.line("rm --keep 1d acme").succeeds();
    blobd.line("gc").succeeds();
    assert_eq!(count(), 1, "the model is in the trash");
    blobd.line("undelete acme").succeeds();
    assert_eq!(state(&blobd, "acme", &["--key", text(&key.public)]).0, "signed");
    blobd.line("rm acme").succeeds();
    blobd.line("gc").succeeds();
    assert_eq!(count(), 0);
}

#[test]
fn altered_added_and_missing_files_are_wrong() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let key = key_files(daemon.scratch(), "site", P256);
    let folder = publish(daemon.scratch());
    import(&blobd, &folder);
    let bundle = daemon.scratch().join("acme.sig");
    blobd.run(["sign", "acme", "--key", text(&key.private), "-o", text(&bundle)]).succeeds();
    let check = |reason: &str| {
        blobd.run(["rm", "acme"]).succeeds();
        import(&blobd, &folder);
        let arguments = ["--key", text(&key.public), "--signature", text(&bundle)];
        let (found, _, found_reason) = state(&blobd, "acme", &arguments);
        let found_reason = found_reason.as_str().unwrap_or_default().to_owned();
        assert_eq!((found.as_str(), found_reason.contains(reason)), ("wrong", true), "{found_reason}");
        assert_eq!(state(&blobd, "acme", &["--key", text(&key.public)]).0, "unsigned", "it is another model");
    };
    fs::write(folder.join("tokenizer.json"), "{ }").unwrap();
    check("file tokenizer.json: not the signed content");
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    fs::write(folder.join("added.json"), "{}").unwrap();
    check("file added.json: not signed");
    fs::remove_file(folder.join("added.json")).unwrap();
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    check("the model lacks tokenizer.json, which were signed");
}

#[test]
fn hostile_bundles_are_refused_with_their_reason() {
    let daemon = TestDaemon::start();
    let blobd = daemon.command();
    let key = key_files(daemon.scratch(), "site", P256);
    import(&blobd, &publish(daemon.scratch()));
    let path = daemon.scratch().join("acme.sig");
    blobd.run(["sign", "acme", "--key", text(&key.private), "-o", text(&path)]).succeeds();
    let valid: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let refused = |content: &[u8], reason: &str| {
        fs::write(&path, content).unwrap();
        for line in [
            &["sign", "acme", "--signature", text(&path)][..],
            &["verify", "acme", "--signatures", "--signature", text(&path)],
        ] {
            let error = blobd.run([line, &["--json"]].concat()).exits_with(1).error();
            assert!(error.message.contains(reason), "{reason}: {error}");
        }
    };
    refused(b"", "not a Sigstore bundle");
    refused(b"\xff\xfe", "expected text");
    refused(&vec![b' '; Bundle::MAX_BYTES + 1], "too long");
    refused("[".repeat(1 << 20).as_bytes(), "not a Sigstore bundle");
    let changed = |change: &dyn Fn(&mut Json)| {
        let mut bundle = valid.clone();
        change(&mut bundle);
        serde_json::to_vec(&bundle).unwrap()
    };
    refused(&changed(&|bundle| bundle["mediaType"] = json!("text/plain")), "wrong media type");
    refused(&changed(&|bundle| bundle["dsseEnvelope"]["payload"] = json!("e30=")), "missing field");
    refused(&changed(&|bundle| bundle["dsseEnvelope"]["signatures"] = json!([])), "expected 1, found 0");
    let with_certificate = json!({ "certificate": { "rawBytes": "" } });
    refused(&changed(&|bundle| bundle["verificationMaterial"] = with_certificate.clone()), "certificate");
    // A signature that the key has not made.
    let forged = changed(&|bundle| bundle["dsseEnvelope"]["signatures"][0]["sig"] = json!("MAA="));
    fs::write(&path, forged).unwrap();
    let arguments = ["--key", text(&key.public), "--signature", text(&path)];
    let (found, _, reason) = state(&blobd, "acme", &arguments);
    assert_eq!(found, "wrong");
    assert!(reason.as_str().unwrap().contains("site.pub, which did not sign this"), "{reason}");
}
