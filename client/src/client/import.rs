//! The frames of an import.

use std::os::fd::BorrowedFd;

use crate::error::{ClientError, ProtocolError};
use crate::protocol::connection::{Connection, ConnectionError};
use crate::protocol::frame::Frame;
use crate::protocol::response::Imported;

/// Sends the descriptors of a file and its sidecars, and waits for the result.
pub(super) fn exchange(
    connection: &mut Connection,
    files: &[BorrowedFd<'_>],
    on_progress: &mut impl FnMut(u64, u64),
) -> Result<Imported, ClientError> {
    let count = u32::try_from(files.len()).unwrap_or(u32::MAX);
    match connection.send(&Frame::Fds { first: 0, count }, files) {
        // The daemon may close early after an error, which can still be received.
        Err(ConnectionError::Closed { .. }) => {}
        sent => sent?,
    }
    loop {
        match connection.receive()? {
            Frame::Progress(progress) => on_progress(progress.completed, progress.total),
            Frame::Imported(imported) => return Ok(imported),
            Frame::Error(error) => return Err(error.into()),
            other => {
                let (found, expected) = (other.kind(), "progress, imported or error");
                return Err(ProtocolError::UnexpectedFrame { found, expected }.into());
            }
        }
    }
}
