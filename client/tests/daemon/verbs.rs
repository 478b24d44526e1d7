//! Verbs with one response, with events and with a file that is passed, and finding the daemon.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::sync::{Arc, Mutex};

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::event::{Event, ImportProgress};
use blobd_client::protocol::frame::Frame;
use blobd_client::protocol::naming::NameEffects;
use blobd_client::protocol::pull::{Imported, PullDone, PullProgress};
use blobd_client::protocol::request::{
    GcParams, ImportFile, ImportParams, PullParams, RemoveParams, TagParams, VerifyParams,
};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use crate::fake::{Call, client_of, listen};

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
    assert_eq!(
        client.tag(&TagParams { source: a, target: b, force: false, origin: None }).unwrap().name,
        "b"
    );
    assert!(client.gc(&GcParams { dry_run: true, ..GcParams::default() }).unwrap().dry_run);

    let calls = calls.lock().unwrap();
    let calls: Vec<_> = calls.iter().map(|(line, body)| (line.as_str(), body.as_str())).collect();
    // A tag that the caller omits is omitted in the request too: the daemon may find the model's only tag.
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
fn pull_without_a_last_line_is_an_error() {
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
fn absent_daemon_is_reported_with_a_hint() {
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
    let response = |call: Call| call.respond(200, r#"{"models":[]}"#);
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

fn import(
    response: impl Fn(Call) + Clone + Send + Sync + 'static,
) -> (Result<Imported, ClientError>, Vec<(u64, u64)>) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"GGUF").unwrap();
    let params = ImportParams::new("tiny.gguf");
    let mut progress = Vec::new();
    let result =
        client_of(response).import(&params, &file, |completed, total| progress.push((completed, total)));
    (result, progress)
}

fn imported() -> Imported {
    Imported {
        name: "tiny:latest".to_owned(),
        digest: Digest::of(b"manifest"),
        file: Some(Digest::of(b"GGUF")),
        size: 4,
        file_count: None,
        files: Vec::new(),
        new_bytes: 4,
        reused_bytes: 0,
        tensor_count: 0,
        new_blob_count: 1,
        sidecars: Vec::new(),
        unchanged: false,
        effects: NameEffects::default(),
    }
}

#[test]
fn daemon_reads_the_file_that_was_passed() {
    let (result, progress) = import(|call| {
        let params: ImportParams = serde_json::from_slice(&call.body).unwrap();
        assert_eq!(params.file_name, "tiny.gguf");
        let mut connection = call.upgrade();
        assert_eq!(connection.receive().unwrap(), Frame::Fds { first: 0, count: 1 });
        let mut file = File::from(connection.take_fds(1).unwrap().pop_front().unwrap());
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "GGUF");
        for completed in [0, 4] {
            connection
                .send(
                    &Frame::Progress(ImportProgress { completed, total: 4, ..ImportProgress::default() }),
                    &[],
                )
                .unwrap();
        }
        connection.send(&Frame::Imported(imported()), &[]).unwrap();
    });
    assert_eq!(result.unwrap(), imported());
    assert_eq!(progress, [(0, 4), (4, 4)]);
}

#[test]
fn refusal_keeps_its_code_even_if_the_daemon_does_not_wait_for_the_file() {
    let (result, _) = import(|call| {
        let body = ErrorBody::new(ErrorCode::InvalidInput, "tiny.gguf: no GGUF file");
        call.upgrade().send(&Frame::Error(body), &[]).unwrap();
    });
    assert_eq!(result.unwrap_err().code(), ErrorCode::InvalidInput);
}

#[test]
fn daemon_that_dies_is_distinguished_from_one_that_sends_something_else() {
    let (result, _) = import(|call| drop(call.upgrade()));
    assert!(matches!(result, Err(ClientError::Closed)));
    let (result, _) = import(|call| {
        call.upgrade().send(&Frame::Ack { received: 1 }, &[]).unwrap();
    });
    assert!(matches!(result, Err(ClientError::Protocol(_))));
}

/// Imports a list of 20 files from a daemon that sends these `want` frames. Returns the numbers of the opened files.
fn import_listed(wants: &'static [(u32, u32)]) -> (Result<Imported, ClientError>, Vec<usize>) {
    let file = |number: usize| ImportFile {
        path: number.to_string(),
        size: 1,
        component: None,
        digest: None,
        was_read: false,
        offset: 0,
        stream: false,
    };
    let params = ImportParams { files: (0..20).map(file).collect(), ..ImportParams::new("tiny") };
    let mut opened = Vec::new();
    let client = client_of(move |call: Call| {
        let mut connection = call.upgrade();
        for (first, count) in wants {
            let (first, count) = (*first, *count);
            // The client may have closed its end.
            if connection.send(&Frame::Want { first, count }, &[]).is_err() {
                return;
            }
            let Ok(frame) = connection.receive() else { return };
            assert_eq!(frame, Frame::Fds { first, count });
            assert_eq!(connection.take_fds(count).unwrap().len(), count as usize);
        }
        connection.send(&Frame::Imported(imported()), &[]).unwrap();
    });
    let open = |number| {
        opened.push(number);
        Ok(tempfile::tempfile().unwrap().into())
    };
    (client.import_listed(&params, open, |_| ()), opened)
}

#[test]
fn files_of_a_list_are_opened_when_the_daemon_wants_them() {
    let (result, opened) = import_listed(&[(0, 16), (16, 4)]);
    assert_eq!((result.unwrap(), opened), (imported(), (0..20).collect()));
    // A daemon may refuse a file before it has asked for all.
    assert_eq!(import_listed(&[(0, 2)]).1, [0, 1]);
}

#[test]
fn daemon_that_wants_other_files_than_the_next_gets_none() {
    for wrong in [&[(1, 16)][..], &[(0, 17)], &[(0, 0)], &[(20, 1)], &[(u32::MAX, 1)]] {
        let (result, opened) = import_listed(wrong);
        assert!(matches!(result, Err(ClientError::Protocol(_))), "{result:?}");
        assert_eq!(opened, [0; 0]);
    }
    for (wrong, before) in [(&[(0, 16), (0, 1)][..], 16), (&[(0, 16), (16, 5)], 16)] {
        let (result, opened) = import_listed(wrong);
        assert!(matches!(result, Err(ClientError::Protocol(_))), "{result:?}");
        assert_eq!(opened.len(), before);
    }
}

#[test]
fn file_that_cannot_be_opened_ends_the_import_with_its_error() {
    let file = ImportFile {
        path: "a".to_owned(),
        size: 1,
        component: None,
        digest: None,
        was_read: false,
        offset: 0,
        stream: false,
    };
    let params = ImportParams { files: vec![file], ..ImportParams::new("tiny") };
    let client = client_of(|call: Call| {
        let mut connection = call.upgrade();
        connection.send(&Frame::Want { first: 0, count: 1 }, &[]).unwrap();
        assert!(connection.receive().is_err());
    });
    let open = |_| Err(ErrorBody::new(ErrorCode::Denied, "a: permission denied"));
    match client.import_listed(&params, open, |_| ()) {
        Err(ClientError::Daemon(error)) => assert_eq!(error.message, "a: permission denied"),
        other => panic!("{other:?}"),
    }
}
