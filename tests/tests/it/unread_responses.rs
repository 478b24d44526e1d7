//! Clients that read nothing of the response to any request: memory and threads stay within their bounds.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::memory::{status_bytes, threads};
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::routes::{Models, all_routes, longest_requests, model_with_large_header, request};
use blobd_tests::wait::eventually;

const LAYER: &str = "application/vnd.ollama.image.model";

/// The bound that docs/SECURITY.md promises.
const MEMORY_BYTES: u64 = 256 << 20;
/// Half of the threads that blocking work may have.
const THREADS: usize = 256;

/// Unread responses to each request. With the header below, all of one route would take more than the bound.
const UNREAD: usize = 20;
const HEADER_MIB: usize = 12;

struct Store {
    daemon: TestDaemon,
    registry: FakeRegistry,
}

impl Store {
    /// A daemon that has a model with a large header, and a registry that has the same one.
    fn start() -> Self {
        Self::with_model(&model_with_large_header(HEADER_MIB))
    }

    fn with_model(model: &[u8]) -> Self {
        let (daemon, registry) = (TestDaemon::start(), FakeRegistry::start().unwrap());
        registry.add_model("library/heads:latest", b"{}", &[(LAYER, model)]).unwrap();
        let path = daemon.scratch().join("heads.gguf");
        std::fs::write(&path, model).unwrap();
        daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
        Self { daemon, registry }
    }

    fn requests(&self) -> Vec<String> {
        let source = self.registry.name("library/heads");
        let models = Models { stored: "heads", source: &source };
        all_routes().iter().map(|route| request(route, models)).collect()
    }

    fn ask(&self, request: &str) -> UnixStream {
        let mut stream = http::connect(&self.daemon.socket());
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// Units of a pool of permits that are in use.
    fn in_use(&self, pool: &str) -> u64 {
        let text = http::get(&self.daemon.socket(), "/v1/metrics").body;
        let start = format!("blobd_permits_in_use{{pool=\"{pool}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("{pool}: {text}")).parse().unwrap()
    }
}

#[test]
fn unread_responses_to_all_requests_stay_within_memory_and_thread_limits() {
    let store = Store::start();
    let pid = store.daemon.pid();
    let requests = store.requests();
    let unread: Vec<_> = requests.iter().flat_map(|text| [(); UNREAD].map(|()| store.ask(text))).collect();
    // Behind all others of its user, of which some read nothing for ten seconds.
    let start = Instant::now();
    let mut most = 0;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| http::get(&store.daemon.socket(), "/v1/heads/heads"));
        while !reader.is_finished() || start.elapsed() < Duration::from_secs(2) {
            most = most.max(threads(pid));
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = reader.join().unwrap().status;
        assert!(matches!(status, 200 | 409), "{status}");
    });
    // Without the pages of the program's file: a build for tests has many more of them.
    let peak = status_bytes(pid, "VmHWM").saturating_sub(status_bytes(pid, "RssFile"));
    assert!(peak < MEMORY_BYTES, "{} MiB", peak >> 20);
    assert!(most < THREADS, "{most} threads");
    drop(unread);
    eventually("no memory is counted after the clients have disconnected", || {
        store.in_use("memory_bytes") == 0 && store.in_use("lasting_connections") == 0
    });
    let heads = store.daemon.client().heads(&"heads".parse().unwrap()).unwrap();
    assert!(heads.content_bytes() > HEADER_MIB << 20, "complete");
}

/// The longest of each request is refused or done soon, and those that need no memory of it are answered meanwhile.
#[test]
fn longest_request_of_each_route_is_answered_quickly_and_delays_no_other() {
    const OF_ANOTHER: Duration = Duration::from_secs(5);
    const LONGEST: Duration = Duration::from_secs(20);
    // With a short header: otherwise requests wait for the memory of a long one.
    let store = Store::with_model(&ModelFile::dense(1).bytes());
    let models = Models { stored: "heads", source: &store.registry.name("library/heads") };
    for route in all_routes() {
        for request in longest_requests(&route, models) {
            let start = Instant::now();
            let asked: Vec<_> = (0..4).map(|_| store.ask(&request)).collect();
            assert_eq!(http::get(&store.daemon.socket(), "/v1/version").status, 200);
            let what: String = request.split("\r\n\r\n").nth(1).unwrap().chars().take(60).collect();
            let version = start.elapsed();
            // What waits for descriptors is never answered.
            for mut stream in asked.into_iter().filter(|_| !request.contains("Upgrade")) {
                let status = http::read_answer(&mut stream).status;
                assert!(status < 500, "{route} {what}: {status}");
            }
            let all = start.elapsed();
            assert!(version < OF_ANOTHER && all < LONGEST, "{route} {what}: {version:?}, {all:?}");
        }
    }
    let pid = store.daemon.pid();
    let peak = status_bytes(pid, "VmHWM").saturating_sub(status_bytes(pid, "RssFile"));
    assert!(peak < MEMORY_BYTES, "{} MiB", peak >> 20);
}

#[test]
fn metrics_of_many_connections_take_few_threads() {
    let store = Store::start();
    let scrape = "GET /v1/metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut asked: Vec<_> = (0..300).map(|_| store.ask(scrape)).collect();
    let mut most = 0;
    while let Some(mut stream) = asked.pop() {
        most = most.max(threads(store.daemon.pid()));
        assert_eq!(http::read_answer(&mut stream).status, 200);
    }
    assert!(most < 64, "{most} threads");
}

#[test]
fn error_about_a_long_request_is_short() {
    let store = Store::start();
    let long = "x".repeat(900_000);
    for body in [format!(r#"{{"reference":"{long}"}}"#), format!(r#"{{"{long}":1}}"#)] {
        let answer = http::post(&store.daemon.socket(), "/v1/verify", &body);
        assert!(answer.status == 400 && answer.body.len() < 10_000, "{} bytes", answer.body.len());
        assert!(!answer.json()["error"]["message"].as_str().unwrap().is_empty());
    }
}
