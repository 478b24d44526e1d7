//! `blobd show`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::response::ModelDetails;
use blobd_store_format::reference::Reference;
use blobd_store_format::stored_file::StoredForm;
use clap::Args;

use super::connect::show;
use super::{Global, residency};
use crate::output::{Table, terminal_width};
use crate::size::human_bytes;

/// Show one model in depth
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd show llama3:8b
  blobd show llama3:8b --tensors
  blobd show mixtral:8x7b --residency
  blobd show llama3:8b --json | jq '.tensors[0].digest'")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "REF")]
    reference: Reference,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// List the metadata
    #[arg(long)]
    metadata: bool,
    /// Show how much is in memory instead, for each stack of experts and for the rest
    #[arg(long, conflicts_with_all = ["tensors", "metadata"])]
    residency: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.residency {
        return residency::show(global, &params.reference);
    }
    show(
        global,
        |client| client.model(&params.reference),
        |details| {
            let mut tables = vec![layers(details)];
            tables.extend(params.metadata.then(|| metadata(details)));
            tables.extend(params.tensors.then(|| tensors(details)));
            let tables: Vec<_> = tables.iter().map(|table| table.render(terminal_width())).collect();
            overview(details) + &tables.join("\n")
        },
    )
}

fn overview(details: &ModelDetails) -> String {
    let unknown = || "-".to_owned();
    let mut table = Table::new(&["name", &crate::output::printable(&details.name)], &[]);
    table.row(["digest".to_owned(), details.digest.to_string()]);
    table.row(["architecture".to_owned(), details.architecture.clone().unwrap_or_else(unknown)]);
    table.row(["parameters".to_owned(), details.parameters.to_string()]);
    table.row(["quantization".to_owned(), details.quantization.clone().unwrap_or_else(unknown)]);
    table.row(["tensors".to_owned(), details.tensors.len().to_string()]);
    table.render(usize::MAX) + "\n"
}

fn layers(details: &ModelDetails) -> Table {
    let mut table = Table::new(&["LAYER", "DIGEST", "SIZE", "STORED"], &[2]);
    for layer in &details.layers {
        let stored = match layer.stored {
            StoredForm::Blob => "as one blob",
            StoredForm::Recipe => "by tensor",
        };
        let component = layer.media_type.component();
        let layer_name = match &layer.name {
            Some(name) => format!("{component} {name}"),
            None => component.to_owned(),
        };
        table.row([layer_name, layer.digest.short(), human_bytes(layer.size), stored.to_owned()]);
    }
    table
}

fn metadata(details: &ModelDetails) -> Table {
    const MAX_VALUE_CHARS: usize = 60;
    let mut table = Table::new(&["KEY", "VALUE"], &[]);
    for (key, value) in &details.metadata {
        let value = value.to_string();
        let shown: String = value.chars().take(MAX_VALUE_CHARS).collect();
        let ellipsis = if shown.len() < value.len() { "…" } else { "" };
        table.row([key.clone(), shown + ellipsis]);
    }
    table
}

fn tensors(details: &ModelDetails) -> Table {
    let mut table = Table::new(&["TENSOR", "TYPE", "SHAPE", "SIZE", "BLOB"], &[3]);
    for tensor in &details.tensors {
        let shape: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
        table.row([
            tensor.name.clone(),
            tensor.type_name.clone(),
            shape.join("×"),
            human_bytes(tensor.size),
            tensor.digest.short(),
        ]);
    }
    table
}
