//! Repairs a blob from the registry of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_registry::{RegistryClient, RegistryError, RemoteFile, Sender};
use blobd_store::BlobWriter;
use blobd_store_format::descriptor::{Archive, Descriptor};
use blobd_store_format::digest::Digest;
use blobd_store_format::origin::Origin;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::source::PullSource;
use blobd_store_format::stored_file::StoredForm;

use super::blob_part::{BlobPart, parts_in_files, parts_of_blob};
use super::{Failure, Repair, Unpublished};
use crate::ops::verify::survey::{FileId, Need, Survey, SurveyedModel};

impl Repair<'_> {
    /// Tries the origins of all models that need the blob, one after the other. Returns the number of bytes received.
    pub(super) fn take_from_origin(
        &self,
        survey: &Survey,
        digest: Digest,
        need: &Need,
    ) -> Result<u64, Failure> {
        let (mut failures, mut tried) = (BTreeSet::new(), BTreeSet::new());
        let mut shards = Vec::new();
        let mut received_bytes = 0;
        for id in &need.files {
            let Some((file, form)) = survey.file(*id) else { continue };
            if let Some(Archive::Compressed(_)) = file.media_type.archive_of_weights() {
                failures.insert(format!(
                    "layer {} is compressed and is not received in part; pull {} again",
                    id.digest.short(),
                    names(survey, *id)
                ));
                continue;
            }
            let parts = self.parts(*id, form, digest);
            if parts.is_empty() {
                shards.extend(self.with_part(*id, &file, digest));
                continue;
            }
            let parts: Vec<_> = parts.into_iter().map(|part| (0, part)).collect();
            for model in survey.models_of(*id) {
                let origin = match self.origin_of(model) {
                    Ok(origin) => origin,
                    Err(failure) => {
                        failures.insert(failure);
                        continue;
                    }
                };
                // Several tags may have the same origin.
                if !tried.insert((origin.to_string(), id.digest)) {
                    continue;
                }
                let path = self.path_in(model, id.digest);
                let fetch = Fetch { repair: self, origin: &origin, files: vec![(file.clone(), path)] };
                match fetch.run(digest, need, &parts, &mut received_bytes) {
                    Ok(()) => return Ok(received_bytes),
                    Err(failure) => failures.insert(failure),
                };
            }
        }
        match self.take_from_shards(survey, (digest, need, &shards), &mut received_bytes) {
            Ok(()) => return Ok(received_bytes),
            Err(others) => failures.extend(others),
        }
        match failures.is_empty() {
            true => Err("no recipe or manifest says which file contained it".to_owned()),
            false => Err(failures.into_iter().collect::<Vec<_>>().join("; ")),
        }
    }

    /// Fetches the blob in parts from several shards of one model.
    fn take_from_shards(
        &self,
        survey: &Survey,
        (digest, need, shards): (Digest, &Need, &[Shard]),
        received: &mut u64,
    ) -> Result<(), BTreeSet<Failure>> {
        let mut by_model: BTreeMap<&str, (&SurveyedModel, Vec<&Shard>)> = BTreeMap::new();
        for shard in shards {
            for model in survey.models_of(shard.id) {
                by_model.entry(&model.name).or_insert((model, Vec::new())).1.push(shard);
            }
        }
        let (mut failures, mut tried) = (BTreeSet::new(), BTreeSet::new());
        for (model, shards) in by_model.into_values() {
            let parts = parts_in_files(shards.iter().map(|shard| &*shard.recipe), digest);
            if parts.is_empty() {
                failures.insert(format!("{} has only a part of it", model.name));
                continue;
            }
            let origin = match self.origin_of(model) {
                Ok(origin) => origin,
                Err(failure) => {
                    failures.insert(failure);
                    continue;
                }
            };
            // Several tags may have the same model.
            if !tried.insert((origin.to_string(), model.manifest)) {
                continue;
            }
            let file = |shard: &&Shard| (shard.file.clone(), self.path_in(model, shard.file.digest));
            let fetch = Fetch { repair: self, origin: &origin, files: shards.iter().map(file).collect() };
            match fetch.run(digest, need, &parts, received) {
                Ok(()) => return Ok(()),
                Err(failure) => failures.insert(failure),
            };
        }
        Err(failures)
    }

    /// The file, if it has a part of the blob and other files of the same model have the rest.
    fn with_part(&self, id: FileId, file: &Descriptor, blob: Digest) -> Option<Shard> {
        let recipe = self.store.content().recipe(id.digest).ok().flatten()?;
        recipe.shared_blobs().contains_key(&blob).then(|| Shard { id, file: file.clone(), recipe })
    }

    /// The ranges of a file that contain the blob; none if its recipe is missing or damaged.
    fn parts(&self, file: FileId, form: Option<StoredForm>, blob: Digest) -> Vec<BlobPart> {
        match form {
            Some(StoredForm::Blob) if file.digest == blob => vec![BlobPart::whole(file.size)],
            Some(StoredForm::Blob) | None => Vec::new(),
            Some(StoredForm::Recipe) => {
                let recipe = self.store.content().recipe(file.digest).ok().flatten();
                recipe.map(|recipe| parts_of_blob(&recipe, blob)).unwrap_or_default()
            }
        }
    }

    /// The path of a file in a model, if its manifest says it.
    fn path_in(&self, model: &SurveyedModel, file: Digest) -> Option<String> {
        let manifest = self.store.names().manifest(&model.name.parse().ok()?).ok()?;
        let mut files = manifest.files().zip(manifest.names());
        files.find(|(layer, name)| layer.digest == file && name.is_some())?.1.map(str::to_owned)
    }

    /// The origin of a model, or what to do if it cannot be fetched.
    fn origin_of(&self, model: &SurveyedModel) -> Result<PullSource, Failure> {
        let name = model.name.parse().ok();
        let own = name.as_ref().and_then(|name| self.store.names().name_origin(name, model.manifest).origin);
        let Some(origin) = own.or_else(|| self.store.names().origin(model.manifest)) else {
            return Err(format!("the origin of {} is unknown; pull or import it again", model.name));
        };
        let origin = match Origin::parse(&origin) {
            Some(Origin::Source(source) | Origin::Copy(source)) => source,
            Some(Origin::Import(file_name)) => return Err(format!("import {file_name} again")),
            Some(Origin::Url(url)) => return Err(format!("pull {url} again, with the query that it had")),
            Some(Origin::Edit { name, .. }) => {
                return Err(format!("repair or pull {}, or edit it again", name.short()));
            }
            None => return Err(format!("{origin:?} is not a registry; pull {} again", model.name)),
        };
        let allowed = self.policy.check_source(&origin, name.as_ref());
        allowed.map_err(|error| error.to_string())?;
        Ok(origin)
    }
}

/// A file that has a part of a blob.
struct Shard {
    id: FileId,
    file: Descriptor,
    recipe: Arc<Recipe>,
}

struct Fetched<'f> {
    senders: Vec<Arc<Sender>>,
    bytes: &'f mut u64,
}

/// Describes the failure of a second attempt, after the first brought bytes with the digest `first`.
fn second_failure(first: Digest, second: &Unpublished) -> Failure {
    match second {
        Unpublished::Wrong(digest) if *digest == first => format!("{second}, twice"),
        Unpublished::Wrong(digest) => {
            format!("the received bytes have the digest {first}, and {digest} when fetched again")
        }
        Unpublished::Failed(failure) => {
            format!("the received bytes have the digest {first}; fetched again: {failure}")
        }
    }
}

struct Fetch<'f> {
    repair: &'f Repair<'f>,
    origin: &'f PullSource,
    /// The files that have the blob, with their paths in the model.
    files: Vec<(Descriptor, Option<String>)>,
}

/// A range of a blob, with the number of its file.
type NumberedPart = (usize, BlobPart);

impl Fetch<'_> {
    fn run(
        &self,
        digest: Digest,
        need: &Need,
        parts: &[NumberedPart],
        received: &mut u64,
    ) -> Result<(), Failure> {
        let fetched = self.fetch(digest, need, parts, received);
        fetched.map_err(|failure| match self.origin {
            PullSource::Registry(reference) => format!("{}: {failure}", reference.short()),
            other => format!("{other}: {failure}"),
        })
    }

    /// Fetches the blob. If its digest is wrong, fetches it a second time over other connections, and from another server if
    /// there is one.
    fn fetch(
        &self,
        digest: Digest,
        need: &Need,
        parts: &[NumberedPart],
        received: &mut u64,
    ) -> Result<(), Failure> {
        let registry = self.repair.registry;
        let located = self
            .files
            .iter()
            .map(|(file, path)| self.while_connected(registry.locate(self.origin, file, path.as_deref())));
        let remotes = located.collect::<Result<Vec<_>, _>>()?;
        let mut fetched = Fetched { senders: Vec::new(), bytes: received };
        let wrong = match self.publish(digest, need, parts, (registry, &remotes), &mut fetched) {
            Err(Unpublished::Wrong(wrong)) => wrong,
            published => return published.map_err(|unpublished| unpublished.to_string()),
        };
        tracing::info!("blob {digest}: the received bytes have the digest {wrong}; they are requested again");
        registry.set_peers_aside(fetched.senders.iter().map(|sender| &**sender));
        let registry = registry.with_fresh_connections();
        let avoiding = |remote: RemoteFile| remote.avoiding(fetched.senders.iter().map(|sender| &**sender));
        let remotes: Vec<_> = remotes.into_iter().map(avoiding).collect();
        let published = self.publish(digest, need, parts, (&registry, &remotes), &mut fetched);
        published.map_err(|unpublished| second_failure(wrong, &unpublished))
    }

    /// Fetches all ranges in the order of the blob, so that it is hashed while it is received.
    fn publish(
        &self,
        digest: Digest,
        need: &Need,
        parts: &[NumberedPart],
        (registry, remotes): (&RegistryClient, &[RemoteFile]),
        fetched: &mut Fetched<'_>,
    ) -> Result<(), Unpublished> {
        self.repair.publish(digest, need.size, |writer| {
            let nonempty = parts.iter().filter(|(_, part)| part.length > 0);
            let mut located = nonempty.filter_map(|(file, part)| Some((remotes.get(*file)?, *part)));
            located.try_for_each(|(remote, part)| self.take((registry, remote), part, writer, fetched))
        })
    }

    fn take(
        &self,
        (registry, remote): (&RegistryClient, &RemoteFile),
        part: BlobPart,
        writer: &mut BlobWriter,
        fetched: &mut Fetched<'_>,
    ) -> Result<(), Failure> {
        let range = part.offset_in_file..part.end_in_file();
        let mut stream = self.while_connected(registry.open_range(remote, range))?;
        fetched.senders.push(Arc::clone(stream.sender()));
        let taken = loop {
            match self.while_connected(stream.next()) {
                Ok(Some(bytes)) => {
                    if let Err(error) = writer.append(&bytes) {
                        break Err(self.repair.failure(&error));
                    }
                }
                Ok(None) => break Ok(()),
                Err(failure) => break Err(failure),
            }
        };
        *fetched.bytes = fetched.bytes.saturating_add(stream.received_bytes());
        taken
    }

    fn while_connected<T>(
        &self,
        response: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, Failure> {
        let events = self.repair.events;
        self.repair.handle.block_on(async {
            tokio::select! {
                response = response => response.map_err(|error| error.to_string()),
                () = events.closed() => Err("the client of this repair has disconnected".to_owned()),
            }
        })
    }
}

/// The models that need a file.
fn names(survey: &Survey, file: FileId) -> String {
    survey.names_of(&[file]).into_iter().collect::<Vec<_>>().join(" or ")
}
