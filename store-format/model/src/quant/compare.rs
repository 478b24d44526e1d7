//! The difference between the numbers of two tensors.

use super::sum::Sum;
use super::{QuantError, Values, element_count, pieces};
use blobd_store_format::gguf::GgmlType;

/// The relative RMS error of a tensor against an original, both little-endian and of any type:
/// `sqrt(sum((a - b)^2) / sum(a^2))`, where `a` are the numbers of the original.
///
/// 0 for equal numbers, even if all are 0; infinite if only the original is 0; NaN if a number is NaN. Both tensors are
/// converted piece by piece, to limit the memory.
///
/// # Errors
/// [`QuantError::ElementCount`] when the tensors have different numbers of elements, and those of [`Values::of`].
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
pub fn relative_rms_error(original: (GgmlType, &[u8]), other: (GgmlType, &[u8])) -> Result<f64, QuantError> {
    let expected = element_count(original.0, original.1)?;
    let found = element_count(other.0, other.1)?;
    if found != expected {
        return Err(QuantError::ElementCount { found, expected });
    }
    let (mut differences, mut squares) = (Sum::default(), Sum::default());
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for (original_piece, other_piece) in pieces(original.0, original.1)?.zip(pieces(other.0, other.1)?) {
        first.clear();
        second.clear();
        Values::of(original.0, original_piece)?.append_to(&mut first);
        Values::of(other.0, other_piece)?.append_to(&mut second);
        for (first, second) in first.chunks(Sum::BLOCK).zip(second.chunks(Sum::BLOCK)) {
            let difference = first.iter().zip(second).map(|(a, b)| (a - b) * (a - b));
            differences.add(difference.sum());
            squares.add(first.iter().map(|a| a * a).sum());
        }
    }
    let (differences, squares) = (differences.value(), squares.value());
    Ok(if differences == 0.0 { 0.0 } else { (differences / squares).sqrt() })
}

#[cfg(test)]
mod tests {
    use super::*;

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
