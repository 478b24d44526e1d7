//! The table of all types: fields, formula, source and file types.
//!
//! The sizes are in [`blobd_store_format::ggml_type`]; a test compares both tables. Names of fields are ggml's, except
//! that parts which ggml reads separately are separate here: `signs` of `IQ2_XXS`, `IQ3_XXS` and `IQ2_S`.

use super::field::FieldType;
use blobd_store_format::gguf::GgmlType;

/// The properties of a type besides its size.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) ggml_type: GgmlType,
    /// Name, type of the elements, number of elements.
    pub(super) fields: &'static [(&'static str, FieldType, u64)],
    pub(super) formula: &'static str,
    pub(super) source: &'static str,
    pub(super) file_types: &'static [u32],
}

/// Writes the table.
macro_rules! rows {
    ($($name:ident [$($field:ident $field_type:ident $count:literal),*]
        $formula:literal, $source:literal, [$($file_type:literal),*];)*) => {
        pub(super) const ROWS: &[Row] = &[
            $(Row {
                ggml_type: GgmlType::$name,
                fields: &[$((stringify!($field), FieldType::$field_type, $count)),*],
                formula: $formula,
                source: $source,
                file_types: &[$($file_type),*],
            }),*
        ];
    };
}

// Formulas: `d` is a block's scale, `dmin` and `m` are minimums, `q` is the element's quant, an unsigned
// number with this number of bits, unless it is said to be signed, `i` the element's number in the block. `x[i/16]` is
// shared by 16 elements. `k4` and `e2m1` are the 16 values of IQ4_NL and of MXFP4, `grid` the row of the
// type's codebook that `q` names, and `sign` is 1 or -1.
rows! {
    F32 [value F32 1] "value", "IEEE 754 binary32", [0];
    F16 [value F16 1] "value", "IEEE 754 binary16", [1];
    Q4_0 [d F16 1, qs U8 16]
        "d * (q - 8), q of 4 bits", "ggml-quants.c dequantize_row_q4_0", [2];
    Q4_1 [d F16 1, m F16 1, qs U8 16]
        "d * q + m, q of 4 bits", "ggml-quants.c dequantize_row_q4_1", [3];
    MXFP4_OLLAMA [e E8m0 1, qs U8 16]
        "2^(e - 128) * e2m1[q], q of 4 bits, elements 2i and 2i + 1 in one byte",
        "Ollama ml/backend/ggml/ggml.go, tensor kind 4", [4];
    Q5_0 [d F16 1, qh U32 1, qs U8 16]
        "d * (q - 16), q of 5 bits", "ggml-quants.c dequantize_row_q5_0", [8];
    Q5_1 [d F16 1, m F16 1, qh U32 1, qs U8 16]
        "d * q + m, q of 5 bits", "ggml-quants.c dequantize_row_q5_1", [9];
    Q8_0 [d F16 1, qs I8 32]
        "d * q, q signed, of 8 bits", "ggml-quants.c dequantize_row_q8_0", [7];
    Q8_1 [d F16 1, s F16 1, qs I8 32]
        "d * q, q signed, of 8 bits; s = d * (sum of all q) is not a minimum",
        "ggml-quants.c quantize_row_q8_1_ref", [];
    Q2_K [scales U8 16, qs U8 64, d F16 1, dmin F16 1]
        "d * (scales[i/16] & 15) * q - dmin * (scales[i/16] >> 4), q of 2 bits",
        "ggml-quants.c dequantize_row_q2_K", [10, 21];
    Q3_K [hmask U8 32, qs U8 64, scales U8 12, d F16 1]
        "d * (s[i/16] - 32) * (q - 4), s of 6 bits, q of 3 bits",
        "ggml-quants.c dequantize_row_q3_K", [11, 12, 13];
    Q4_K [d F16 1, dmin F16 1, scales U8 12, qs U8 128]
        "d * s[i/32] * q - dmin * m[i/32], s and m of 6 bits, q of 4 bits",
        "ggml-quants.c dequantize_row_q4_K", [14, 15];
    Q5_K [d F16 1, dmin F16 1, scales U8 12, qh U8 32, qs U8 128]
        "d * s[i/32] * q - dmin * m[i/32], s and m of 6 bits, q of 5 bits",
        "ggml-quants.c dequantize_row_q5_K", [16, 17];
    Q6_K [ql U8 128, qh U8 64, scales I8 16, d F16 1]
        "d * scales[i/16] * (q - 32), q of 6 bits", "ggml-quants.c dequantize_row_q6_K", [18];
    Q8_K [d F32 1, qs I8 256, bsums I16 16]
        "d * q, q signed, of 8 bits", "ggml-quants.c dequantize_row_q8_K", [];
    IQ2_XXS [d F16 1,
        qs U8 4, signs U32 1, qs U8 4, signs U32 1, qs U8 4, signs U32 1, qs U8 4, signs U32 1,
        qs U8 4, signs U32 1, qs U8 4, signs U32 1, qs U8 4, signs U32 1, qs U8 4, signs U32 1]
        "d * (0.5 + s[i/32]) * 0.25 * grid * sign, s of 4 bits, q of 8 bits for 8 elements",
        "ggml-quants.c dequantize_row_iq2_xxs", [19];
    IQ2_XS [d F16 1, qs U16 32, scales U8 8]
        "d * (0.5 + s[i/16]) * 0.25 * grid * sign, s of 4 bits, q of 9 bits for 8 elements",
        "ggml-quants.c dequantize_row_iq2_xs", [20, 28];
    IQ3_XXS [d F16 1, qs U8 64, signs U32 8]
        "d * (0.5 + s[i/32]) * 0.5 * grid * sign, s of 4 bits, q of 8 bits for 4 elements",
        "ggml-quants.c dequantize_row_iq3_xxs", [23];
    IQ1_S [d F16 1, qs U8 32, qh U16 8]
        "d * (2 * s[i/32] + 1) * (grid + delta), s of 3 bits, delta 1/8 or -1/8, q of 11 bits for 8 elements",
        "ggml-quants.c dequantize_row_iq1_s", [24];
    IQ4_NL [d F16 1, qs U8 16]
        "d * k4[q], q of 4 bits", "ggml-quants.c dequantize_row_iq4_nl", [25];
    IQ3_S [d F16 1, qs U8 64, qh U8 8, signs U8 32, scales U8 4]
        "d * (1 + 2 * s[i/32]) * grid * sign, s of 4 bits, q of 9 bits for 4 elements",
        "ggml-quants.c dequantize_row_iq3_s", [22, 26, 27];
    IQ2_S [d F16 1, qs U8 32, signs U8 32, qh U8 8, scales U8 8]
        "d * (0.5 + s[i/16]) * 0.25 * grid * sign, s of 4 bits, q of 10 bits for 8 elements",
        "ggml-quants.c dequantize_row_iq2_s", [29];
    IQ4_XS [d F16 1, scales_h U16 1, scales_l U8 4, qs U8 128]
        "d * (s[i/32] - 32) * k4[q], s of 6 bits, q of 4 bits",
        "ggml-quants.c dequantize_row_iq4_xs", [30];
    I8 [value I8 1] "value", "two's complement", [];
    I16 [value I16 1] "value", "two's complement", [];
    I32 [value I32 1] "value", "two's complement", [];
    I64 [value I64 1] "value", "two's complement", [];
    F64 [value F64 1] "value", "IEEE 754 binary64", [];
    IQ1_M [qs U8 32, qh U8 16, scales U16 4]
        "d * (2 * s[i/16] + 1) * (grid + delta), d in the upper 4 bits of each of scales, s of 3 bits, delta 1/8 or -1/8, q of 11 bits for 8 elements",
        "ggml-quants.c dequantize_row_iq1_m", [31];
    BF16 [value Bf16 1] "value", "the upper half of an IEEE 754 binary32", [32];
    TQ1_0 [qs U8 48, qh U8 4, d F16 1]
        "d * (t - 1), t a ternary digit, five in a byte of qs and four in a byte of qh",
        "ggml-quants.c dequantize_row_tq1_0", [36];
    TQ2_0 [qs U8 64, d F16 1]
        "d * (q - 1), q of 2 bits", "ggml-quants.c dequantize_row_tq2_0", [37];
    MXFP4 [e E8m0 1, qs U8 16]
        "2^(e - 128) * e2m1[q], q of 4 bits", "ggml-quants.c dequantize_row_mxfp4", [38];
    NVFP4 [d Ue4m3 4, qs U8 32]
        "d[i/16] * 0.5 * e2m1[q], q of 4 bits", "ggml-quants.c dequantize_row_nvfp4", [39];
    Q1_0 [d F16 1, qs U8 16]
        "d if q else -d, q of 1 bit", "ggml-quants.c dequantize_row_q1_0", [40];
    Q2_0 [d F16 1, qs U8 16]
        "d * (q - 1), q of 2 bits", "ggml-quants.c dequantize_row_q2_0", [41];
}

#[cfg(test)]
mod tests;
