//! The files of an import: what is known before they are read, and how each is stored.

use blobd_client::protocol::pull::{Imported, ImportedFile, ImportedSidecar};
use blobd_client::protocol::request::{ImportParams, SidecarComponent};
use blobd_model::facts::ModelFacts;
use blobd_store::{Ingest, StoreError};
use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::{FileFormat, ModelHeader};
use blobd_store_format::file_type::ShardName;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::model_file::{check_paths, layer_type};

use super::shards::{ShardReader, Shards};
use super::source::{FileFacts, ImportSource, inspect, refuse_changed};
use crate::ingest::{Accepted, BegunFile, IngestError, IngestedFile, begin_file};
use crate::ops::OpError;
use crate::ops::describe::read_header;
use crate::ops::name_change::display_name;
use crate::ops::new_model::NewFile;
use crate::policy::{Terms, TermsBuilder};

/// The files of a model, in the order of its layers.
pub(super) struct Files {
    files: Vec<File>,
    /// Whether the client has listed them, so that each has a path. Otherwise they are one file and its sidecars.
    is_list: bool,
}

struct File {
    /// Its path in the model, or its name, also for errors.
    name: String,
    component: Option<SidecarComponent>,
    size: u64,
    /// Where its content begins in its descriptor. At 0 it is all of that.
    offset: u64,
    /// Whether its bytes come from a pipe.
    is_stream: bool,
    /// Its metadata, if it is known already.
    inspected: Option<FileFacts>,
    /// What the manifest says about it, if there is one already.
    described: Option<Descriptor>,
    /// Its digest, if the client knows it or a manifest says it.
    expected: Option<Digest>,
    /// Whether it was read, and had that digest.
    was_read: bool,
}

/// What a model consists of, after all of its files were read.
pub(super) struct StoredFiles {
    pub(super) files: Vec<NewFile>,
    pub(super) terms: Terms,
    pub(super) tensor_count: u64,
}

impl Files {
    /// The listed files. Without a list, the file and its sidecars, which are inspected now.
    ///
    /// # Errors
    /// [`OpError::ModelPath`] for a path that a model may not have; those of [`inspect`].
    pub(super) fn from_params(
        params: &ImportParams,
        manifest: Option<&Manifest>,
        source: &mut dyn ImportSource,
    ) -> Result<Self, OpError> {
        if let Some(manifest) = manifest {
            return Self::of_manifest(params, manifest);
        }
        if params.files.is_empty() {
            return Self::with_sidecars(params, source);
        }
        if !params.sidecars.is_empty() {
            return Err(OpError::FilesAndSidecars);
        }
        check_paths(params.files.iter().map(|file| file.path.as_str()))?;
        let files = params.files.iter().map(|file| File {
            name: file.path.clone(),
            component: file.component,
            size: file.size,
            offset: file.offset,
            is_stream: file.stream,
            inspected: None,
            described: None,
            expected: file.digest,
            was_read: file.was_read,
        });
        Ok(Self { files: files.collect(), is_list: true })
    }

    /// The files that the manifest names, each digest once.
    fn of_manifest(params: &ImportParams, manifest: &Manifest) -> Result<Self, OpError> {
        let mut seen = BTreeSet::new();
        let described: Vec<_> = manifest.files().filter(|file| seen.insert(file.digest)).collect();
        let sizes = || described.iter().map(|file| file.size);
        if !sizes().eq(params.files.iter().map(|file| file.size)) {
            return Err(OpError::NotOfManifest { expected: described.len(), found: params.files.len() });
        }
        let files = described.into_iter().zip(&params.files).map(|(file, listed)| File {
            name: layout::blob_name(file.digest),
            component: None,
            size: file.size,
            offset: listed.offset,
            is_stream: listed.stream,
            inspected: None,
            expected: Some(file.digest),
            described: Some(file.clone()),
            was_read: listed.was_read,
        });
        Ok(Self { files: files.collect(), is_list: true })
    }

    fn with_sidecars(params: &ImportParams, source: &mut dyn ImportSource) -> Result<Self, OpError> {
        let sidecars = params.sidecars.iter().map(|sidecar| (Some(sidecar.component), &sidecar.file_name));
        let mut files = Vec::with_capacity(params.sidecars.len().saturating_add(1));
        for (number, (component, name)) in
            std::iter::once((None, &params.file_name)).chain(sidecars).enumerate()
        {
            let name = display_name(name);
            select(source, number, &name)?;
            let facts = inspect(source, &name)?;
            let (size, inspected) = (facts.size, Some(facts));
            files.push(File {
                name,
                component,
                size,
                offset: 0,
                is_stream: false,
                inspected,
                described: None,
                expected: None,
                was_read: false,
            });
        }
        Ok(Self { files, is_list: false })
    }

    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.files.iter().map(|file| file.size)
    }

    /// Without files that are known to have the same weights as others of the model.
    pub(super) fn distinct_sizes(&self) -> impl Iterator<Item = u64> {
        let is_again = |file: &&File| file.name.starts_with("consolidated");
        let has_first = self
            .files
            .iter()
            .any(|file| !is_again(&file) && FileFormat::SAFETENSORS.stem_of(&file.name).is_some());
        self.files.iter().filter(move |file| !(has_first && is_again(file))).map(|file| file.size)
    }

    pub(super) fn size(&self) -> u64 {
        self.sizes().fold(0, u64::saturating_add)
    }

    /// Adds the files to the ingest. `check` refuses a file by what is known of the model's licenses and formats when its
    /// header has been read. `trusts_client`: files that were read before are not read again.
    pub(super) fn ingest(
        &self,
        ingest: &mut Ingest,
        trusts_client: bool,
        source: &mut dyn ImportSource,
        progress: &mut dyn FnMut(u64, u64),
        check: impl Fn(&str, Terms) -> Result<(), OpError>,
    ) -> Result<StoredFiles, OpError> {
        let (mut terms, mut added) = (TermsBuilder::default(), Vec::with_capacity(self.files.len()));
        let (mut read, mut tensor_count, total) = (0_u64, 0_u64, self.size());
        let mut shards = self.read_shards(source, &check)?;
        let admitted = shards.admit(ingest, source);
        admitted.map_err(|error| match self.files.iter().find(|file| file.may_be_shard()) {
            Some(first) => first.refused(error),
            None => OpError::Ingest { name: String::new(), source: error },
        })?;
        for (number, file) in self.files.iter().enumerate() {
            select(source, number, &file.name)?;
            let before = file.inspected(source)?;
            let stored = if trusts_client { file.stored(ingest)? } else { None };
            if let Some((media_type, ingested)) = stored {
                if file.component.is_none() {
                    tensor_count = tensor_count.saturating_add(ingested.facts.tensor_count);
                }
                read = read.saturating_add(file.size);
                added.push(file.added(media_type, ingested));
                continue;
            }
            let mut report = |of_file: u64, _| progress(read.saturating_add(of_file), total);
            let begun = begin_file(source, (file.size, self.accepted(file)), &mut report);
            let begun = begun.map_err(|error| file.refused(error))?;
            let media_type = file.media_type(begun.header());
            let is_license = media_type.component() == LICENSE;
            self.check_begun(&begun).map_err(|error| file.refused(error))?;
            match begun.header() {
                Some(header) => terms.add_header(header),
                None => terms.add_file(&media_type, Some(&file.name)),
            }
            let is_last = number.saturating_add(1) == self.files.len() && !is_license;
            check(&file.name, if is_last { terms.clone().finish() } else { terms.so_far() })?;
            let begun = shards.sharing(number, before, begun).map_err(|error| file.refused(error))?;
            let ingested = begun.ingest(ingest, shards.blobs()).map_err(|error| file.refused(error))?;
            file.check_digest(ingested.digest)?;
            refuse_changed(source, &file.name, before)?;
            if is_license {
                terms.add_license(ingested.small.as_deref());
            }
            read = read.saturating_add(file.size);
            if file.component.is_none() {
                tensor_count = tensor_count.saturating_add(ingested.facts.tensor_count);
            }
            added.push(file.added(media_type, ingested));
        }
        shards.into_recipes()?.into_iter().for_each(|recipe| ingest.add_recipe(recipe));
        let terms = terms.finish();
        // With the text of a license that was read last.
        self.files.last().map_or(Ok(()), |last| check(&last.name, terms.clone()))?;
        Ok(StoredFiles { files: added, terms, tensor_count })
    }

    /// Reads the headers of the model's shards, to find the experts that are in several of them.
    fn read_shards(
        &self,
        source: &mut dyn ImportSource,
        check: impl Fn(&str, Terms) -> Result<(), OpError>,
    ) -> Result<Shards, OpError> {
        let (mut reader, mut terms) = (ShardReader::default(), TermsBuilder::default());
        let is_candidate = |file: &File| self.is_list && file.may_be_shard();
        let count = self.files.iter().filter(|file| is_candidate(file)).count();
        let last = self.files.iter().rposition(is_candidate).unwrap_or_default();
        // A stream can be read only once, so experts that are in several of its shards are stored in several blobs.
        let is_stream = self.files.iter().any(|file| file.is_stream);
        if count < 2 || is_stream || !source.keep(last.saturating_add(1)) {
            return Ok(reader.finish());
        }
        for (number, file) in self.files.iter().enumerate().take(last.saturating_add(1)) {
            select(source, number, &file.name)?;
            if is_candidate(file) {
                let facts = file.inspected(source)?;
                let mut report = |_, _| ();
                let begun = begin_file(source, (file.size, self.accepted(file)), &mut report);
                let begun = begun.map_err(|error| file.refused(error))?;
                begun.header().into_iter().for_each(|header| terms.add_header(header));
                // Before anything is evicted for the model.
                check(&file.name, terms.so_far())?;
                let added = reader.add((number, &file.name), facts, &begun);
                added.map_err(|error| file.refused(error))?;
            }
        }
        Ok(reader.finish())
    }

    /// Files of a list are split only if their format is known. A file whose name says that it has such a format must have
    /// it, and so must one without a list.
    fn accepted(&self, file: &File) -> Accepted {
        if file.described.is_some() {
            return Accepted::Any;
        }
        let is_named = || FileFormat::split_name(&file.name).is_some();
        match self.is_list && file.component.is_none() && !is_named() {
            true => Accepted::Any,
            false => Accepted::KnownFormats,
        }
    }

    /// Refuses a shard without the others, before it is read.
    fn check_begun(&self, begun: &BegunFile<'_>) -> Result<(), IngestError> {
        let Some(count) = begun.header().and_then(ModelHeader::shard).map(|shard| shard.count) else {
            return Ok(());
        };
        let found = self.files.iter().filter(|file| file.component.is_none()).count();
        if count > found as u64 { Err(IngestError::Shard { count, found }) } else { Ok(()) }
    }

    /// Completes the answer with what it says about each file. The layers of the manifest are the files.
    pub(super) fn described(&self, manifest: &Manifest, mut imported: Imported) -> Imported {
        let files = || self.files.iter().zip(manifest.layers());
        if self.is_list {
            (imported.size, imported.file_count) = (self.size(), Some(self.files.len() as u64));
            let have_paths = self.files.iter().all(|file| file.described.is_none());
            if have_paths && self.files.len() <= Imported::MAX_LISTED {
                let listed = |(file, layer): (&File, &Descriptor)| ImportedFile {
                    path: file.name.clone(),
                    digest: layer.digest,
                    size: layer.size,
                };
                imported.files = files().map(listed).collect();
            }
            return imported;
        }
        imported.file = manifest.layers().first().map(|layer| layer.digest);
        imported.size = self.files.first().map_or(0, |file| file.size);
        let sidecar = |(file, layer): (&File, &Descriptor)| {
            let (component, file_name) = (file.component?, file.name.clone());
            Some(ImportedSidecar { component, file_name, digest: layer.digest, size: layer.size })
        };
        imported.sidecars = files().filter_map(sidecar).collect();
        imported
    }
}

const LICENSE: &str = "license";

impl File {
    /// Inspects the file, which is the selected one. Refuses one that is not as its client has listed it.
    fn inspected(&self, source: &mut dyn ImportSource) -> Result<FileFacts, OpError> {
        let facts = match self.inspected {
            Some(facts) => facts,
            None => inspect(source, &self.name)?,
        };
        let is_listed = match self.offset {
            _ if self.is_stream => true,
            0 => facts.size == self.size,
            offset => offset.checked_add(self.size).is_some_and(|end| end <= facts.size),
        };
        if is_listed { Ok(facts) } else { Err(self.refused(IngestError::Changed)) }
    }

    /// Refuses a file that is not the one in the manifest, or that the client has listed.
    fn check_digest(&self, found: Digest) -> Result<(), OpError> {
        match self.expected.filter(|expected| *expected != found) {
            Some(expected) => Err(self.refused(IngestError::WrongDigest { expected, found })),
            None => Ok(()),
        }
    }

    /// Whether it may be one of several files of weights. GGUF files say so themselves, whatever their names.
    fn may_be_shard(&self) -> bool {
        match &self.described {
            Some(described) => described.media_type.holds_tensors(),
            None => {
                let is_gguf = FileFormat::GGUF.stem_of(&self.name).is_some();
                self.component.is_none() && (is_gguf || ShardName::from_path(&self.name).is_some())
            }
        }
    }

    /// The stored file with the digest that was found when this one was read. `None` if it must be read.
    fn stored(&self, ingest: &mut Ingest) -> Result<Option<(MediaType, IngestedFile)>, OpError> {
        let Some(digest) = self.expected.filter(|_| self.was_read && !self.is_stream) else {
            return Ok(None);
        };
        let (store, size) = (Arc::clone(ingest.store()), self.size);
        let descriptor = Descriptor { media_type: self.media_type(None), digest, size };
        // Before the check, so that the file is not collected before the commit.
        ingest.lease().protect(digest);
        let Some(stored) = store.content().stored_file_now(&descriptor)? else { return Ok(None) };
        ingest.lease().protect_all(stored.blob_sizes().into_iter().map(|(digest, _)| digest));
        let is_split = self.component.is_some() || FileFormat::split_name(&self.name).is_some();
        if is_split && stored.recipe.is_none() || !store.content().has_file(&descriptor)? {
            return Ok(None);
        }
        let header = stored.recipe.as_ref().map(|recipe| read_header(&store, recipe)).transpose()?.flatten();
        let facts = header.as_deref().map_or_else(ModelFacts::default, ModelFacts::from_header);
        let media_type = self.media_type(header.as_deref());
        ingest.staging().expect_instead(size, []);
        ingest.note_reused(size);
        Ok(Some((media_type, IngestedFile { digest, size, facts, small: None })))
    }

    fn media_type(&self, header: Option<&dyn ModelHeader>) -> MediaType {
        if let Some(described) = &self.described {
            return described.media_type.clone();
        }
        match self.component {
            Some(SidecarComponent::Projector) => MediaType::new(MediaType::OLLAMA_PROJECTOR),
            Some(SidecarComponent::Draft) => MediaType::new(MediaType::OLLAMA_DRAFT),
            None => layer_type(&self.name, header.map(|header| header.format().tensor_format())),
        }
    }

    fn added(&self, media_type: MediaType, ingested: IngestedFile) -> NewFile {
        let IngestedFile { digest, size, facts, .. } = ingested;
        let facts = if facts.format.is_some() { vec![facts] } else { Vec::new() };
        NewFile { facts, ..NewFile::new(Descriptor { media_type, digest, size }, Some(&self.name)) }
    }

    fn refused(&self, source: IngestError) -> OpError {
        OpError::Ingest { name: self.name.clone(), source }
    }
}

fn select(source: &mut dyn ImportSource, number: usize, name: &str) -> Result<(), OpError> {
    Ok(source.select(number).map_err(StoreError::io("select", name))?)
}
