//! A model in another program's store, and its files.

use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use blobd_cli_common::file_error;
use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::git_id::{GitHasher, GitId};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::source::PullSource;

use crate::local_folder::{Identity, open_listed};
use crate::{ErrorBody, ErrorCode, Reference};

/// A model in another program's store.
#[derive(Debug)]
pub(crate) struct FoundModel {
    /// As its program calls it.
    pub(crate) name: String,
    /// The name that it gets; `None` if it cannot be imported.
    pub(crate) target: Option<Reference>,
    /// What it needs there, in bytes.
    pub(crate) size: u64,
    pub(crate) files: Vec<FoundFile>,
    /// The files by which its program finds it, if those are not the files of the model.
    pub(crate) entries: Vec<PathBuf>,
    /// Its manifest, if its program keeps one of the kind that the store has.
    pub(crate) manifest: Option<Manifest>,
    /// Where its program has pulled it from, if it says so.
    pub(crate) source: Option<PullSource>,
    /// When its program last gave the name another content, if it says so.
    pub(crate) named: Option<SystemTime>,
    /// What a user should know about it.
    pub(crate) notes: Vec<String>,
    pub(crate) problem: Option<Problem>,
}

impl FoundModel {
    /// A model that gets this name.
    pub(super) fn new(target: Reference, files: Vec<FoundFile>) -> Self {
        let size = files.iter().map(|file| file.size).fold(0, u64::saturating_add);
        let name = target.short();
        Self { target: Some(target), size, files, ..Self::without_files(name) }
    }

    pub(super) fn unusable(name: String, problem: Problem) -> Self {
        Self { problem: Some(problem), ..Self::without_files(name) }
    }

    const fn without_files(name: String) -> Self {
        Self {
            name,
            target: None,
            size: 0,
            files: Vec::new(),
            entries: Vec::new(),
            manifest: None,
            source: None,
            named: None,
            notes: Vec::new(),
            problem: None,
        }
    }

    pub(super) fn rename(&mut self, target: Reference) {
        self.name = target.short();
        self.target = Some(target);
    }

    /// A model that its program has pulled under its own name.
    pub(super) fn pulled(self) -> Self {
        Self { source: self.target.clone().map(PullSource::Registry), ..self }
    }

    /// Whether the stored model of its name has the same files, by the digests that their program gives them. Small files
    /// without one are read; a large one counts as another file.
    pub(super) fn is_like(&self, stored: &Manifest) -> bool {
        if let Some(own) = &self.manifest {
            return own.digest() == stored.digest();
        }
        let is_like = |(file, layer): (&FoundFile, &Descriptor)| {
            file.size == layer.size && file.claimed.or_else(|| file.small_digest()) == Some(layer.digest)
        };
        self.files.len() == stored.layers().len() && self.files.iter().zip(stored.layers()).all(is_like)
    }

    /// When its program last gave the name another content: as it says, else when the latest of its files was written.
    pub(super) fn updated(&self) -> Option<SystemTime> {
        let paths = self.entries.iter().chain(self.files.iter().map(|file| &file.source));
        let written = || paths.filter_map(|path| path.metadata().and_then(|file| file.modified()).ok()).max();
        self.named.or_else(written)
    }

    /// Whether it consists of GGUF files, and is not a folder.
    pub(super) fn is_gguf(&self) -> bool {
        self.files.iter().all(|file| FileFormat::GGUF.stem_of(&file.path).is_some())
    }

    /// Whether both are one model, as far as that is known without reading them.
    pub(super) fn is_same_content(&self, other: &Self) -> bool {
        let manifest = |model: &Self| model.manifest.as_ref().map(Manifest::digest);
        let is_same = |(own, other): (&FoundFile, &FoundFile)| {
            own.component == other.component && own.claimed.is_some() && own.claimed == other.claimed
        };
        let (own, others) = (&self.files, &other.files);
        let has_same_files = || own.len() == others.len() && own.iter().zip(others).all(is_same);
        manifest(self) == manifest(other) && (self.has_files_of(other) || has_same_files())
    }

    pub(crate) fn largest_file(&self) -> Option<Identity> {
        self.files.iter().map(|file| file.identity).max_by_key(Identity::size)
    }

    /// Whether it consists of the same files on disk, under the same paths.
    pub(crate) fn has_files_of(&self, other: &Self) -> bool {
        let is_single = self.files.len() == 1;
        let is_same = |(own, other): (&FoundFile, &FoundFile)| {
            own.identity == other.identity
                && own.component == other.component
                && (is_single || own.path == other.path)
        };
        let manifest = |model: &Self| model.manifest.as_ref().map(Manifest::digest);
        let (own, others) = (&self.files, &other.files);
        manifest(self) == manifest(other) && own.len() == others.len() && own.iter().zip(others).all(is_same)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct FoundFile {
    /// Its path in the model.
    pub(crate) path: String,
    pub(crate) source: PathBuf,
    /// Where its program finds it: `source`, or a link to it.
    pub(crate) place: PathBuf,
    pub(crate) size: u64,
    /// The SHA-256 that its program gives it. It only serves to find out what is stored already.
    pub(crate) claimed: Option<Digest>,
    /// The SHA-256 that it must have, or it is damaged.
    pub(super) certain: Option<Digest>,
    /// Git's SHA-1 that it must have, or it is damaged.
    pub(super) git_id: Option<GitId>,
    /// What it is in the model, if that does not follow from its content.
    pub(crate) component: Option<SidecarComponent>,
    pub(crate) identity: Identity,
}

impl FoundFile {
    pub(super) fn new(path: String, source: PathBuf, identity: Identity) -> Self {
        let (place, size) = (source.clone(), identity.size());
        let (claimed, certain, git_id, component) = (None, None, None, None);
        Self { path, source, place, size, claimed, certain, git_id, component, identity }
    }

    /// The SHA-256 that it must have; `None` if nothing says it. The daemon compares only this digest, so a file that has
    /// git's instead is read here.
    ///
    /// # Errors
    /// When the file has another content than git's SHA-1 says, or cannot be read.
    pub(crate) fn checked(&self) -> Result<Option<Digest>, ErrorBody> {
        let Some(expected) = self.git_id else { return Ok(self.certain) };
        let failed = |error| file_error(&self.source.display().to_string(), &error);
        let (mut git, mut sha256) = (GitHasher::new(self.size), Hasher::new());
        let (mut file, mut buffer) = (self.open()?.take(self.size), vec![0; 64 << 10]);
        loop {
            let read = file.read(&mut buffer).map_err(failed)?;
            let Some(bytes @ [_, ..]) = buffer.get(..read) else { break };
            git.update(bytes);
            sha256.update(bytes);
        }
        let found = git.finish();
        if found == expected {
            return Ok(self.certain.or_else(|| Some(sha256.finish())));
        }
        let what = format!(
            "wrong digest: expected the git object {expected}, found {found}; the store that it comes from is damaged"
        );
        Err(ErrorBody::new(ErrorCode::InvalidInput, format!("{}: {what}", self.path)).with_hint(GET_AGAIN))
    }

    /// Opens the file for reading.
    ///
    /// # Errors
    /// When it cannot be opened, or is not the file that was found.
    pub(crate) fn open(&self) -> Result<File, ErrorBody> {
        open_listed(&self.source, self.identity)
    }

    /// The digest of a small file; `None` if it is large or cannot be read.
    fn small_digest(&self) -> Option<Digest> {
        const MAX_BYTES: u64 = 32 << 20;
        let bytes = (self.size <= MAX_BYTES).then(|| self.read().ok()).flatten()?;
        Some(Digest::of(&bytes))
    }

    /// The content of the file that was found.
    pub(super) fn read(&self) -> Result<Vec<u8>, ErrorBody> {
        let mut bytes = Vec::new();
        let read = self.open()?.take(self.size).read_to_end(&mut bytes);
        read.map_err(|error| file_error(&self.source.display().to_string(), &error))?;
        Ok(bytes)
    }
}

/// What to do about a model that is not whole in its program's store.
const GET_AGAIN: &str = "pull the model again, here or with the program that the store belongs to";

/// Why a model cannot be imported.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}: {what}", path.display())]
pub(crate) struct Problem {
    path: PathBuf,
    what: String,
    hint: Option<Cow<'static, str>>,
    /// Whether the model is left out on purpose, and nothing is wrong with it.
    is_left_out: bool,
}

impl Problem {
    pub(super) fn new(path: &Path, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), what: what.into(), hint: Some(GET_AGAIN.into()), is_left_out: false }
    }

    /// Why a model is left out that nothing is wrong with.
    pub(super) fn left_out(path: &Path, what: impl Into<String>) -> Self {
        Self { is_left_out: true, hint: None, ..Self::new(path, what) }
    }

    pub(crate) const fn is_left_out(&self) -> bool {
        self.is_left_out
    }

    pub(super) fn with_hint(self, hint: impl Into<Cow<'static, str>>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// The name of a model that the store cannot have.
    pub(super) fn name(path: &Path, error: impl std::fmt::Display) -> Self {
        Self::new(path, error.to_string()).with_hint("import its files by their paths, with `--name REF`")
    }

    pub(super) fn unreadable(path: &Path) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |error| {
            let problem = Self::new(&path, format!("cannot be read: {error}"));
            match error.kind() {
                ErrorKind::PermissionDenied => problem.with_hint("run the command as a user who can read it"),
                _ => problem,
            }
        }
    }

    pub(crate) fn error(&self) -> ErrorBody {
        let body = ErrorBody::new(ErrorCode::InvalidInput, self.to_string());
        match &self.hint {
            Some(hint) => body.with_hint(hint),
            None => body,
        }
    }
}

/// The problem of an entry of a folder that is not a file of it.
pub(super) fn not_of_folder(place: &Path, found: &str) -> Problem {
    let what = format!("wrong kind of file: expected a file of the folder, found {found}");
    Problem::new(place, what).with_hint("`--follow` follows links that lead out of a folder")
}
