//! The client's side of the socket: heads, bodies, lines, responses to an open.
//!
//! Invariant: for any bytes and descriptors from a daemon, ended at any point, a client
//! gets a response or an error and never waits forever; a tensor that it can map is as long as
//! the table says and can be read from first byte to last.
#![no_main]

use std::borrow::Cow;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock};

use blobd_client::Client;
use blobd_client::protocol::connection::send_message;
use blobd_client::protocol::request::{FileSelection, ImportParams, OpenParams, PullParams, TensorSelection};
use blobd_store_format::reference::Reference;
use libfuzzer_sys::fuzz_target;

/// A flag in the first byte: the rest is lines of JSON, which are sent as frames after an upgrade. A fuzzer
/// would rarely find lengths that fit their frames.
const FRAMED: u8 = 0x80;
/// The most bytes that fit into a socket's buffer even as frames of one byte, so that writing does not block.
const MAX_RESPONSE_BYTES: usize = 32 << 10;
/// The file behind every descriptor.
const BLOB_BYTES: usize = 10_000;

fuzz_target!(|input: &[u8]| {
    let [verb, fd_count, at_low, at_high, response @ ..] = input else { return };
    let response = &response[..response.len().min(MAX_RESPONSE_BYTES)];
    let attach_at = usize::from(u16::from_le_bytes([*at_low, *at_high])).min(response.len());
    let (response, attach_at) =
        if verb & FRAMED == 0 { (Cow::Borrowed(response), attach_at) } else { framed(response) };
    let (client, daemon) = conversation(&response, attach_at, usize::from(*fd_count % 65));
    let reference: Reference = "m".parse().expect("a name");
    match (verb & !FRAMED) % 6 {
        0 => drop(client.models()),
        1 => drop(client.model(&reference)),
        2 => drop(client.pull(&PullParams::of(reference), |_event| ())),
        3 => {
            let params = ImportParams::new("m.gguf");
            drop(client.import(&params, blob(), |_completed, _total| ()));
        }
        4 => open(&client, &OpenParams::new(reference)),
        _ => open(
            &client,
            &OpenParams {
                files: FileSelection::All,
                tensors: TensorSelection::Prefix(String::new()),
                ..OpenParams::new(reference)
            },
        ),
    }
    drop(daemon);
});

/// Lines as frames; the descriptors are sent with the first frame that announces some.
fn framed(lines: &[u8]) -> (Cow<'static, [u8]>, usize) {
    let mut bytes = b"HTTP/1.1 101 Switching Protocols\r\n\r\n".to_vec();
    let mut attach_at = None;
    for line in lines.split(|byte| *byte == b'\n') {
        if line.starts_with(b"{\"fds\"") {
            attach_at.get_or_insert(bytes.len());
        }
        bytes.extend((line.len() as u32).to_le_bytes());
        bytes.extend(line);
    }
    let attach_at = attach_at.unwrap_or(bytes.len());
    (bytes.into(), attach_at)
}

fn open(client: &Client, params: &OpenParams) {
    let Ok(model) = client.open_with(params) else { return };
    for tensor in model.tensors() {
        if let Ok(map) = model.map_tensor(tensor) {
            assert_eq!(map.len() as u64, tensor.size);
            let sum =
                map.iter().step_by(512).chain(map.last()).fold(0_u64, |sum, byte| sum + u64::from(*byte));
            assert!(sum > 0 || map.is_empty(), "the file behind each descriptor has no zeros");
        }
        assert!(model.tensor(&tensor.name).is_some());
    }
    for (index, layer) in model.layers().iter().enumerate() {
        let _ =
            (model.layer_header(index), model.layer_bytes(index), model.text(layer.media_type.component()));
        // The sizes come from the daemon, so only small layers are written.
        if layer.size <= 1 << 20 {
            let mut out = Vec::new();
            if let Ok(written) = model.write_layer(index, &mut out) {
                assert_eq!(out.len() as u64, written);
            }
        }
    }
}

/// A client whose daemon has sent all its data.
fn conversation(response: &[u8], attach_at: usize, fd_count: usize) -> (Client, UnixStream) {
    let (ours, mut daemon) = UnixStream::pair().expect("a socket pair");
    let (before, after) = response.split_at(attach_at);
    daemon.write_all(before).expect("fits the buffer");
    let fds: Vec<BorrowedFd<'_>> = vec![blob().as_fd(); fd_count];
    let sent = send_message(&daemon, after, &fds).expect("fits the buffer");
    daemon.write_all(&after[sent..]).expect("fits the buffer");
    daemon.shutdown(Shutdown::Write).expect("a socket can be shut down");
    let once = Mutex::new(Some(ours));
    let connector = move || {
        let stream = once.lock().map(|mut stream| stream.take()).unwrap_or_default();
        stream.ok_or_else(|| std::io::ErrorKind::ConnectionRefused.into())
    };
    (Client::with_connector(Arc::new(connector)), daemon)
}

fn blob() -> &'static File {
    static BLOB: OnceLock<File> = OnceLock::new();
    BLOB.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("blobd-fuzz-{}", std::process::id()));
        let mut bytes = Vec::new();
        std::io::repeat(7).take(BLOB_BYTES as u64).read_to_end(&mut bytes).expect("memory");
        std::fs::write(&path, bytes).expect("a temporary file");
        let file = File::open(&path).expect("the file just written");
        std::fs::remove_file(&path).expect("the file just written");
        file
    })
}
