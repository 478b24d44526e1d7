//! `blobd export`

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blobd_cli_common::connect::{client_error, connect, note_name};
use blobd_cli_common::model_folder::is_folder_of;
use blobd_cli_common::model_name::{ModelName, only};
use blobd_cli_common::output::{DataOutput, human_bytes, print, print_json, print_message, printable};
use blobd_cli_common::output_file::refuse_terminal;
use blobd_cli_common::progress::{Bar, Progress};
use blobd_cli_common::source_file::{file_paths, stem};
use blobd_cli_common::{Global, usage};
use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_client::protocol::response::{LayerSummary, OpenLayer};
use blobd_model::rewrite::RewrittenFile;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{self, ListedFile};
use clap::Args;
use serde::Serialize;

use self::outputs::{HashingWriter, Outputs};
pub(crate) use self::plan::{ExportPlan, NewFile, is_folder_path};
use self::plan::{PlannedFile, has_content, refuse_existing};
use self::rewrite::{RewriteArgs, Rewriting};
use crate::{Client, Digest, ErrorBody, ErrorCode, Reference};

mod outputs;
mod plan;
mod rewrite;

/// Write a model's original files, bit for bit, or other GGUF files with the same tensors
#[derive(Debug, Args)]
#[command(
    after_help = "The projector, the draft and the adapters of a model are written with it into a folder, by
default the current one. A single file or standard output gets the model only.

Examples:
  blobd export llama3:8b                       writes llama3-8b.gguf
  blobd export llama3:8b -o /models/           into a directory, which is made if it is missing
  blobd export llama3:8b -o - | sha256sum
  blobd export llama3:8b -o old.gguf --force   replaces a file with other content
  blobd export llama3:8b --component template -o -
  blobd export llama3:70b --split-max-size 50GB -o /models/
  blobd export llama3:70b --merge              one file instead of shards
  blobd export llama3:8b --alignment 4096 --endian big"
)]
pub struct Params {
    /// The model
    #[arg(value_name = "REF")]
    model: ModelName,
    /// The file or directory to write to; - for standard output. In a directory, each file has its own path from
    /// the model's manifest, or a name made from the model's
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// The part to export: model, projector, draft, adapter, template, params, license, config, or all. The default is the
    /// model, or what there is in its place, such as an adapter, and in a folder what belongs to it; of a model that is a
    /// folder or has a file for each tensor, all of its files
    #[arg(long, value_name = "NAME")]
    component: Option<String>,
    /// Replace files that exist, and write weights to a terminal
    #[arg(short, long)]
    force: bool,
    #[command(flatten, next_help_heading = "Other files with the same tensors")]
    rewrite: RewriteArgs,
}

#[derive(Serialize)]
pub(crate) struct Exported {
    path: String,
    digest: Digest,
    size: u64,
    /// The file had this content before, and was not written.
    already_there: bool,
}

/// Writes the files of a model.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let reference = only(global, &connected.client, &params.model)?;
    let chosen = Chosen::new(&connected.client, params, &reference);
    let model = open_component(&connected.client, &reference, chosen.opened())?;
    note_name(global, &reference, model.name());
    chosen.note_left_out(global, &model);
    let to_stdout = params.output.as_deref() == Some(Path::new("-"));
    let has_weights = model.layers().iter().any(|layer| layer.media_type.holds_tensors());
    if let Some(output) = params.output.as_deref().filter(|_| has_weights && !params.force) {
        refuse_terminal(Some(output))?;
    }
    let exported = match params.rewrite.options() {
        Some(options) => {
            let rewriting = Rewriting::new(&model, &options)?;
            if to_stdout {
                return rewrite_to_stdout(rewriting, global.hides_progress());
            }
            write_rewritten(global, params, &model, rewriting)?
        }
        None if to_stdout => return write_to_stdout(&model, global.hides_progress()),
        None => write_original(global, params, &chosen, &model)?,
    };
    if global.json { print_json(&serde_json::json!({ "exported": exported })) } else { Ok(()) }
}

/// The component that stands for all files.
const ALL: &str = "all";

/// The files of a model that are written.
#[derive(Debug)]
enum Chosen {
    /// Those of a component that the user has named.
    Named(String),
    /// All files of the folder.
    All,
    /// Those of the weights, without those of other components that belong to them.
    Weights { component: String, left_out: Vec<String> },
    /// All files with tensors.
    WithSidecars,
}

impl Chosen {
    fn new(client: &Client, params: &Params, reference: &Reference) -> Self {
        if params.component.as_deref() == Some(ALL) {
            return Self::All;
        }
        if let Some(component) = &params.component {
            return Self::Named(component.clone());
        }
        let layers = client.model(reference).map(|details| details.layers).unwrap_or_default();
        let Some(component) = default_component(&layers) else { return Self::All };
        let sidecars = layers.iter().map(|layer| &layer.media_type).filter(|layer| layer.holds_tensors());
        let mut left_out: Vec<_> = sidecars.map(|layer| layer.component().to_owned()).collect();
        left_out.retain(|other| *other != component);
        left_out.dedup();
        let is_folder = params.output.as_deref().is_none_or(is_folder_path);
        if is_folder && !left_out.is_empty() && params.rewrite.options().is_none() {
            return Self::WithSidecars;
        }
        Self::Weights { component, left_out }
    }

    /// The component that is opened; `None` for all.
    fn opened(&self) -> Option<String> {
        match self {
            Self::Named(component) | Self::Weights { component, .. } => Some(component.clone()),
            Self::All | Self::WithSidecars => None,
        }
    }

    fn takes(&self, layer: &OpenLayer) -> bool {
        match self {
            Self::Named(_) | Self::Weights { .. } => true,
            // The configuration of the manifest is not a file of the folder.
            Self::All => layer.media_type.component() != "config",
            Self::WithSidecars => layer.media_type.holds_tensors(),
        }
    }

    /// Says on standard error which parts of the model were not written.
    fn note_left_out(&self, global: &Global, model: &OpenModel) {
        let Self::Weights { left_out, .. } = self else { return };
        let Some(first) = left_out.first().filter(|_| !global.hides_reports()) else { return };
        let (name, parts) = (printable(model.name()), left_out.join(", the "));
        print_message(&format!(
            "blobd: not written: the {parts} of {name}; `-o DIR/` writes them too, `--component {first}` writes one\n"
        ));
    }
}

/// Opens the files of a component, or all.
pub(crate) fn open_component(
    client: &Client,
    reference: &Reference,
    component: Option<String>,
) -> Result<OpenModel, ErrorBody> {
    let request = OpenParams {
        reference: reference.clone(),
        tensors: TensorSelection::None,
        component,
        files: FileSelection::All,
        purpose: OpenPurpose::Export,
    };
    client.open_with(&request).map_err(client_error)
}

/// The component of the weights; `None`, for all, if the model is a folder or has a file for each tensor.
fn default_component(layers: &[LayerSummary]) -> Option<String> {
    let media_types = layers.iter().map(|layer| &layer.media_type);
    let is_of_tensors = media_types.clone().any(|media_type| media_type.component() == "tensor")
        && !media_types.clone().any(MediaType::holds_tensors);
    let named = layers.iter().map(|layer| (&layer.media_type, layer.name.as_deref()));
    let is_all = is_of_tensors || is_folder_of(named);
    (!is_all).then(|| MediaType::weights_component(media_types).to_owned())
}

/// The plan of an export, for which no file with other content is in the way.
#[derive(Debug)]
pub(crate) struct Checked {
    plan: ExportPlan,
    /// Whether each file exists with its content, and need not be written.
    present: Vec<bool>,
}

impl Checked {
    /// Refuses files that exist, unless they are replaced.
    pub(crate) fn new(plan: ExportPlan, force: bool) -> Result<Self, ErrorBody> {
        plan.files.iter().try_for_each(PlannedFile::check_kind)?;
        if !force {
            plan.files.iter().try_for_each(|planned| refuse_existing(&planned.place.path()))?;
        }
        let present = vec![false; plan.files.len()];
        Ok(Self { plan, present })
    }

    /// Refuses files that exist with another content. The digests of all must be known.
    pub(crate) fn comparing(global: &Global, plan: ExportPlan) -> Result<Self, ErrorBody> {
        plan.files.iter().try_for_each(PlannedFile::check_kind)?;
        let content = |planned: &PlannedFile| {
            has_content(global, &planned.place.path(), planned.file.digest, planned.file.size)
        };
        let present = plan.files.iter().map(content).collect::<Result<_, _>>()?;
        Ok(Self { plan, present })
    }
}

fn write_original(
    global: &Global,
    params: &Params,
    chosen: &Chosen,
    model: &OpenModel,
) -> Result<Vec<Exported>, ErrorBody> {
    let paths = file_paths(&stored_name(model)?, model).into_iter();
    let file = |(index, (path, layer)): (usize, (String, &OpenLayer))| NewFile {
        index,
        path,
        digest: layer.digest,
        size: layer.size,
    };
    let files = paths.zip(model.layers()).enumerate();
    let files: Vec<_> = files.filter(|(_, (_, layer))| chosen.takes(layer)).map(file).collect();
    let plan = ExportPlan::new(params.output.as_deref(), &files)?;
    let checked = match params.force {
        true => Checked::new(plan, true)?,
        false => Checked::comparing(global, plan)?,
    };
    let written = write_checked(
        global,
        params.force,
        checked,
        |planned, out, name, bar| write_layer(model, planned.index, out, name, bar).map(|()| planned.digest),
        || Ok(()),
    )?;
    reported(global, written)
}

/// Writes all files of a plan, and gives them their names if `verify` finds the data of all of them intact. `write`
/// returns the digest of the written file.
pub(crate) fn write_checked(
    global: &Global,
    force: bool,
    Checked { plan, present }: Checked,
    mut write: impl FnMut(&NewFile, &File, &str, &Bar) -> Result<Digest, ErrorBody>,
    verify: impl FnOnce() -> Result<(), ErrorBody>,
) -> Result<Vec<Exported>, ErrorBody> {
    let missing = plan.files.iter().zip(&present).filter(|(_, present)| !**present);
    let missing: Vec<&PlannedFile> = missing.map(|(planned, _)| planned).collect();
    let outputs = Outputs::create(&missing, force, global.json)?;
    let progress = Progress::new(global.hides_progress());
    let mut digests = Vec::new();
    for (index, planned) in missing.iter().enumerate() {
        let name = planned.place.path().display().to_string();
        let Some(out) = outputs.file(index) else { break };
        let bar = progress.bar(&name, planned.file.size);
        let digest = write(&planned.file, out, &name, &bar);
        bar.clear();
        digests.push(digest?);
    }
    verify()?;
    outputs.publish()?;
    let mut written = digests.into_iter();
    let files = plan.files.iter().zip(present);
    let exported = |(PlannedFile { file, place }, already_there): (&PlannedFile, bool)| {
        let digest = if already_there { file.digest } else { written.next().unwrap_or(file.digest) };
        Exported { path: place.path().display().to_string(), digest, size: file.size, already_there }
    };
    Ok(files.map(exported).collect())
}

fn write_rewritten(
    global: &Global,
    params: &Params,
    model: &OpenModel,
    rewriting: Rewriting<'_>,
) -> Result<Vec<Exported>, ErrorBody> {
    let sizes: Vec<u64> = rewriting.files().iter().map(RewrittenFile::size).collect();
    let paths = rewritten_paths(&stored_name(model)?, model, &rewriting);
    let file = |(index, (path, size))| {
        // Each has content of its own, whose digest is known when it is written.
        NewFile { index, path, digest: number_digest(index), size }
    };
    let files: Vec<_> = paths.into_iter().zip(sizes).enumerate().map(file).collect();
    let plan = ExportPlan::new(params.output.as_deref(), &files)?;
    let checked = Checked::new(plan, params.force)?;
    let rewriting = RefCell::new(Some(rewriting));
    let gone = || ErrorBody::new(ErrorCode::Internal, "export: the model is closed");
    let written = write_checked(
        global,
        params.force,
        checked,
        |planned, out, name, bar| {
            rewriting.borrow_mut().as_mut().ok_or_else(gone)?.write(planned.index, out, name, bar)
        },
        || rewriting.borrow_mut().take().ok_or_else(gone)?.verify(),
    )?;
    reported(global, written)
}

/// Files of the model keep their names; shards that are merged or made have none yet.
fn rewritten_paths(reference: &Reference, model: &OpenModel, rewriting: &Rewriting<'_>) -> Vec<String> {
    let count = rewriting.files().len();
    if rewriting.layers().len() == count {
        let paths = file_paths(reference, model);
        return rewriting.layers().iter().filter_map(|layer| paths.get(*layer).cloned()).collect();
    }
    let Some(layer) = model.layers().first() else { return Vec::new() };
    let extension = Some(FileFormat::DEFAULT.extension());
    let file = |index| ListedFile {
        media_type: &layer.media_type,
        name: None,
        digest: number_digest(index),
        extension,
    };
    file_paths::names(&stem(reference), &(0..count).map(file).collect::<Vec<_>>())
}

/// Distinguishes files whose content is not known yet.
fn number_digest(index: usize) -> Digest {
    Digest::of(&index.to_le_bytes())
}

fn reported(global: &Global, files: Vec<Exported>) -> Result<Vec<Exported>, ErrorBody> {
    if !global.hides_reports() {
        let line = |Exported { path, digest, size, already_there }: &Exported| {
            let there = if *already_there { ", already there" } else { "" };
            format!("{path} {}: {}{there}\n", digest.short(), human_bytes(*size))
        };
        print(&files.iter().map(line).collect::<String>())?;
    }
    Ok(files)
}

/// The stored name: the user may have given an ID or a pattern.
fn stored_name(model: &OpenModel) -> Result<Reference, ErrorBody> {
    model.name().parse().map_err(usage)
}

fn rewrite_to_stdout(mut rewriting: Rewriting<'_>, hides_progress: bool) -> Result<(), ErrorBody> {
    let [file] = rewriting.files() else {
        return Err(usage("-o -: several files would be written; give a directory"));
    };
    let bar = Bar::new("exporting", file.size(), hides_progress);
    let mut out = DataOutput::lock();
    let written = rewriting.write(0, &mut out, "standard output", &bar);
    bar.clear();
    out.result(written.and_then(|_digest| rewriting.verify()))
}

fn write_to_stdout(model: &OpenModel, hides_progress: bool) -> Result<(), ErrorBody> {
    let Some((layer, others)) = model.layers().split_first() else {
        return Err(usage("-o -: the model has no such file"));
    };
    if others.iter().any(|other| other.digest != layer.digest) {
        return Err(usage("-o -: the model has several such files; give a directory"));
    }
    let bar = Bar::new("exporting", layer.size, hides_progress);
    let mut out = DataOutput::lock();
    let written = write_layer(model, 0, &mut out, "standard output", &bar);
    bar.clear();
    out.result(written)
}

/// Reads all files of a stored model, and checks that each has the digest that the manifest gives.
pub(crate) fn check_stored(client: &Client, reference: &Reference) -> Result<(), ErrorBody> {
    let model = open_component(client, reference, None)?;
    let bar = Bar::new("", 0, true);
    let name = reference.short();
    (0..model.layers().len()).try_for_each(|index| write_layer(&model, index, io::sink(), &name, &bar))
}

/// Writes and hashes in one pass, and checks that the digest is the manifest's.
pub(crate) fn write_layer(
    model: &OpenModel,
    index: usize,
    out: impl Write,
    name: &str,
    bar: &Bar,
) -> Result<(), ErrorBody> {
    let Some(layer) = model.layers().get(index) else { return Err(usage("no such file in the model")) };
    let mut out = HashingWriter::new(out, layer.size, bar);
    let written = model.write_layer(index, &mut out);
    let found = written.and_then(|_length| out.finish().map_err(ModelError::Write));
    let found = found.map_err(|error| ErrorBody::new(error.code(), format!("{name}: {error}")))?;
    if found == layer.digest {
        return Ok(());
    }
    let message =
        format!("{name}: wrong digest: expected {}, found {found}; the stored data is damaged", layer.digest);
    Err(ErrorBody::new(ErrorCode::Corrupt, message).with_hint("pull or import the model again"))
}
