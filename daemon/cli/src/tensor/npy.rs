//! The header of a numpy file.
//!
//! Source: numpy's `NEP 1` and `numpy/lib/format.py`, version 1.0.

use blobd_store_format::gguf::GgmlType;

/// How numpy calls the numbers that a tensor of this type is written as. `BF16`, which numpy lacks, and
/// quantised types are written as `float32`.
pub(super) const fn numpy_type(ggml_type: GgmlType) -> &'static str {
    match ggml_type {
        GgmlType::F16 => "<f2",
        GgmlType::F64 => "<f8",
        GgmlType::I8 => "|i1",
        GgmlType::I16 => "<i2",
        GgmlType::I32 => "<i4",
        GgmlType::I64 => "<i8",
        _ => "<f4",
    }
}

/// The size of such a number in bytes.
pub(super) const fn item_bytes(ggml_type: GgmlType) -> u64 {
    match ggml_type {
        GgmlType::I8 => 1,
        GgmlType::F16 | GgmlType::I16 => 2,
        GgmlType::F64 | GgmlType::I64 => 8,
        _ => 4,
    }
}

/// The header of an array in C order, whose slowest dimension is the first.
pub(super) fn header(numpy_type: &str, shape: &[u64]) -> Vec<u8> {
    const MAGIC: &[u8] = b"\x93NUMPY\x01\x00";
    const ALIGNMENT: usize = 64;
    let lengths: String = shape.iter().map(|length| format!("{length}, ")).collect();
    let mut text =
        format!("{{'descr': '{numpy_type}', 'fortran_order': False, 'shape': ({}), }}", lengths.trim_end());
    let start = MAGIC.len() + size_of::<u16>();
    let end = (start + text.len() + 1).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', end - start - text.len() - 1));
    text.push('\n');
    // At most 1,024 dimensions of 20 digits: never saturates.
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    [MAGIC, &length.to_le_bytes(), text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::tensor::Shape;

    use super::*;

    #[test]
    fn headers_are_python_and_end_at_a_multiple_of_64() {
        let text = |shape: &[u64]| {
            let header = header("<f4", shape);
            assert_eq!(header.len() % 64, 0);
            assert_eq!(header.last(), Some(&b'\n'));
            assert_eq!(usize::from(u16::from_le_bytes([header[8], header[9]])), header.len() - 10);
            String::from_utf8(header[10..].to_vec()).unwrap().trim_end().to_owned()
        };
        assert_eq!(text(&[2, 3]), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3,), }");
        assert_eq!(text(&[7]), "{'descr': '<f4', 'fortran_order': False, 'shape': (7,), }");
        assert_eq!(text(&[]), "{'descr': '<f4', 'fortran_order': False, 'shape': (), }");
        assert_eq!(text(&[u64::MAX; 4]).len(), 142);
        let longest = Shape::MAX_DIMENSIONS;
        assert_eq!(text(&vec![u64::MAX; longest]).matches(&u64::MAX.to_string()).count(), longest);
    }
}
