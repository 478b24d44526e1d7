//! The models that `show` and `fit` describe: in the store, in local files, or at a registry.
//!
//! Only headers and short texts are read. A model at a registry is not stored, and is asked for only if its name has a host
//! or the user wants it.

use std::path::{Path, PathBuf};

use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{FileHead, LayerSummary, ModelHeads};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::source::PullSource;
use clap::Args;

use crate::advice::{has_host, parse_source};
use crate::connect::{Connected, client_error, connect, note_name};
use crate::described_model::{DescribedModel, ModelLocation};
use crate::local_files::describe_path;
use crate::model_name::{ModelName, only};
use crate::{Client, ErrorBody, ErrorCode, Global, Reference, usage};

/// Names the model that a command describes.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// The model: its name, the path of a file or folder, or a source as `blobd pull` takes it
    #[arg(value_name = "REF|PATH")]
    model: String,
    #[command(flatten)]
    lookup: Lookup,
}

/// Where a model is looked for that is not stored. A name with a host, and a URL, says so itself; any other name is asked
/// for only if the user wants that.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Lookup {
    /// Ask the default registry for a model that is not in the store; a name with a host needs no option
    #[arg(long, conflicts_with = "stored")]
    remote: bool,
    /// Look only in the store, whatever the name is
    #[arg(long)]
    stored: bool,
}

impl Lookup {
    /// Looks only in the store.
    pub const STORED: Self = Self { remote: false, stored: true };

    /// Whether the registry of a model that is not stored is asked.
    fn asks_registry(self, typed: &str, source: &PullSource) -> bool {
        let names_host = || has_host(typed) || !matches!(source, PullSource::Registry(_));
        !self.stored && (self.remote || names_host())
    }
}

impl ModelArgs {
    /// Finds and reads the model: a local file if the text is the path of one, else in the store, else at its registry.
    /// Also returns the connection, if one was needed.
    pub fn describe(&self, global: &Global) -> Result<(DescribedModel, Option<Connected>), ErrorBody> {
        if let Some(path) = self.path() {
            return Ok((describe_path(&path)?, None));
        }
        // Before a daemon is needed.
        if let Err(refused) = parse_source(&self.model)
            && !NamePattern::is_pattern(&self.model)
        {
            return Err(refused);
        }
        let connected = connect(global)?;
        Ok((self.describe_with(global, &connected)?, Some(connected)))
    }

    /// As [`Self::describe`], for a model that is not a local file, over a connection that exists.
    pub fn describe_with(&self, global: &Global, connected: &Connected) -> Result<DescribedModel, ErrorBody> {
        let source = match parse_source(&self.model) {
            Ok(source) => source,
            Err(refused) if !NamePattern::is_pattern(&self.model) => return Err(refused),
            Err(_pattern) => PullSource::Registry(only(global, &connected.client, &self.name()?)?),
        };
        let reference = source.name().map_err(usage)?;
        let model = match describe_stored(&connected.client, &reference) {
            Err(error) if error.code != ErrorCode::NotFound || self.lookup.stored => Err(error),
            Err(error) if !self.lookup.asks_registry(&self.model, &source) => {
                Err(self.with_remote_hint(error, &source))
            }
            Err(error) => {
                // Without a tag, one of the stored tags was meant more likely than another one at the registry.
                if reference.omits_tag() && has_tags(&connected.client, &reference)? {
                    return Err(error);
                }
                describe_remote(&connected.client, source, error)
            }
            described => described,
        };
        let model = model.map_err(|error| self.with_folder_hint(error))?;
        if let ModelLocation::Store(stored) = &model.place {
            note_name(global, &reference, &stored.short());
        }
        Ok(model)
    }

    /// No registry was asked.
    fn with_remote_hint(&self, error: ErrorBody, source: &PullSource) -> ErrorBody {
        let known = error.hint.as_ref().map_or_else(String::new, |hint| format!("{hint}; "));
        let has_owner =
            matches!(source, PullSource::Registry(name) if name.namespace() != Reference::DEFAULT_NAMESPACE);
        let typed = self.model.trim();
        let hub = if has_owner {
            format!("; a repository of Hugging Face is hf.co/{typed}")
        } else {
            String::new()
        };
        error.with_hint(format!("{known}--remote asks its registry, {}{hub}", source.host()))
    }

    /// A folder of the name that was not found may have been meant.
    fn with_folder_hint(&self, error: ErrorBody) -> ErrorBody {
        let name = &self.model;
        match error.code == ErrorCode::NotFound && Path::new(name).is_dir() {
            true => error.with_hint(format!("the folder of this name is ./{name}")),
            false => error,
        }
    }

    /// Describes a stored model without its headers and texts, which the policy denies. `denied` is the error of a model
    /// that is not stored.
    pub fn describe_denied(
        &self,
        global: &Global,
        denied: ErrorBody,
    ) -> Result<(DescribedModel, Option<Connected>), ErrorBody> {
        let connected = connect(global)?;
        let reference = only(global, &connected.client, &self.name()?)?;
        let details = match connected.client.model(&reference).map_err(client_error) {
            Err(error) if error.code == ErrorCode::NotFound => return Err(denied),
            details => details?,
        };
        let file = |layer: LayerSummary| FileHead {
            media_type: layer.media_type,
            name: layer.name,
            digest: Some(layer.digest),
            size: layer.size,
            content: None,
        };
        let stored = details.name.parse().map_err(usage)?;
        let files = details.layers.into_iter().map(file).collect();
        let heads = ModelHeads { name: details.name, digest: Some(details.digest), origin: None, files };
        Ok((DescribedModel::new(heads, ModelLocation::Store(stored)), Some(connected)))
    }

    /// The text as the name of a stored model.
    pub fn name(&self) -> Result<ModelName, ErrorBody> {
        self.model.parse()
    }

    /// For a model that was not named by an argument of its own.
    pub fn new(model: &str, lookup: Lookup) -> Self {
        Self { model: model.to_owned(), lookup }
    }

    /// The path, if the text can only be a path, or is that of an existing file. That of a folder has a slash at its start
    /// or end.
    pub fn path(&self) -> Option<PathBuf> {
        let path = Path::new(&self.model);
        let is_path = ["/", "./", "../"].iter().any(|start| self.model.starts_with(start))
            || self.model.ends_with('/')
            || [".", ".."].contains(&self.model.as_str());
        (is_path || (FileFormat::split_name(&self.model).is_some() && path.is_file()))
            .then(|| path.to_owned())
    }
}

/// The component of a stored model's weights, or of what it has in their place, such as an adapter.
///
/// If the daemon does not describe the model, the request that opens it says why, and is the one in the audit log.
pub fn weights_component(client: &Client, reference: &Reference) -> String {
    let layers = client.model(reference).map(|details| details.layers).unwrap_or_default();
    MediaType::weights_component(layers.iter().map(|layer| &layer.media_type)).to_owned()
}

fn describe_stored(client: &Client, reference: &Reference) -> Result<DescribedModel, ErrorBody> {
    let heads = client.heads(reference).map_err(client_error)?;
    // The stored name: the reference may be an ID, or leave out the tag.
    let stored = heads.name.parse().unwrap_or_else(|_malformed| reference.clone());
    Ok(DescribedModel::new(heads, ModelLocation::Store(stored)))
}

fn has_tags(client: &Client, reference: &Reference) -> Result<bool, ErrorBody> {
    let models = client.models().map_err(client_error)?.models;
    let is_tag = |name: &str| name.parse().is_ok_and(|stored: Reference| stored.is_sibling_of(reference));
    Ok(models.iter().any(|model| is_tag(&model.name)))
}

/// If the model's registry cannot be reached, the model was simply not found.
fn describe_remote(
    client: &Client,
    source: PullSource,
    missing: ErrorBody,
) -> Result<DescribedModel, ErrorBody> {
    let is_named = matches!(source, PullSource::Registry(_));
    let params = PullParams::of_source(source);
    let remote = match client.inspect(&params).map_err(client_error) {
        Err(error) if is_named && matches!(error.code, ErrorCode::Upstream | ErrorCode::NotFound) => {
            let message = format!("{}; not at its registry either: {}", missing.message, error.message);
            let body = ErrorBody::new(ErrorCode::NotFound, message);
            return Err(match error.hint.or(missing.hint) {
                Some(hint) => body.with_hint(hint),
                None => body,
            });
        }
        remote => remote?,
    };
    let place = ModelLocation::Registry(remote.origin.clone().unwrap_or_default());
    Ok(DescribedModel::new(remote, place))
}
