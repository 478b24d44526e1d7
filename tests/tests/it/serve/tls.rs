//! `[serve]` with a certificate.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::tls::{AUTHORITY, CERTIFICATE, KEY};
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};

use super::Site;

/// Writes a file of these permissions, and returns its path.
fn file(folder: &Path, name: &str, content: &str, mode: u32) -> String {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn settings(certificate: &str, key: &str) -> String {
    format!("certificate = {certificate:?}\nkey = {key:?}\n")
}

#[test]
fn model_is_pulled_over_tls_by_who_trusts_the_authority() {
    let folder = tmpfs_directory();
    let [certificate, key] =
        [("c.pem", CERTIFICATE), ("k.pem", KEY)].map(|(name, pem)| file(folder.path(), name, pem, 0o600));
    let site = Site::start_with(&settings(&certificate, &key));
    let bytes = site.add(&ModelFile::dense(1), &["tiny"]);
    assert!(site.daemon.log().contains("models for other machines on https://127.0.0.1:"));
    let name = format!("https://localhost:{}/library/tiny", site.address.port());
    let authority = file(folder.path(), "authority.pem", AUTHORITY, 0o600);
    let trusting = file(folder.path(), "trusting.toml", &format!("ca_files = [{authority:?}]\n"), 0o600);
    let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(Path::new(&trusting));
    blobd.run(["pull", &name, "--name", "m"]).succeeds();
    let exported = folder.path().join("m.gguf");
    blobd.run(["export", "m", "-o", exported.to_str().unwrap()]).succeeds();
    assert!(fs::read(exported).unwrap() == bytes);
    let error =
        Blobd::at_root(&folder.path().join("other")).run(["pull", &name, "--json"]).exits_with(1).error();
    assert!(error.message.contains("certificate"), "{error}");
}

#[test]
fn request_without_tls_is_not_answered() {
    let folder = tmpfs_directory();
    let [certificate, key] =
        [("c.pem", CERTIFICATE), ("k.pem", KEY)].map(|(name, pem)| file(folder.path(), name, pem, 0o600));
    let site = Site::start_with(&settings(&certificate, &key));
    let mut stream = TcpStream::connect(site.address).unwrap();
    stream.write_all(b"GET /v2/ HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
}

#[test]
fn files_that_are_no_certificate_and_its_key_are_named() {
    let folder = tmpfs_directory();
    let [certificate, key] =
        [("c.pem", CERTIFICATE), ("k.pem", KEY)].map(|(name, pem)| file(folder.path(), name, pem, 0o600));
    let open = file(folder.path(), "open.pem", KEY, 0o644);
    let other = file(folder.path(), "other.pem", AUTHORITY, 0o600);
    let refused = |settings: &str| {
        let config = folder.path().join("config.toml");
        fs::write(&config, super::section(settings)).unwrap();
        let blobd = Blobd::at_root(&folder.path().join("store")).configured_by(&config);
        let run = blobd.run(["serve"]);
        assert_ne!(run.code, 0, "{settings}");
        run.stderr
    };
    for (certificate, key, expected) in [
        (&certificate, &open, "can be read or changed by others: expected mode 0600 or 0640, found 0644"),
        (&key, &key, "contains no certificate in PEM"),
        (&certificate, &other, "contains no private key in PEM"),
        (&other, &key, "cannot be used: "),
    ] {
        let error = refused(&settings(certificate, key));
        assert!(error.contains(expected) && error.contains("config.toml:"), "{expected}: {error}");
    }
    let error = refused(&format!("certificate = {certificate:?}\n"));
    assert!(error.contains("serve.certificate: expected serve.key beside it"), "{error}");
    let error = refused(&format!("key = {key:?}\n"));
    assert!(error.contains("serve.key: expected serve.certificate beside it"), "{error}");
    let error = refused(&settings("/nonexistent", &key));
    assert!(error.contains("serve.certificate: /nonexistent: cannot read"), "{error}");
}

/// Another authority, and a certificate with its key that it has signed.
const OTHER: [&str; 3] = [
    include_str!("../../../../daemon/registry/src/testdata/ca.pem"),
    include_str!("../../../../daemon/registry/src/testdata/server.pem"),
    include_str!("../../../../daemon/registry/src/testdata/server.key"),
];

#[test]
fn renewed_certificate_is_used_after_sighup_and_a_wrong_one_is_not() {
    let folder = tmpfs_directory();
    let write = |name: &str, pem: &str| file(folder.path(), name, pem, 0o600);
    let (certificate, key) = (write("c.pem", CERTIFICATE), write("k.pem", KEY));
    let site = Site::start_with(&settings(&certificate, &key));
    site.add(&ModelFile::dense(1), &["tiny"]);
    let trusts = |authority: &str| {
        let authority = write("authority.pem", authority);
        let config = write("trusting.toml", &format!("ca_files = [{authority:?}]\n"));
        let name = format!("https://localhost:{}/library/tiny", site.address.port());
        let store = tmpfs_directory();
        let blobd = Blobd::at_root(&store.path().join("store")).configured_by(Path::new(&config));
        blobd.run(["pull", &name, "--name", "m"]).code == 0
    };
    assert!(trusts(AUTHORITY) && !trusts(OTHER[0]));
    let reloads = || site.daemon.log().matches("SIGHUP: ").count();
    let reload = || {
        let before = reloads();
        kill_process(Pid::from_raw(site.daemon.pid().try_into().unwrap()).unwrap(), Signal::HUP).unwrap();
        eventually("the configuration is read", || reloads() > before);
    };
    // Half a renewal: the key is that of the other certificate.
    write("c.pem", OTHER[1]);
    reload();
    assert!(site.daemon.log().contains("SIGHUP: the configuration stays as it is"));
    assert!(trusts(AUTHORITY) && !trusts(OTHER[0]));
    write("k.pem", OTHER[2]);
    reload();
    assert!(trusts(OTHER[0]) && !trusts(AUTHORITY));
}
