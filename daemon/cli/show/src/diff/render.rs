//! The tables of `diff`.

use blobd_cli_common::output::{Table, human_bytes, or_dash, terminal_width};
use blobd_model::diff::Change;
use blobd_model::metadata_json::short_text;
use blobd_store_format::size::human_number;
use serde_json::Value as Json;

use super::report::{Report, TensorForm, TensorRow};
use crate::Digest;

const MAX_VALUE_CHARS: usize = 40;

pub(super) fn render(report: &Report) -> String {
    let mut models = Table::new(&["A", &report.a], &[]).with_names_in(&[1]);
    models.row(["B".to_owned(), report.b.clone()]);
    let head = format!(
        "{}{} shared, {} only in A, {} only in B\n",
        models.render(terminal_width()),
        human_bytes(report.shared_bytes),
        human_bytes(report.only_a_bytes),
        human_bytes(report.only_b_bytes)
    );
    let not_compared = report.unknown_bytes.map_or_else(String::new, |bytes| {
        let bytes = human_bytes(bytes);
        format!("{bytes} of the same types and shapes, not compared: a model is not in the store\n")
    });
    let without_error = report.without_error.filter(|count| *count > 0).map_or_else(String::new, |count| {
        let (tensors, have) = if count == 1 { ("tensor", "has") } else { ("tensors", "have") };
        format!(
            "{count} {tensors} with other numbers {have} no error: the type has no known numbers, these are not finite, \
             or the tensor is in a layer of its own\n"
        )
    });
    let details = [tensors(report), metadata(report), layers(report)];
    let tables = [changes(report)].into_iter().chain(details.into_iter().filter(Table::has_rows));
    let tables: Vec<_> = tables.map(|table| table.render(terminal_width())).collect();
    format!("{head}{not_compared}{without_error}\n{}", tables.join("\n"))
}

fn changes(report: &Report) -> Table {
    let rows = report.changes.iter().map(|sum| {
        let [a, b] = [sum.a_bytes, sum.b_bytes].map(human_bytes);
        [sum.change.name().to_owned(), sum.tensors.to_string(), a, b]
    });
    Table::with_rows(&["CHANGE", "TENSORS", "IN A", "IN B"], &[1, 2, 3], rows)
}

fn tensors(report: &Report) -> Table {
    let has_errors = report.tensors.iter().any(|tensor| tensor.relative_error.is_some());
    let mut headings = vec!["TENSOR", "CHANGE", "IN A", "IN B"];
    if report.repeats_names {
        headings.insert(1, "FILE");
    }
    headings.extend(has_errors.then_some("ERROR"));
    let is_different = |tensor: &&TensorRow| !matches!(tensor.change, Change::Shared | Change::Unknown);
    let rows = report.tensors.iter().filter(is_different).map(|tensor| {
        let [a, b] = [&tensor.a, &tensor.b].map(|form| or_dash(form.as_ref().map(described)));
        let error = tensor.relative_error.map(|error| human_number(error, 4));
        let name = match &tensor.b_name {
            Some(other) => format!("{} → {other}", tensor.name),
            None => tensor.name.clone(),
        };
        let file = report.repeats_names.then(|| or_dash(file(tensor)));
        let cells = [name].into_iter().chain(file).chain([tensor.change.name().to_owned(), a, b]);
        cells.chain(error)
    });
    let texts: Vec<_> = (1..headings.len()).collect();
    Table::with_rows(&headings, &[], rows).with_texts_in(&texts).leaving_out_first(&["ERROR"])
}

/// The file of A, or of B if only that has the tensor; of a renamed tensor both.
fn file(tensor: &TensorRow) -> Option<String> {
    let [a, b] = [&tensor.a, &tensor.b].map(|form| form.as_ref().and_then(|form| form.file.clone()));
    match (a, b) {
        (Some(a), Some(b)) if a != b => Some(format!("{a} → {b}")),
        (a, b) => a.or(b),
    }
}

/// `Q4_K 256×768 108 KiB`
fn described(form: &TensorForm) -> String {
    let shape: Vec<_> = form.shape.iter().map(u64::to_string).collect();
    format!("{} {} {}", form.type_name, shape.join("×"), human_bytes(form.bytes))
}

fn metadata(report: &Report) -> Table {
    let rows = report.metadata.iter().map(|row| [row.key.clone(), cut(&row.a), cut(&row.b)]);
    Table::with_rows(&["KEY", "IN A", "IN B"], &[], rows).with_texts_in(&[1, 2])
}

fn cut(value: &Json) -> String {
    if value.is_null() {
        return "-".to_owned();
    }
    let text = short_text(value);
    let shown: String = text.chars().take(MAX_VALUE_CHARS).collect();
    if shown.len() < text.len() { shown + "…" } else { shown }
}

fn layers(report: &Report) -> Table {
    let digest = |digest: Option<Digest>| or_dash(digest.map(Digest::short));
    let rows = report.layers.iter().map(|row| [row.component.clone(), digest(row.a), digest(row.b)]);
    Table::with_rows(&["FILE", "IN A", "IN B"], &[], rows)
}
