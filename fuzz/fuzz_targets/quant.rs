//! Quantised tensors.
//!
//! Invariant: any bytes of any type are converted or refused, and never make the conversion panic. Whole
//! blocks of a known type are converted, to as many numbers as they have elements; swapping the byte order
//! twice restores them.
#![no_main]

use blobd_model::quant::{BlockLayout, Values, dequantize, element_count, swap_bytes};
use blobd_store_format::gguf::GgmlType;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((id, bytes)) = input.split_first() else { return };
    let ggml_type = GgmlType::from_id(u32::from(*id) % 48);
    let is_whole = ggml_type.block().is_some_and(|(_, size)| (bytes.len() as u64).is_multiple_of(size));
    assert_eq!(BlockLayout::for_type(ggml_type).is_some(), ggml_type.block().is_some());
    let Ok(count) = element_count(ggml_type, bytes) else {
        assert!(!is_whole, "whole blocks are refused");
        assert!(dequantize(ggml_type, bytes, &mut []).is_err());
        assert!(Values::from_bytes(ggml_type, bytes).is_err());
        assert!(swap_bytes(ggml_type, &mut bytes.to_vec()).is_err());
        return;
    };
    assert!(is_whole, "partial blocks are converted");
    let mut out = vec![0.0; count];
    assert_eq!(dequantize(ggml_type, bytes, &mut out), Ok(()));
    assert_eq!(Values::from_bytes(ggml_type, bytes).map(|values| values.len()), Ok(count));
    let mut swapped = bytes.to_vec();
    assert_eq!(swap_bytes(ggml_type, &mut swapped), Ok(()));
    assert_eq!(swap_bytes(ggml_type, &mut swapped), Ok(()));
    assert_eq!(swapped, bytes);
});
