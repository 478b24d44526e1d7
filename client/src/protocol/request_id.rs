//! The IDs of requests, which relate what a client did to what the daemon logs about it.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::Serialize;

/// The header of a request and its response that has the ID.
pub const REQUEST_ID_HEADER: &str = "x-request-id";

/// The longest ID, in bytes: a UUID or two fit, and a line of the log stays readable.
pub const MAX_REQUEST_ID_BYTES: usize = 64;

/// The ID of a request: letters, digits, `.`, `-` and `_`, so that it needs no quotes in any log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct RequestId(String);

impl RequestId {
    /// The ID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RequestId {
    type Err = RequestIdError;

    fn from_str(text: &str) -> Result<Self, RequestIdError> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        if text.is_empty() || text.len() > MAX_REQUEST_ID_BYTES || !text.bytes().all(is_allowed) {
            return Err(RequestIdError { length: text.len() });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The text is not a request ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "request ID: expected 1 to {MAX_REQUEST_ID_BYTES} letters, digits, `.`, `-` and `_`, found {length} bytes"
)]
pub struct RequestIdError {
    length: usize,
}

/// Makes IDs: all from one value begin with the same random digits, followed by a number.
#[derive(Debug)]
pub struct RequestIds {
    prefix: String,
    count: AtomicU64,
}

impl Default for RequestIds {
    fn default() -> Self {
        // The keys of `RandomState` come from the kernel, but one process may use related keys for several values.
        let random = RandomState::new().hash_one((std::process::id(), SystemTime::now()));
        Self { prefix: format!("{:012x}", random >> 16), count: AtomicU64::new(0) }
    }
}

impl RequestIds {
    /// Another ID.
    pub fn next_id(&self) -> RequestId {
        let number = self.count.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        RequestId(format!("{}.{number}", self.prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_one_source_are_related_and_those_of_two_differ() {
        let (ids, others) = (RequestIds::default(), RequestIds::default());
        let (first, second) = (ids.next_id(), ids.next_id());
        assert_eq!(first.as_str().strip_suffix(".1"), second.as_str().strip_suffix(".2"));
        assert_ne!(first, others.next_id());
        assert_eq!(first.to_string().parse(), Ok(first));
    }

    #[test]
    fn texts_that_could_corrupt_a_log_are_not_ids() {
        let long = "a".repeat(MAX_REQUEST_ID_BYTES + 1);
        for text in ["", "a b", "a\n", "a\"", "é", "a/b", "a=b", &long] {
            assert!(text.parse::<RequestId>().is_err(), "{text:?}");
        }
        let uuid = "123e4567-e89b-12d3-a456-426614174000";
        assert_eq!(uuid.parse::<RequestId>().unwrap().as_str(), uuid);
    }
}
