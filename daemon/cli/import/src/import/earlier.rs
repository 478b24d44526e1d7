//! What earlier imports of files and folders have read. A model is not read again if it is stored and none of its files has
//! changed since.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use blobd_client::protocol::naming::NameEffects;
use blobd_client::protocol::pull::{Imported, ImportedFile, ImportedSidecar};
use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;

use super::plan::{PathModel, Planned};
use super::{Params, notes, with_folders};
use crate::local_folder::Identity;
use crate::other_stores::{ImportedModels, ModelKey, ReadModel, StoredModels};
use crate::{Client, ErrorBody, Reference};

/// The models that earlier commands and this one have read.
#[derive(Debug)]
pub(super) struct Earlier {
    record: ImportedModels,
    /// Those of this command, by their numbers, as they were before it read anything.
    keys: BTreeMap<usize, ModelKey>,
}

impl Earlier {
    /// Looks for each model in the record and in the store. Returns those that need not be read, by their numbers: none if
    /// `reads_all` is set.
    ///
    /// # Errors
    /// When the models of the store cannot be listed.
    pub(super) fn new(
        client: &Client,
        params: &Params,
        models: &[PathModel],
        reads_all: bool,
    ) -> Result<(Self, BTreeMap<usize, Imported>), ErrorBody> {
        let record = ImportedModels::load();
        let planned = models.iter().enumerate().filter_map(|(number, (path, planned))| {
            Some((number, Files::new(params, path, planned.as_ref().ok()?)))
        });
        let planned: BTreeMap<usize, Files<'_>> = planned.collect();
        let keys = planned.iter().filter_map(|(number, files)| Some((*number, files.key()?)));
        let keys: BTreeMap<usize, ModelKey> = keys.collect();
        let read = keys.iter().filter_map(|(number, key)| Some((*number, record.get(*key)?)));
        let read: BTreeMap<usize, ReadModel> = read.filter(|_| !reads_all).collect();
        let mut stored = BTreeMap::new();
        if !read.is_empty() {
            let names = StoredModels::list(client)?;
            let found = read.iter().filter_map(|(number, read)| {
                Some((*number, planned.get(number)?.stored(client, &names, *read)?))
            });
            stored.extend(found);
        }
        Ok((Self { record, keys }, stored))
    }

    /// Remembers a model that was read, if its files are as they were before.
    pub(super) fn add(&mut self, number: usize, files: &Files<'_>, imported: &Imported) {
        let before = self.keys.get(&number).copied();
        if let Some(key) = files.key().filter(|key| Some(*key) == before) {
            self.record.add(key, imported);
        }
    }

    /// Without it, the next import reads the files again.
    pub(super) fn save(&self) {
        let _ = self.record.save();
    }
}

/// The files of a planned model.
pub(super) struct Files<'p> {
    params: &'p Params,
    planned: &'p Planned,
    /// What its name is derived from.
    name_source: String,
    /// The path of each file in the model, and on the disk.
    files: Vec<(&'p str, PathBuf, Option<SidecarComponent>)>,
}

impl<'p> Files<'p> {
    pub(super) fn new(params: &'p Params, path: &'p Path, planned: &'p Planned) -> Self {
        let (name_source, files) = match planned {
            Planned::File { sidecars } => {
                let own = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                let sidecars = sidecars.iter().filter(|_| params.with_sidecars).map(|sidecar| {
                    (sidecar.file_name.as_str(), sidecar.path.clone(), Some(sidecar.component))
                });
                let files = std::iter::once((own, path.to_owned(), None)).chain(sidecars);
                (with_folders(path), files.collect())
            }
            Planned::List(model) => {
                let places = model.paths().into_iter().map(|(place, _listed)| place);
                let files = model.files.iter().zip(places);
                let files = files.map(|(file, place)| (file.path.as_str(), place, file.component));
                (model.name_source.clone(), files.collect())
            }
        };
        Self { params, planned, name_source, files }
    }

    /// `None` if a file is not there.
    fn key(&self) -> Option<ModelKey> {
        let identity = |place: &Path| fs::metadata(place).ok().map(|data| Identity::from(&data));
        let files =
            self.files.iter().map(|(path, place, component)| Some((*path, *component, identity(place)?)));
        let files: Vec<_> = files.collect::<Option<_>>()?;
        let name = self.params.name.as_ref().map_or_else(|| self.name_source.clone(), Reference::short);
        Some(ModelKey::new(&name, files.into_iter()))
    }

    /// The stored model under the name that the import gave it, as the import of the same files would answer.
    fn stored(
        &self,
        client: &Client,
        names: &StoredModels<'_>,
        ReadModel { manifest: digest, tensor_count }: ReadModel,
    ) -> Option<Imported> {
        let name = self.candidates(digest)?.into_iter().find(|name| names.has_whole(name, digest))?;
        let manifest = client.manifest(&name).ok().filter(|manifest| manifest.digest() == digest)?;
        let layers = manifest.layers();
        let (first, rest) = layers.split_first().filter(|_| layers.len() == self.files.len())?;
        let total = layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        let is_list = matches!(self.planned, Planned::List(_));
        let file = |(path, layer): (&str, &Descriptor)| ImportedFile {
            path: path.to_owned(),
            digest: layer.digest,
            size: layer.size,
        };
        let paths = self.files.iter().map(|(path, ..)| *path);
        let is_listed = is_list && layers.len() <= Imported::MAX_LISTED;
        let sidecar =
            |((path, _, component), layer): (&(&str, PathBuf, Option<SidecarComponent>), &Descriptor)| {
                let (component, file_name) = ((*component)?, (*path).to_owned());
                Some(ImportedSidecar { component, file_name, digest: layer.digest, size: layer.size })
            };
        let sidecars = self.files.iter().skip(1).zip(rest).filter_map(sidecar).filter(|_| !is_list);
        Some(Imported {
            name: name.short(),
            digest,
            file: (!is_list).then_some(first.digest),
            size: if is_list { total } else { first.size },
            file_count: is_list.then_some(layers.len() as u64),
            files: paths.zip(layers).map(file).filter(|_| is_listed).collect(),
            new_bytes: 0,
            reused_bytes: total,
            tensor_count,
            new_blob_count: 0,
            sidecars: sidecars.collect(),
            unchanged: true,
            effects: NameEffects { notes: notes(self.params, self.planned), ..NameEffects::default() },
        })
    }

    /// The names that an import may give.
    fn candidates(&self, manifest: Digest) -> Option<Vec<Reference>> {
        if let Some(name) = &self.params.name {
            return Some(vec![name.clone()]);
        }
        let names = DerivedName::from_path(&self.name_source).ok()?.with_id(manifest, false);
        Some(std::iter::once(names.first()).chain(names.others()).cloned().collect())
    }
}
