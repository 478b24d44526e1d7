//! Statistics of a tensor's numbers, in two passes.

use super::{ElementType, QuantError};

/// The first pass over a tensor: the count, range and sum of its numbers.
///
/// ```
/// use blobd_model::quant::Range;
///
/// let numbers = [1.0, 2.0, f64::NAN, 6.0];
/// let mut range = Range::default();
/// range.push(&numbers);
/// let mut distribution = range.distribution(5);
/// distribution.push(&numbers);
/// let statistics = distribution.finish();
/// assert_eq!((statistics.mean, statistics.nan_count), (Some(3.0), 1));
/// assert_eq!(statistics.histogram.counts, [1, 1, 0, 0, 1]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Range {
    finite: u64,
    nan_count: u64,
    inf_count: u64,
    bounds: Option<(f64, f64)>,
    sum: Sum,
}

impl Range {
    pub fn push(&mut self, values: &[f64]) {
        for block in values.chunks(Sum::BLOCK) {
            let (mut sum, mut count) = (0.0, 0);
            let (mut least, mut greatest) = (f64::INFINITY, f64::NEG_INFINITY);
            for value in block.iter().copied().filter(|value| value.is_finite()) {
                (least, greatest) = (least.min(value), greatest.max(value));
                sum += value;
                count += 1;
            }
            let nan_count = block.iter().filter(|value| value.is_nan()).count() as u64;
            self.nan_count += nan_count;
            self.inf_count += block.len() as u64 - count - nan_count;
            self.finite += count;
            self.sum.add(sum);
            if count > 0 {
                let (min, max) = self.bounds.unwrap_or((least, greatest));
                self.bounds = Some((min.min(least), max.max(greatest)));
            }
        }
    }

    /// Starts the second pass, which needs the same numbers again. The histogram divides the range of the finite
    /// numbers into `bins` parts.
    #[expect(clippy::cast_precision_loss, reason = "a count of 2^53 elements is not reached")]
    pub fn distribution(self, bins: usize) -> Distribution {
        let mean = self.bounds.map(|_| self.sum.value() / self.finite as f64);
        let edges = self.bounds.map_or_else(Vec::new, |(min, max)| edges(min, max, bins.max(1)));
        let counts = vec![0; edges.len().saturating_sub(1)];
        Distribution { range: self, mean, squares: Sum::default(), histogram: Histogram { edges, counts } }
    }
}

/// The second pass over a tensor: deviations from the mean, and a histogram. Made by [`Range::distribution`].
#[derive(Clone, Debug)]
pub struct Distribution {
    range: Range,
    mean: Option<f64>,
    squares: Sum,
    histogram: Histogram,
}

impl Distribution {
    pub fn push(&mut self, values: &[f64]) {
        let Some(mean) = self.mean else { return };
        for block in values.chunks(Sum::BLOCK) {
            let mut squares = 0.0;
            for value in block.iter().copied().filter(|value| value.is_finite()) {
                squares += (value - mean) * (value - mean);
                self.histogram.add(value);
            }
            self.squares.add(squares);
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a count of 2^53 elements is not reached")]
    pub fn finish(self) -> Statistics {
        let Range { finite, nan_count, inf_count, bounds, .. } = self.range;
        Statistics {
            min: bounds.map(|(min, _)| min),
            max: bounds.map(|(_, max)| max),
            mean: self.mean,
            std: self.mean.map(|_| (self.squares.value() / finite as f64).sqrt()),
            nan_count,
            inf_count,
            histogram: self.histogram,
        }
    }
}

/// Statistics of the finite numbers of a tensor, and the counts of the others.
///
/// They agree with those of numpy in `float64` (`min`, `max`, `mean`, `std`, `histogram`) within 1e-12.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// The least; like the next three, `None` if no number is finite.
    pub min: Option<f64>,
    pub max: Option<f64>,
    pub mean: Option<f64>,
    /// The standard deviation of all numbers, not of a sample.
    pub std: Option<f64>,
    pub nan_count: u64,
    pub inf_count: u64,
    /// The distribution of the finite numbers.
    pub histogram: Histogram,
}

/// A histogram with bins of equal width. The last bin contains its upper edge, the others do not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The edges of the bins in ascending order, one more than there are bins. Empty without finite numbers.
    pub edges: Vec<f64>,
    /// How many numbers each bin has.
    pub counts: Vec<u64>,
}

impl Histogram {
    fn add(&mut self, value: f64) {
        let bins = self.counts.len();
        let bin = bin_near(&self.edges, bins, value);
        // Because of rounding, the right bin may be a neighbour.
        let edge = |number: usize| self.edges.get(number).copied().unwrap_or(f64::NAN);
        let bin = match bin {
            above if above > 0 && value < edge(above) => above - 1,
            below if below + 1 < bins && value >= edge(below + 1) => below + 1,
            bin => bin,
        };
        if let Some(count) = self.counts.get_mut(bin) {
            *count += 1;
        }
    }
}

/// The relative RMS error of a tensor against an original, both little-endian and of any type:
/// `sqrt(sum((a - b)^2) / sum(a^2))`, where `a` are the numbers of the original.
///
/// 0 for equal numbers, even if all are 0; infinite if only the original is 0; NaN if a number is NaN. Both tensors are
/// converted piece by piece, to limit the memory.
///
/// # Errors
/// [`QuantError::ElementCount`] when the tensors have different numbers of elements, and those of [`ElementType::values`].
///
/// ```
/// use blobd_store_format::gguf::GgmlType;
/// use blobd_model::quant::relative_rms_error;
///
/// let original: Vec<u8> = [3.0_f32, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// let other: Vec<u8> = [3_i8, 3].iter().map(|value| value.cast_unsigned()).collect();
/// assert_eq!(relative_rms_error((GgmlType::F32, &original), (GgmlType::I8, &other))?, 0.2);
/// # Ok::<(), blobd_model::quant::QuantError>(())
/// ```
pub fn relative_rms_error(
    original: (impl Into<ElementType>, &[u8]),
    other: (impl Into<ElementType>, &[u8]),
) -> Result<f64, QuantError> {
    let (original, other): ((ElementType, _), (ElementType, _)) =
        ((original.0.into(), original.1), (other.0.into(), other.1));
    let expected = original.0.element_count(original.1)?;
    let found = other.0.element_count(other.1)?;
    if found != expected {
        return Err(QuantError::ElementCount { found, expected });
    }
    let (mut differences, mut squares) = (Sum::default(), Sum::default());
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for (original_piece, other_piece) in original.0.pieces(original.1)?.zip(other.0.pieces(other.1)?) {
        first.clear();
        second.clear();
        original.0.values(original_piece)?.append_to(&mut first);
        other.0.values(other_piece)?.append_to(&mut second);
        for (first, second) in first.chunks(Sum::BLOCK).zip(second.chunks(Sum::BLOCK)) {
            let difference = first.iter().zip(second).map(|(a, b)| (a - b) * (a - b));
            differences.add(difference.sum());
            squares.add(first.iter().map(|a| a * a).sum());
        }
    }
    let (differences, squares) = (differences.value(), squares.value());
    Ok(if differences == 0.0 { 0.0 } else { (differences / squares).sqrt() })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates, and is limited")]
#[expect(clippy::cast_precision_loss, reason = "few bins")]
fn bin_near(edges: &[f64], bins: usize, value: f64) -> usize {
    let (Some(first), Some(last)) = (edges.first(), edges.last()) else { return 0 };
    // Halves, since the difference of two numbers may be infinite.
    let part = (value / 2.0 - first / 2.0) / (last / 2.0 - first / 2.0);
    ((part * bins as f64) as usize).min(bins.saturating_sub(1))
}

#[expect(clippy::cast_precision_loss, reason = "few bins")]
fn edges(min: f64, max: f64, bins: usize) -> Vec<f64> {
    // If all numbers are equal, they are put in the middle of a range of 1, as in numpy.
    let (min, max) = if min < max { (min, max) } else { (min - 0.5, max + 0.5) };
    // If the difference is infinite, that of the halves is not.
    let scale = if (max - min).is_finite() { 1.0 } else { 0.5 };
    let (start, step) = (min * scale, (max * scale - min * scale) / bins as f64);
    let lower = (0..bins).map(|number| (number as f64 * step + start) / scale);
    lower.chain([max]).collect()
}

/// A compensated sum: its error does not grow with the number of terms. Source: A. Neumaier, 1974.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    sum: f64,
    lost: f64,
}

impl Sum {
    /// How many numbers are added without compensation before their sum is added with it. Few enough for an error of
    /// about 1e-14, and enough for speed.
    pub(super) const BLOCK: usize = 128;

    pub(super) fn add(&mut self, term: f64) {
        let sum = self.sum + term;
        self.lost += match self.sum.abs() >= term.abs() {
            true => (self.sum - sum) + term,
            false => (term - sum) + self.sum,
        };
        self.sum = sum;
    }

    pub(super) fn value(&self) -> f64 {
        // After an overflow the compensation is NaN.
        if self.sum.is_finite() { self.sum + self.lost } else { self.sum }
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::gguf::GgmlType;
    use proptest::prelude::*;

    use super::*;

    fn statistics(pieces: &[&[f64]], bins: usize) -> Statistics {
        let mut range = Range::default();
        pieces.iter().for_each(|piece| range.push(piece));
        let mut distribution = range.distribution(bins);
        pieces.iter().for_each(|piece| distribution.push(piece));
        distribution.finish()
    }

    #[test]
    fn known_numbers_have_known_statistics() {
        let found = statistics(&[&[2.0, 4.0, 4.0, 4.0], &[5.0, 5.0, 7.0, 9.0]], 7);
        assert_eq!(
            (found.min, found.max, found.mean, found.std),
            (Some(2.0), Some(9.0), Some(5.0), Some(2.0))
        );
        assert_eq!(found.histogram.edges, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        assert_eq!(found.histogram.counts, [1, 0, 3, 2, 0, 1, 1]);
    }

    #[test]
    fn undefined_and_infinite_numbers_are_only_counted() {
        let found = statistics(&[&[1.0, f64::NAN, f64::INFINITY, 3.0, f64::NEG_INFINITY, -f64::NAN]], 2);
        assert_eq!((found.nan_count, found.inf_count), (2, 2));
        assert_eq!(
            (found.min, found.max, found.mean, found.std),
            (Some(1.0), Some(3.0), Some(2.0), Some(1.0))
        );
        assert_eq!(found.histogram.counts, [1, 1]);
    }

    #[test]
    fn without_finite_numbers_there_are_no_statistics() {
        for numbers in [&[][..], &[f64::NAN], &[f64::INFINITY]] {
            let found = statistics(&[numbers], 4);
            assert_eq!((found.min, found.max, found.mean, found.std), (None, None, None, None));
            assert_eq!(found.histogram, Histogram::default());
        }
    }

    #[test]
    fn equal_numbers_are_in_the_middle_of_the_histogram() {
        let found = statistics(&[&[3.0, 3.0]], 4);
        assert_eq!((found.mean, found.std), (Some(3.0), Some(0.0)));
        assert_eq!(found.histogram.edges, [2.5, 2.75, 3.0, 3.25, 3.5]);
        assert_eq!(found.histogram.counts, [0, 0, 2, 0]);
    }

    #[test]
    fn extreme_numbers_have_finite_edges() {
        let found = statistics(&[&[f64::MIN, 0.0, f64::MAX]], 4);
        assert!(found.histogram.edges.iter().all(|edge| edge.is_finite()), "{found:?}");
        assert_eq!(found.histogram.counts, [1, 0, 1, 1]);
    }

    #[test]
    fn small_deviations_from_a_large_mean_are_exact() {
        let found = statistics(&[&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]], 3);
        assert_eq!((found.mean, found.std), (Some(1e9 + 2.0), Some((2.0_f64 / 3.0).sqrt())));
    }

    proptest! {
        #[test]
        fn every_number_is_in_the_bin_of_its_edges(
            numbers in prop::collection::vec(-1e6..1e6, 1..200), bins in 1_usize..40,
        ) {
            let found = statistics(&[&numbers], bins);
            let Histogram { edges, counts } = &found.histogram;
            for (bin, count) in counts.iter().enumerate() {
                let is_last = bin + 1 == bins;
                let is_in = |x: &f64| edges[bin] <= *x && (*x < edges[bin + 1] || is_last && *x <= edges[bins]);
                let expected = numbers.iter().filter(|x| is_in(x)).count();
                prop_assert_eq!(*count, expected as u64, "bin {} of {}", bin, bins);
            }
            prop_assert_eq!(counts.iter().sum::<u64>(), numbers.len() as u64);
        }

        #[test]
        fn pieces_do_not_change_the_result(numbers in prop::collection::vec(-1e3..1e3, 2..600)) {
            let (first, second) = numbers.split_at(numbers.len() / 3);
            let (whole, pieces) = (statistics(&[&numbers], 8), statistics(&[first, second], 8));
            prop_assert_eq!(&whole.histogram, &pieces.histogram);
            prop_assert!((whole.mean.unwrap() - pieces.mean.unwrap()).abs() < 1e-12 * 1e3);
            prop_assert!((whole.std.unwrap() - pieces.std.unwrap()).abs() < 1e-12 * 1e3);
        }
    }

    fn sum(terms: &[f64]) -> f64 {
        let mut sum = Sum::default();
        terms.iter().for_each(|term| sum.add(*term));
        sum.value()
    }

    #[test]
    fn small_terms_are_not_lost() {
        assert_eq!(sum(&[1.0, 1e100, 1.0, -1e100]), 2.0);
        assert_eq!(sum(&[0.1; 10]), 1.0);
    }

    #[test]
    fn overflow_is_infinite() {
        assert_eq!(sum(&[f64::MAX, f64::MAX]), f64::INFINITY);
        assert!(sum(&[1.0, f64::NAN]).is_nan());
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn error(original: &[f32], other: &[f32]) -> f64 {
        let (original, other) = (floats(original), floats(other));
        relative_rms_error((GgmlType::F32, &original), (GgmlType::F32, &other)).unwrap()
    }

    #[test]
    fn equal_tensors_have_no_error() {
        assert_eq!([error(&[1.5; 300], &[1.5; 300]), error(&[0.0; 3], &[0.0; 3]), error(&[], &[])], [0.0; 3]);
    }

    #[test]
    fn error_is_relative_to_the_original() {
        assert_eq!(error(&[3.0, 4.0], &[3.0, 9.0]), 1.0);
        assert_eq!(error(&[2.0; 1000], &[0.0; 1000]), 1.0);
        assert_eq!(error(&[0.0], &[1.0]), f64::INFINITY);
        assert!(error(&[f32::NAN, 1.0], &[1.0, 1.0]).is_nan());
    }

    /// Pieces of both tensors end at the same elements, even if their block sizes differ.
    #[test]
    fn long_tensors_of_different_types_are_compared_element_by_element() {
        // Blocks of 32 with scale 1 and of 256 with scales of 1, all quants 1.
        let q8_0: Vec<u8> = [&[0x00, 0x3c][..], &[1; 32]].concat().repeat(8 * 600);
        let q8_k: Vec<u8> = [&1.0_f32.to_le_bytes()[..], &[1; 256], &[0; 32]].concat().repeat(600);
        assert_eq!(relative_rms_error((GgmlType::Q8_0, &q8_0), (GgmlType::Q8_K, &q8_k)), Ok(0.0));
    }

    #[test]
    fn tensors_of_different_lengths_and_unknown_types_are_refused() {
        let two = floats(&[1.0, 2.0]);
        let lengths = relative_rms_error((GgmlType::F32, &two), (GgmlType::F32, &two[..4]));
        assert_eq!(lengths, Err(QuantError::ElementCount { found: 1, expected: 2 }));
        let unknown = GgmlType::from_id(77);
        let error = relative_rms_error((GgmlType::F32, &two), (unknown, &two));
        assert_eq!(error, Err(QuantError::UnknownType { ggml_type: unknown }));
    }
}
