//! The content type of a model file by its first four bytes, as Ollama names it.
//!
//! Source: `DetectContentType` in Ollama's `fs/ggml/ggml.go`, August 2025. [`crate::file_format`] is the
//! table of the formats that blobd reads; this one also names those that came before GGUF.

/// The content type of a file that starts with these bytes: `gguf` in either byte order, or one of the
/// formats before August 2023, `ggml`, `ggmf`, `ggjt` and `ggla`. `None` for any other file, and for less
/// than four bytes.
///
/// ```
/// use blobd_store_format::content_type::content_type;
///
/// assert_eq!(content_type(b"GGUF\x03\0\0\0"), Some("gguf"));
/// assert_eq!(content_type(b"tjgg"), Some("ggjt"));
/// assert_eq!(content_type(b"PK\x03\x04"), None);
/// ```
pub fn content_type(start: &[u8]) -> Option<&'static str> {
    // The formats wrote their name as a little-endian number.
    match u32::from_le_bytes(*start.first_chunk()?) {
        0x6767_6d6c => Some("ggml"),
        0x6767_6d66 => Some("ggmf"),
        0x6767_6a74 => Some("ggjt"),
        0x6767_6c61 => Some("ggla"),
        0x4655_4747 | 0x4747_5546 => Some("gguf"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_recognised_by_its_little_endian_number() {
        for (start, name) in [
            (b"lmgg", "ggml"),
            (b"fmgg", "ggmf"),
            (b"tjgg", "ggjt"),
            (b"algg", "ggla"),
            (b"GGUF", "gguf"),
            (b"FUGG", "gguf"),
        ] {
            assert_eq!(content_type(start), Some(name), "{name}");
            assert_eq!(content_type(&start[..3]), None, "{name} cut");
        }
    }

    #[test]
    fn names_in_reading_order_are_not_an_old_format() {
        for start in [&b"ggml"[..], b"ggjt", b"GGJT", b"", b"\0\0\0\0"] {
            assert_eq!(content_type(start), None, "{start:?}");
        }
    }
}
