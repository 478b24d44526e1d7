//! Requests to the `blobd exec` that started the program, and its responses; `daemon/cli/mount/src/exec/service.rs` describes
//! their form.

use std::ffi::{c_int, c_uint};
use std::io::{self, Read, Write};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::sys::{EIO, Iovec, MSG_CMSG_CLOEXEC, Message, SCM_RIGHTS, SOL_SOCKET, recvmsg};

/// The environment variable that names the socket of `blobd exec`.
pub(crate) const SOCKET_VARIABLE: &str = "BLOBD_EXEC_SOCKET";

/// The longest error message read from `blobd exec`.
const MAX_REASON_BYTES: usize = 4096;

/// The longest path that it sends; the kernel's limit.
const MAX_PATH_BYTES: usize = 4096;

/// The most descriptors in one message.
const BATCH: usize = 64;
const BATCH_U32: u32 = 64;

/// Why a model cannot be opened: the value for `errno`, and a message, which may be empty.
pub(crate) struct OpenError {
    pub(crate) errno: c_int,
    pub(crate) reason: String,
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        let reason = format!("request to blobd exec failed: {error}");
        Self { errno: error.raw_os_error().unwrap_or(EIO), reason }
    }
}

/// What is requested. Paths are relative to the directory of the models.
#[derive(Clone)]
pub(crate) enum Request {
    /// The image of the file with this path.
    File { path: Vec<u8> },
    /// The folder of a model that this path is in.
    Folder { path: Vec<u8> },
    /// The image of a file in a folder, which is named by its number.
    FileOfFolder { folder: u64, path: Vec<u8> },
    /// The image of the mounted file with this inode.
    Mounted { inode: u64 },
}

impl Request {
    /// The connection, from which the rest of the response can be read. What was requested is in use while it is open.
    pub(crate) fn send(&self) -> Result<UnixStream, OpenError> {
        let socket = std::env::var_os(SOCKET_VARIABLE);
        let socket = socket.ok_or_else(|| io::Error::other(format!("{SOCKET_VARIABLE} is not set")))?;
        let (kind, number, path): (u32, u64, &[u8]) = match self {
            Self::File { path } => (0, 0, path),
            Self::Folder { path } => (1, 0, path),
            Self::FileOfFolder { folder, path } => (2, *folder, path),
            Self::Mounted { inode } => (3, *inode, b""),
        };
        let mut stream = UnixStream::connect(socket)?;
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(number.to_le_bytes());
        bytes.extend(u32::try_from(path.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(path);
        stream.write_all(&bytes)?;
        let (status, reason_length) = (read_u32(&mut stream)?, read_u32(&mut stream)?);
        if status == 0 {
            return Ok(stream);
        }
        let mut reason = vec![0; (reason_length as usize).min(MAX_REASON_BYTES)];
        stream.read_exact(&mut reason)?;
        let reason = String::from_utf8_lossy(&reason).into_owned();
        Err(OpenError { errno: status.cast_signed(), reason })
    }
}

/// The response to a request for a folder.
pub(crate) struct FolderHead {
    pub(crate) number: u64,
    /// The bytes of the path that are the model's name.
    pub(crate) name_length: usize,
    /// The directory that stands for the folder: links with the names of the files.
    pub(crate) directory: Vec<u8>,
}

impl FolderHead {
    pub(crate) fn read(stream: &mut UnixStream) -> io::Result<Self> {
        let number = read_u64(stream)?;
        let name_length = read_u32(stream)? as usize;
        let mut directory = vec![0; (read_u32(stream)? as usize).min(MAX_PATH_BYTES)];
        stream.read_exact(&mut directory)?;
        Ok(Self { number, name_length, directory })
    }
}

/// The first numbers of the response to a request for an image.
pub(crate) struct ImageHead {
    /// The digest of what is shown: requests with the same digest give the same image.
    pub(crate) digest: [u8; 32],
    pub(crate) length: u64,
    pub(crate) header_length: u64,
    /// Bytes that cannot be mapped, sent after the header, and their place in the image.
    pub(crate) copied_offset: u64,
    pub(crate) copied_length: u64,
    part_count: u32,
    fd_count: u32,
}

impl ImageHead {
    pub(crate) fn read(stream: &mut UnixStream) -> io::Result<Self> {
        let mut digest = [0; 32];
        stream.read_exact(&mut digest)?;
        let mut next = || read_u64(stream);
        let (length, header_length, copied_offset, copied_length) = (next()?, next()?, next()?, next()?);
        let (part_count, fd_count) = (read_u32(stream)?, read_u32(stream)?);
        Ok(Self { digest, length, header_length, copied_offset, copied_length, part_count, fd_count })
    }

    /// Receives the parts and the descriptors, in batches, and calls `place` for each part. The parts are sorted by
    /// descriptor.
    pub(crate) fn receive_parts(
        &self,
        stream: &mut UnixStream,
        mut place: impl FnMut(&Part, &OwnedFd) -> io::Result<()>,
    ) -> io::Result<()> {
        let parts: io::Result<Vec<_>> = (0..self.part_count).map(|_| Part::read(stream)).collect();
        let parts = parts?;
        let mut remaining = parts.as_slice();
        let mut first = 0;
        while first < self.fd_count {
            let fds = receive_fds(stream)?;
            let count = (self.fd_count - first).min(BATCH_U32);
            if fds.len() != count as usize {
                return Err(io::Error::other("descriptors lost: too many open files; raise `ulimit -n`"));
            }
            let batch_end = remaining.partition_point(|part| part.fd < first.saturating_add(count));
            let (batch, later) = remaining.split_at(batch_end);
            for part in batch {
                place(part, fds.get(part.fd.saturating_sub(first) as usize).ok_or_else(invalid)?)?;
            }
            (remaining, first) = (later, first + count);
            stream.write_all(&[0])?;
        }
        if remaining.is_empty() { Ok(()) } else { Err(invalid()) }
    }
}

/// A part of an image that is a range of a blob.
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) fd_offset: u64,
    fd: u32,
}

impl Part {
    fn read(stream: &mut UnixStream) -> io::Result<Self> {
        let mut next = || read_u64(stream);
        let (offset, length, fd_offset) = (next()?, next()?, next()?);
        Ok(Self { offset, length, fd_offset, fd: read_u32(stream)? })
    }
}

fn read_u32(stream: &mut UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_u64(stream: &mut UnixStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

pub(crate) fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// The control data of a message: a `size_t` in two words, two `int`s, then the descriptors.
#[repr(C, align(8))]
struct Control([c_uint; 4 + BATCH]);

fn receive_fds(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = 0_u8;
    let mut part = Iovec { base: (&raw mut byte).cast(), length: 1 };
    let mut control = Control([0; 4 + BATCH]);
    // SAFETY: Needed to receive descriptors. All pointers are to locals that outlive the call, with the
    // correct lengths. All zeros is a valid `Message`.
    let received = unsafe {
        let mut message: Message = zeroed();
        (message.parts, message.part_count) = (&raw mut part, 1);
        (message.control, message.control_length) = ((&raw mut control).cast(), size_of::<Control>());
        recvmsg(stream.as_raw_fd(), &raw mut message, MSG_CMSG_CLOEXEC)
    };
    if received < 1 {
        return Err(if received == 0 { invalid() } else { io::Error::last_os_error() });
    }
    let [length, _, level, kind, fds @ ..] = control.0;
    if (level.cast_signed(), kind.cast_signed()) != (SOL_SOCKET, SCM_RIGHTS) {
        return Err(invalid());
    }
    let count = (length as usize / size_of::<c_int>()).saturating_sub(4);
    // SAFETY: Needed to own the descriptors, which the kernel has just created in this process.
    Ok(fds.into_iter().take(count).map(|fd| unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) }).collect())
}
