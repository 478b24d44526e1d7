//! Passing an open file to the daemon.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};

use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::event::ImportProgress;
use blobd_client::protocol::frame::Frame;
use blobd_client::protocol::lost_model::NameEffects;
use blobd_client::protocol::request::ImportParams;
use blobd_client::protocol::response::Imported;
use blobd_store_format::digest::Digest;

use crate::fake::{Call, client_of};

fn import(
    response: impl Fn(Call) + Clone + Send + Sync + 'static,
) -> (Result<Imported, ClientError>, Vec<(u64, u64)>) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"GGUF").unwrap();
    let params =
        ImportParams { file_name: "tiny.gguf".to_owned(), name: None, force: false, sidecars: Vec::new() };
    let mut progress = Vec::new();
    let result =
        client_of(response).import(&params, &file, |completed, total| progress.push((completed, total)));
    (result, progress)
}

fn imported() -> Imported {
    Imported {
        name: "tiny:latest".to_owned(),
        digest: Digest::of(b"manifest"),
        file: Digest::of(b"GGUF"),
        size: 4,
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
