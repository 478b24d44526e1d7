//! Pushes to an independent registry, see [`crate::pull::third_party`]; skipped if it is not installed.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use blobd_fixtures::skipped::skipped;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::temp_dirs::tmpfs_directory;

use super::{check_pulled, push, with_model};
use crate::pull::third_party::{Access, PASSWORD, ThirdPartyRegistry, daemon_with_credentials};

#[test]
fn model_pushed_to_a_real_registry_is_pulled_bit_for_bit() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    let name = registry.name("team/tiny:1");
    let pushed = push(&daemon, "tiny", &name, &[]);
    assert_eq!(pushed["sent_bytes"], pushed["size"]);
    check_pulled(&name, &weights);
    assert_eq!(push(&daemon, "tiny", &name, &[])["unchanged"], true);
    // A second repository gets the files from the first.
    daemon.command().run(["tag", "tiny", &name]).succeeds();
    let copied = push(&daemon, &name, &registry.name("team/copy:1"), &[]);
    assert_eq!(copied["mounted_bytes"], copied["size"]);
    check_pulled(&registry.name("team/copy:1"), &weights);
}

#[test]
fn each_form_at_a_real_registry_is_pulled_and_copied() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    push(&daemon, "tiny", &registry.name("team/tiny:1"), &[]);
    for form in ["modelpack", "docker"] {
        let name = registry.name(&format!("team/tiny:{form}"));
        let pushed = push(&daemon, "tiny", &name, &["--as", form]);
        assert_eq!(pushed["present_bytes"], weights.len(), "{form}");
        assert_eq!(push(&daemon, "tiny", &name, &["--as", form])["unchanged"], true);
        check_pulled(&name, &weights);
        let copies = tmpfs_directory();
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--src-tls-verify=false"]);
        skopeo.arg(format!("docker://{}/team/tiny:{form}", registry.address));
        skopeo.arg(format!("dir:{}", copies.path().display()));
        let Ok(copied) = skopeo.output() else { continue };
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let manifest = std::fs::read(copies.path().join("manifest.json")).unwrap();
        assert_eq!(pushed["digest"], format!("sha256:{}", sha256(&manifest)), "{form}");
        assert!(std::fs::read(copies.path().join(sha256(&weights))).unwrap() == weights, "{form}");
    }
}

#[test]
fn image_at_a_real_registry_is_copied_by_skopeo_and_unpacked_by_tar() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let (daemon, weights) = with_model(&ModelFile::dense_of(1, 2, 128));
    let pushed = push(&daemon, "tiny", &registry.name("img/tiny:1"), &["--as", "image"]);
    assert_eq!(pushed["sent_bytes"], pushed["size"]);
    let again = push(&daemon, "tiny", &registry.name("img/tiny:1"), &["--as", "image"]);
    assert_eq!((&again["unchanged"], &again["sent_bytes"]), (&true.into(), &0.into()));
    let (layout, unpacked) = (tmpfs_directory(), tmpfs_directory());
    let mut skopeo = Command::new("skopeo");
    skopeo.args(["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--src-tls-verify=false"]);
    skopeo.arg(format!("docker://{}/img/tiny:1", registry.address));
    skopeo.arg(format!("oci:{}:1", layout.path().display()));
    let copied = match skopeo.output() {
        Ok(copied) => copied,
        Err(error) => return skipped(format_args!("skopeo cannot be run: {error}")),
    };
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    let layer = pushed["files"][0]["digest"].as_str().unwrap().replace(':', "/");
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(layout.path().join("blobs").join(layer)).arg("-C").arg(unpacked.path());
    assert!(tar.status().unwrap().success());
    assert!(std::fs::read(unpacked.path().join("models/model.gguf")).unwrap() == weights);
    // A runtime's own check of the configuration against the layers.
    let mut inspect = Command::new("skopeo");
    inspect.args(["inspect", "--config", &format!("oci:{}:1", layout.path().display())]);
    let inspected = inspect.output().unwrap();
    assert!(inspected.status.success(), "{}", String::from_utf8_lossy(&inspected.stderr));
}

/// Forwards connections to a registry. The first that sends more than `limit` bytes breaks there.
fn breaking(registry: SocketAddr, limit: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let is_broken = Arc::new(AtomicBool::new(false));
    thread::spawn(move || {
        for client in listener.incoming() {
            let is_broken = Arc::clone(&is_broken);
            thread::spawn(move || forward(client.unwrap(), registry, limit, &is_broken));
        }
    });
    address
}

/// Forwards one connection, which breaks at the limit unless another one has.
fn forward(
    mut client: TcpStream,
    registry: SocketAddr,
    limit: usize,
    is_broken: &AtomicBool,
) -> io::Result<()> {
    let mut server = TcpStream::connect(registry)?;
    let (mut from, mut to) = (server.try_clone()?, client.try_clone()?);
    let back = thread::spawn(move || {
        let _ended = io::copy(&mut from, &mut to);
        let _gone = to.shutdown(Shutdown::Both);
    });
    let (mut buffer, mut sent) = (vec![0; 1 << 16], 0);
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let reaches_limit = sent + count >= limit && !is_broken.swap(true, Ordering::Relaxed);
        let count = if reaches_limit { limit.saturating_sub(sent) } else { count };
        if server.write_all(&buffer[..count]).is_err() || reaches_limit {
            break;
        }
        sent += count;
    }
    let _gone = server.shutdown(Shutdown::Both);
    let _gone = client.shutdown(Shutdown::Both);
    back.join().unwrap();
    Ok(())
}

#[test]
fn connection_to_a_real_registry_that_breaks_at_any_tenth_ends_in_the_exact_model() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let model = ModelFile::dense_of(1, 2, 128);
    let (daemon, weights) = with_model(&model);
    for tenth in 1..10 {
        let address = breaking(registry.address, weights.len() * tenth / 10);
        let repository = format!("team/tiny{tenth}");
        push(&daemon, "tiny", &format!("http://{address}/{repository}"), &[]);
        check_pulled(&registry.name(&repository), &weights);
    }
}

#[test]
fn real_registry_gets_the_password_stored_by_login() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Password) else { return };
    let (daemon, config) = daemon_with_credentials();
    let model = ModelFile::dense(1);
    let path = model.write_to(daemon.scratch(), "tiny.gguf");
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "tiny"]).succeeds();
    let name = registry.name("team/tiny:1");
    let failure = || daemon.command().run(["push", "tiny", &name, "--json"]).exits_with(7).error();
    assert!(failure().message.contains("blobd login"));
    registry.log_in(&daemon, &config, "a wrong password");
    failure();
    registry.log_in(&daemon, &config, PASSWORD);
    push(&daemon, "tiny", &name, &[]);
    daemon.command().run(["pull", &name]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == model.bytes());
    // From a registry that demands a password to another one.
    let Some(second) = ThirdPartyRegistry::start(Access::Password) else { return };
    let moved = second.name("team/moved:1");
    daemon.command().run(["transfer", &name, &moved, "--json"]).exits_with(7);
    second.log_in(&daemon, &config, PASSWORD);
    daemon.command().run(["transfer", &name, &moved]).succeeds();
    daemon.command().run(["pull", &moved]).succeeds();
    assert!(daemon.command().run(["export", &moved, "-o", "-"]).stdout == model.bytes());
    assert!(!daemon.log().contains(PASSWORD));
}
