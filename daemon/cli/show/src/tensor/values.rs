//! Single elements of a tensor.

use std::ops::Range;

use blobd_cli_common::output::{Table, terminal_width};
use blobd_model::quant::Values;
use serde::Serialize;
use serde_json::Value as Json;

use super::source::StoredTensor;
use super::{quant_error, usage};
use crate::ErrorBody;

/// The most elements at a time: the result is one JSON document, which is collected in memory.
const MAX_VALUES: u64 = 1 << 20;

#[derive(Debug, Serialize)]
pub(super) struct TensorValues {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(rename = "type")]
    type_name: String,
    shape: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expert: Option<u64>,
    /// The number of the first element.
    first: u64,
    /// Numbers; what is not finite is `"NaN"`, `"Infinity"` or `"-Infinity"`. A complex number is a list of both parts.
    values: Vec<Json>,
    #[serde(skip)]
    texts: Vec<String>,
}

pub(super) fn of(tensor: &StoredTensor, range: &Range<u64>) -> Result<TensorValues, ErrorBody> {
    let elements = tensor.elements();
    let count = range.end.saturating_sub(range.start);
    if range.end > elements {
        let end = range.end;
        return Err(usage(format!("--values: beyond the tensor: expected at most {elements}, found {end}")));
    }
    if count > MAX_VALUES {
        let message = format!("--values: too many elements: expected at most {MAX_VALUES}, found {count}");
        return Err(usage(message).with_hint("--npy writes all"));
    }
    let found = |values: Vec<Json>, texts: Vec<String>| TensorValues {
        name: tensor.name.clone(),
        file: tensor.file.clone(),
        type_name: tensor.type_name.clone(),
        shape: tensor.shape.clone(),
        expert: tensor.expert,
        first: range.start,
        values,
        texts,
    };
    let (mut values, mut texts) = (Vec::new(), Vec::new());
    if let Some(packed) = tensor.packed()? {
        append(&Values::F32(packed.unpack(range.clone())), &mut values, &mut texts);
        return Ok(found(values, texts));
    }
    let element_type = tensor.element_type()?;
    // A type that can be converted has blocks of at least one element.
    let (block, block_bytes) = element_type.block().unwrap_or((1, 1));
    let index = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let blocks = range.start / block..range.end.div_ceil(block);
    let bytes = blocks.start.saturating_mul(block_bytes)..blocks.end.saturating_mul(block_bytes);
    let bytes = tensor.bytes.get(index(bytes.start)..index(bytes.end)).unwrap_or_default();
    for piece in tensor.pieces_of(bytes)? {
        let converted = element_type.values(&piece?).map_err(|error| quant_error(&tensor.name, &error))?;
        append(&converted, &mut values, &mut texts);
    }
    let (skipped, wanted) = (index(range.start % block), index(count));
    let values = values.into_iter().skip(skipped).take(wanted).collect();
    Ok(found(values, texts.into_iter().skip(skipped).take(wanted).collect()))
}

pub(super) fn render(found: &TensorValues) -> String {
    let rows = (found.first..).zip(&found.texts).map(|(number, text)| [number.to_string(), text.clone()]);
    Table::with_rows(&["ELEMENT", "VALUE"], &[0, 1], rows).render(terminal_width())
}

fn append(converted: &Values, values: &mut Vec<Json>, texts: &mut Vec<String>) {
    match converted {
        Values::F32(numbers) => {
            values.extend(numbers.iter().map(|number| json(f64::from(*number))));
            texts.extend(numbers.iter().map(f32::to_string));
        }
        Values::F64(numbers) => {
            values.extend(numbers.iter().map(|number| json(*number)));
            texts.extend(numbers.iter().map(f64::to_string));
        }
        Values::I64(numbers) => {
            values.extend(numbers.iter().map(|number| Json::from(*number)));
            texts.extend(numbers.iter().map(i64::to_string));
        }
        Values::U64(numbers) => {
            values.extend(numbers.iter().map(|number| Json::from(*number)));
            texts.extend(numbers.iter().map(u64::to_string));
        }
        Values::Complex(numbers) => {
            values.extend(numbers.iter().map(|parts| parts.map(|part| json(part.into())).to_vec().into()));
            texts.extend(numbers.iter().map(|[real, imaginary]| format!("{real}{imaginary:+}i")));
        }
        _ => {}
    }
}

fn json(number: f64) -> Json {
    match number {
        _ if number.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        _ => number.into(),
    }
}
