//! SIGTERM ends the daemon within a time limit, even if operations hang.

use std::io::Write as _;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::hanging::{Hang, HangingFiles};
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::staged;
use blobd_tests::wait::eventually;

use super::fairness::{Background, Tarpit};

/// The time limit for stopping.
const LIMIT: Duration = Duration::from_secs(10);

fn stops(daemon: &mut TestDaemon) {
    let started = Instant::now();
    let status = daemon.stop();
    assert!(status.success(), "{status}: {}", daemon.log());
    assert!(started.elapsed() < LIMIT, "{:?}: {}", started.elapsed(), daemon.log());
}

/// Asserts that no process of a stopped daemon keeps the next one from opening the store.
fn stops_and_starts_again(hang: Hang) {
    let mut daemon = TestDaemon::start();
    let model = ModelFile::dense_of(1, 2, 128);
    let Some(files) = HangingFiles::mount(&daemon.scratch().join("hanging"), model.bytes()) else { return };
    let path = files.path(hang);
    let _import = Background::start(&daemon, None, &["import", "--name", "m", path.to_str().unwrap()]);
    eventually("the daemon's process hangs", || files.waiting() > 0);
    stops(&mut daemon);
    daemon.restart();
    assert_eq!(staged(daemon.root()), [""; 0]);
    daemon.command().line("ls").succeeds();
}

#[test]
fn import_that_hangs_in_a_read_does_not_delay_the_stop() {
    stops_and_starts_again(Hang::Read);
}

#[test]
fn import_that_hangs_in_a_direct_read_does_not_delay_the_stop() {
    stops_and_starts_again(Hang::DirectRead);
}

#[test]
fn import_that_hangs_when_inspected_does_not_delay_the_stop() {
    stops_and_starts_again(Hang::Inspect);
}

#[test]
fn import_that_hangs_on_close_does_not_delay_the_stop() {
    stops_and_starts_again(Hang::Close);
}

#[test]
fn pull_from_a_registry_that_never_responds_does_not_delay_the_stop() {
    let (mut daemon, tarpit) = (TestDaemon::start(), Tarpit::start());
    let _pull = Background::start(&daemon, None, &["pull", &tarpit.name("m")]);
    let _plan = Background::start(&daemon, None, &["pull", "--dry-run", &tarpit.name("other")]);
    tarpit.wait_for(2);
    stops(&mut daemon);
}

#[test]
fn clients_that_do_not_read_do_not_delay_the_stop() {
    let mut daemon = TestDaemon::start();
    let model = ModelFile::dense(1).write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), model.as_os_str()]).succeeds();
    let requests =
        ["GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n", "GET /v1/doctor HTTP/1.1\r\nhost: x\r\n\r\n"];
    let unread: Vec<_> = requests
        .into_iter()
        .map(|request| {
            let mut stream = http::connect(&daemon.socket());
            // Several responses on each connection, so that they fill the kernel's buffers.
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            (0..64).for_each(|_| drop(stream.write_all(request.as_bytes())));
            stream
        })
        .collect();
    stops(&mut daemon);
    drop(unread);
}

/// Checks the tests' own tarpit.
#[test]
fn tarpit_accepts_and_sends_nothing() {
    let tarpit = Tarpit::start();
    let port = tarpit.port();
    let _connection = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    tarpit.wait_for(1);
    assert!(TcpListener::bind(("127.0.0.1", port)).is_err());
}
