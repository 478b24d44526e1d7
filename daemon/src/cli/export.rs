//! `blobd export`

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use blobd_client::client::Client;
use blobd_client::error::ModelError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{FileSelection, OpenParams, TensorSelection};
use blobd_client::protocol::response::OpenLayer;
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::gguf::rewrite::RewrittenFile;
use blobd_store_format::reference::Reference;
use clap::Args;
use serde::Serialize;

use self::existing::{has_content, refuse_existing};
use self::rewrite::{RewriteArgs, Rewriting};
use super::connect::{client_error, connect, note_name};
use super::file_name::file_name;
use super::interrupt::on_end;
use super::model_name::{ModelName, only};
use super::output_file::{Existing, TemporaryName};
use super::progress::{Bar, Progress};
use super::target::{Target, refuse_terminal, write_error};
use super::{Global, usage};
use crate::output::{DataOutput, print, print_json};
use crate::size::human_bytes;

mod existing;
mod rewrite;

/// Write a model's original file, bit for bit, or another GGUF file with the same tensors
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd export llama3:8b                       writes llama3-8b.gguf
  blobd export llama3:8b -o /models/           into a directory
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
    /// The file or directory to write to; - for standard output
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// The part to export: model, projector, adapter, template, params, license, config
    #[arg(long, default_value = "model", value_name = "NAME")]
    component: String,
    /// Replace files that exist, and write weights to a terminal
    #[arg(short, long)]
    force: bool,
    #[command(flatten, next_help_heading = "Other files with the same tensors")]
    rewrite: RewriteArgs,
}

impl Params {
    const fn existing(&self) -> Existing {
        if self.force { Existing::Replace } else { Existing::Keep }
    }
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
    let request = OpenParams {
        reference: reference.clone(),
        tensors: TensorSelection::None,
        component: Some(params.component.clone()),
        files: FileSelection::All,
    };
    client.open_with(&request).map_err(client_error)
}

fn write_original(global: &Global, params: &Params, model: &OpenModel) -> Result<Vec<Exported>, ErrorBody> {
    let temporary = TemporaryName::default();
    remove_at_end(vec![temporary.clone()])?;
    let count = model.layers().len();
    let path_of = |(index, layer)| output_path(params, model, layer, index, count);
    let paths = model.layers().iter().enumerate().map(path_of).collect::<Result<Vec<_>, _>>()?;
    let files = paths.iter().zip(model.layers());
    // Checked before anything is written.
    let present: Vec<bool> = match params.force {
        true => vec![false; count],
        false => {
            files.clone().map(|(path, layer)| has_content(global, path, layer)).collect::<Result<_, _>>()?
        }
    };
    let (mut exported, progress) = (Vec::new(), Progress::new(global.hides_progress()));
    for (index, ((path, layer), already_there)) in files.zip(present).enumerate() {
        if !already_there {
            let bar = progress.bar(&path.display().to_string(), layer.size);
            write_file(model, index, path, params.existing(), &temporary, &bar)?;
            bar.clear();
        }
        exported.push(report(global, path, layer.digest, layer.size, already_there)?);
    }
    Ok(exported)
}

/// Writes all files and gives them their names when the data of all is verified.
fn write_rewritten(
    global: &Global,
    params: &Params,
    model: &OpenModel,
    mut rewriting: Rewriting<'_>,
) -> Result<Vec<Exported>, ErrorBody> {
    let sizes: Vec<u64> = rewriting.files().iter().map(RewrittenFile::size).collect();
    let names: Vec<_> = sizes.iter().map(|_file| TemporaryName::default()).collect();
    remove_at_end(names.clone())?;
    let layers = model.layers();
    // With the files of the model go their names; shards that are merged or made have none yet.
    let layer_of = |index: usize| match layers.len() == sizes.len() {
        true => layers.get(index).cloned(),
        false => layers.first().map(|layer| OpenLayer { name: None, ..layer.clone() }),
    };
    let path_of = |index| match layer_of(index) {
        Some(layer) => output_path(params, model, &layer, index, sizes.len()),
        None => Err(usage("the model has no such file")),
    };
    let paths = (0..sizes.len()).map(path_of).collect::<Result<Vec<_>, _>>()?;
    if !params.force {
        paths.iter().try_for_each(|path| refuse_existing(path))?;
    }
    let (mut written, progress) = (Vec::new(), Progress::new(global.hides_progress()));
    for (index, ((path, size), temporary)) in paths.into_iter().zip(sizes).zip(&names).enumerate() {
        let name = path.display().to_string();
        let target = Target::create(&path, size, params.existing(), temporary);
        let target = target.map_err(|error| write_error(&path, &error))?;
        let bar = progress.bar(&name, size);
        let digest = rewriting.write(index, target.file(), &name, &bar);
        bar.clear();
        written.push((path, digest?, size, target));
    }
    rewriting.verify()?;
    let publish = |(path, digest, size, target): (PathBuf, Digest, u64, Target)| {
        target.publish().map_err(|error| write_error(&path, &error))?;
        report(global, &path, digest, size, false)
    };
    written.into_iter().map(publish).collect()
}

/// A signal that ends the process removes the files that have temporary names.
fn remove_at_end(names: Vec<TemporaryName>) -> Result<(), ErrorBody> {
    let remove = move || names.iter().for_each(TemporaryName::remove_and_block);
    on_end(remove).map_err(|error| ErrorBody::new(ErrorCode::Internal, error))
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

/// In the current directory or the given one.
fn output_path(
    params: &Params,
    model: &OpenModel,
    layer: &OpenLayer,
    index: usize,
    count: usize,
) -> Result<PathBuf, ErrorBody> {
    // The stored name: the user may have given an ID.
    let reference = model.name().parse().map_err(usage)?;
    let name = file_name(&reference, layer, index, count);
    match &params.output {
        None => Ok(name.into()),
        Some(directory) if directory.is_dir() => Ok(directory.join(name)),
        Some(path) if index == 0 => Ok(path.clone()),
        Some(path) => Err(usage(format!(
            "{}: is one file, but the model has {count} such files; give a directory",
            path.display()
        ))),
    }
}

fn write_file(
    model: &OpenModel,
    index: usize,
    path: &Path,
    existing: Existing,
    temporary: &TemporaryName,
    bar: &Bar,
) -> Result<(), ErrorBody> {
    let name = path.display().to_string();
    let size = model.layers().get(index).map_or(0, |layer| layer.size);
    let target =
        Target::create(path, size, existing, temporary).map_err(|error| write_error(path, &error))?;
    write_layer(model, index, target.file(), &name, bar)?;
    target.publish().map_err(|error| write_error(path, &error))
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
    let [layer] = model.layers() else {
        return Err(usage("-o -: the model has several such files; give a directory"));
    };
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
    let message = format!("{name}: digest {found}, {} expected; the stored data is damaged", layer.digest);
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
