//! The byte order of a tensor.

use std::ops::Range;

use super::QuantError;
use super::block::BlockLayout;
use super::field::Field;
use blobd_store_format::gguf::GgmlType;

/// Changes the byte order of a tensor, or of any whole number of its blocks, in place.
///
/// Every field of several bytes is reversed, in the unit in which ggml reads it: the scales of `Q4_K` are
/// reversed, its packed quants are not. Packed bits that ggml reads as one integer, such as the high bits of
/// `Q5_0`, are reversed as that integer. A second call restores the bytes. For the types that PyPI's
/// `gguf-convert-endian` supports, the result is the same.
///
/// # Errors
/// [`QuantError::UnknownType`] for a removed or unknown type, whose fields are not known;
/// [`QuantError::PartialBlock`] when the bytes are not whole blocks. The bytes are unchanged then.
///
/// ```
/// use blobd_store_format::gguf::GgmlType;
/// use blobd_model::quant::swap_bytes;
///
/// let mut values = 1.5_f32.to_le_bytes();
/// swap_bytes(GgmlType::F32, &mut values)?;
/// assert_eq!(values, 1.5_f32.to_be_bytes());
/// assert!(swap_bytes(GgmlType::from_id(77), &mut values).is_err());
/// # Ok::<(), blobd_model::quant::QuantError>(())
/// ```
pub fn swap_bytes(ggml_type: GgmlType, bytes: &mut [u8]) -> Result<(), QuantError> {
    let layout = BlockLayout::for_type(ggml_type).ok_or(QuantError::UnknownType { ggml_type })?;
    let block_bytes = super::whole_blocks(&layout, bytes.len())?;
    let fields: Vec<_> = layout.fields().filter(|field| field.field_type.bytes() > 1).map(place).collect();
    if fields.is_empty() {
        return Ok(());
    }
    for block in bytes.chunks_exact_mut(block_bytes) {
        for (range, width) in &fields {
            let field = block.get_mut(range.clone()).unwrap_or_default();
            field.chunks_exact_mut(*width).for_each(<[u8]>::reverse);
        }
    }
    Ok(())
}

/// A field's bytes in the block, and the size of an element. Blocks have at most a few hundred bytes.
fn place(field: Field) -> (Range<usize>, usize) {
    let index = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    (index(field.offset)..index(field.offset + field.bytes()), index(field.field_type.bytes()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn scales_are_reversed_and_packed_bytes_are_not() {
        let mut block: Vec<u8> = (0..144).collect();
        swap_bytes(GgmlType::Q4_K, &mut block).unwrap();
        assert_eq!(block[..6], [1, 0, 3, 2, 4, 5]);
        assert!(block[4..].iter().copied().eq(4..144));

        let mut two_blocks: Vec<u8> = (0..68).collect();
        swap_bytes(GgmlType::Q8_0, &mut two_blocks).unwrap();
        assert_eq!((two_blocks[0], two_blocks[1], two_blocks[34], two_blocks[35]), (1, 0, 35, 34));
        assert_eq!(two_blocks[2..34], (2..34).collect::<Vec<_>>());
    }

    #[test]
    fn scales_at_the_end_of_a_block_are_reversed() {
        let mut block: Vec<u8> = (0..210).collect();
        swap_bytes(GgmlType::Q6_K, &mut block).unwrap();
        assert!(block[..208].iter().copied().eq(0..208));
        assert_eq!(block[208..], [209, 208]);
    }

    #[test]
    fn packed_integers_are_reversed_as_a_whole() {
        let mut block: Vec<u8> = (0..22).collect();
        swap_bytes(GgmlType::Q5_0, &mut block).unwrap();
        assert_eq!(block[..8], [1, 0, 5, 4, 3, 2, 6, 7]);
        let mut block: Vec<u8> = (0..66).collect();
        swap_bytes(GgmlType::IQ2_XXS, &mut block).unwrap();
        assert_eq!(block[..14], [1, 0, 2, 3, 4, 5, 9, 8, 7, 6, 10, 11, 12, 13]);
    }

    #[test]
    fn plain_numbers_are_reversed() {
        let mut values = [1_i64.to_le_bytes(), (-2_i64).to_le_bytes()].concat();
        swap_bytes(GgmlType::I64, &mut values).unwrap();
        assert_eq!(values, [1_i64.to_be_bytes(), (-2_i64).to_be_bytes()].concat());
        let mut bytes = [1, 2, 3];
        swap_bytes(GgmlType::I8, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3]);
    }

    #[test]
    fn unknown_types_are_refused_by_name() {
        for id in [5, 31, 43, 142, u32::MAX] {
            let error = swap_bytes(GgmlType::from_id(id), &mut [0; 4]).unwrap_err();
            assert!(error.to_string().contains(&format!("type-{id}")), "{error}");
        }
    }

    #[test]
    fn partial_blocks_are_refused_and_unchanged() {
        let mut bytes = [7; 35];
        let error = swap_bytes(GgmlType::Q8_0, &mut bytes).unwrap_err();
        assert_eq!(error, QuantError::PartialBlock { ggml_type: GgmlType::Q8_0, found: 35, block_bytes: 34 });
        assert_eq!(bytes, [7; 35]);
        assert_eq!(swap_bytes(GgmlType::Q8_0, &mut []), Ok(()));
    }

    proptest! {
        #[test]
        fn swapping_twice_restores_the_bytes(id in 0_u32..43, seed: u64, blocks in 0_usize..4) {
            let Some(layout) = BlockLayout::for_type(GgmlType::from_id(id)) else { return Ok(()) };
            let size = blocks * usize::try_from(layout.bytes()).unwrap();
            let original: Vec<u8> = (0..size).map(|i| (seed.rotate_left(u32::try_from(i % 64).unwrap()) & 255) as u8).collect();
            let mut bytes = original.clone();
            swap_bytes(layout.ggml_type(), &mut bytes).unwrap();
            swap_bytes(layout.ggml_type(), &mut bytes).unwrap();
            prop_assert_eq!(bytes, original);
        }
    }
}
