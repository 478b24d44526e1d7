//! How far the values of tensors differ, by dequantisation.

use std::borrow::Cow;

use blobd_client::protocol::error::ErrorBody;
use blobd_model::diff::{Change, TensorPair};
use blobd_model::quant::{relative_rms_error, swap_bytes};
use blobd_store_format::gguf::{ByteOrder, GgmlType};
use blobd_store_format::recipe::TensorEntry;

use super::report::Report;
use super::side::{Opened, Side};
use crate::connect::Connected;
use crate::progress::Bar;

/// Adds the relative error of each tensor that both models have with the same shape and different content. Tensors
/// without known values, models that are not in GGUF, and names that a model has twice are left out.
pub(super) fn add_errors(
    connected: Option<&Connected>,
    a: &Side,
    b: &Side,
    pairs: &[TensorPair<'_>],
    report: &mut Report,
    is_quiet: bool,
) -> Result<(), ErrorBody> {
    if a.header.is_none() || b.header.is_none() {
        return Ok(());
    }
    let rows = pairs.iter().zip(&mut report.tensors);
    let compared: Vec<_> = rows
        .filter(|(pair, _)| matches!(pair.change, Change::Changed | Change::Retyped))
        .filter(|(pair, _)| a.is_unique(pair.name()) && b.is_unique(pair.name()))
        .collect();
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
        done = done.saturating_add(size(pair));
        bar.set(done, total);
    }
    bar.clear();
    Ok(())
}

/// `None` if the error is not a finite number, or if a type has no known values.
fn relative_error(
    [(a, a_order), (b, b_order)]: [(&Opened<'_>, ByteOrder); 2],
    pair: &TensorPair<'_>,
) -> Result<Option<f64>, ErrorBody> {
    let (a, b) = (a.bytes(pair.name())?, b.bytes(pair.name())?);
    let side = |bytes, tensor: Option<&TensorEntry>, order| {
        let ggml_type = GgmlType::from_name(&tensor?.type_name)?;
        Some((ggml_type, little_endian(ggml_type, bytes, order)?))
    };
    let a = side(&*a, pair.a, a_order);
    let Some((b, a)) = side(&*b, pair.b, b_order).zip(a) else { return Ok(None) };
    let error = relative_rms_error((a.0, &a.1), (b.0, &b.1)).ok();
    Ok(error.filter(|error| error.is_finite()))
}

fn little_endian(ggml_type: GgmlType, bytes: &[u8], order: ByteOrder) -> Option<Cow<'_, [u8]>> {
    match order {
        ByteOrder::Little => Some(Cow::Borrowed(bytes)),
        ByteOrder::Big => {
            let mut swapped = bytes.to_vec();
            swap_bytes(ggml_type, &mut swapped).ok()?;
            Some(Cow::Owned(swapped))
        }
    }
}
