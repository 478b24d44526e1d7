//! Serves the preloaded library: receives a path, sends what is there.
//!
//! All numbers are little-endian. The request is its kind (4 bytes: 0 for the image of the file with a path, 1 for the
//! folder that a path is in, 2 for the image of a file in a folder, 3 for that of a mounted file), the number of the folder or
//! the inode of the mounted file (8 bytes), a path's length (4 bytes) and the path, relative to `/blobd` or to the folder. The response begins with an errno and the length of an
//! error message (4 bytes each), then the message.
//!
//! If the errno is 0, the response for a folder is its number (8 bytes), how many bytes of the path are the model's name,
//! the length of a path (4 bytes each), and the path of the directory that stands for the folder.
//!
//! The response for an image is the digest of what it shows (32 bytes), the lengths of the image and of its header, the
//! offset and the length of the bytes that are copied (8 bytes each), the number of parts and of descriptors (4 bytes each),
//! the header, the copied bytes, the parts (offset in the image, length, offset in the blob: 8 bytes each; index of the
//! descriptor: 4), sorted by descriptor, and then the descriptors, up to 64 with each byte; the library confirms each byte
//! with one. The library and this file are built together, so the protocol may change.

use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use blobd_cli_common::connect::{client_error, model_error};
use blobd_cli_common::internal;
use blobd_cli_common::model_source::weights_component;
use blobd_client::gguf_view::{ImagePart, ImagePlan};
use blobd_client::model::OpenModel;
use blobd_client::protocol::connection::send_all;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_client::protocol::response::OpenPiece;
use blobd_store_format::stored_file::FilePieces;

use super::file_image::FileImage;
use super::folders::{Folder, Folders};
use super::mounted::MountedFiles;
use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

/// The kinds of requests; any other is for a mounted file.
const FILE: u32 = 0;
const FOLDER: u32 = 1;
const FILE_OF_FOLDER: u32 = 2;
/// The kernel's limit for paths.
const MAX_PATH_BYTES: u32 = 4096;
const COPY_BYTES: usize = 1 << 20;
/// Descriptors that are sent with one byte.
const BATCH: usize = 64;
/// C's `ENOENT`, `EIO` and `EACCES`.
const NOT_FOUND: u32 = 2;
const FAILED: u32 = 5;
const DENIED: u32 = 13;

pub(super) fn run(listener: &UnixListener, client: &Client, folders: PathBuf) {
    let service = Service {
        client: client.clone(),
        folders: Folders::new(client.clone(), folders),
        mounted: MountedFiles::new(client.clone()),
    };
    let service = Arc::new(service);
    for stream in listener.incoming().flatten() {
        let service = Arc::clone(&service);
        thread::spawn(move || {
            // Fails if the program has ended, which needs no response.
            let _ = serve(stream, &service);
        });
    }
}

struct Service {
    client: Client,
    folders: Folders,
    mounted: MountedFiles,
}

/// Serves one request, and holds the lease until the program closes the connection.
fn serve(mut stream: UnixStream, service: &Service) -> io::Result<()> {
    let Service { client, folders, .. } = service;
    let (kind, number) = (read_array(&mut stream)?, u64::from_le_bytes(read_array(&mut stream)?));
    let length = u32::from_le_bytes(read_array(&mut stream)?).min(MAX_PATH_BYTES);
    let mut path = vec![0; usize::try_from(length).unwrap_or(0)];
    stream.read_exact(&mut path)?;
    let path = String::from_utf8_lossy(&path);
    match u32::from_le_bytes(kind) {
        FILE => serve_file(&mut stream, open(&path, client)),
        FOLDER => serve_folder(&mut stream, &path, folders),
        FILE_OF_FOLDER => {
            let unknown = || ErrorBody::new(ErrorCode::NotFound, "the folder is not open any more");
            let folder = folders.open_folder(number).ok_or_else(unknown);
            // The program holds the folder, so this needs no lease.
            send_file_of_folder(&mut stream, folder.and_then(|folder| Ok((folder.layer(&path)?, folder))))
        }
        _ => serve_mounted(&mut stream, number, service),
    }
}

fn read_array<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The program sends nothing more: this returns when it closes the connection.
fn wait_for_close(stream: &mut UnixStream) -> io::Result<()> {
    stream.read(&mut [0]).map(drop)
}

fn serve_file(stream: &mut UnixStream, opened: Result<Opened, ErrorBody>) -> io::Result<()> {
    let (model, image) = match opened {
        Ok(opened) => opened,
        Err(error) => return stream.write_all(&refusal(&error)),
    };
    send_image(stream, &model, model.digest(), &image)?;
    let _lease = model.into_lease();
    wait_for_close(stream)
}

fn serve_mounted(stream: &mut UnixStream, inode: u64, service: &Service) -> io::Result<()> {
    let file = match service.mounted.find(inode) {
        Ok(file) => file,
        Err(error) => return stream.write_all(&refusal(&error)),
    };
    if !file.is_in_folder {
        return serve_file(stream, open_component(&service.client, file.reference, &file.component));
    }
    let folder = service.folders.open(&file.reference.short(), &file.reference);
    let found = folder.and_then(|folder| Ok((folder.layer_of(file.digest)?, folder)));
    let lease = found.as_ref().ok().map(|(_, folder)| Arc::clone(folder));
    send_file_of_folder(stream, found)?;
    wait_for_close(stream)?;
    drop(lease);
    Ok(())
}

fn serve_folder(stream: &mut UnixStream, path: &str, folders: &Folders) -> io::Result<()> {
    let (folder, name_length) = match folders.find(path) {
        Ok(found) => found,
        Err(error) => return stream.write_all(&refusal(&error)),
    };
    let directory = folder.directory.as_os_str().as_bytes();
    let mut bytes = vec![0; 8];
    bytes.extend(folder.number.to_le_bytes());
    for length in [name_length, directory.len()] {
        bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    }
    bytes.extend(directory);
    stream.write_all(&bytes)?;
    wait_for_close(stream)
}

fn send_file_of_folder(
    stream: &mut UnixStream,
    found: Result<(usize, Arc<Folder>), ErrorBody>,
) -> io::Result<()> {
    let planned = found.and_then(|(layer, folder)| {
        let image = FileImage::of_layer(&folder.model, layer).map_err(model_error)?;
        let digest = folder.model.layers().get(layer).map(|layer| layer.digest);
        Ok((digest.unwrap_or_else(|| folder.model.digest()), image, folder))
    });
    match planned {
        Ok((digest, image, folder)) => send_image(stream, &folder.model, digest, &image),
        Err(error) => stream.write_all(&refusal(&error)),
    }
}

type Opened = (OpenModel, FileImage);

fn open(path: &str, client: &Client) -> Result<Opened, ErrorBody> {
    let name = path.strip_suffix(".gguf").unwrap_or(path);
    let (name, component) = name.split_once('+').map_or((name, None), |(name, rest)| (name, Some(rest)));
    let reference: Reference = name.parse().map_err(|error| ErrorBody::new(ErrorCode::NotFound, error))?;
    let component = match component {
        Some(component) => component.to_owned(),
        None => weights_component(client, &reference),
    };
    open_component(client, reference, &component)
}

fn open_component(client: &Client, reference: Reference, component: &str) -> Result<Opened, ErrorBody> {
    let params = OpenParams {
        reference,
        tensors: TensorSelection::All,
        component: Some(component.to_owned()),
        files: FileSelection::Whole,
        purpose: OpenPurpose::Exec,
    };
    let model = client.open_with(&params).map_err(client_error)?;
    let ImagePlan { header, parts, length } = model.plan_contiguous(component).map_err(model_error)?;
    let image = FileImage { header, parts, copied_offset: length, copied: Vec::new(), length };
    Ok((model, image))
}

fn send_image(
    stream: &mut UnixStream,
    model: &OpenModel,
    digest: Digest,
    image: &FileImage,
) -> io::Result<()> {
    let mut parts = image.parts.clone();
    parts.sort_by_key(|part| part.fd);
    if let Err(error) = parts.iter().try_for_each(|part| check_length(model, part)) {
        return stream.write_all(&refusal(&error));
    }
    let mut fds: Vec<u32> = parts.iter().map(|part| part.fd).collect();
    fds.dedup();
    let mut bytes = vec![0; 8];
    bytes.extend(digest.as_bytes());
    for number in [image.length, image.header.len() as u64, image.copied_offset, image.copied_length()] {
        bytes.extend(number.to_le_bytes());
    }
    for count in [parts.len(), fds.len()] {
        bytes.extend(u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
    }
    bytes.extend(&image.header);
    stream.write_all(&bytes)?;
    send_copied(stream, model, &image.copied)?;
    let mut bytes = Vec::new();
    for part in &parts {
        for number in [part.offset, part.length, part.fd_offset] {
            bytes.extend(number.to_le_bytes());
        }
        let number = fds.partition_point(|fd| *fd < part.fd);
        bytes.extend(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
    }
    stream.write_all(&bytes)?;
    send_fds(stream, model, &fds)
}

fn send_copied(stream: &mut UnixStream, model: &OpenModel, pieces: &[OpenPiece]) -> io::Result<()> {
    let pieces = FilePieces::new(pieces.to_vec()).map_err(io::Error::other)?;
    let mut buffer = vec![0; usize::try_from(pieces.size()).unwrap_or(usize::MAX).min(COPY_BYTES)];
    let mut offset = 0;
    while offset < pieces.size() {
        let read = pieces.read_at(offset, &mut buffer, |fd, at, bytes| model.read_at(fd, at, bytes));
        let count = read.map_err(io::Error::other)?;
        stream.write_all(buffer.get(..count).unwrap_or_default())?;
        offset = offset.saturating_add(count as u64);
    }
    Ok(())
}

/// Checks that the blob contains the part: reading a mapping beyond the end of its file raises SIGBUS.
fn check_length(model: &OpenModel, part: &ImagePart) -> Result<(), ErrorBody> {
    let fd = model.fd(part.fd).ok_or_else(|| {
        let message =
            format!("the model has {} descriptors, more than this process may open", model.fd_count());
        ErrorBody::new(ErrorCode::Internal, message).with_hint("raise `ulimit -Hn`")
    })?;
    let found = rustix::fs::fstat(fd).map(|stat| u64::try_from(stat.st_size).unwrap_or(0));
    let found = found.map_err(internal)?;
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
