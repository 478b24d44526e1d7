//! Metadata keys as text.

use std::borrow::Cow;

/// A metadata key as text. Different keys have different texts: in keys that are not UTF-8 or contain a
/// backslash, each invalid byte is written as `\xff` and each backslash as `\\`. The text may hold control
/// characters.
#[must_use]
pub fn key_text(key: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(key) {
        Ok(text) if !text.contains('\\') => Cow::Borrowed(text),
        _ => Cow::Owned(key.utf8_chunks().map(|chunk| escaped(chunk.valid(), chunk.invalid())).collect()),
    }
}

fn escaped(valid: &str, invalid: &[u8]) -> String {
    invalid.iter().fold(valid.replace('\\', "\\\\"), |text, byte| format!("{text}\\x{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ordinary_keys_are_unchanged() {
        assert_eq!(key_text(b"general.architecture"), "general.architecture");
        assert_eq!(key_text("größe".as_bytes()), "größe");
    }

    #[test]
    fn bytes_that_are_not_utf8_stay_apart() {
        assert_eq!(key_text(b"a\xff"), "a\\xff");
        assert_eq!(key_text(b"a\xfe"), "a\\xfe");
        assert_eq!(key_text(b"a\\xff"), "a\\\\xff");
    }

    proptest! {
        #[test]
        fn different_keys_have_different_texts(
            one in proptest::collection::vec(prop_oneof![Just(b'\\'), Just(b'x'), Just(b'f'), any::<u8>()], 0..8),
            two in proptest::collection::vec(prop_oneof![Just(b'\\'), Just(b'x'), Just(b'f'), any::<u8>()], 0..8),
        ) {
            prop_assert_eq!(key_text(&one) == key_text(&two), one == two);
        }
    }
}
