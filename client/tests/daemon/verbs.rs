//! The verbs that response with JSON, and finding the daemon.

use std::sync::{Arc, Mutex};

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::event::Event;
use blobd_client::protocol::request::{GcParams, PullParams, RemoveParams, TagParams, VerifyParams};
use blobd_client::protocol::response::{PullDone, PullProgress};
use blobd_store_format::reference::Reference;

use crate::fake::{client_of, listen};

fn reference() -> Reference {
    "http://localhost:5000/me/tiny:q4@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        .parse()
        .unwrap()
}

#[test]
fn each_verb_has_its_route_and_body() {
    let digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let calls = Arc::new(Mutex::new(Vec::new()));
    let client = client_of({
        let calls = Arc::clone(&calls);
        move |call| {
            calls
                .lock()
                .unwrap()
                .push((call.line().to_owned(), String::from_utf8(call.body.clone()).unwrap()));
            let path = call.line().split(' ').nth(1).unwrap().to_owned();
            let body = match path.as_str() {
                "/v1/version" => r#"{"version":"0.1.0","protocol":1,"root":"/x","pid":7}"#.to_owned(),
                "/v1/models" => r#"{"models":[]}"#.to_owned(),
                "/v1/df" => concat!(
                    r#"{"logical_bytes":1,"physical_bytes":2,"saved_bytes":3,"reclaimable_bytes":4,"#,
                    r#""partial_bytes":5,"free_bytes":6,"blob_count":7,"models":[]}"#
                )
                .to_owned(),
                "/v1/ps" => r#"{"sessions":[]}"#.to_owned(),
                "/v1/remove" => r#"{"removed":["a"],"freed_bytes":1,"kept":[]}"#.to_owned(),
                "/v1/tag" => format!(r#"{{"name":"b","digest":"{digest}"}}"#),
                "/v1/gc" => r#"{"dry_run":true,"deleted":[],"freed_bytes":0,"later":1}"#.to_owned(),
                _ => format!(
                    concat!(
                        r#"{{"name":"tiny","digest":"{}","architecture":null,"parameters":1,"#,
                        r#""quantization":null,"metadata":{{}},"layers":[],"tensors":[]}}"#
                    ),
                    digest
                ),
            };
            call.respond(200, &body);
        }
    });
    assert_eq!(client.version().unwrap().pid, 7);
    assert!(client.models().unwrap().models.is_empty());
    assert_eq!(client.model(&reference()).unwrap().name, "tiny");
    assert_eq!(client.disk_usage().unwrap().blob_count, 7);
    assert!(client.sessions().unwrap().sessions.is_empty());
    let (a, b): (Reference, Reference) = ("a".parse().unwrap(), "b:latest".parse().unwrap());
    assert_eq!(
        client
            .remove(&RemoveParams { references: vec![a.clone()], ..RemoveParams::default() })
            .unwrap()
            .freed_bytes,
        1
    );
    assert_eq!(client.tag(&TagParams { source: a, target: b, force: false }).unwrap().name, "b");
    assert!(client.gc(&GcParams { dry_run: true, ..GcParams::default() }).unwrap().dry_run);

    let calls = calls.lock().unwrap();
    let calls: Vec<_> = calls.iter().map(|(line, body)| (line.as_str(), body.as_str())).collect();
    // A tag that was left out is left out of the request: the daemon may know the only one.
    let (a, b) = ("registry.ollama.ai/library/a", "registry.ollama.ai/library/b:latest");
    assert_eq!(
        calls,
        [
            ("get /v1/version http/1.1", ""),
            ("get /v1/models http/1.1", ""),
            (&*format!("get /v1/models/http://localhost:5000/me/tiny:q4@{digest} http/1.1"), ""),
            ("get /v1/df http/1.1", ""),
            ("get /v1/ps http/1.1", ""),
            ("post /v1/remove http/1.1", &format!(r#"{{"references":["{a}"]}}"#)),
            ("post /v1/tag http/1.1", &format!(r#"{{"source":"{a}","target":"{b}"}}"#)),
            ("get /v1/gc http/1.1", ""),
        ]
    );
}

const PROGRESS: &str = r#"{"status":"pulling","total":10,"completed":5}"#;

fn pull(
    chunks: &'static [&'static str],
    complete: bool,
) -> (Result<String, ClientError>, Vec<Event<PullProgress, PullDone>>) {
    let client = client_of(move |call| call.stream_chunks(chunks, complete));
    let mut events = Vec::new();
    let result = client.pull(&PullParams::of(reference()), |event| events.push(event));
    (result.map(|done| done.name), events)
}

#[test]
fn pull_reports_every_line_and_returns_the_last() {
    let (result, events) = pull(
        &[
            PROGRESS,
            "\n{\"status\":\"ver",
            "ifying\"}\n",
            concat!(
                r#"{"status":"success","name":"tiny:latest","digest":"sha256:"#,
                r#"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","#,
                r#""downloaded_bytes":10,"reused_bytes":0}"#,
                "\n"
            ),
        ],
        true,
    );
    assert_eq!(result.unwrap(), "tiny:latest");
    let [Event::Progress(first), Event::Progress(second), Event::Done(_)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((first.completed, second.status.as_str()), (Some(5), "verifying"));
}

#[test]
fn pull_that_fails_midway_returns_the_daemons_error() {
    let (result, events) =
        pull(&[PROGRESS, "\n", r#"{"error":{"code":"upstream","message":"registry gone"}}"#], true);
    let error = result.unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (ErrorCode::Upstream, "registry gone"));
    assert!(matches!(events[..], [Event::Progress(_), Event::Failed(_)]), "{events:?}");
}

#[test]
fn pull_without_a_last_line_is_not_taken_for_done() {
    for (chunks, complete) in [(&[PROGRESS, "\n"][..], true), (&[PROGRESS, "\n"], false), (&[], false)] {
        assert!(matches!(pull(chunks, complete).0, Err(ClientError::Closed)));
    }
    assert!(matches!(pull(&["nonsense\n"], true).0, Err(ClientError::Protocol(_))));
}

#[test]
fn error_before_the_response_keeps_its_code() {
    let body = r#"{"error":{"code":"busy","message":"too many sessions"}}"#;
    let error = client_of(move |call| call.respond(409, body)).models().unwrap_err();
    assert_eq!(error.code(), ErrorCode::Busy);
}

#[test]
fn absent_daemon_is_told_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("blobd.sock");
    let expected =
        format!("blobd daemon: nothing listens on {}; start it with `blobd serve`", socket.display());
    assert_eq!(Client::connect(&socket).unwrap_err().to_string(), expected);
    // A socket that a dead daemon has left behind.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert_eq!(Client::connect(&socket).unwrap_err().to_string(), expected);
}

#[test]
fn client_outlives_a_restart_of_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("blobd.sock");
    let response = |call: crate::fake::Call| call.respond(200, r#"{"models":[]}"#);
    listen(&socket, response);
    let client = Client::connect(&socket).unwrap();
    client.models().unwrap();
    std::fs::remove_file(&socket).unwrap();
    assert!(matches!(client.models(), Err(ClientError::NotRunning { .. })));
    listen(&socket, response);
    client.models().unwrap();
}

#[test]
fn verification_ends_with_its_last_line() {
    let client = client_of(|call| {
        assert_eq!(call.line(), "post /v1/verify http/1.1");
        assert_eq!(call.body, br#"{"repair":true}"#);
        let lines = [
            "{\"status\":\"reading blobs\",\"total\":9,\"completed\":4}\n",
            "{\"checked_blobs\":2,\"checked_bytes\":9,\"corrupt\":[]}\n",
        ];
        call.stream_chunks(&lines, true);
    });
    let mut progress = Vec::new();
    let params = VerifyParams { reference: None, repair: true };
    let verified = client.verify(&params, |event| {
        if let Event::Progress(event) = event {
            progress.push(event.completed);
        }
    });
    assert_eq!((verified.unwrap().checked_blobs, progress), (2, vec![4]));
    let failing = client_of(|call| {
        call.stream_chunks(&["{\"error\":{\"code\":\"not_found\",\"message\":\"no such model\"}}\n"], true);
    });
    assert_eq!(failing.verify(&params, |_| ()).unwrap_err().code(), ErrorCode::NotFound);
}
