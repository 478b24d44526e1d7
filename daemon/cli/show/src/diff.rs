//! `blobd diff`

use std::borrow::Cow;

use blobd_cli_common::Global;
use blobd_cli_common::connect::{Connected, connect, print_result};
use blobd_cli_common::model_source::{Lookup, ModelArgs};
use blobd_cli_common::progress::Bar;
use blobd_model::diff::{Change, DiffTensor, TensorPair, diff_tensors};
use blobd_model::quant::{ElementType, relative_rms_error, swap_bytes};
use blobd_store_format::gguf::ByteOrder;
use clap::Args;

use self::report::Report;
use self::side::{Opened, Side};
use crate::ErrorBody;

mod render;
mod report;
mod side;

/// Show how two models differ: tensors, metadata and texts
#[derive(Debug, Args)]
#[command(
    after_help = "Tensors are compared by name, and by file if several files of a model have the name. Shared bytes
are on disk once, whatever their names: a tensor that both models have, but not under one name, is
renamed; so are the experts of a stack. If a model is not in the store, only its header is fetched:
types, shapes and metadata are compared, contents are not. Numbers are those of the type: scales in
tensors of their own are not applied.

Examples:
  blobd diff llama3:8b-q4_K_M llama3:8b-q4_K_S
  blobd diff llama3:8b ./model-Q4_K_M.gguf         a model and a file of this machine
  blobd diff llama3:8b hf.co/user/repo:Q4_K_M      before the download
  blobd diff model:f16 model:q4_K_M --values       how far the numbers are apart
  blobd diff base:f16 finetuned:f16 --json | jq '.tensors[] | select(.change != \"shared\")'"
)]
pub struct Params {
    /// The first model: its name, the path of a file or folder, or a source as `blobd pull` takes it
    #[arg(value_name = "REF|PATH")]
    a: String,
    /// The second model
    #[arg(value_name = "REF|PATH")]
    b: String,
    #[command(flatten)]
    lookup: Lookup,
    /// Compute the relative error of each tensor that differs: the root mean square of the differences, relative to
    /// that of A
    #[arg(long)]
    values: bool,
}

/// Compares two models, and prints what differs.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let models = [&params.a, &params.b].map(|model| ModelArgs::new(model, params.lookup));
    let needs_store = models.iter().any(|model| model.path().is_none());
    let connected = if needs_store { Some(connect(global)?) } else { None };
    let connected = connected.as_ref();
    let [a, b] = &models;
    let (a, b) = (Side::read(global, a, connected)?, Side::read(global, b, connected)?);
    let mut diff = diff_tensors(&a.tensors, &b.tensors);
    if !(a.has_contents() && b.has_contents()) {
        diff.forget_contents();
        let report = Report::new(&a, &b, &diff).without_contents();
        return print_result(global, &report, render::render);
    }
    diff.find_renamed();
    find_equal(connected, &a, &b, &mut diff.tensors)?;
    let mut report = Report::new(&a, &b, &diff);
    if params.values {
        add_errors(connected, &a, &b, &diff.tensors, &mut report, global.hides_progress())?;
    }
    print_result(global, &report, render::render)
}

/// Marks tensors as shared that have the same bytes in different packed groups: if one expert of a group differs, so
/// does the digest of the whole group.
fn find_equal(
    connected: Option<&Connected>,
    a: &Side,
    b: &Side,
    pairs: &mut [TensorPair<'_>],
) -> Result<(), ErrorBody> {
    let packed = &a.packed_blobs() | &b.packed_blobs();
    let candidates = pairs.iter_mut().filter(|pair| pair.may_be_equal(&packed));
    let candidates: Vec<_> = candidates.filter(|pair| is_distinct(a, b, pair)).collect();
    if candidates.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = candidates.iter().map(|pair| pair.name().to_owned()).collect();
    let (a, b) = (a.open(connected, names.clone())?, b.open(connected, names)?);
    for pair in candidates {
        let Some((of_a, of_b)) = pair.a.zip(pair.b) else { continue };
        if *a.bytes(of_a)? == *b.bytes(of_b)? {
            pair.change = Change::Shared;
        }
    }
    Ok(())
}

/// Whether no other tensor has its name in its file.
fn is_distinct(a: &Side, b: &Side, pair: &TensorPair<'_>) -> bool {
    let repeats =
        |side: &Side, tensor: Option<&DiffTensor>| tensor.is_some_and(|tensor| side.repeats(tensor));
    !repeats(a, pair.a) && !repeats(b, pair.b)
}

/// Adds the relative error of each tensor that both models have with the same shape and different content, and counts
/// those that have none: types without known numbers, numbers that are not finite, and tensors that cannot be opened.
fn add_errors(
    connected: Option<&Connected>,
    a: &Side,
    b: &Side,
    pairs: &[TensorPair<'_>],
    report: &mut Report,
    is_quiet: bool,
) -> Result<(), ErrorBody> {
    let has_other_numbers = |pair: &TensorPair<'_>| matches!(pair.change, Change::Changed | Change::Retyped);
    let mut without_error = pairs.iter().filter(|pair| has_other_numbers(pair)).count() as u64;
    report.without_error = Some(without_error);
    let rows = pairs.iter().zip(&mut report.tensors);
    let opens = |pair: &TensorPair<'_>| {
        is_distinct(a, b, pair)
            && pair.a.is_some_and(|of_a| a.opens(of_a))
            && pair.b.is_some_and(|of_b| b.opens(of_b))
    };
    let compared: Vec<_> = rows.filter(|(pair, _)| has_other_numbers(pair) && opens(pair)).collect();
    if compared.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = compared.iter().map(|(pair, _)| pair.name().to_owned()).collect();
    let (first, second) = (a.open(connected, names.clone())?, b.open(connected, names)?);
    let size = |pair: &TensorPair<'_>| pair.a.map_or(0, |tensor| tensor.size);
    let total = compared.iter().fold(0_u64, |sum, (pair, _)| sum.saturating_add(size(pair)));
    let (bar, mut done) = (Bar::new("comparing", total, is_quiet), 0_u64);
    for (pair, row) in compared {
        let sides = [(&first, a.byte_order()), (&second, b.byte_order())];
        row.relative_error = relative_error(sides, pair)?;
        without_error = without_error.saturating_sub(u64::from(row.relative_error.is_some()));
        done = done.saturating_add(size(pair));
        bar.set(done, total);
    }
    bar.clear();
    report.without_error = Some(without_error);
    Ok(())
}

/// `None` if the error is not a finite number, or if a type has no known values.
fn relative_error(
    [(a, a_order), (b, b_order)]: [(&Opened<'_>, ByteOrder); 2],
    pair: &TensorPair<'_>,
) -> Result<Option<f64>, ErrorBody> {
    let Some((of_a, of_b)) = pair.a.zip(pair.b) else { return Ok(None) };
    let (a, b) = (a.bytes(of_a)?, b.bytes(of_b)?);
    let side = |bytes, tensor: &DiffTensor, order| {
        let element_type = ElementType::from_name(tensor.format, &tensor.type_name)?;
        let order = if tensor.format.is_gguf() { order } else { ByteOrder::Little };
        Some((element_type, little_endian(element_type, bytes, order)?))
    };
    let a = side(&*a, of_a, a_order);
    let Some((b, a)) = side(&*b, of_b, b_order).zip(a) else { return Ok(None) };
    let error = relative_rms_error((a.0, &a.1), (b.0, &b.1)).ok();
    Ok(error.filter(|error| error.is_finite()))
}

fn little_endian(element_type: ElementType, bytes: &[u8], order: ByteOrder) -> Option<Cow<'_, [u8]>> {
    let (ByteOrder::Big, ElementType::Ggml(ggml_type)) = (order, element_type) else {
        return Some(Cow::Borrowed(bytes));
    };
    let mut swapped = bytes.to_vec();
    swap_bytes(ggml_type, &mut swapped).ok()?;
    Some(Cow::Owned(swapped))
}
