//! `blobd load`: stores the models of an OCI image layout, such as one that `blobd save` has written.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::{client_error, connect_or_create};
use blobd_cli_common::model_name::parse_new_name;
use blobd_cli_common::output::{human_bytes, print_text, printable};
use blobd_cli_common::progress::Bar;
use blobd_cli_common::{Global, internal, usage};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportFile, ImportParams};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::index::LayoutModel;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use clap::Args;
use serde::Serialize;

use crate::import::summary;
use crate::layout_source::{LayoutSource, ReadModel};
use crate::{Client, Digest, ErrorBody};

/// Store the models of an archive or folder that `blobd save` has written
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd load models.tar
  blobd load models/ --list                           the models in it; stores nothing
  blobd load tiny.tar --name tiny:copy
  ssh other blobd save llama3:8b -o - | blobd load -

Other programs write such OCI image layouts too: skopeo, oras, crane. All digests are checked. What
is read from a pipe is first copied into a temporary file; TMPDIR names its folder.")]
pub struct Params {
    /// The archive or the folder, or - for standard input
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Name the only model of the layout [default: as it was saved]
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Replace other models that have the names now
    #[arg(short, long)]
    force: bool,
    /// List the models of the layout, and store nothing
    #[arg(short, long)]
    list: bool,
}

/// A model of the layout, as it is listed.
#[derive(Debug, Serialize)]
struct ListedModel {
    name: String,
    digest: Digest,
    /// The size of all its files.
    size: u64,
}

/// Stores the models, or lists them. One with a fault does not stop the others.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let bar = Bar::new("reading", 0, global.hides_progress());
    let source = match params.path == Path::new("-") {
        true => LayoutSource::from_stdin(&bar),
        false => LayoutSource::open(&params.path, &bar),
    };
    bar.clear();
    let source = source?;
    let models = source.models()?;
    if params.name.is_some() && models.len() != 1 {
        return Err(usage(format!("--name: names one model, but the layout has {}", models.len())));
    }
    if params.list {
        return list(global, params, models);
    }
    let connected = connect_or_create(global)?;
    let mut batch = Batch::new(global, models.len());
    for (listed, manifest) in models {
        let name = name_of(params, &listed);
        let label = name.as_ref().map_or_else(|_| listed.manifest.digest.to_string(), Reference::short);
        let load = |manifest: Manifest| {
            let model = Model { name: &name.clone()?, manifest: &manifest, source: &source };
            model.load(global, params, &connected.client)
        };
        if let Some(imported) = batch.add(&label, manifest.and_then(load))
            && !global.hides_reports()
        {
            print_text(&summary(imported))?;
        }
    }
    batch.finish("loaded", ["model was not loaded", "models were not loaded"])
}

fn list(global: &Global, params: &Params, models: Vec<ReadModel>) -> Result<(), ErrorBody> {
    let mut batch = Batch::new(global, models.len());
    for (listed, manifest) in models {
        let model = || {
            let (name, manifest) = (name_of(params, &listed)?.short(), manifest?);
            Ok(ListedModel { name, digest: manifest.digest(), size: manifest.size() })
        };
        if let Some(ListedModel { name, digest, size }) = batch.add(&listed.manifest.digest, model())
            && !global.json
        {
            print_text(&format!("{} {}: {}\n", printable(name), digest.short(), human_bytes(*size)))?;
        }
    }
    batch.finish("models", ["model cannot be loaded", "models cannot be loaded"])
}

/// The requested name, or the one in the layout. A layout that other programs wrote may have only a tag; then the model is
/// named after the file.
fn name_of(params: &Params, listed: &LayoutModel) -> Result<Reference, ErrorBody> {
    if let Some(name) = &params.name {
        return Ok(name.clone());
    }
    let whole = listed.name.iter().chain(listed.ref_name.iter().filter(|name| name.contains([':', '/'])));
    if let Some(name) = whole.into_iter().find_map(|name| name.parse().ok()) {
        return Ok(name);
    }
    let tag = listed.ref_name.as_deref().unwrap_or(Reference::DEFAULT_TAG);
    let stem = params.path.file_stem().and_then(|stem| stem.to_str()).filter(|stem| *stem != "-");
    let named = stem.and_then(|stem| format!("{}:{tag}", stem.to_lowercase()).parse().ok());
    named.ok_or_else(|| {
        let digest = listed.manifest.digest;
        usage(format!("model {digest}: has no name in the layout")).with_hint("--name gives it one")
    })
}

struct Model<'m> {
    name: &'m Reference,
    manifest: &'m Manifest,
    source: &'m LayoutSource,
}

impl Model<'_> {
    fn load(&self, global: &Global, params: &Params, client: &Client) -> Result<Imported, ErrorBody> {
        let mut seen = BTreeSet::new();
        let files: Vec<&Descriptor> = self.manifest.files().filter(|file| seen.insert(file.digest)).collect();
        let listed = |file: &&Descriptor| ImportFile {
            path: layout::blob_name(file.digest),
            size: file.size,
            component: None,
            digest: Some(file.digest),
            was_read: false,
            offset: self.source.offset_of(file.digest),
        };
        let request = ImportParams {
            name: Some(self.name.clone()),
            force: params.force,
            files: files.iter().map(listed).collect(),
            manifest: Some(String::from_utf8_lossy(self.manifest.raw()).into_owned()),
            ..ImportParams::new(params.path.display().to_string())
        };
        let open = |number: usize| {
            let file = files.get(number).ok_or_else(|| internal("load: no such file"))?;
            self.source.open_blob(file.digest, file.size)
        };
        let bar = Bar::new(&self.name.short(), self.manifest.size(), global.hides_progress());
        let imported = client.import_listed(&request, open, |completed, total| bar.set(completed, total));
        bar.clear();
        imported.map_err(client_error)
    }
}
