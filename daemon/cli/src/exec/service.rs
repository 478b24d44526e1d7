//! Serves the preloaded library: receives a path, sends a header and the descriptors of blobs.
//!
//! All numbers are little-endian. The request is a path's length (4 bytes) and the path, without
//! `/blobd/`. The response begins with an errno and the length of an error message (4 bytes each), then
//! the message. If the errno is 0, these follow: the lengths of the image and of the header (8 bytes each),
//! the number of parts and of descriptors (4 bytes each), the header, the parts (offset in the image,
//! length, offset in the blob: 8 bytes each; index of the descriptor: 4), sorted by descriptor, and then
//! the descriptors, up to 64 with each byte; the library confirms each byte with one. The library and this
//! file are built together, so the protocol may change.

use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use blobd_client::client::Client;
use blobd_client::gguf_view::{ImagePart, ImagePlan};
use blobd_client::model::OpenModel;
use blobd_client::protocol::connection::send_all;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_store_format::reference::Reference;

use super::super::connect::client_error;
use super::super::model_source::weights_component;

/// The kernel's limit for paths.
const MAX_PATH_BYTES: u32 = 4096;
/// How many descriptors are sent with one byte.
const BATCH: usize = 64;
/// C's `ENOENT`, `EIO` and `EACCES`.
const NOT_FOUND: u32 = 2;
const FAILED: u32 = 5;
const DENIED: u32 = 13;

/// Serves requests until the process ends.
pub(super) fn run(listener: &UnixListener, client: &Client) {
    for stream in listener.incoming().flatten() {
        let client = client.clone();
        thread::spawn(move || {
            // Fails if the program has ended, which needs no response.
            let _ = serve(stream, &client);
        });
    }
}

/// Serves one request, and holds the lease until the program closes the connection.
fn serve(mut stream: UnixStream, client: &Client) -> io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length).min(MAX_PATH_BYTES);
    let mut path = vec![0; usize::try_from(length).unwrap_or(0)];
    stream.read_exact(&mut path)?;
    let (model, response) = match open(&String::from_utf8_lossy(&path), client) {
        Ok(opened) => opened,
        Err(error) => return stream.write_all(&refusal(&error)),
    };
    stream.write_all(&response.bytes)?;
    send_fds(&mut stream, &model, &response.fds)?;
    let _lease = model.into_lease();
    // The program sends nothing more: this returns when it closes the connection.
    let _ = stream.read(&mut [0])?;
    Ok(())
}

struct Response {
    bytes: Vec<u8>,
    /// Which of the model's descriptors are sent after the bytes.
    fds: Vec<u32>,
}

fn open(path: &str, client: &Client) -> Result<(OpenModel, Response), ErrorBody> {
    let name = path.strip_suffix(".gguf").unwrap_or(path);
    let (name, component) = name.split_once('+').map_or((name, None), |(name, rest)| (name, Some(rest)));
    let reference: Reference = name.parse().map_err(|error| ErrorBody::new(ErrorCode::NotFound, error))?;
    let component = match component {
        Some(component) => component.to_owned(),
        None => weights_component(client, &reference),
    };
    let params = OpenParams {
        reference,
        tensors: TensorSelection::All,
        component: Some(component.clone()),
        files: FileSelection::Whole,
        purpose: OpenPurpose::Exec,
    };
    let model = client.open_with(&params).map_err(client_error)?;
    let plan = model.plan_contiguous(&component).map_err(|error| ErrorBody::new(error.code(), error))?;
    let response = encode(&model, plan)?;
    Ok((model, response))
}

fn encode(model: &OpenModel, mut plan: ImagePlan) -> Result<Response, ErrorBody> {
    plan.parts.sort_by_key(|part| part.fd);
    let mut fds: Vec<u32> = plan.parts.iter().map(|part| part.fd).collect();
    fds.dedup();
    let mut bytes = vec![0; 8];
    for number in [plan.length, plan.header.len() as u64] {
        bytes.extend(number.to_le_bytes());
    }
    for count in [plan.parts.len(), fds.len()] {
        bytes.extend(u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
    }
    bytes.extend(&plan.header);
    for part in &plan.parts {
        check_length(model, part)?;
        let number = fds.partition_point(|fd| *fd < part.fd);
        for number in [part.offset, part.length, part.fd_offset] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
    }
    Ok(Response { bytes, fds })
}

/// Checks that the blob contains the part: reading a mapping beyond the end of its file raises SIGBUS.
fn check_length(model: &OpenModel, part: &ImagePart) -> Result<(), ErrorBody> {
    let fd = model.fd(part.fd).ok_or_else(|| {
        let message =
            format!("the model has {} descriptors, more than this process may open", model.fd_count());
        ErrorBody::new(ErrorCode::Internal, message).with_hint("raise `ulimit -Hn`")
    })?;
    let found = rustix::fs::fstat(fd).map(|stat| u64::try_from(stat.st_size).unwrap_or(0));
    let found = found.map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    if part.fd_offset.checked_add(part.length).is_some_and(|end| end <= found) {
        return Ok(());
    }
    let message = format!(
        "blob: too short: expected at least {} + {} bytes, found {found}",
        part.fd_offset, part.length
    );
    Err(ErrorBody::new(ErrorCode::Corrupt, message).with_hint("run `blobd verify`"))
}

fn send_fds(stream: &mut UnixStream, model: &OpenModel, fds: &[u32]) -> io::Result<()> {
    for batch in fds.chunks(BATCH) {
        let batch: Vec<BorrowedFd<'_>> = batch.iter().filter_map(|fd| model.fd(*fd)).collect();
        send_all(stream, &[0], &batch)?;
        stream.read_exact(&mut [0])?;
    }
    Ok(())
}

fn refusal(error: &ErrorBody) -> Vec<u8> {
    let number = match error.code {
        ErrorCode::NotFound => NOT_FOUND,
        ErrorCode::Denied | ErrorCode::DeniedByPolicy => DENIED,
        _ => FAILED,
    };
    let reason = match &error.hint {
        Some(hint) => format!("{}; {hint}", error.message),
        None => error.message.clone(),
    };
    let length = u32::try_from(reason.len()).unwrap_or(0);
    [&number.to_le_bytes(), &length.to_le_bytes(), reason.as_bytes()].concat()
}
