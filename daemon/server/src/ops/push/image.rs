//! A model as an ordinary container image: tar layers with its files under `/models`, which are made while they are sent.
//!
//! A layer is a list of parts: headers, files and padding, each at a known place, so that it can be read at any offset without
//! being anywhere. Its digest is another one than those of its files, so all files are read once more before anything is sent.
//! Large files have layers of their own, so that versions of a model share the files in which they do not differ; the small ones
//! are in one layer together. Runtimes refuse images with more than 127 layers, so of many files some share a layer.
//!
//! Sources: the OCI image specification, `layer.md` and `config.md`.

use std::collections::BTreeSet;
use std::ops::Range;

use blobd_client::protocol::event::Phase;
use blobd_store::{Content, FileReader, Model, StoredFile};
use blobd_store_format::archive::{TarReader, layer_headers};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_paths;
use blobd_store_format::manifest::Manifest;
use bytes::Bytes;
use serde_json::{Value as Json, json};

use super::super::OpError;
use super::form::{FormFile, Published, files, is_packed};
use super::progress::{Listeners, Progress};
use super::stopped;

/// The folder that the files are in.
const FOLDER: &str = "models/";
/// From this size on, a file has a layer of its own.
const LARGE_FILE_BYTES: u64 = 1 << 20;
/// The most layers of large files.
const MAX_LARGE_LAYERS: usize = 100;
/// The two blocks of zeros that end an archive.
const END_BYTES: usize = 1024;
/// The bytes that are hashed at once.
const HASHED_BYTES: u64 = 1 << 20;

/// A layer of an image, with its digest.
#[derive(Debug)]
pub(super) struct ImageLayer<'m> {
    archive: Archive<'m>,
    pub(super) file: Descriptor,
}

impl<'m> ImageLayer<'m> {
    /// A name for people: the path of its file in the image.
    pub(super) fn name(&self) -> String {
        match self.archive.paths.as_slice() {
            [path] => path.clone(),
            [path, others @ ..] => format!("{path} and {} more", others.len()),
            [] => FOLDER.to_owned(),
        }
    }

    pub(super) fn reader<'r>(&'r self, content: &'r Content) -> ArchiveReader<'r> {
        ArchiveReader { content, archive: &self.archive, open: None }
    }
}

/// The image of a model. Reads all its files.
///
/// # Errors
/// [`OpError::NotPushable`] if a file has no place in an image.
pub(super) fn image<'m>(
    content: &Content,
    model: &'m Model,
    listeners: Listeners<'_>,
) -> Result<(Published, Vec<ImageLayer<'m>>), OpError> {
    let refused = |reason| OpError::NotPushable { model: model.reference.short(), reason };
    let groups = groups(model).map_err(refused)?;
    let archives: Vec<Archive<'m>> = groups.iter().map(|group| Archive::new(group)).collect();
    let progress = Progress::new(listeners, "computing the digests of the layers", Phase::Hashing);
    progress.expect(archives.iter().map(|archive| archive.size));
    let mut before = 0_u64;
    let mut layers = Vec::with_capacity(archives.len());
    for archive in archives {
        let digest = archive.digest(content, |bytes| {
            progress.set(model.manifest.digest(), before.saturating_add(bytes));
            if listeners.events.is_closed() { Err(stopped()) } else { Ok(()) }
        })?;
        before = before.saturating_add(archive.size);
        let file =
            Descriptor { media_type: MediaType::new(MediaType::OCI_LAYER), digest, size: archive.size };
        layers.push(ImageLayer { archive, file });
    }
    let config = config(&layers).to_string().into_bytes();
    let raw = manifest(&layers, &config, model.manifest.digest()).to_string().into_bytes();
    let published = Published { manifest: Manifest::parse(raw)?, config: Some(config.into()) };
    Ok((published, layers))
}

/// The files of each layer.
fn groups(model: &Model) -> Result<Vec<Vec<FormFile<'_>>>, String> {
    let mut files = files(model);
    let listed = || files.iter().map(|file| (file.path.as_str(), file.stored.descriptor.digest));
    file_paths::check(listed()).map_err(|clash| clash.to_string())?;
    let distinct: BTreeSet<usize> = file_paths::distinct(listed()).into_iter().collect();
    if let Some(packed) = files.iter().find(|file| is_packed(&file.stored.descriptor.media_type)) {
        return Err(format!("{}: an archive would be in the image as it is, not its files", packed.path));
    }
    let mut place = 0..;
    files.retain(|_| place.next().is_some_and(|place| distinct.contains(&place)));
    let (large, small): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| file.stored.descriptor.size >= LARGE_FILE_BYTES);
    let in_layer = large.len().div_ceil(MAX_LARGE_LAYERS).max(1);
    let mut groups = Vec::new();
    for (place, file) in large.into_iter().enumerate() {
        match groups.last_mut() {
            Some(group) if place % in_layer > 0 => Vec::push(group, file),
            _ => groups.push(vec![file]),
        }
    }
    groups.extend(Some(small).filter(|small| !small.is_empty()));
    Ok(groups)
}

/// A tar archive that is nowhere.
#[derive(Debug)]
struct Archive<'m> {
    parts: Vec<Part<'m>>,
    size: u64,
    /// The paths of its files.
    paths: Vec<String>,
}

/// A part of an archive, and where it begins.
#[derive(Debug)]
struct Part<'m> {
    offset: u64,
    bytes: PartBytes<'m>,
}

#[derive(Debug)]
enum PartBytes<'m> {
    Made(Bytes),
    File(&'m StoredFile),
}

impl Part<'_> {
    fn size(&self) -> u64 {
        match &self.bytes {
            PartBytes::Made(bytes) => bytes.len() as u64,
            PartBytes::File(file) => file.descriptor.size,
        }
    }
}

impl<'m> Archive<'m> {
    fn new(files: &[FormFile<'m>]) -> Self {
        let mut archive = Self { parts: Vec::new(), size: 0, paths: Vec::new() };
        let (mut folders, mut made) = (BTreeSet::new(), Vec::new());
        for file in files {
            let path = format!("{FOLDER}{}", file.path);
            for folder in path.match_indices('/').filter_map(|(end, _)| path.get(..=end)) {
                if folders.insert(folder.to_owned()) {
                    made.extend(layer_headers(folder, 0));
                }
            }
            let size = file.stored.descriptor.size;
            made.extend(layer_headers(&path, size));
            archive.push(PartBytes::Made(std::mem::take(&mut made).into()));
            archive.push(PartBytes::File(file.stored));
            let rest = size % TarReader::BLOCK_BYTES;
            let padding = TarReader::BLOCK_BYTES.checked_sub(rest).filter(|_| rest > 0);
            made = vec![0; padding.and_then(|padding| usize::try_from(padding).ok()).unwrap_or(0)];
            archive.paths.push(path);
        }
        made.extend([0; END_BYTES]);
        archive.push(PartBytes::Made(made.into()));
        archive
    }

    fn push(&mut self, bytes: PartBytes<'m>) {
        let part = Part { offset: self.size, bytes };
        self.size = self.size.saturating_add(part.size());
        self.parts.push(part);
    }

    /// `report` receives the number of bytes that were read.
    fn digest(
        &self,
        content: &Content,
        mut report: impl FnMut(u64) -> Result<(), OpError>,
    ) -> Result<Digest, OpError> {
        let mut reader = ArchiveReader { content, archive: self, open: None };
        let (mut hasher, mut offset) = (Hasher::new(), 0);
        while offset < self.size {
            let bytes = reader.read(offset..offset.saturating_add(HASHED_BYTES))?;
            hasher.update(&bytes);
            let length = bytes.len() as u64;
            if length == 0 {
                return Err(OpError::Internal(format!("a layer ends at {offset} of {}", self.size)));
            }
            offset = offset.saturating_add(length);
            report(offset)?;
        }
        Ok(hasher.finish())
    }
}

/// Reads an archive at any offset.
#[derive(Debug)]
pub(super) struct ArchiveReader<'r> {
    content: &'r Content,
    archive: &'r Archive<'r>,
    /// The file that was read last, by the offset of its part.
    open: Option<(u64, FileReader<'r>)>,
}

impl ArchiveReader<'_> {
    /// The bytes from the start of the range on, at most to the end of the part that they are in; none at the end.
    pub(super) fn read(&mut self, range: Range<u64>) -> Result<Bytes, OpError> {
        let parts = &self.archive.parts;
        let after = parts.partition_point(|part| part.offset <= range.start);
        // Parts without bytes begin where the next one does.
        let Some(part) = after.checked_sub(1).and_then(|place| parts.get(place)) else {
            return Ok(Bytes::new());
        };
        let within = |offset: u64| offset.saturating_sub(part.offset).min(part.size());
        let (start, end) = (within(range.start), within(range.end));
        match part.bytes {
            PartBytes::Made(ref bytes) => {
                let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                Ok(bytes.slice(place(start)..place(end)))
            }
            PartBytes::File(file) => {
                let reader = match &mut self.open {
                    Some((offset, reader)) if *offset == part.offset => reader,
                    open => &mut open.insert((part.offset, FileReader::new(self.content, file))).1,
                };
                Ok(reader.read_range(start..end)?.into())
            }
        }
    }
}

/// The time of everything in an image, which does not depend on when it is made.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// Files run on no processor. The same machine names it everywhere, so that the same model is the same image.
const ARCHITECTURE: &str = "amd64";

fn config(layers: &[ImageLayer<'_>]) -> Json {
    let digests: Vec<Digest> = layers.iter().map(|layer| layer.file.digest).collect();
    let step = |layer: &ImageLayer<'_>| json!({ "created": CREATED, "created_by": "blobd push --as image", "comment": layer.name() });
    json!({
        "created": CREATED,
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {},
        "rootfs": { "type": "layers", "diff_ids": digests },
        "history": layers.iter().map(step).collect::<Vec<_>>(),
    })
}

fn manifest(layers: &[ImageLayer<'_>], config: &[u8], model: Digest) -> Json {
    json!({
        "schemaVersion": 2,
        "mediaType": MediaType::OCI_MANIFEST,
        "config": { "mediaType": MediaType::OCI_CONFIG, "digest": Digest::of(config), "size": config.len() },
        "layers": layers.iter().map(|layer| &layer.file).collect::<Vec<_>>(),
        "annotations": { Manifest::MODEL_ANNOTATION: model },
    })
}
