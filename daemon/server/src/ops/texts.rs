//! Which files of a model are short texts, such as its template.

use blobd_store_format::descriptor::MediaType;

/// The longest text that is read. Templates and licences are at most some 100 KiB.
pub(super) const MAX_TEXT_BYTES: u64 = 128 << 10;
/// The bytes of all texts of a model together.
const MAX_TEXTS_BYTES: u64 = 384 << 10;

/// The texts of one model, limited in total.
#[derive(Debug)]
pub(super) struct Texts {
    bytes_left: u64,
}

impl Texts {
    pub(super) const fn new() -> Self {
        Self { bytes_left: MAX_TEXTS_BYTES }
    }

    /// Whether a file of this type and size is a text to be read, and not an image or an archive.
    pub(super) fn admit(&mut self, media_type: &MediaType, size: u64) -> bool {
        let component = media_type.component();
        let is_text = matches!(
            component,
            "config" | "template" | "system" | "params" | "license" | "messages" | "json"
        );
        match self.bytes_left.checked_sub(size) {
            Some(left) if is_text && size <= MAX_TEXT_BYTES => {
                self.bytes_left = left;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_others_than_texts_are_left_out() {
        let of = |component: &str| MediaType::new(format!("application/vnd.ollama.image.{component}"));
        let mut texts = Texts::new();
        assert!(texts.admit(&of("template"), MAX_TEXT_BYTES));
        assert!(!texts.admit(&of("template"), MAX_TEXT_BYTES + 1));
        assert!(!texts.admit(&of("model"), 10));
        assert!(texts.admit(&of("license"), MAX_TEXT_BYTES) && texts.admit(&of("license"), MAX_TEXT_BYTES));
        assert!(!texts.admit(&of("license"), 1), "the total is used up");
        assert!(texts.admit(&of("system"), 0));
    }
}
