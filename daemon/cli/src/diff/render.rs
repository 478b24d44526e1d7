//! The tables of `diff`.

use blobd_model::diff::Change;
use blobd_model::metadata_json::short_text;
use blobd_store_format::digest::Digest;
use blobd_store_format::size::{human_bytes, human_number};
use blobd_store_format::text::printable;
use serde_json::Value as Json;

use super::report::{Report, TensorForm};
use crate::output::{Table, terminal_width};

/// Values of metadata are cut at this length.
const MAX_VALUE_CHARS: usize = 40;

pub(super) fn render(report: &Report) -> String {
    let head = format!(
        "A  {}\nB  {}\n{} shared, {} only in A, {} only in B\n\n",
        printable(&report.a),
        printable(&report.b),
        human_bytes(report.shared_bytes),
        human_bytes(report.only_a_bytes),
        human_bytes(report.only_b_bytes)
    );
    let not_compared = report.unknown_bytes.map(|bytes| {
        format!(
            "{} of the same types and shapes, not compared: a model is not in the store\n\n",
            human_bytes(bytes)
        )
    });
    let head = not_compared.map_or(head.clone(), |line| head.trim_end().to_owned() + "\n" + &line);
    let mut tables = vec![changes(report)];
    tables.extend([tensors(report), metadata(report), layers(report)].into_iter().flatten());
    let tables: Vec<_> = tables.iter().map(|table| table.render(terminal_width())).collect();
    head + &tables.join("\n")
}

fn changes(report: &Report) -> Table {
    let mut table = Table::new(&["CHANGE", "TENSORS", "IN A", "IN B"], &[1, 2, 3]);
    for sum in &report.changes {
        table.row([
            sum.change.name().to_owned(),
            sum.tensors.to_string(),
            human_bytes(sum.a_bytes),
            human_bytes(sum.b_bytes),
        ]);
    }
    table
}

/// The tensors that differ.
fn tensors(report: &Report) -> Option<Table> {
    let has_errors = report.tensors.iter().any(|tensor| tensor.relative_error.is_some());
    let headings: &[&str] = &["TENSOR", "CHANGE", "IN A", "IN B", "ERROR"];
    let mut table = Table::new(if has_errors { headings } else { &headings[..4] }, &[]);
    let mut differing = report
        .tensors
        .iter()
        .filter(|tensor| !matches!(tensor.change, Change::Shared | Change::Unknown))
        .peekable();
    differing.peek()?;
    for tensor in differing {
        let form = |form: &Option<TensorForm>| form.as_ref().map_or_else(|| "-".to_owned(), described);
        let error = tensor.relative_error.map(|error| human_number(error, 4));
        let cells = [tensor.name.clone(), tensor.change.name().to_owned(), form(&tensor.a), form(&tensor.b)];
        table.row(cells.into_iter().chain(error));
    }
    Some(table)
}

/// `Q4_K 256×768 108 KiB`
fn described(form: &TensorForm) -> String {
    let shape: Vec<_> = form.shape.iter().map(u64::to_string).collect();
    format!("{} {} {}", form.type_name, shape.join("×"), human_bytes(form.bytes))
}

fn metadata(report: &Report) -> Option<Table> {
    let mut table = Table::new(&["KEY", "IN A", "IN B"], &[]);
    for row in &report.metadata {
        table.row([row.key.clone(), cut(&row.a), cut(&row.b)]);
    }
    (!report.metadata.is_empty()).then_some(table)
}

fn cut(value: &Json) -> String {
    if value.is_null() {
        return "-".to_owned();
    }
    let text = short_text(value);
    let shown: String = text.chars().take(MAX_VALUE_CHARS).collect();
    if shown.len() < text.len() { shown + "…" } else { shown }
}

fn layers(report: &Report) -> Option<Table> {
    let mut table = Table::new(&["FILE", "IN A", "IN B"], &[]);
    let digest = |digest: Option<Digest>| digest.map_or_else(|| "-".to_owned(), Digest::short);
    for row in &report.layers {
        table.row([row.component.clone(), digest(row.a), digest(row.b)]);
    }
    (!report.layers.is_empty()).then_some(table)
}
