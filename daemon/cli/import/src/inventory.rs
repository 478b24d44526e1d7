//! `blobd inventory`: which files and tensors this store has, for `blobd save --given` on another machine.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use blobd_cli_common::connect::{client_error, connect};
use blobd_cli_common::output::{DataOutput, counted, human_bytes, print_json, print_message, printable};
use blobd_cli_common::output_file::refuse_terminal;
use blobd_cli_common::{Global, file_error};
use blobd_client::protocol::response::ModelDetails;
use blobd_store_format::inventory::Inventory;
use clap::Args;
use serde::Serialize;

use crate::export::{Checked, ExportPlan, NewFile, write_checked};
use crate::{Client, Digest, ErrorBody, ErrorCode};

/// List which files and tensors the store has, for another machine that saves a delta
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd inventory -o lab.inventory
  ssh lab blobd inventory > lab.inventory
  blobd save llama3:8b-tuned --given lab.inventory -o delta.tar

It has 32 bytes for each file and tensor, and nothing else: no names. Damaged models are left out,
and so are those that you may not open.")]
pub struct Params {
    /// The file to write, or - for standard output [default: -]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace a file that exists
    #[arg(short, long)]
    force: bool,
}

#[derive(Debug, Serialize)]
struct Written {
    path: String,
    size: u64,
    /// The models whose files and tensors are in it.
    models: usize,
    digests: usize,
}

/// Writes the inventory.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let path = params.output.as_deref().filter(|path| *path != Path::new("-"));
    if !params.force {
        refuse_terminal(path)?;
    }
    let connected = connect(global)?;
    let (digests, models) = stored(&connected.client)?;
    let inventory = Inventory::new(digests);
    let bytes = inventory.to_bytes();
    match path {
        None => {
            let mut out = DataOutput::lock();
            let written = out.write_all(&bytes).and_then(|()| out.flush());
            let written = written.map_err(|error| file_error("standard output", &error));
            out.result(written)?;
        }
        Some(path) => write_file(global, params.force, path, &bytes)?,
    }
    let shown = path.map_or_else(|| "standard output".to_owned(), |path| path.display().to_string());
    let (size, digests) = (bytes.len() as u64, inventory.len());
    let written = Written { path: shown, size, models, digests };
    if global.json && path.is_some() {
        return print_json(&written);
    }
    if !global.hides_reports() {
        let Written { path, size, models, digests } = written;
        let models = counted(models, "model");
        let size = human_bytes(size);
        // Standard output may be the inventory.
        print_message(&format!("{}: {digests} files and tensors of {models}, {size}\n", printable(&path)));
    }
    Ok(())
}

fn write_file(global: &Global, force: bool, path: &Path, bytes: &[u8]) -> Result<(), ErrorBody> {
    let (digest, size) = (Digest::of(bytes), bytes.len() as u64);
    let plan =
        ExportPlan::new(Some(path), &[NewFile { index: 0, path: "inventory".to_owned(), digest, size }])?;
    let checked = Checked::new(plan, force)?;
    let write = |planned: &NewFile, mut out: &File, name: &str, _: &_| {
        out.write_all(bytes).map_err(|error| file_error(name, &error)).map(|()| planned.digest)
    };
    write_checked(global, force, checked, write, || Ok(())).map(|_written| ())
}

/// The files and tensors of all models that can be opened, and how many models these are.
fn stored(client: &Client) -> Result<(BTreeSet<Digest>, usize), ErrorBody> {
    let (mut digests, mut seen) = (BTreeSet::new(), BTreeSet::new());
    let listed = client.models().map_err(client_error)?.models;
    for model in listed.into_iter().filter(|model| model.damage.is_none()) {
        let Ok(reference) = model.name.parse() else { continue };
        if seen.contains(&model.digest) {
            continue;
        }
        match client.model(&reference) {
            Ok(details) => {
                if details.policy.as_ref().is_none_or(|policy| policy.allowed) {
                    seen.insert(model.digest);
                    digests.extend(digests_of(&details));
                }
            }
            // It was removed meanwhile.
            Err(error) if error.code() == ErrorCode::NotFound => {}
            Err(error) => return Err(client_error(error)),
        }
    }
    Ok((digests, seen.len()))
}

/// The digests of the files of a model, and of the blobs that have its tensors.
pub(crate) fn digests_of(details: &ModelDetails) -> impl Iterator<Item = Digest> {
    let files = details.layers.iter().map(|layer| layer.digest);
    files.chain(details.tensors.iter().filter(|tensor| tensor.size > 0).map(|tensor| tensor.digest))
}

/// Reads an inventory.
pub(crate) fn read(path: &Path) -> Result<Inventory, ErrorBody> {
    let name = path.display().to_string();
    let failed = |error| file_error(&name, &error);
    let (file, mut bytes) = (File::open(path).map_err(failed)?, Vec::new());
    file.take(Inventory::MAX_BYTES.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    Inventory::parse(&bytes).map_err(|error| {
        let body = ErrorBody::new(ErrorCode::InvalidInput, format!("{name}: {error}"));
        body.with_hint("`blobd inventory` writes one on the machine that is to get the delta")
    })
}
