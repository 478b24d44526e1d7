//! Models at Hugging Face: chooses the files of a repository to pull, and their source.
//!
//! The choice is made from the list of files. If the registry has a manifest for the chosen file, it is used too,
//! because it adds the template and the parameters. Files are requested at the commit that was listed, so they cannot
//! change in between.

mod folder;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::model_file::{has_other_weights, layer_type};
use blobd_store_format::reference::Reference;
use blobd_store_format::repository::{Choice, Refusal, RepositoryFiles, Wanted};
use blobd_store_format::source::{Components, Draft, HubFile, Projector};

use super::RegistryClient;
use super::error::{FailureKind, RegistryError, Result};
use super::huggingface::{HubListing, address};
use super::listing::TreeFile;
use super::manifest::nearest;
use super::published::{Chosen, ChosenFile, PublishedModel, RemoteModel};
use super::remote::RemoteFile;
use super::server_reason::ServerReason;

impl RegistryClient {
    /// The model that a file belongs to: the file, its other shards and its components.
    pub(super) async fn hub_model(&self, file: &HubFile, components: &Components) -> Result<RemoteModel> {
        if components.have_patterns() || components.revision.is_some() {
            return Err(RegistryError::NoChoice { subject: file.to_string() });
        }
        let listed = self.list(file.repository(), file.revision()).await?;
        let choice = choose(&listed, Wanted::File(file.path()), components);
        let choice = choice.map_err(|refusal| {
            let reason = ServerReason::default();
            refused(refusal, file.repository(), (&file.to_string(), file.path()), &listed, reason)
        })?;
        Hub { client: self, repository: file.repository(), listed: &listed }.files(&choice)
    }

    /// The model that a tag means.
    pub(super) async fn hub_model_of_tag(
        &self,
        reference: &Reference,
        components: &Components,
    ) -> Result<RemoteModel> {
        let chooses = components.have_patterns() || components.revision.is_some();
        let published = match components.revision {
            // The registry has manifests of the default branch only.
            Some(_) => Err(RegistryError::unusable(reference.to_string(), "a revision has no manifest")),
            None => match self.manifest(reference).await {
                Err(error) if !knows_no_tag(&error) => return Err(error),
                published => published,
            },
        };
        let repository = reference.repository();
        let revision = components.revision.as_deref().unwrap_or(HubFile::DEFAULT_REVISION);
        let listed = match self.list(&repository, revision).await {
            Ok(listed) if listed.weights().next().is_some() || chooses => listed,
            // The registry's own reason comes first.
            Ok(listed) if published.is_err() => {
                let refused = published.map_err(|error| no_model(error, &repository, &listed));
                return refused.map(|manifest| RemoteModel::Published(manifest.into()));
            }
            // A mirror of the registry alone has no list, so nothing can be chosen.
            Err(error) if components.revision.is_some() => return Err(error),
            Err(error) if !has_no_list(&error) => return published.and(Err(error)),
            _ if components.are_default() => {
                return published.map(|manifest| RemoteModel::Published(manifest.into()));
            }
            _ => {
                return published.and(Err(RegistryError::NoChoice { subject: format!("model {reference}") }));
            }
        };
        let hub = Hub { client: self, repository: &repository, listed: &listed };
        if let Some(folder) = hub.folder_of(reference, components)? {
            return Ok(folder);
        }
        let choice = match choose(&listed, Wanted::Tag(reference.tag()), components) {
            Ok(choice) => choice,
            // The registry knows other tags too.
            Err(Refusal::NoSuchTag { .. }) if published.is_ok() => {
                return published.map(|manifest| RemoteModel::Published(manifest.into()));
            }
            Err(refusal) => {
                let reason = published.as_ref().err().map(RegistryError::reason).unwrap_or_default();
                let has_reason = reason.sentence().is_some();
                let subject = format!("model {reference}");
                let refused = refused(refusal, &repository, (&subject, reference.tag()), &listed, reason);
                return Err(match (refused, published) {
                    (refused @ RegistryError::NoModel { .. }, Err(error)) if has_reason => {
                        error.explained(refused.hint().unwrap_or_default())
                    }
                    (refused, _) => refused,
                });
            }
        };
        match hub.manifest(reference, published, &choice).await {
            Some(manifest) => hub.completed(manifest, &choice, components),
            None => hub.files(&choice),
        }
    }

    /// Finds the file with this content in the repository of a model, for a repair. Only files of Git LFS have a digest in
    /// the list: of the others, the one at `path` is most likely the file.
    pub(super) async fn hub_file(
        &self,
        repository: &str,
        revision: &str,
        (file, path): (&Descriptor, Option<&str>),
    ) -> Result<Option<RemoteFile>> {
        let listed = self.list(repository, revision).await?;
        let hub = Hub { client: self, repository, listed: &listed };
        let component = file.media_type.component();
        let with = |digest| {
            let is_it = |known: &&TreeFile| {
                let is_same_kind = || layer_type(&known.path, known.format()).component() == component;
                known.size == file.size && known.digest == digest && (digest.is_some() || is_same_kind())
            };
            listed.files.iter().find(is_it)
        };
        let at_path = || {
            let is_it = |known: &&TreeFile| {
                path == Some(&*known.path) && known.size == file.size && known.digest.is_none()
            };
            listed.files.iter().find(is_it)
        };
        let found = with(Some(file.digest)).or_else(at_path).or_else(|| with(None));
        found.map(|found| hub.remote(found, file.media_type.as_str())).transpose()
    }
}

/// Whether the registry may lack only the tag: it has no sharded models and knows few names.
fn knows_no_tag(error: &RegistryError) -> bool {
    matches!(
        error.main(),
        RegistryError::Status { status: 400, .. }
            | RegistryError::NotFound { .. }
            | RegistryError::NoSuchName { .. }
            | RegistryError::NoSuchTag { .. }
    )
}

/// Whether the error means that a server does not list files at all, rather than that it failed.
fn has_no_list(error: &RegistryError) -> bool {
    error.kind() == FailureKind::NotFound
        || matches!(error.main(), RegistryError::Status { status: 400..=499 | 501, .. })
}

fn choose(listed: &HubListing, wanted: Wanted<'_>, components: &Components) -> Result<Choice, Refusal> {
    let files = RepositoryFiles::new(listed.files.iter().map(|file| file.path.as_str()));
    files.choose(wanted, components)
}

/// Whether the weights of a manifest are this file.
fn is_of(manifest: &Manifest, file: &TreeFile) -> bool {
    let mut models = manifest.layers().iter().filter(|layer| layer.media_type.component() == MODEL);
    models.next().is_some_and(|model| Some(model.digest) == file.digest) && models.next().is_none()
}

const MODEL: &str = "model";

/// A repository and its files.
struct Hub<'h> {
    client: &'h RegistryClient,
    repository: &'h str,
    listed: &'h HubListing,
}

impl Hub<'_> {
    /// The registry's manifest for the chosen file, which may have another tag there. The registry has no manifests for
    /// shards.
    async fn manifest(
        &self,
        reference: &Reference,
        published: Result<Manifest>,
        choice: &Choice,
    ) -> Option<Manifest> {
        let published = published.ok()?;
        let [file] = choice.model[..] else { return None };
        let file = self.listed.files.get(file)?;
        if is_of(&published, file) {
            return Some(published);
        }
        let reference = reference.with_tag(file_name(&file.path)).ok()?;
        self.client.manifest(&reference).await.ok().filter(|manifest| is_of(manifest, file))
    }

    /// The chosen files as a model without a manifest.
    fn files(&self, choice: &Choice) -> Result<RemoteModel> {
        let first = choice.model.first().and_then(|file| self.listed.files.get(*file));
        let first = first.map(|file| file.path.as_str()).unwrap_or_default();
        let origin = HubFile::new(self.repository, Some(&self.listed.commit), first).ok();
        let files = self.chosen(choice).map(|(file, media_type)| self.remote(file, media_type));
        Ok(RemoteModel::Files {
            files: files.collect::<Result<_, _>>()?,
            origin: origin.map(|file| file.to_string()),
            chosen: Some(self.chosen_paths(choice)),
        })
    }

    /// Adds the chosen components to the registry's manifest. Files that the registry does not name are pulled from the
    /// repository.
    fn completed(&self, manifest: Manifest, choice: &Choice, components: &Components) -> Result<RemoteModel> {
        let mut elsewhere = Vec::new();
        for (file, media_type) in self.chosen(choice).skip(choice.model.len()) {
            elsewhere.push(self.remote(file, media_type)?);
        }
        let Some(added) =
            elsewhere.iter().map(|file| Some((file.descriptor()?, file.name()?))).collect::<Option<Vec<_>>>()
        else {
            // A manifest cannot name a file without a known digest.
            return self.files(choice);
        };
        let replaces = |component: &str| {
            added.iter().any(|(file, _)| file.media_type.component() == component)
                || !is_wanted(component, components)
        };
        let kept: Vec<_> = manifest
            .layers()
            .iter()
            .zip(manifest.names().skip(1))
            .filter(|(layer, _)| {
                !replaces(layer.media_type.component())
                    || added.iter().any(|(file, _)| file.digest == layer.digest)
            })
            .collect();
        let missing: Vec<_> = added
            .iter()
            .filter(|(file, _)| !kept.iter().any(|(layer, _)| layer.digest == file.digest))
            .collect();
        let chosen = Some(self.chosen_paths(choice));
        if missing.is_empty() && kept.len() == manifest.layers().len() {
            return Ok(RemoteModel::Published(PublishedModel { chosen, ..manifest.into() }));
        }
        let layers = kept.iter().map(|(layer, name)| ((*layer).clone(), name.map(str::to_owned)));
        let missing = missing.into_iter().map(|(file, name)| (file.clone(), Some((*name).to_owned())));
        let composed = Manifest::compose_named(manifest.config().clone(), layers.chain(missing).collect());
        let manifest =
            composed.map_err(|error| RegistryError::unusable(address(self.repository), error.to_string()))?;
        Ok(RemoteModel::Published(PublishedModel { elsewhere, chosen, ..manifest.into() }))
    }

    /// The chosen files with their media types, the weights first.
    fn chosen<'c>(&'c self, choice: &'c Choice) -> impl Iterator<Item = (&'c TreeFile, &'static str)> {
        let of_type = |files: &'c [usize], media_type| files.iter().map(move |file| (*file, media_type));
        let model = of_type(&choice.model, MediaType::OLLAMA_MODEL);
        let projector = of_type(&choice.projector, MediaType::OLLAMA_PROJECTOR);
        let draft = of_type(&choice.draft, MediaType::OLLAMA_DRAFT);
        let files = model.chain(projector).chain(draft);
        files.filter_map(|(file, media_type)| Some((self.listed.files.get(file)?, media_type)))
    }

    fn chosen_paths(&self, choice: &Choice) -> Chosen {
        let file = |(file, media_type): (&TreeFile, &str)| ChosenFile {
            media_type: MediaType::new(media_type),
            path: file.path.clone(),
        };
        Chosen {
            files: self.chosen(choice).map(file).collect(),
            listed: self.listed.gguf().count(),
            beside: None,
            notes: Vec::new(),
        }
    }

    fn remote(&self, file: &TreeFile, media_type: &str) -> Result<RemoteFile> {
        self.remote_as(file, media_type, file_name(&file.path))
    }

    fn remote_as(&self, file: &TreeFile, media_type: &str, name: &str) -> Result<RemoteFile> {
        self.client.remote_of_hub((self.repository, &self.listed.commit), file, media_type, name)
    }
}

/// Whether a component of the registry's manifest is pulled. Only a projector and a draft can be left out.
fn is_wanted(component: &str, components: &Components) -> bool {
    match component {
        "projector" => components.projector != Projector::None,
        "draft" => components.draft != Draft::None,
        _ => true,
    }
}

/// The error for a refused choice. `wanted` is the tag or path that no file matches.
fn refused(
    refusal: Refusal,
    repository: &str,
    (subject, wanted): (&str, &str),
    listed: &HubListing,
    reason: ServerReason,
) -> RegistryError {
    let (subject, host) = (subject.to_owned(), HubFile::HOST.to_owned());
    let link = |paths: &[String]| {
        let first = paths.first().and_then(|path| HubFile::new(repository, None, path).ok());
        first.map(|file| file.to_string()).unwrap_or_default()
    };
    match refusal {
        Refusal::NoSuchTag { tags } => {
            RegistryError::NoSuchName { subject, host, reason, nearest: nearest(wanted, &tags) }
        }
        Refusal::NoModel { others } => {
            let example = link(&others);
            RegistryError::NoModel { subject, host, others, example }
        }
        Refusal::Ambiguous { candidates } => {
            let example = link(&candidates);
            RegistryError::Ambiguous { subject, host, candidates, example }
        }
        Refusal::MissingShards { count, missing } => {
            RegistryError::MissingShards { subject, host, count, missing }
        }
        Refusal::NoProjector { projectors } if projectors.is_empty() => {
            RegistryError::NotFound { subject: format!("projector of {subject}"), host, reason }
        }
        Refusal::NoProjector { projectors } => {
            let nearest = projectors.join(", ");
            RegistryError::NoSuchName { subject: format!("projector of {subject}"), host, reason, nearest }
        }
        _ => {
            let paths: Vec<String> = listed.files.iter().map(|file| file.path.clone()).collect();
            RegistryError::NoSuchName { subject, host, reason, nearest: nearest(wanted, &paths) }
        }
    }
}

/// Explains the registry's refusal when the repository has no model file in a known format.
fn no_model(error: RegistryError, repository: &str, listed: &HubListing) -> RegistryError {
    let address = address(repository);
    let mut others =
        listed.files.iter().map(|file| file.path.as_str()).filter(|path| has_other_weights(path));
    error.explained(match others.next() {
        Some(path) => format!(
            "{address} has weights of a format that is not split, such as {path}: `--include '*'` stores all its files \
             whole; or pull a variant with safetensors or GGUF files"
        ),
        None => format!("{address} has no model file that blobd knows: pull a GGUF variant"),
    })
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
