//! Text that cannot be printed by accident.

use std::fmt;

use hyper::header::HeaderValue;

/// A password or a token. It cannot be printed, compared or serialised; [`Secret::reveal`] gives the text.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Wraps a text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for use in a request or a file, never in a message.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// A header that `Debug` does not print; `None` if the text contains characters that are not allowed in a header.
pub(crate) fn hidden_header(text: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::try_from(text).ok()?;
    header.set_sensitive(true);
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret:?} {:#?}", Some(&secret)).matches("hidden").count(), 2);
        assert!(!format!("{:?}", hidden_header("Basic hunter2")).contains("hunter2"));
        assert!(hidden_header("a\r\nX-Injected: b").is_none());
        assert_eq!(secret.reveal(), "hunter2");
    }
}
