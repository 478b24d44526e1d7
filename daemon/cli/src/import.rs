//! `blobd import`

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use blobd_client::client::Client;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::ImportParams;
use blobd_client::protocol::response::Imported;
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::reference::Reference;
use blobd_store_format::size::human_bytes;
use blobd_store_format::text::printable;
use clap::Args;

use super::advice::instead_of_import;
use super::batch::Batch;
use super::connect::{client_error, connect_or_create};
use super::local_sidecars::{self, LocalSidecar, with_sidecars};
use super::model_name::parse_new_name;
use super::progress::Progress;
use super::{Global, file_error, lost_models, usage};
use crate::output::print_text;

/// Store GGUF files of this machine as models
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd import llama-3-8b-Q4_K_M.gguf               becomes llama-3-8b:Q4_K_M
  blobd import model.gguf --name my/model:v1
  blobd import *.gguf                               stores what they share once
  blobd import gemma-Q4_K_M.gguf --with-sidecars    with mmproj-F16.gguf in the same folder")]
pub(super) struct Params {
    /// The files
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// The model's name; derived from the file name, and made distinct, if omitted
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Replace another model that has the name, also a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
    /// Store the projector and the draft that are in the file's folder and belong to it in the same model
    #[arg(long)]
    with_sidecars: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let files = with_sidecars(&params.paths, params.with_sidecars);
    if params.name.is_some() && files.len() > 1 {
        return Err(usage("--name: names one model, but several files are given"));
    }
    let connected = connect_or_create(global)?;
    let progress = Progress::new(global.hides_progress());
    let mut batch = Batch::new(global, files.len());
    for (path, sidecars) in &files {
        let imported = import(&progress, params, &connected.client, (path, sidecars));
        if let Some(imported) = batch.add(&path.display(), imported)
            && !global.hides_reports()
        {
            print_text(&summary(imported))?;
        }
    }
    if files.len() > 1 && !batch.done().is_empty() && !global.hides_reports() {
        print_text(&sums(batch.done()))?;
    }
    batch.finish("imported", ["files was not imported", "files were not imported"])
}

fn import(
    progress: &Progress,
    params: &Params,
    client: &Client,
    (path, sidecars): (&Path, &[LocalSidecar]),
) -> Result<Imported, ErrorBody> {
    let taken = if params.with_sidecars { sidecars } else { &[] };
    let file = open(path)?;
    let opened = taken.iter().map(|sidecar| open(&sidecar.path)).collect::<Result<Vec<_>, _>>()?;
    let shown = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let bar = progress.bar(&shown, 0);
    let file_name = with_folders(path);
    let request = ImportParams {
        file_name,
        name: params.name.clone(),
        force: params.force,
        sidecars: taken.iter().map(LocalSidecar::request).collect(),
    };
    let files: Vec<_> = std::iter::once(&file).chain(&opened).map(File::as_fd).collect();
    let imported = client.import_files(&request, &files, |completed, total| bar.set(completed, total));
    bar.clear();
    let mut imported = imported.map_err(client_error)?;
    if !params.with_sidecars {
        imported.effects.notes.extend(local_sidecars::note(sidecars));
    }
    Ok(imported)
}

/// The file's name with the folders that may distinguish its model from that of another file of the same name.
fn with_folders(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let names = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_string_lossy()),
        _ => None,
    });
    let names: Vec<_> = names.collect();
    let skipped = names.len().saturating_sub(DerivedName::MAX_FOLDERS + 1);
    names.get(skipped..).unwrap_or_default().join("/")
}

/// Opens the file with the caller's rights; the daemon only gets the descriptor. `O_NONBLOCK`, because
/// opening a pipe would wait for its writer; the daemon then refuses the pipe.
fn open(path: &Path) -> Result<File, ErrorBody> {
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking)
        .open(path)
        .map_err(|error| not_opened(path, &error))
}

/// The error for a file that cannot be opened. If it does not exist, the hint says how to pull a model of that name.
fn not_opened(path: &Path, error: &io::Error) -> ErrorBody {
    let body = file_error(&path.display().to_string(), error);
    match instead_of_import(path).filter(|_| error.kind() == io::ErrorKind::NotFound) {
        Some(hint) => body.with_hint(hint),
        None => body,
    }
}

fn sums(imported: &[Imported]) -> String {
    let sum = |bytes: fn(&Imported) -> u64| imported.iter().map(bytes).fold(0, u64::saturating_add);
    let [new, reused] = [sum(|done| done.new_bytes), sum(|done| done.reused_bytes)].map(human_bytes);
    let models = if imported.len() == 1 { "model" } else { "models" };
    format!("{} {models}: {new} new, {reused} shared\n", imported.len())
}

fn summary(done: &Imported) -> String {
    let Imported { name, digest, size, new_bytes, reused_bytes, tensor_count, .. } = done;
    let [size, new, reused] = [size, new_bytes, reused_bytes].map(|bytes| human_bytes(*bytes));
    let sidecars = done.sidecars.iter().map(|sidecar| format!("with {}\n", printable(&sidecar.file_name)));
    let more = sidecars.collect::<String>() + &lost_models::effects(&done.effects);
    let digest = digest.short();
    format!("{name} {digest}: {size}, {new} new, {reused} shared, {tensor_count} tensors\n{more}")
}
