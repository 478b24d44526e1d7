//! An OCI image layout that arrives as a stream: its files are passed on as they come.
//!
//! That needs the index and the manifests before the files, as `blobd save` writes them. A file that comes before it is wanted,
//! or that a later model needs too, is copied into a temporary file. A layout whose index does not come first is copied
//! whole, and so is one with a delta, whose parts are not in the order of the files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, PipeWriter, Read, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::Receiver;

use blobd_cli_common::output::{human_bytes, print_message};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, file_error, internal};
use blobd_store_format::delta::Delta;
use blobd_store_format::index::{LayoutModel, LayoutSignature, ManifestIndex};
use blobd_store_format::manifest::Manifest;

use crate::layout_source::{LayoutSource, Member, ReadModel, checked_manifest, invalid_layout, signatures};
use crate::tar_stream::{Entry, STEP_BYTES, TarStream};
use crate::{Digest, ErrorBody};

/// What a stream turns out to be.
#[derive(Debug)]
pub(crate) enum OpenedStream {
    /// Its models are known, and their files follow.
    Live(Box<LayoutStream>),
    /// It was copied into a temporary file.
    Copied(LayoutSource),
}

/// A stream whose index and manifests were read.
#[derive(Debug)]
pub(crate) struct LayoutStream {
    tar: TarStream,
    copies: Copies,
    models: Vec<ReadModel>,
    signatures: Signatures,
    /// The last model that needs each file.
    last_uses: BTreeMap<String, usize>,
    /// The model whose files are wanted now.
    current: usize,
    /// Why nothing more can be read.
    failure: Option<ErrorBody>,
}

/// The signatures of the index, with their manifests and bundles.
#[derive(Debug, Default)]
struct Signatures {
    listed: Vec<LayoutSignature>,
    files: BTreeMap<String, Vec<u8>>,
}

impl Signatures {
    /// The files that are to be read before those of the models: none if the index does not name all of them.
    fn paths(listed: &[LayoutSignature]) -> BTreeSet<String> {
        let files = |signature: &LayoutSignature| Some([signature.manifest.digest, signature.bundle?]);
        let files: Option<Vec<_>> = listed.iter().map(files).collect();
        files.into_iter().flatten().flatten().map(ManifestIndex::layout_blob_path).collect()
    }
}

/// The writing end of a pipe that is to get the file with this digest.
#[derive(Debug)]
pub(crate) struct FilePipe {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) end: PipeWriter,
}

impl LayoutStream {
    /// The most bytes of all manifests, which are kept in memory.
    const MAX_MANIFESTS_BYTES: u64 = 64 << 20;

    /// Reads a stream up to the manifests of its models.
    pub(crate) fn open(
        global: &Global,
        name: String,
        input: File,
        bar: &Bar,
    ) -> Result<OpenedStream, ErrorBody> {
        let (mut tar, mut copies) = (TarStream::new(name, input), Copies::new());
        loop {
            let Some(entry) = tar.next()? else {
                let name = tar.name().to_owned();
                return Ok(OpenedStream::Copied(copies.into_source(name)?));
            };
            match entry.path.as_str() {
                ManifestIndex::LAYOUT_PATH if copies.is_empty() => {
                    let raw = tar.read_whole(&entry, LayoutSource::MAX_INDEX_BYTES)?;
                    let live = Self::with_index(tar, copies, &raw, bar)?;
                    let has_delta =
                        live.models.iter().any(|(_, manifest)| manifest.as_ref().is_ok_and(is_delta));
                    // A layout by another program: which of its files are bundles is known only after reading them.
                    let seeks = live.signatures.listed.iter().any(|signature| signature.bundle.is_none());
                    return match has_delta || seeks {
                        true => live.copied_whole(&raw, bar).map(OpenedStream::Copied),
                        false => Ok(OpenedStream::Live(Box::new(live))),
                    };
                }
                ManifestIndex::LAYOUT_MARKER_PATH => {}
                _ => {
                    if copies.is_empty() && !global.hides_reports() {
                        let folder = std::env::temp_dir().display().to_string();
                        print_message(&format!(
                            "{}: its index does not come first, so it is copied to {folder} before it is loaded\n",
                            tar.name()
                        ));
                    }
                    copies.add(&mut tar, &entry, bar)?;
                }
            }
        }
    }

    fn with_index(mut tar: TarStream, mut copies: Copies, raw: &[u8], bar: &Bar) -> Result<Self, ErrorBody> {
        let parsed = ManifestIndex::parse_layout(raw);
        let (listed, signatures) = parsed.map_err(|error| invalid_layout(tar.name(), &error))?;
        let path = |listed: &LayoutModel| ManifestIndex::layout_blob_path(listed.manifest.digest);
        let mut wanted: BTreeMap<String, Option<Vec<u8>>> =
            listed.iter().map(|listed| (path(listed), None)).collect();
        let of_signatures = Signatures::paths(&signatures);
        wanted.extend(of_signatures.iter().map(|path| (path.clone(), None)));
        let mut left = Self::MAX_MANIFESTS_BYTES;
        while wanted.values().any(Option::is_none) {
            let Some(entry) = tar.next()? else { break };
            match wanted.get_mut(&entry.path) {
                Some(manifest) => {
                    *manifest = Some(tar.read_whole(&entry, Manifest::MAX_BYTES.min(left))?);
                    left = left.saturating_sub(entry.size);
                }
                None => copies.add(&mut tar, &entry, bar)?,
            }
        }
        let manifest = |listed: &LayoutModel| match wanted.get(&path(listed)) {
            Some(Some(raw)) => checked_manifest(tar.name(), &listed.manifest, raw.clone()),
            _ => Err(invalid_layout(
                tar.name(),
                &format_args!("manifest {} is missing", listed.manifest.digest),
            )),
        };
        let models: Vec<ReadModel> = listed.iter().map(|listed| (listed.clone(), manifest(listed))).collect();
        let mut last_uses = BTreeMap::new();
        for (number, (_, manifest)) in models.iter().enumerate() {
            let files = manifest.iter().flat_map(Manifest::files);
            last_uses.extend(files.map(|file| (ManifestIndex::layout_blob_path(file.digest), number)));
        }
        let files = wanted.into_iter().filter(|(path, _)| of_signatures.contains(path));
        let files: BTreeMap<_, _> = files.filter_map(|(path, bytes)| Some((path, bytes?))).collect();
        // A model may have its signature as one of its files.
        for (path, bytes) in files.iter().filter(|(path, _)| last_uses.contains_key(*path)) {
            copies.insert(tar.name(), path.clone(), bytes)?;
        }
        let signatures = Signatures { listed: signatures, files };
        Ok(Self { tar, copies, models, signatures, last_uses, current: 0, failure: None })
    }

    /// Copies the rest of the stream.
    fn copied_whole(mut self, index: &[u8], bar: &Bar) -> Result<LayoutSource, ErrorBody> {
        let manifests = self.models.iter().filter_map(|(_, manifest)| manifest.as_ref().ok());
        let manifests =
            manifests.map(|manifest| (ManifestIndex::layout_blob_path(manifest.digest()), manifest.raw()));
        let signatures = self.signatures.files.iter().map(|(path, bytes)| (path.clone(), bytes.as_slice()));
        let read = manifests.chain(signatures).chain([(ManifestIndex::LAYOUT_PATH.to_owned(), index)]);
        for (path, bytes) in read {
            self.copies.insert(self.tar.name(), path, bytes)?;
        }
        while let Some(entry) = self.tar.next()? {
            self.copies.add(&mut self.tar, &entry, bar)?;
        }
        self.copies.into_source(self.tar.name().to_owned())
    }

    /// The models of the index, each with its manifest.
    pub(crate) fn models(&self) -> &[ReadModel] {
        &self.models
    }

    /// The signatures of the model with this manifest, as texts of bundles.
    pub(crate) fn signatures(&self, model: Digest) -> Vec<String> {
        let Signatures { listed, files } = &self.signatures;
        signatures(listed, model, |digest, most| {
            let bytes = files.get(&ManifestIndex::layout_blob_path(digest))?;
            (bytes.len() as u64 <= most).then(|| bytes.clone())
        })
    }

    /// Reads the whole stream, keeps nothing of it, and checks that all files of each model are there.
    pub(crate) fn into_checked_models(mut self) -> Result<Vec<ReadModel>, ErrorBody> {
        let copies = std::mem::take(&mut self.copies.members);
        let mut sizes: BTreeMap<String, u64> =
            copies.into_iter().map(|(path, member)| (path, member.size)).collect();
        while let Some(Entry { path, size }) = self.tar.next()? {
            sizes.insert(path, size);
        }
        let name = self.tar.name();
        let check = |manifest: Manifest| {
            manifest.files().try_for_each(|file| {
                let found = sizes.get(&ManifestIndex::layout_blob_path(file.digest)).copied();
                check_size(name, file.digest, file.size, found)
            })?;
            Ok(manifest)
        };
        Ok(self.models.into_iter().map(|(listed, manifest)| (listed, manifest.and_then(check))).collect())
    }

    /// From now on the files of the model with this number are wanted, and those that only earlier ones need are skipped.
    pub(crate) fn begin(&mut self, model: usize) -> Result<(), ErrorBody> {
        self.current = model;
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Where the file with this digest is in [`Self::copied_file`], if it has come already.
    pub(crate) fn copied(&self, digest: Digest) -> Option<Member> {
        self.copies.members.get(&ManifestIndex::layout_blob_path(digest)).copied()
    }

    /// The temporary file.
    pub(crate) fn copied_file(&self) -> Result<Option<File>, ErrorBody> {
        self.copies.file.as_ref().map(File::try_clone).transpose().map_err(internal)
    }

    /// Reads the rest of the stream, to find out whether it has its end.
    pub(crate) fn finish(&mut self) -> Result<(), ErrorBody> {
        let finished = self.tar.finish();
        self.noted(finished)
    }

    /// Writes the files into their pipes, in order. The last byte of the pipe with the number `last` is written when the end
    /// of the archive was read, so that a model is not stored if that is missing.
    pub(crate) fn feed(
        &mut self,
        pipes: &Receiver<FilePipe>,
        last: Option<usize>,
        bar: &Bar,
    ) -> Result<(), ErrorBody> {
        for (number, pipe) in pipes.iter().enumerate() {
            let filled = self.fill(pipe, last == Some(number), bar);
            self.noted(filled)?;
        }
        Ok(())
    }

    fn noted(&mut self, result: Result<(), ErrorBody>) -> Result<(), ErrorBody> {
        result.inspect_err(|error| self.failure = Some(error.clone()))
    }

    fn fill(&mut self, pipe: FilePipe, is_last: bool, bar: &Bar) -> Result<(), ErrorBody> {
        let FilePipe { digest, size, end } = pipe;
        let path = ManifestIndex::layout_blob_path(digest);
        let mut out = PipeEnd { end: Some(end), left: size, holds_last: is_last, held: None };
        if let Some(member) = self.copied(digest) {
            check_size(self.tar.name(), digest, size, Some(member.size))?;
            self.copies.read(member, |bytes| out.write(bytes))?;
        } else {
            loop {
                let Some(entry) = self.tar.next()? else {
                    return check_size(self.tar.name(), digest, size, None);
                };
                let is_needed = self.last_uses.get(&entry.path);
                if entry.path == path {
                    check_size(self.tar.name(), digest, size, Some(entry.size))?;
                    let keeps = is_needed.is_some_and(|last| *last > self.current);
                    self.pass_on(&entry, &mut out, keeps)?;
                    break;
                }
                if is_needed.is_some_and(|last| *last >= self.current) {
                    self.copies.add(&mut self.tar, &entry, bar)?;
                }
            }
        }
        // Without its reader, the import has failed already.
        if is_last && out.end.is_some() {
            self.tar.finish()?;
            out.release();
        }
        Ok(())
    }

    /// Passes the current file on, and copies it too if a later model needs it.
    fn pass_on(&mut self, entry: &Entry, out: &mut PipeEnd, keeps: bool) -> Result<(), ErrorBody> {
        let mut buffer = vec![0; STEP_BYTES];
        let begun = self.copies.size;
        loop {
            let bytes = self.tar.read(&mut buffer)?;
            if bytes.is_empty() {
                break;
            }
            out.write(bytes);
            if keeps {
                self.copies.append(self.tar.name(), bytes)?;
            } else if out.end.is_none() {
                // Nobody needs the rest.
                break;
            }
        }
        if keeps {
            self.copies.members.insert(entry.path.clone(), Member { offset: begun, size: entry.size });
        }
        Ok(())
    }
}

fn is_delta(manifest: &Manifest) -> bool {
    // One that cannot be read is reported when it is loaded.
    Delta::in_manifest(manifest).map_or(true, |delta| delta.is_some())
}

fn check_size(name: &str, digest: Digest, size: u64, found: Option<u64>) -> Result<(), ErrorBody> {
    match found {
        Some(found) if found == size => Ok(()),
        // Archives do not list empty files.
        None if size == 0 => Ok(()),
        Some(found) => {
            let what = format_args!("wrong size of file {digest}: expected {size}, found {found}");
            Err(invalid_layout(name, &what))
        }
        None => Err(invalid_layout(name, &format_args!("file {digest} is missing"))),
    }
}

/// The writing end of a pipe. It takes everything and passes nothing on when the reader has closed its end.
struct PipeEnd {
    end: Option<PipeWriter>,
    left: u64,
    holds_last: bool,
    held: Option<u8>,
}

impl PipeEnd {
    fn write(&mut self, bytes: &[u8]) {
        self.left = self.left.saturating_sub(bytes.len() as u64);
        let mut bytes = bytes;
        if self.holds_last
            && self.left == 0
            && let Some((last, before)) = bytes.split_last()
        {
            (self.held, bytes) = (Some(*last), before);
        }
        self.put(bytes);
    }

    fn release(mut self) {
        let held = self.held.take();
        self.put(held.as_slice());
    }

    fn put(&mut self, bytes: &[u8]) {
        if self.end.as_mut().is_some_and(|end| end.write_all(bytes).is_err()) {
            self.end = None;
        }
    }
}

/// Files that came before they were wanted, in a temporary file without a name, in the folder that `TMPDIR` names.
#[derive(Debug)]
struct Copies {
    file: Option<File>,
    size: u64,
    members: BTreeMap<String, Member>,
}

impl Copies {
    /// Where the first file begins: the daemon takes one at 0 for all that its descriptor has.
    const BEGIN: u64 = 1;

    const fn new() -> Self {
        Self { file: None, size: Self::BEGIN, members: BTreeMap::new() }
    }

    fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    fn add(&mut self, tar: &mut TarStream, entry: &Entry, bar: &Bar) -> Result<(), ErrorBody> {
        let (mut buffer, begun) = (vec![0; STEP_BYTES], self.size);
        loop {
            let bytes = tar.read(&mut buffer)?;
            if bytes.is_empty() {
                break;
            }
            let length = bytes.len();
            self.append(tar.name(), buffer.get(..length).unwrap_or_default())?;
            bar.set(tar.position(), 0);
        }
        self.members.insert(entry.path.clone(), Member { offset: begun, size: entry.size });
        Ok(())
    }

    /// Adds a file that was read.
    fn insert(&mut self, name: &str, path: String, bytes: &[u8]) -> Result<(), ErrorBody> {
        let member = Member { offset: self.size, size: bytes.len() as u64 };
        self.append(name, bytes)?;
        self.members.insert(path, member);
        Ok(())
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> Result<(), ErrorBody> {
        let copied = self.size.saturating_sub(Self::BEGIN);
        let temporary = |error: io::Error| {
            let folder = std::env::temp_dir().display().to_string();
            let body = file_error(&folder, &error);
            body.with_hint(format!(
                "files of {name} that come before they are needed are copied there, {} so far; TMPDIR names another folder",
                human_bytes(copied)
            ))
        };
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(tempfile::tempfile().map_err(temporary)?),
        };
        file.write_all_at(bytes, self.size).map_err(temporary)?;
        self.size = self.size.saturating_add(bytes.len() as u64);
        Ok(())
    }

    fn read(&self, member: Member, mut take: impl FnMut(&[u8])) -> Result<(), ErrorBody> {
        let Some(file) = &self.file else { return Err(internal("load: nothing was copied")) };
        let mut file = file.try_clone().map_err(internal)?;
        file.seek(SeekFrom::Start(member.offset)).map_err(internal)?;
        let (mut content, mut buffer) = (file.take(member.size), vec![0; STEP_BYTES]);
        loop {
            let read = content.read(&mut buffer).map_err(internal)?;
            if read == 0 {
                return Ok(());
            }
            take(buffer.get(..read).unwrap_or_default());
        }
    }

    fn into_source(self, name: String) -> Result<LayoutSource, ErrorBody> {
        let file = self.file.map_or_else(|| tempfile::tempfile().map_err(internal), Ok)?;
        Ok(LayoutSource::from_members(name, file, self.members))
    }
}
