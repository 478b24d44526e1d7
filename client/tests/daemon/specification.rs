//! Checks `docs/PROTOCOL.md`: its frames can be parsed, its tables equal those of the code, and its client works.

use std::process::Command;

use blobd_client::protocol::error::{ErrorCode, ErrorResponse};
use blobd_client::protocol::frame::FrameDecoder;
use blobd_client::protocol::request::{ImportParams, OpenParams};

use crate::fake::{FakeModel, listen};

const SPECIFICATION: &str = include_str!("../../../docs/PROTOCOL.md");

/// The contents of the blocks in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let fences = SPECIFICATION.split("\n```").skip(1).step_by(2);
    fences.filter_map(|fence| fence.strip_prefix(language)?.strip_prefix('\n')).collect()
}

#[test]
fn frames_of_the_examples_are_frames() {
    let mut kinds = Vec::new();
    for line in blocks("text").iter().flat_map(|block| block.lines()) {
        let Some(frame) = line.strip_prefix("daemon: ").or(line.strip_prefix("client: ")) else { continue };
        let (length, json) = frame.split_at(12);
        let length = length.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap());
        let bytes: Vec<u8> = length.chain(json.bytes()).collect();
        let mut decoder = FrameDecoder::new();
        decoder.push(&bytes);
        let frame = decoder.next_frame().unwrap().unwrap();
        assert_eq!(frame.encode().unwrap(), bytes, "{json}");
        kinds.push(frame.kind());
    }
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds, ["ack", "error", "fds", "imported", "open", "pieces", "progress", "tensors", "want"]);
}

#[test]
fn bodies_of_the_examples_are_bodies() {
    let json = blocks("json");
    let [error, pull, open, import] = json[..] else { panic!("{json:?}") };
    serde_json::from_str::<ErrorResponse>(error).unwrap();
    for line in pull.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
    serde_json::from_str::<OpenParams>(open).unwrap();
    serde_json::from_str::<ImportParams>(import).unwrap();
}

#[test]
fn error_table_matches_the_code() {
    let table = SPECIFICATION.lines().skip_while(|line| !line.starts_with("| code |")).skip(2);
    let mut count = 0;
    for row in table.take_while(|line| line.starts_with('|')) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let code: ErrorCode = serde_json::from_str(&cells[1].replace('`', "\"")).unwrap();
        assert_eq!(cells[3], code.http_status().to_string(), "{row}");
        assert_eq!(cells[4], code.exit_code().to_string(), "{row}");
        count += 1;
    }
    assert_eq!(count, ErrorCode::ALL.len());
}

#[test]
fn python_client_of_the_walk_through_works() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("blobd.sock");
    let mut model = FakeModel::new();
    for i in 0..100u8 {
        let fd = model.add_file(&[i; 16]);
        model.add_tensor(&format!("blk.{i}.weight"), Some(fd), 8, 8);
    }
    listen(&socket, move |call| {
        if call.body.ends_with(b"\"missing\"}") {
            let body = r#"{"error":{"code":"not_found","message":"no model missing"}}"#;
            return call.respond(404, body);
        }
        model.serve(call);
    });
    let python = |reference: &str| {
        let program = *blocks("python").first().unwrap();
        Command::new("python3").arg("-c").arg(program).arg(&socket).arg(reference).output()
    };
    let Ok(output) = python("tiny") else {
        blobd_fixtures::skipped::skipped("there is no python3");
        return;
    };
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert_eq!(out.lines().count(), 100);
    assert_eq!(out.lines().last(), Some("blk.99.weight F32 [2] 63 63 63 63 63 63 63 63"));
    let refused = python("missing").unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no model missing"));
}
