//! The files of a model that arrives as a delta: rebuilt from the parts of the delta and from what the store has.
//!
//! Each part is compared with its digest before anything is stored. What the store has is read through models that the caller
//! may open, and the daemon checks the digest of each file that results.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;

use blobd_cli_common::connect::client_error;
use blobd_cli_common::internal;
use blobd_client::model::OpenModel;
use blobd_store_format::delta::{Delta, patch};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Hasher;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::stored_file::Source;

use crate::delta::open;
use crate::layout_source::{LayoutSource, checked_manifest};
use crate::tar_stream::STEP_BYTES;
use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

/// A delta with all that is needed to rebuild its files.
pub(crate) struct DeltaSource<'s> {
    source: &'s LayoutSource,
    delta: Delta,
    manifest: Manifest,
    recipes: BTreeMap<Digest, Recipe>,
    headers: BTreeMap<Digest, Vec<u8>>,
    stored: Stored,
}

impl<'s> DeltaSource<'s> {
    /// Checks the parts of a delta, which is this artifact, and finds the rest in the store. `name` is for errors.
    pub(crate) fn new(
        client: &Client,
        source: &'s LayoutSource,
        (artifact, delta): (&Manifest, Delta),
        name: &str,
    ) -> Result<Self, ErrorBody> {
        let mut checked = BTreeSet::new();
        for part in artifact.files().filter(|part| checked.insert(part.digest)) {
            check_part(source, part)?;
        }
        let manifest =
            checked_manifest(name, &delta.manifest, source.read_part(&delta.manifest, Manifest::MAX_BYTES)?)?;
        let invalid = |what: &dyn std::fmt::Display| source.invalid(&format_args!("{name}: {what}"));
        let mut recipes = BTreeMap::new();
        for (file, part) in &delta.recipes {
            let recipe = source.read_part(part, Recipe::MAX_BYTES)?;
            let recipe = Recipe::parse(&recipe).map_err(|error| invalid(&error))?;
            if recipe.file() != *file {
                return Err(invalid(&format_args!(
                    "recipe of another file: expected {file}, found {}",
                    recipe.file()
                )));
            }
            recipes.insert(*file, recipe);
        }
        let needed = Needed::new(&manifest, &delta, &recipes).map_err(|what| invalid(&what))?;
        let stored = Stored::find(client, &delta, needed, name)?;
        let mut headers = BTreeMap::new();
        for (digest, part) in &delta.patches {
            let base = stored.header(part.base)?;
            let bytes = source.read_part(&part.layer, patch::MAX_BYTES)?;
            let header = patch::apply(&base, &bytes, part.size).map_err(|error| invalid(&error))?;
            let found = Digest::of(&header);
            if found != *digest {
                return Err(invalid(&format_args!(
                    "wrong digest of a header: expected {digest}, found {found}"
                )));
            }
            headers.insert(*digest, header);
        }
        Ok(Self { source, delta, manifest, recipes, headers, stored })
    }

    /// The manifest of the model.
    pub(crate) const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where a file begins in what [`LayoutSource::open_blob`] opens; `None` if it is rebuilt.
    pub(crate) fn offset_of(&self, file: &Descriptor) -> Option<u64> {
        let is_part = self.delta.blobs.contains_key(&file.digest);
        (is_part || file.size == 0).then(|| self.source.offset_of(file.digest))
    }

    /// Writes a file that is rebuilt.
    pub(crate) fn write(&self, file: Digest, mut out: impl Write) -> Result<(), ErrorBody> {
        let Some(recipe) = self.recipes.get(&file) else { return self.stored.write_file(file, out) };
        let mut buffer = vec![0; STEP_BYTES];
        let mut parts: HashMap<Digest, (File, u64)> = HashMap::new();
        for source in recipe.pieces().sources(0..recipe.size()) {
            match source {
                Source::Literal { bytes } => out.write_all(bytes).map_err(internal)?,
                Source::Zeros { length } => {
                    io::copy(&mut io::repeat(0).take(length), &mut out).map_err(internal)?;
                }
                Source::Blob { blob, offset, length } => {
                    let mut done = 0;
                    while done < length {
                        let step = usize::try_from(length.saturating_sub(done)).unwrap_or(usize::MAX);
                        let portion = step.min(buffer.len());
                        let bytes = buffer.get_mut(..portion).unwrap_or_default();
                        self.read_blob(&mut parts, blob, offset.saturating_add(done), bytes)?;
                        out.write_all(bytes).map_err(internal)?;
                        done = done.saturating_add(bytes.len() as u64);
                    }
                }
            }
        }
        Ok(())
    }

    fn read_blob(
        &self,
        parts: &mut HashMap<Digest, (File, u64)>,
        blob: Digest,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), ErrorBody> {
        if let Some(header) = self.headers.get(&blob) {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let from = header.get(start..).and_then(|rest| rest.get(..bytes.len()));
            bytes.copy_from_slice(from.ok_or_else(|| internal("load: a piece beyond the header"))?);
            return Ok(());
        }
        let Some(part) = self.delta.blobs.get(&blob) else {
            return self.stored.read_blob(blob, offset, bytes);
        };
        // Each is in the same archive, or in a file of its own that is opened once.
        let (file, begin) = match parts.get(&blob) {
            Some(open) => open,
            None => {
                parts.clear();
                let opened = File::from(self.source.open_blob(part.digest, part.size)?);
                parts.entry(blob).or_insert((opened, self.source.offset_of(part.digest)))
            }
        };
        file.read_exact_at(bytes, begin.saturating_add(offset)).map_err(internal)
    }
}

/// Compares a part of a delta with its digest.
fn check_part(source: &LayoutSource, part: &Descriptor) -> Result<(), ErrorBody> {
    let mut file = File::from(source.open_blob(part.digest, part.size)?);
    file.seek(SeekFrom::Start(source.offset_of(part.digest))).map_err(internal)?;
    let (mut content, mut hash, mut buffer) = (file.take(part.size), Hasher::new(), vec![0; STEP_BYTES]);
    loop {
        let read = content.read(&mut buffer).map_err(internal)?;
        if read == 0 {
            break;
        }
        hash.update(buffer.get(..read).unwrap_or_default());
    }
    match hash.finish() {
        found if found == part.digest => Ok(()),
        found => {
            let expected = part.digest;
            Err(source.invalid(&format_args!("wrong digest of a part: expected {expected}, found {found}")))
        }
    }
}

/// What a delta needs of the store.
struct Needed {
    blobs: BTreeSet<Digest>,
    files: BTreeSet<Digest>,
}

impl Needed {
    fn new(manifest: &Manifest, delta: &Delta, recipes: &BTreeMap<Digest, Recipe>) -> Result<Self, String> {
        let (mut blobs, mut files) = (BTreeSet::new(), BTreeSet::new());
        for file in manifest.files().filter(|file| file.size > 0) {
            match (delta.blobs.get(&file.digest), recipes.get(&file.digest)) {
                (Some(part), _) if part.size != file.size => {
                    return Err(format!(
                        "file {}: expected {} bytes, found {}",
                        file.digest, file.size, part.size
                    ));
                }
                (Some(_), _) => {}
                (None, Some(recipe)) if recipe.size() != file.size => {
                    let (digest, expected, found) = (file.digest, file.size, recipe.size());
                    return Err(format!("recipe of file {digest}: expected {expected} bytes, found {found}"));
                }
                (None, Some(recipe)) => {
                    for (blob, end) in recipe.blob_sizes() {
                        match (delta.blobs.get(&blob), delta.patches.get(&blob)) {
                            (Some(part), _) if part.size < end => {
                                return Err(format!(
                                    "blob {blob}: expected {end} bytes, found {}",
                                    part.size
                                ));
                            }
                            (None, None) => {
                                blobs.insert(blob);
                            }
                            _ => {}
                        }
                    }
                }
                (None, None) => {
                    files.insert(file.digest);
                }
            }
        }
        files.extend(delta.patches.values().map(|patch| patch.base));
        Ok(Self { blobs, files })
    }
}

/// Models of the store that have what a delta needs, open so that they stay.
struct Stored {
    models: Vec<OpenModel>,
    /// In which model each blob is, and the number of its descriptor there.
    blobs: HashMap<Digest, (usize, u32)>,
    /// In which model each file is, and the number of its layer there.
    files: HashMap<Digest, (usize, usize)>,
}

impl Stored {
    fn find(client: &Client, delta: &Delta, needed: Needed, name: &str) -> Result<Self, ErrorBody> {
        let mut stored = Self { models: Vec::new(), blobs: HashMap::new(), files: HashMap::new() };
        let Needed { mut blobs, mut files } = needed;
        let count = blobs.len().saturating_add(files.len());
        let given = delta.given.iter().filter_map(|name| name.parse().ok());
        let listed = client.models().map_err(client_error)?.models.into_iter();
        let names = given.chain(listed.filter_map(|model| model.name.parse().ok()));
        for reference in names {
            if blobs.is_empty() && files.is_empty() {
                break;
            }
            // Another model may have what one lacks that is damaged, removed meanwhile, or not the caller's.
            let _ = stored.add(client, &reference, &mut blobs, &mut files);
        }
        let missing: Vec<Digest> = files.into_iter().chain(blobs).collect();
        if missing.is_empty() { Ok(stored) } else { Err(missing_base(name, delta, &missing, count)) }
    }

    /// Opens a model if it has some of what is needed.
    fn add(
        &mut self,
        client: &Client,
        reference: &Reference,
        blobs: &mut BTreeSet<Digest>,
        files: &mut BTreeSet<Digest>,
    ) -> Result<(), ErrorBody> {
        let details = client.model(reference).map_err(client_error)?;
        let has_files = details.layers.iter().any(|layer| files.contains(&layer.digest));
        let tensors: HashMap<(u32, &str), Digest> = details
            .tensors
            .iter()
            .filter(|tensor| blobs.contains(&tensor.digest))
            .filter_map(|tensor| Some(((tensor.layer?, tensor.name.as_str()), tensor.digest)))
            .collect();
        if !has_files && tensors.is_empty() {
            return Ok(());
        }
        let (model, number) = (open(client, reference)?, self.models.len());
        for (place, layer) in model.layers().iter().enumerate() {
            if files.remove(&layer.digest) {
                self.files.insert(layer.digest, (number, place));
            }
        }
        for tensor in model.tensors() {
            if let (Some(fd), Some(blob)) = (tensor.fd, tensors.get(&(tensor.layer, tensor.name.as_str())))
                && blobs.remove(blob)
            {
                self.blobs.insert(*blob, (number, fd));
            }
        }
        self.models.push(model);
        Ok(())
    }

    fn model(&self, number: usize) -> Result<&OpenModel, ErrorBody> {
        self.models.get(number).ok_or_else(|| internal("load: no such model"))
    }

    fn read_blob(&self, blob: Digest, offset: u64, bytes: &mut [u8]) -> Result<(), ErrorBody> {
        let (model, fd) = self.blobs.get(&blob).ok_or_else(|| internal("load: no such blob"))?;
        let read = self.model(*model)?.read_at(*fd, offset, bytes);
        read.map_err(|error| ErrorBody::new(error.code(), format!("blob {blob}: {error}")))
    }

    fn write_file(&self, file: Digest, out: impl Write) -> Result<(), ErrorBody> {
        let (model, layer) = self.files.get(&file).ok_or_else(|| internal("load: no such file"))?;
        let written = self.model(*model)?.write_layer(*layer, out);
        written.map(drop).map_err(|error| ErrorBody::new(error.code(), format!("file {file}: {error}")))
    }

    fn header(&self, file: Digest) -> Result<Vec<u8>, ErrorBody> {
        let (model, layer) = self.files.get(&file).ok_or_else(|| internal("load: no such file"))?;
        let header = self.model(*model)?.layer_header(*layer);
        header.map(|header| header.to_vec()).map_err(|error| ErrorBody::new(error.code(), error.to_string()))
    }
}

fn missing_base(name: &str, delta: &Delta, missing: &[Digest], count: usize) -> ErrorBody {
    const MAX_LISTED: usize = 8;
    let mut listed: Vec<String> = missing.iter().take(MAX_LISTED).map(Digest::to_string).collect();
    if missing.len() > MAX_LISTED {
        listed.push(format!("and {} more", missing.len().saturating_sub(MAX_LISTED)));
    }
    let message = format!(
        "{name}: delta: the store lacks {} of the {count} files and tensors that it needs: {}",
        missing.len(),
        listed.join(", ")
    );
    let hint = match delta.given.as_slice() {
        [] => "it was made for a store with another inventory: write that again with `blobd inventory`, or save the \
               whole model"
            .to_owned(),
        given => format!("store {} first, for which it was made, or save the whole model", given.join(" and ")),
    };
    ErrorBody::new(ErrorCode::NotFound, message).with_hint(hint)
}
