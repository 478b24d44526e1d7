//! Receives and validates the response to an open.
//!
//! Tensors refer to layers and descriptors, pieces to descriptors, and counts to later frames; all are
//! checked here. Only the length of the files is checked later, when they are mapped.

use std::collections::{HashSet, VecDeque};
use std::os::fd::OwnedFd;

use blobd_store_format::stored_file::FilePieces;
use rustix::process::{Resource, getrlimit};

use crate::blob::Blob;
use crate::error::{ClientError, ModelError, ProtocolError};
use crate::model::OpenModel;
use crate::protocol::MAX_OPEN_LAYERS;
use crate::protocol::connection::Connection;
use crate::protocol::frame::Frame;
use crate::protocol::response::{OpenHead, OpenLayer, OpenPiece, TensorLocation};

pub(crate) const MAX_LAYERS: u64 = MAX_OPEN_LAYERS as u64;
/// The most tensors accepted, of all layers together; a GGUF file has 131,072 at most.
pub(crate) const MAX_TENSORS: u64 = 1 << 20;
/// The most pieces accepted, of all layers together: a tensor and its padding are two.
pub(crate) const MAX_PIECES: u64 = 4 << 20;
/// The most descriptors accepted: one per tensor, and some for headers and whole files.
pub(crate) const MAX_FDS: u64 = MAX_TENSORS + 2 * MAX_LAYERS;

/// The most blobs mapped in advance: more than an ordinary model has, and far below the limit of maps
/// per process (65,530 by default).
const MAX_PREPARED: usize = 4096;

/// Receives the whole response; the connection becomes the lease.
pub(crate) fn receive(mut connection: Connection) -> Result<OpenModel, ClientError> {
    let head = match next(&mut connection)? {
        Frame::Open(head) => head,
        other => return Err(unexpected(&other, "open")),
    };
    check_head(&head)?;
    let pieces = receive_pieces(&mut connection, &head)?;
    let tensors = receive_tensors(&mut connection, &head)?;
    let blobs = receive_blobs(&mut connection, head.fd_count, &tensors)?;
    Ok(OpenModel::new(head, pieces, tensors, blobs, connection.into_stream()))
}

fn receive_pieces(
    connection: &mut Connection,
    head: &OpenHead,
) -> Result<Vec<FilePieces<OpenPiece>>, ClientError> {
    let mut pieces = vec![Vec::new(); head.layers.len()];
    let mut left: u64 = head.layers.iter().map(|layer| layer.piece_count).sum();
    while left > 0 {
        let (layer, part) = match next(connection)? {
            Frame::Pieces { layer, pieces } => (usize::try_from(layer).unwrap_or(usize::MAX), pieces),
            other => return Err(unexpected(&other, "pieces")),
        };
        left = count_down(left, part.len(), "pieces")?;
        let known = pieces.get_mut(layer);
        known.ok_or(ProtocolError::Layer { layer, problem: "no such layer" })?.extend(part);
    }
    let layers = head.layers.iter().zip(pieces).enumerate();
    let checked = layers.map(|(number, (layer, pieces))| {
        check_pieces(layer, pieces, head.fd_count)
            .map_err(|problem| ProtocolError::Layer { layer: number, problem }.into())
    });
    checked.collect()
}

fn receive_tensors(connection: &mut Connection, head: &OpenHead) -> Result<Vec<TensorLocation>, ClientError> {
    let mut tensors = Vec::new();
    let mut left = head.tensor_count;
    while left > 0 {
        let part = match next(connection)? {
            Frame::Tensors(part) => part,
            other => return Err(unexpected(&other, "tensors")),
        };
        left = count_down(left, part.len(), "tensors")?;
        for tensor in part {
            if let Err(problem) = check_tensor(&tensor, head) {
                return Err(ProtocolError::Tensor { name: tensor.name, problem }.into());
            }
            tensors.push(tensor);
        }
    }
    Ok(tensors)
}

/// Receives the descriptors. While the daemon opens the next batch, received tensors are mapped; the
/// rest is mapped on demand.
fn receive_blobs(
    connection: &mut Connection,
    fd_count: u32,
    tensors: &[TensorLocation],
) -> Result<Vec<Blob>, ClientError> {
    let keep_open = u64::from(fd_count) <= max_open_files() / 2;
    let holds_tensor: HashSet<u32> = tensors.iter().filter_map(|tensor| tensor.fd).collect();
    let mut blobs = Vec::new();
    let (mut received, mut prepared) = (0, 0);
    while received < fd_count {
        prepared = prepare_while_waiting(connection, &blobs, prepared, &holds_tensor);
        let fds = receive_batch(connection, received, fd_count)?;
        for (fd, number) in fds.into_iter().zip(received..) {
            blobs.push(if keep_open {
                Blob::open(fd)
            } else {
                Blob::mapped(&fd).map_err(|reason| ModelError::Map { fd: number, reason })?
            });
            received = number + 1;
        }
    }
    Ok(blobs)
}

/// Maps blobs with tensors, from number `next` on, until the daemon has sent more or none is left;
/// returns the next number.
fn prepare_while_waiting(
    connection: &Connection,
    blobs: &[Blob],
    next: usize,
    holds_tensor: &HashSet<u32>,
) -> usize {
    /// A check for received data costs a fraction of a map.
    const AT_ONCE: usize = 4;
    let mut numbered = (0..).zip(blobs).take(MAX_PREPARED).skip(next).peekable();
    while numbered.peek().is_some() && !connection.has_more() {
        let some = numbered.by_ref().take(AT_ONCE);
        some.filter(|(number, _)| holds_tensor.contains(number)).for_each(|(_, blob)| blob.prepare());
    }
    numbered.next().map_or(blobs.len(), |(number, _)| usize::try_from(number).unwrap_or(usize::MAX))
}

fn receive_batch(
    connection: &mut Connection,
    received: u32,
    fd_count: u32,
) -> Result<VecDeque<OwnedFd>, ClientError> {
    let (first, count) = match next(connection)? {
        Frame::Fds { first, count } => (first, count),
        other => return Err(unexpected(&other, "fds")),
    };
    if first != received || count == 0 || count > fd_count - received {
        return Err(ProtocolError::Batch { first, count, received, fd_count }.into());
    }
    let fds = connection.take_fds(count)?;
    connection.send(&Frame::Ack { received: received + count }, &[])?;
    Ok(fds)
}

/// The next frame, unless it is the daemon's error.
fn next(connection: &mut Connection) -> Result<Frame, ClientError> {
    match connection.receive()? {
        Frame::Error(error) => Err(error.into()),
        frame => Ok(frame),
    }
}

/// Subtracts a part from a count. A part is never empty, so that the list of parts ends.
fn count_down(left: u64, part: usize, what: &'static str) -> Result<u64, ProtocolError> {
    let part = part as u64;
    let rest = left.checked_sub(part).filter(|_| part > 0);
    rest.ok_or(ProtocolError::Count { what, found: part, expected: left })
}

fn unexpected(frame: &Frame, expected: &'static str) -> ClientError {
    ProtocolError::UnexpectedFrame { found: frame.kind(), expected }.into()
}

fn max_open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Compares the head's counts with the limits, and its layers with the number of descriptors.
fn check_head(head: &OpenHead) -> Result<(), ProtocolError> {
    let piece_count = head.layers.iter().try_fold(0u64, |sum, layer| sum.checked_add(layer.piece_count));
    for (what, found, limit) in [
        ("layers", head.layers.len() as u64, MAX_LAYERS),
        ("tensors", head.tensor_count, MAX_TENSORS),
        ("pieces", piece_count.unwrap_or(u64::MAX), MAX_PIECES),
        ("descriptors", head.fd_count.into(), MAX_FDS),
    ] {
        if found > limit {
            return Err(ProtocolError::TooMany { what, found, limit });
        }
    }
    let known = |fd: Option<u32>| fd.is_none_or(|fd| fd < head.fd_count);
    for (number, layer) in head.layers.iter().enumerate() {
        if !known(layer.fd) || !known(layer.header.map(|header| header.fd)) {
            return Err(ProtocolError::Layer { layer: number, problem: NO_SUCH_FD });
        }
    }
    Ok(())
}

fn check_pieces(
    layer: &OpenLayer,
    pieces: Vec<OpenPiece>,
    fd_count: u32,
) -> Result<FilePieces<OpenPiece>, &'static str> {
    if pieces.len() as u64 != layer.piece_count {
        return Err("another number of pieces received than announced");
    }
    if pieces.iter().any(|piece| matches!(piece, OpenPiece::Fd { fd, .. } if *fd >= fd_count)) {
        return Err(NO_SUCH_FD);
    }
    let pieces = FilePieces::new(pieces).map_err(|_too_long| "a piece ends beyond 2^64")?;
    match pieces.is_empty() || pieces.size() == layer.size {
        true => Ok(pieces),
        false => Err("its pieces do not add up to its size"),
    }
}

fn check_tensor(tensor: &TensorLocation, head: &OpenHead) -> Result<(), &'static str> {
    let TensorLocation { layer, fd, offset, size, experts, .. } = tensor;
    if usize::try_from(*layer).is_ok_and(|layer| layer >= head.layers.len()) {
        return Err("no such layer");
    }
    match fd {
        Some(fd) if *fd >= head.fd_count => return Err(NO_SUCH_FD),
        None if *size > 0 => return Err("bytes without a descriptor"),
        _ => {}
    }
    if offset.checked_add(*size).is_none() {
        return Err("ends beyond 2^64");
    }
    match experts {
        Some(experts) if experts.count.checked_mul(experts.stride) != Some(*size) => {
            Err("its experts do not add up to its size")
        }
        _ => Ok(()),
    }
}

const NO_SUCH_FD: &str = "descriptor beyond the number announced";
