//! The daemon as a service of systemd: a socket that outlives it, and what it tells systemd.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use blobd_client::Client;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::RemoveParams;
use blobd_fixtures::skipped::skipped;
use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::reader::Reader;
use blobd_tests::service::{Service, WATCHDOG};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;

/// A service with a model `m` whose daemon has ended.
fn with_model(mut service: Service) -> Service {
    let model = ModelFile::dense(1).write_to(service.scratch(), "m.gguf");
    Blobd::at_root(&service.root())
        .run(["import", model.to_str().unwrap(), "--name", "m", "--quiet"])
        .succeeds();
    service.start();
    service.wait_for("READY=1");
    assert!(service.stop().success(), "{}", service.log());
    service
}

#[test]
fn passed_socket_is_served_and_stays_when_the_daemon_ends() {
    let mut service = Service::new();
    fs::set_permissions(service.socket(), fs::Permissions::from_mode(0o640)).unwrap();
    let before = fs::metadata(service.socket()).unwrap();
    service.start();
    let messages = service.wait_for("READY=1");
    let ready = messages.last().unwrap();
    let serving = format!("STATUS=serving {} on {}", service.root().display(), service.socket().display());
    assert!(ready.contains(&serving), "{ready}");
    service.command().line("ls").succeeds();
    assert!(service.stop().success(), "{}", service.log());
    service.wait_for("STOPPING=1");
    let after = fs::metadata(service.socket()).unwrap();
    assert_eq!((after.ino(), after.mode(), after.gid()), (before.ino(), before.mode(), before.gid()));
}

#[test]
fn client_that_connects_before_the_daemon_starts_is_served() {
    let mut service = with_model(Service::new());
    let socket = service.socket();
    let waiting = thread::spawn(move || {
        let client = Client::connect(socket).unwrap();
        client.open(&"m".parse().unwrap()).map(|model| model.tensors().len())
    });
    service.start();
    assert!(waiting.join().unwrap().unwrap() > 0);
}

/// As when a package is upgraded under programs that use models.
#[test]
fn restarts_lose_no_map_and_fail_no_open() {
    const CLIENTS: u64 = 4;
    const RESTARTS: usize = 5;
    let mut service = with_model(Service::new());
    service.start();
    let socket = service.socket();
    let mut reader = Reader::open(&socket, "m");
    let digest = reader.touch();
    let (stop, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    let use_models = || {
        let client = Client::connect(&socket).unwrap();
        while !stop.load(Ordering::Relaxed) {
            client.open(&"m".parse().unwrap()).unwrap();
            assert_eq!(client.models().unwrap().models.len(), 1);
            // Not repeated if a daemon has read it.
            assert_eq!(client.remove(&missing_model()).unwrap_err().code(), ErrorCode::NotFound);
            opened.fetch_add(1, Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(use_models)).collect();
        let have_failed = || clients.iter().any(thread::ScopedJoinHandle::is_finished);
        for _ in 0..RESTARTS {
            let before = opened.load(Ordering::Relaxed);
            eventually("clients use models", || {
                have_failed() || opened.load(Ordering::Relaxed) > before + CLIENTS
            });
            assert!(service.stop().success(), "{}", service.log());
            service.start();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(reader.touch(), digest);
}

fn missing_model() -> RemoveParams {
    RemoveParams { references: vec!["missing".parse().unwrap()], ..RemoveParams::default() }
}

#[test]
fn daemon_that_is_alive_tells_the_watchdog() {
    let microseconds = WATCHDOG.as_micros().to_string();
    let mut service = Service::new().with_variable("WATCHDOG_USEC", &microseconds);
    service.start();
    service.wait_for("READY=1");
    for _ in 0..3 {
        service.wait_for("WATCHDOG=1");
    }
    assert!(service.stop().success(), "{}", service.log());
}

/// The store is locked by a command that does not end.
#[test]
fn long_start_asks_systemd_for_more_time() {
    let mut service = with_model(Service::new());
    let lock = fs::File::options().read(true).write(true).open(service.root().join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    service.start();
    let messages = service.wait_for("EXTEND_TIMEOUT_USEC=60000000");
    let opening = format!("STATUS=opening the store {}", service.root().display());
    assert!(messages.iter().any(|message| message.contains(&opening)), "{messages:?}");
    drop(lock);
    service.wait_for("READY=1");
}

#[test]
fn descriptor_that_is_not_a_listening_socket_is_refused() {
    let folder = tmpfs_directory();
    let others: [(OwnedFd, &str); 2] = [
        (fs::File::create(folder.path().join("file")).unwrap().into(), "a file that is not a socket"),
        (UnixStream::pair().unwrap().0.into(), "a Unix socket that does not listen"),
    ];
    for (descriptor, found) in others {
        let mut service = Service::with_descriptor(descriptor);
        service.start();
        assert_eq!(service.ended().code(), Some(78), "{}", service.log());
        let log = service.log();
        assert!(
            log.contains(&format!(
                "descriptor from systemd: expected a listening Unix stream socket, found {found}"
            )),
            "{log}"
        );
        assert!(log.contains("hint: ") && log.contains("ListenStream="), "{log}");
    }
}

#[test]
fn several_descriptors_are_refused() {
    let mut service = Service::new().with_variable("LISTEN_FDNAMES", "a:b");
    service.start_with_descriptors(2);
    assert_eq!(service.ended().code(), Some(78), "{}", service.log());
    assert!(
        service.log().contains("descriptors from systemd: expected one, found 2 (a, b)"),
        "{}",
        service.log()
    );
}

#[test]
fn settings_of_a_passed_socket_are_those_of_its_unit() {
    let mut service = Service::new().configured("socket = \"/nonexistent/s\"\nsocket_mode = \"0666\"\n");
    let before = fs::metadata(service.socket()).unwrap().mode();
    service.start();
    service.wait_for("READY=1");
    assert_eq!(fs::metadata(service.socket()).unwrap().mode(), before);
    let log = service.log();
    assert!(log.contains("socket: /nonexistent/s: ignored"), "{log}");
    assert!(log.contains("socket_group, socket_mode: ignored") && log.contains("SocketMode="), "{log}");
}

/// Its clients are other users than its own, which own no blobs.
#[test]
fn passed_socket_that_admits_other_users_starts_a_daemon_for_many_users() {
    if rustix::process::geteuid().is_root() {
        skipped("a daemon of root is always for many users");
        return;
    }
    for mode in [0o660, 0o600] {
        let mut service = Service::new();
        fs::set_permissions(service.socket(), fs::Permissions::from_mode(mode)).unwrap();
        service.start();
        service.wait_for("READY=1");
        let report = service.command().line("doctor --json").json();
        let checks = report["checks"].as_array().unwrap();
        let owner = checks.iter().find(|check| check["name"] == "owner").unwrap();
        let is_single = owner["detail"].as_str().unwrap().contains("the only user");
        assert_eq!(is_single, mode == 0o600, "{mode:o}: {owner}");
    }
}

/// Variables that a service has inherited from its own service manager, such as in a terminal.
#[test]
fn variables_for_another_process_are_ignored() {
    let folder = tmpfs_directory();
    let socket = folder.path().join("own.sock");
    let mut command = Command::new(programs::blobd());
    Blobd::at_root(&folder.path().join("store")).prepare(&mut command);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1").env("WATCHDOG_PID", "1").env("WATCHDOG_USEC", "1");
    let mut child = command.arg("serve").arg("--socket").arg(&socket).spawn().unwrap();
    eventually("the daemon responds", || {
        Client::connect(&socket).is_ok_and(|client| client.version().is_ok())
    });
    child.kill().unwrap();
    child.wait().unwrap();
}
