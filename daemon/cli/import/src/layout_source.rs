//! An OCI image layout to load models from: a tar archive, a folder, or a stream that is copied into a temporary file.
//!
//! Nothing in it is trusted: the index and the manifests have limits, and the daemon checks the digest of each file that it
//! stores.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blobd_cli_common::progress::Bar;
use blobd_cli_common::{file_error, internal};
use blobd_store_format::archive::{TarError, TarReader};
use blobd_store_format::index::{LayoutModel, ManifestIndex};
use blobd_store_format::manifest::Manifest;

use crate::local_folder::{Folder, Links};
use crate::{Digest, ErrorBody, ErrorCode};

/// The files of a layout.
#[derive(Debug)]
pub(crate) struct LayoutSource {
    /// For errors.
    name: String,
    files: Files,
}

#[derive(Debug)]
enum Files {
    Folder(Folder),
    Archive { archive: File, members: BTreeMap<String, Member> },
}

/// A model of the index, and its manifest if all of its files are there.
pub(crate) type ReadModel = (LayoutModel, Result<Manifest, ErrorBody>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    offset: u64,
    size: u64,
}

impl LayoutSource {
    /// The most files of an archive: those of some hundred models.
    const MAX_MEMBERS: usize = 100_000;
    /// The most bytes of the index, which has at most 1,024 entries.
    const MAX_INDEX_BYTES: u64 = 1 << 20;

    /// Reads what there is at a path. A pipe is copied into a temporary file first.
    pub(crate) fn open(path: &Path, bar: &Bar) -> Result<Self, ErrorBody> {
        let name = path.display().to_string();
        let failed = |error: io::Error| file_error(&name, &error);
        let metadata = path.metadata().map_err(failed)?;
        if metadata.is_dir() {
            let files = Files::Folder(Folder::list(path, Links::Inside)?);
            return Ok(Self { name, files });
        }
        let file = File::open(path).map_err(failed)?;
        Self::from_file(name, file, bar)
    }

    /// Reads an archive from standard input.
    pub(crate) fn from_stdin(bar: &Bar) -> Result<Self, ErrorBody> {
        let name = "standard input".to_owned();
        let stdin = rustix::io::dup(io::stdin()).map_err(|error| file_error(&name, &error.into()))?;
        Self::from_file(name, File::from(stdin), bar)
    }

    fn from_file(name: String, file: File, bar: &Bar) -> Result<Self, ErrorBody> {
        let metadata = file.metadata().map_err(|error| file_error(&name, &error))?;
        let archive = if metadata.is_file() { file } else { copied(&name, file, bar)? };
        let members = members(&name, &archive)?;
        Ok(Self { name, files: Files::Archive { archive, members } })
    }

    /// The models that the index lists.
    ///
    /// # Errors
    /// For an index that cannot be read. Of a model with a fault, only the model's own result is an error.
    pub(crate) fn models(&self) -> Result<Vec<ReadModel>, ErrorBody> {
        if self.member(ManifestIndex::LAYOUT_PATH).is_none() {
            let message = format!(
                "{}: not an OCI image layout: expected a file {}, found none",
                self.name,
                ManifestIndex::LAYOUT_PATH
            );
            let body = ErrorBody::new(ErrorCode::InvalidInput, message);
            return Err(body.with_hint("`blobd import` takes model files and folders of them"));
        }
        let raw = self.read(ManifestIndex::LAYOUT_PATH, Self::MAX_INDEX_BYTES)?;
        let index = ManifestIndex::parse(&raw).and_then(ManifestIndex::into_layout_models);
        let models = index.map_err(|error| self.invalid(&error))?;
        Ok(models.into_iter().map(|listed| (listed.clone(), self.manifest(&listed))).collect())
    }

    /// Reads the manifest of a model, and checks that all of its files are there.
    fn manifest(&self, listed: &LayoutModel) -> Result<Manifest, ErrorBody> {
        let digest = listed.manifest.digest;
        self.check_member(digest, listed.manifest.size, "manifest")?;
        let raw = self.read(&ManifestIndex::layout_blob_path(digest), Manifest::MAX_BYTES)?;
        let found = Digest::of(&raw);
        if found != digest {
            let what = format!("wrong digest of a manifest: expected {digest}, found {found}");
            return Err(self.invalid(&what));
        }
        let manifest = Manifest::parse(raw)
            .map_err(|error| self.invalid(&format_args!("manifest {digest}: {error}")))?;
        manifest.files().try_for_each(|file| self.check_member(file.digest, file.size, "file"))?;
        Ok(manifest)
    }

    fn check_member(&self, digest: Digest, size: u64, what: &str) -> Result<(), ErrorBody> {
        // Archives do not list empty files.
        let found = match self.member(&ManifestIndex::layout_blob_path(digest)) {
            None if size == 0 => return Ok(()),
            found => found,
        };
        match found {
            Some(found) if found.size == size => Ok(()),
            Some(found) => Err(self.invalid(&format_args!(
                "wrong size of {what} {digest}: expected {size}, found {}",
                found.size
            ))),
            None => Err(self.invalid(&format_args!("{what} {digest} is missing"))),
        }
    }

    /// Opens the file with this digest. Also returns where it begins in what was opened.
    pub(crate) fn open_blob(&self, digest: Digest, size: u64) -> Result<OwnedFd, ErrorBody> {
        if size == 0 {
            return tempfile::tempfile().map(OwnedFd::from).map_err(internal);
        }
        match &self.files {
            Files::Folder(folder) => folder.open(&ManifestIndex::layout_blob_path(digest)).map(OwnedFd::from),
            Files::Archive { archive, .. } => archive.try_clone().map(OwnedFd::from).map_err(internal),
        }
    }

    /// Where the file with this digest begins in what [`Self::open_blob`] opens.
    pub(crate) fn offset_of(&self, digest: Digest) -> u64 {
        self.member(&ManifestIndex::layout_blob_path(digest)).map_or(0, |member| member.offset)
    }

    fn member(&self, path: &str) -> Option<Member> {
        match &self.files {
            Files::Folder(folder) => {
                let size = folder.identity(path).ok()?.size();
                Some(Member { offset: 0, size })
            }
            Files::Archive { members, .. } => members.get(path).copied(),
        }
    }

    /// Reads a file of at most `most` bytes.
    fn read(&self, path: &str, most: u64) -> Result<Vec<u8>, ErrorBody> {
        let Member { offset, size } = self.member(path).unwrap_or(Member { offset: 0, size: 0 });
        if size > most {
            let what = format!("{path}: too long: expected at most {most} bytes, found {size}");
            return Err(self.invalid(&what));
        }
        match &self.files {
            Files::Folder(folder) => folder.read(path, most),
            Files::Archive { archive, .. } => {
                let mut bytes = vec![0; usize::try_from(size).map_err(internal)?];
                let read = archive.read_exact_at(&mut bytes, offset);
                read.map(|()| bytes).map_err(|error| file_error(&self.name, &error))
            }
        }
    }

    fn invalid(&self, what: &dyn std::fmt::Display) -> ErrorBody {
        let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{}: {what}", self.name));
        body.with_hint(COPY_AGAIN)
    }
}

const COPY_AGAIN: &str = "copy it again, and compare the sizes";

/// Copies a stream into a temporary file without a name, in the folder that `TMPDIR` names.
fn copied(name: &str, mut stream: File, bar: &Bar) -> Result<File, ErrorBody> {
    const STEP_BYTES: usize = 1 << 20;
    let temporary = |error: io::Error| {
        let folder = std::env::temp_dir().display().to_string();
        let body = file_error(&folder, &error);
        body.with_hint(format!("{name} is copied there first; TMPDIR names another folder"))
    };
    let mut file = tempfile::tempfile().map_err(temporary)?;
    let (mut buffer, mut copied) = (vec![0; STEP_BYTES], 0_u64);
    loop {
        let length = stream.read(&mut buffer).map_err(|error| file_error(name, &error))?;
        if length == 0 {
            return Ok(file);
        }
        file.write_all(buffer.get(..length).unwrap_or_default()).map_err(temporary)?;
        copied = copied.saturating_add(length as u64);
        bar.set(copied, 0);
    }
}

/// Finds the files of an archive by its headers.
fn members(name: &str, archive: &File) -> Result<BTreeMap<String, Member>, ErrorBody> {
    let failed = |error: io::Error| file_error(name, &error);
    let invalid = |error: TarError| {
        let hint = match error {
            TarError::Outside { .. } => COPY_AGAIN,
            _ => {
                "expected an archive as `blobd save` writes it, not compressed; `blobd import` takes model files"
            }
        };
        ErrorBody::new(ErrorCode::InvalidInput, format!("{name}: {error}")).with_hint(hint)
    };
    let size = archive.metadata().map_err(failed)?.len();
    let mut reader = TarReader::new(size).with_max_files(LayoutSource::MAX_MEMBERS);
    let mut is_ended = false;
    while let Some(wanted) = reader.wanted() {
        let length = usize::try_from(wanted.end.saturating_sub(wanted.start)).map_err(internal)?;
        let mut bytes = vec![0; length];
        archive.read_exact_at(&mut bytes, wanted.start).map_err(failed)?;
        is_ended = bytes.iter().all(|byte| *byte == 0);
        reader.push(&bytes).map_err(invalid)?;
    }
    if !is_ended {
        let what = format!("{name}: archive of {size} bytes: its end is missing");
        return Err(ErrorBody::new(ErrorCode::InvalidInput, what).with_hint(COPY_AGAIN));
    }
    let member = |file: blobd_store_format::file_layout::ArchiveFile| {
        (file.path, Member { offset: file.offset, size: file.size })
    };
    Ok(reader.into_files().into_iter().map(member).collect())
}
