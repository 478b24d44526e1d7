//! `blobd export`

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use blobd_client::client::Client;
use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_client::protocol::response::OpenLayer;
use blobd_model::rewrite::RewrittenFile;
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_paths::{self, ListedFile};
use blobd_store_format::reference::Reference;
use blobd_store_format::size::human_bytes;
use clap::Args;
use serde::Serialize;

use self::existing::{has_content, refuse_existing};
use self::outputs::Outputs;
use self::plan::{ExportPlan, NewFile, PlannedFile};
use self::rewrite::{RewriteArgs, Rewriting};
use super::connect::{client_error, connect, note_name};
use super::file_name::{file_paths, stem};
use super::model_name::{ModelName, only};
use super::model_source::weights_component;
use super::progress::{Bar, Progress};
use super::target::refuse_terminal;
use super::{Global, usage};
use crate::output::{DataOutput, print, print_json};

mod existing;
mod outputs;
mod plan;
mod rewrite;

/// Write a model's original files, bit for bit, or other GGUF files with the same tensors
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd export llama3:8b                       writes llama3-8b.gguf
  blobd export llama3:8b -o /models/           into a directory, which is made if it is missing
  blobd export llama3:8b -o - | sha256sum
  blobd export llama3:8b -o old.gguf --force   replaces a file with other content
  blobd export llama3:8b --component template -o -
  blobd export llama3:70b --split-max-size 50GB -o /models/
  blobd export llama3:70b --merge              one file instead of shards
  blobd export llama3:8b --alignment 4096 --endian big")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "REF")]
    model: ModelName,
    /// The file or directory to write to; - for standard output. In a directory, each file has its own path from
    /// the model's manifest, or a name made from the model's
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// The part to export: model, projector, adapter, template, params, license, config. The default is the model, or
    /// what there is in its place, such as an adapter
    #[arg(long, value_name = "NAME")]
    component: Option<String>,
    /// Replace files that exist, and write weights to a terminal
    #[arg(short, long)]
    force: bool,
    #[command(flatten, next_help_heading = "Other files with the same tensors")]
    rewrite: RewriteArgs,
}

#[derive(Serialize)]
struct Exported {
    path: String,
    digest: Digest,
    size: u64,
    /// The file had this content before, and was not written.
    already_there: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let reference = only(global, &connected.client, &params.model)?;
    let model = open(&connected.client, params, &reference)?;
    note_name(global, &reference, model.name());
    let to_stdout = params.output.as_deref() == Some(Path::new("-"));
    let has_weights = model.layers().iter().any(|layer| layer.media_type.holds_tensors());
    if let Some(output) = params.output.as_deref().filter(|_| has_weights && !params.force) {
        refuse_terminal(Some(output))?;
    }
    let exported = match params.rewrite.options() {
        Some(options) => {
            let rewriting = Rewriting::of(&model, &options)?;
            if to_stdout {
                return rewrite_to_stdout(rewriting, global.hides_progress());
            }
            write_rewritten(global, params, &model, rewriting)?
        }
        None if to_stdout => return write_to_stdout(&model, global.hides_progress()),
        None => write_original(global, params, &model)?,
    };
    if global.json { print_json(&serde_json::json!({ "exported": exported })) } else { Ok(()) }
}

fn open(client: &Client, params: &Params, reference: &Reference) -> Result<OpenModel, ErrorBody> {
    let component = match &params.component {
        Some(component) => component.clone(),
        None => weights_component(client, reference),
    };
    let request = OpenParams {
        reference: reference.clone(),
        tensors: TensorSelection::None,
        component: Some(component),
        files: FileSelection::All,
        purpose: OpenPurpose::Export,
    };
    client.open_with(&request).map_err(client_error)
}

/// The plan of an export; a file that is there with other content is refused.
struct Checked {
    plan: ExportPlan,
    /// Whether each file is there with its content, and need not be written.
    present: Vec<bool>,
}

fn write_original(global: &Global, params: &Params, model: &OpenModel) -> Result<Vec<Exported>, ErrorBody> {
    let paths = file_paths(&stored_name(model)?, model).into_iter();
    let file = |(index, (path, layer)): (usize, (String, &OpenLayer))| NewFile {
        index,
        path,
        digest: layer.digest,
        size: layer.size,
    };
    let files: Vec<_> = paths.zip(model.layers()).enumerate().map(file).collect();
    let plan = ExportPlan::new(params.output.as_deref(), &files)?;
    plan.files.iter().try_for_each(PlannedFile::check_kind)?;
    let content = |planned: &PlannedFile| {
        has_content(global, &planned.place.path(), planned.file.digest, planned.file.size)
    };
    let present = match params.force {
        true => vec![false; plan.files.len()],
        false => plan.files.iter().map(content).collect::<Result<_, _>>()?,
    };
    let checked = Checked { plan, present };
    write_checked(
        global,
        params,
        checked,
        |planned, out, name, bar| write_layer(model, planned.index, out, name, bar).map(|()| planned.digest),
        || Ok(()),
    )
}

/// Writes all files of a plan, and gives them their names when `verify` has found the data of all right. `write`
/// returns the digest of what it has written.
fn write_checked(
    global: &Global,
    params: &Params,
    Checked { plan, present }: Checked,
    mut write: impl FnMut(&NewFile, &File, &str, &Bar) -> Result<Digest, ErrorBody>,
    verify: impl FnOnce() -> Result<(), ErrorBody>,
) -> Result<Vec<Exported>, ErrorBody> {
    let missing: Vec<&PlannedFile> = plan
        .files
        .iter()
        .zip(&present)
        .filter(|(_, present)| !**present)
        .map(|(planned, _)| planned)
        .collect();
    let outputs = Outputs::create(&missing, params.force)?;
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
    let report = |(PlannedFile { file, place }, present): (&PlannedFile, bool)| {
        let digest = if present { file.digest } else { written.next().unwrap_or(file.digest) };
        report(global, &place.path(), digest, file.size, present)
    };
    files.map(report).collect()
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
    plan.files.iter().try_for_each(PlannedFile::check_kind)?;
    if !params.force {
        plan.files.iter().try_for_each(|planned| refuse_existing(&planned.place.path()))?;
    }
    let present = vec![false; plan.files.len()];
    let rewriting = RefCell::new(Some(rewriting));
    let gone = || ErrorBody::new(ErrorCode::Internal, "export: the model is closed");
    write_checked(
        global,
        params,
        Checked { plan, present },
        |planned, out, name, bar| {
            rewriting.borrow_mut().as_mut().ok_or_else(gone)?.write(planned.index, out, name, bar)
        },
        || rewriting.borrow_mut().take().ok_or_else(gone)?.verify(),
    )
}

/// With the files of the model go their names; shards that are merged or made have none yet.
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

fn report(
    global: &Global,
    path: &Path,
    digest: Digest,
    size: u64,
    already_there: bool,
) -> Result<Exported, ErrorBody> {
    let path = path.display().to_string();
    if !global.hides_reports() {
        let there = if already_there { ", already there" } else { "" };
        print(&format!("{path} {}: {}{there}\n", digest.short(), human_bytes(size)))?;
    }
    Ok(Exported { path, digest, size, already_there })
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
    let mut out = DataOutput::new();
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
    let mut out = DataOutput::new();
    let written = write_layer(model, 0, &mut out, "standard output", &bar);
    bar.clear();
    out.result(written)
}

/// Writes and hashes in one pass, and checks that the digest is the manifest's.
fn write_layer(
    model: &OpenModel,
    index: usize,
    out: impl Write,
    name: &str,
    bar: &Bar,
) -> Result<(), ErrorBody> {
    const BUFFER_BYTES: usize = 1 << 20;
    let Some(layer) = model.layers().get(index) else { return Err(usage("no such file in the model")) };
    let mut out = HashingWriter {
        out: BufWriter::with_capacity(BUFFER_BYTES, out),
        hasher: Hasher::new(),
        written: 0,
        layer,
        bar,
    };
    let written =
        model.write_layer(index, &mut out).and_then(|_length| out.flush().map_err(ModelError::Write));
    written.map_err(|error| ErrorBody::new(error.code(), format!("{name}: {error}")))?;
    let found = out.hasher.finish();
    if found == layer.digest {
        return Ok(());
    }
    let message =
        format!("{name}: wrong digest: expected {}, found {found}; the stored data is damaged", layer.digest);
    Err(ErrorBody::new(ErrorCode::Corrupt, message).with_hint("pull or import the model again"))
}

struct HashingWriter<'l, W: Write> {
    out: BufWriter<W>,
    hasher: Hasher,
    written: u64,
    layer: &'l OpenLayer,
    bar: &'l Bar,
}

impl<W: Write> Write for HashingWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.out.write(bytes)?;
        self.hasher.update(bytes.get(..length).unwrap_or_default());
        self.written += length as u64;
        self.bar.set(self.written, self.layer.size);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
