//! Statistics of a tensor, and their display.

use blobd_cli_common::output::{Table, human_bytes, or_dash, terminal_width};
use blobd_model::quant::{Histogram, Range};
use blobd_store_format::size::human_number;
use serde::Serialize;

use super::source::StoredTensor;
use crate::ErrorBody;

/// Parts of the histogram: as many as a terminal shows with the other lines.
const BINS: usize = 16;

const BAR_CHARS: usize = 40;

#[derive(Debug, Serialize)]
pub(super) struct TensorStatistics {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(rename = "type")]
    type_name: String,
    shape: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expert: Option<u64>,
    elements: u64,
    bytes: u64,
    /// `null`, as the next three, if no number is finite.
    min: Option<f64>,
    max: Option<f64>,
    mean: Option<f64>,
    std: Option<f64>,
    nan_count: u64,
    inf_count: u64,
    histogram: Shown,
}

#[derive(Debug, Serialize)]
struct Shown {
    edges: Vec<f64>,
    counts: Vec<u64>,
}

pub(super) fn of(tensor: &StoredTensor) -> Result<TensorStatistics, ErrorBody> {
    let mut range = Range::default();
    tensor.each_piece(|numbers| range.push(numbers))?;
    let mut distribution = range.distribution(BINS);
    tensor.each_piece(|numbers| distribution.push(numbers))?;
    let found = distribution.finish();
    let Histogram { edges, counts } = found.histogram;
    Ok(TensorStatistics {
        name: tensor.name.clone(),
        file: tensor.file.clone(),
        type_name: tensor.type_name.clone(),
        shape: tensor.shape.clone(),
        expert: tensor.expert,
        elements: tensor.elements(),
        bytes: tensor.bytes.len() as u64,
        min: found.min,
        max: found.max,
        mean: found.mean,
        std: found.std,
        nan_count: found.nan_count,
        inf_count: found.inf_count,
        histogram: Shown { edges, counts },
    })
}

pub(super) fn render(statistics: &TensorStatistics) -> String {
    let number = |value: Option<f64>| or_dash(value.map(|value| human_number(value, 6)));
    let shape: Vec<_> = statistics.shape.iter().map(u64::to_string).collect();
    let mut table = Table::new(&["tensor", &blobd_store_format::text::printable(&statistics.name)], &[]);
    let mut row = |key: &str, value: String| table.row([key.to_owned(), value]);
    if let Some(file) = &statistics.file {
        row("file", file.clone());
    }
    row("type", statistics.type_name.clone());
    row("shape", shape.join("×"));
    if let Some(expert) = statistics.expert {
        row("expert", expert.to_string());
    }
    row("elements", statistics.elements.to_string());
    row("size", human_bytes(statistics.bytes));
    row("minimum", number(statistics.min));
    row("maximum", number(statistics.max));
    row("mean", number(statistics.mean));
    row("deviation", number(statistics.std));
    row("NaN", statistics.nan_count.to_string());
    row("infinite", statistics.inf_count.to_string());
    let table = table.render(terminal_width());
    let histogram = histogram(&statistics.histogram);
    if histogram.is_empty() { table } else { format!("{table}\n{histogram}") }
}

/// A line per bin: its lower edge, its count, and a bar.
fn histogram(shown: &Shown) -> String {
    let most = shown.counts.iter().copied().max().unwrap_or_default();
    if most == 0 {
        return String::new();
    }
    let bins = shown.edges.iter().zip(&shown.counts);
    let rows = bins.map(|(edge, count)| [human_number(*edge, 4), count.to_string(), bar(*count, most)]);
    Table::with_rows(&["FROM", "COUNT", "HISTOGRAM"], &[0, 1], rows).render(usize::MAX)
}

/// A bar whose length is the count's share of the greatest. A bin that is not empty has a bar.
fn bar(count: u64, most: u64) -> String {
    let length = u128::from(count) * BAR_CHARS as u128 / u128::from(most.max(1));
    let length = usize::try_from(length).unwrap_or(BAR_CHARS).max(usize::from(count > 0));
    "█".repeat(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_proportional_and_never_empty_for_a_count() {
        assert_eq!(bar(8, 8).chars().count(), BAR_CHARS);
        assert_eq!(bar(4, 8).chars().count(), BAR_CHARS / 2);
        assert_eq!([bar(1, u64::MAX).as_str(), bar(0, 8).as_str()], ["█", ""]);
    }

    #[test]
    fn histogram_without_numbers_is_left_out() {
        assert_eq!(histogram(&Shown { edges: Vec::new(), counts: Vec::new() }), "");
        let one = histogram(&Shown { edges: vec![0.5, 1.5], counts: vec![3] });
        assert_eq!(one.lines().nth(1), Some(format!(" 0.5      3  {}", bar(1, 1)).as_str()));
    }
}
