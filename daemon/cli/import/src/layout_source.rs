//! An OCI image layout to load models from: a tar archive or a folder. `layout_stream` reads one that arrives as a stream.
//!
//! Nothing in it is trusted: the index and the manifests have limits, and the daemon checks the digest of each file that it
//! stores.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use blobd_cli_common::{file_error, internal};
use blobd_client::protocol::lists::MAX_SIGNATURES;
use blobd_store_format::archive::{TarError, TarReader};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::index::{LayoutModel, LayoutSignature, ManifestIndex};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::signature::{Bundle, SignatureArtifact};

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
pub(crate) struct Member {
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl LayoutSource {
    /// The most files of an archive: those of some hundred models.
    pub(crate) const MAX_MEMBERS: usize = 100_000;
    /// The most bytes of the index, which has at most 1,024 entries.
    pub(crate) const MAX_INDEX_BYTES: u64 = 1 << 20;

    /// Reads a folder.
    pub(crate) fn from_folder(path: &Path) -> Result<Self, ErrorBody> {
        let files = Files::Folder(Folder::list(path, Links::Inside)?);
        Ok(Self { name: path.display().to_string(), files })
    }

    /// Reads an archive that is a file.
    pub(crate) fn from_archive(name: String, archive: File) -> Result<Self, ErrorBody> {
        let members = members(&name, &archive)?;
        Ok(Self::from_members(name, archive, members))
    }

    /// The files that are in `archive` at these places.
    pub(crate) fn from_members(name: String, archive: File, members: BTreeMap<String, Member>) -> Self {
        Self { name, files: Files::Archive { archive, members } }
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
        let (models, _) = self.index()?;
        Ok(models.into_iter().map(|listed| (listed.clone(), self.manifest(&listed))).collect())
    }

    fn index(&self) -> Result<(Vec<LayoutModel>, Vec<LayoutSignature>), ErrorBody> {
        let raw = self.read(ManifestIndex::LAYOUT_PATH, Self::MAX_INDEX_BYTES)?;
        ManifestIndex::parse_layout(&raw).map_err(|error| self.invalid(&error))
    }

    /// The signatures of the model with this manifest, as texts of bundles.
    pub(crate) fn signatures(&self, model: Digest) -> Result<Vec<String>, ErrorBody> {
        let (_, listed) = self.index()?;
        Ok(signatures(&listed, model, |digest, most| {
            self.read(&ManifestIndex::layout_blob_path(digest), most).ok()
        }))
    }

    /// Reads the manifest of a model, and checks that all of its files are there.
    fn manifest(&self, listed: &LayoutModel) -> Result<Manifest, ErrorBody> {
        let digest = listed.manifest.digest;
        self.check_member(digest, listed.manifest.size, "manifest")?;
        let raw = self.read(&ManifestIndex::layout_blob_path(digest), Manifest::MAX_BYTES)?;
        let manifest = checked_manifest(&self.name, &listed.manifest, raw)?;
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

    /// Reads a file of this digest and size, of at most `most` bytes.
    pub(crate) fn read_part(&self, part: &Descriptor, most: u64) -> Result<Vec<u8>, ErrorBody> {
        self.read(&ManifestIndex::layout_blob_path(part.digest), most)
    }

    pub(crate) fn invalid(&self, what: &dyn std::fmt::Display) -> ErrorBody {
        invalid_layout(&self.name, what)
    }
}

/// The signatures of a model among those that an index lists. What is missing, too long or not a signature is left out: a
/// rule of the daemon may then refuse the model.
pub(crate) fn signatures(
    listed: &[LayoutSignature],
    model: Digest,
    read: impl Fn(Digest, u64) -> Option<Vec<u8>>,
) -> Vec<String> {
    let read = |digest, most| read(digest, most).filter(|bytes| Digest::of(bytes) == digest);
    let bundle = |listed: &LayoutSignature| {
        let manifest = read(listed.manifest.digest, SignatureArtifact::KIND.max_manifest_bytes)?;
        let digest = SignatureArtifact::parse(&manifest, model).ok()?.bundle().digest;
        String::from_utf8(read(digest, MAX_SIGNATURE_BYTES)?).ok()
    };
    let mut left = MAX_SIGNATURE_BYTES;
    let fits = |text: &String| match left.checked_sub(text.len() as u64) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    listed.iter().filter_map(bundle).filter(fits).take(MAX_SIGNATURES).collect()
}

/// The bytes of all signatures of a model: they are in one request with its manifest. The longest one fits.
const MAX_SIGNATURE_BYTES: u64 = Bundle::MAX_BYTES as u64;

/// A manifest with the digest and the size that the index says.
pub(crate) fn checked_manifest(name: &str, listed: &Descriptor, raw: Vec<u8>) -> Result<Manifest, ErrorBody> {
    let (digest, found) = (listed.digest, Digest::of(&raw));
    if raw.len() as u64 != listed.size {
        let (expected, found) = (listed.size, raw.len());
        let what = format!("wrong size of manifest {digest}: expected {expected}, found {found}");
        return Err(invalid_layout(name, &what));
    }
    if found != digest {
        let what = format!("wrong digest of a manifest: expected {digest}, found {found}");
        return Err(invalid_layout(name, &what));
    }
    Manifest::parse(raw).map_err(|error| invalid_layout(name, &format_args!("manifest {digest}: {error}")))
}

pub(crate) fn invalid_layout(name: &str, what: &dyn std::fmt::Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidInput, format!("{name}: {what}")).with_hint(COPY_AGAIN)
}

pub(crate) fn not_an_archive(name: &str, error: &TarError) -> ErrorBody {
    let hint = match error {
        TarError::Outside { .. } => COPY_AGAIN,
        _ => {
            "expected an archive as `blobd save` writes it, not compressed; `blobd import` takes model files"
        }
    };
    ErrorBody::new(ErrorCode::InvalidInput, format!("{name}: {error}")).with_hint(hint)
}

const COPY_AGAIN: &str = "copy it again, and compare the sizes";

/// Finds the files of an archive by its headers.
fn members(name: &str, archive: &File) -> Result<BTreeMap<String, Member>, ErrorBody> {
    let failed = |error: io::Error| file_error(name, &error);
    let size = archive.metadata().map_err(failed)?.len();
    let mut reader = TarReader::new(size).with_max_files(LayoutSource::MAX_MEMBERS);
    let mut is_ended = false;
    while let Some(wanted) = reader.wanted() {
        let length = usize::try_from(wanted.end.saturating_sub(wanted.start)).map_err(internal)?;
        let mut bytes = vec![0; length];
        archive.read_exact_at(&mut bytes, wanted.start).map_err(failed)?;
        is_ended = bytes.iter().all(|byte| *byte == 0);
        reader.push(&bytes).map_err(|error| not_an_archive(name, &error))?;
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
