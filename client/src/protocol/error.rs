//! Errors in the protocol: a stable code, a message, an optional hint.

use std::fmt;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Deserializer, Serialize};

/// An error from the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The kind of failure: see the table of codes.
    ///
    /// A code that this version does not know is parsed as [`ErrorCode::Internal`].
    #[serde(deserialize_with = "known_or_internal")]
    pub code: ErrorCode,
    /// What happened, for people: in lower case, the subject first.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The ID of the request that failed, under which the daemon's log and its audit log have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

/// One of several models or files of a request that failed; the request went on with the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedItem {
    /// The model or file, as it was given.
    pub name: String,
    /// Why it failed.
    pub error: ErrorBody,
}

impl ErrorBody {
    /// An error without a hint.
    pub fn new(code: ErrorCode, message: impl fmt::Display) -> Self {
        Self { code, message: without_system_numbers(message.to_string()), hint: None, request: None }
    }

    /// Adds a hint: what to do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }
}

impl fmt::Display for ErrorBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for ErrorBody {}

/// The body of a response that is an error: `{"error":{"code":…,"message":…}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// A description of the failure.
    pub error: ErrorBody,
}

/// Defines the codes: `Name: "name in JSON", HTTP status, exit code of the command line;`
macro_rules! error_codes {
    ($($(#[$doc:meta])* $code:ident: $name:literal, $http_status:literal, $exit_code:literal;)*) => {
        /// A kind of failure. Each has one HTTP status and one exit code of the command line.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum ErrorCode {
            $($(#[$doc])* #[serde(rename = $name)] $code,)*
        }

        impl ErrorCode {
            /// All codes of this version.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$code),*];

            /// Its name in JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$code => $name,)*
                }
            }

            /// The HTTP status of a response with this code.
            pub const fn http_status(self) -> u16 {
                match self {
                    $(Self::$code => $http_status,)*
                }
            }

            /// The exit code of the command line.
            pub const fn exit_code(self) -> u8 {
                match self {
                    $(Self::$code => $exit_code,)*
                }
            }
        }
    };
}

error_codes! {
    /// The request is malformed: a wrong name, an unknown route, a body that is not JSON.
    InvalidRequest: "invalid_request", 400, 2;
    /// The file or manifest is malformed; nothing of it was kept.
    InvalidInput: "invalid_input", 422, 1;
    /// No such model, tensor or tag.
    NotFound: "not_found", 404, 3;
    /// A resource is in use: by another daemon, or by too many sessions.
    Busy: "busy", 409, 4;
    /// Stored data is damaged.
    Corrupt: "corrupt", 500, 5;
    /// No space is left for the data to be written.
    NoSpace: "no_space", 507, 6;
    /// The data would be charged to the caller, whose quota has too little space left.
    OverQuota: "over_quota", 507, 6;
    /// Nothing can be added or removed, because a sync has failed.
    ReadOnly: "read_only", 503, 1;
    /// The caller may not do this.
    Denied: "denied", 403, 7;
    /// A rule of the daemon's policy denies the model to the caller.
    DeniedByPolicy: "denied_by_policy", 403, 7;
    /// A registry failed, sent wrong data or could not be reached.
    Upstream: "upstream", 502, 1;
    /// No daemon answers where one is expected.
    Unavailable: "unavailable", 503, 8;
    /// The daemon itself failed.
    Internal: "internal", 500, 1;
}

/// Removes ` (os error 2)` and the like, which the standard library appends to the text of the system.
fn without_system_numbers(mut message: String) -> String {
    const START: &str = " (os error ";
    let mut from = 0;
    while let Some(found) = message.get(from..).and_then(|rest| rest.find(START)) {
        let start = from + found;
        let digits = start + START.len();
        let rest = message.get(digits..).unwrap_or_default();
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if end > 0 && rest.get(end..).is_some_and(|rest| rest.starts_with(')')) {
            message.replace_range(start..digits + end + 1, "");
        }
        from = start + 1;
    }
    message
}

fn known_or_internal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ErrorCode, D::Error> {
    let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
    let known: Result<_, serde::de::value::Error> = ErrorCode::deserialize(text.as_ref().into_deserializer());
    Ok(known.unwrap_or(ErrorCode::Internal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_survives_a_round_trip_through_json() {
        let error = ErrorBody::new(ErrorCode::NoSpace, "no space").with_hint("run gc");
        let json = serde_json::to_string(&ErrorResponse { error: error.clone() }).unwrap();
        assert_eq!(json, r#"{"error":{"code":"no_space","message":"no space","hint":"run gc"}}"#);
        assert_eq!(serde_json::from_str::<ErrorResponse>(&json).unwrap().error, error);
        assert_eq!(error.to_string(), "no space; run gc");
    }

    #[test]
    fn message_has_the_text_of_the_system_without_its_number() {
        let error = std::io::Error::from_raw_os_error(2);
        let body = ErrorBody::new(ErrorCode::NotFound, format!("a: {error}; b: {error}"));
        assert_eq!(body.message, "a: No such file or directory; b: No such file or directory");
        for text in ["x (os error )", "x (os error 2", "x (os error 2x)", "é (os error "] {
            assert_eq!(ErrorBody::new(ErrorCode::NotFound, text).message, text);
        }
    }

    #[test]
    fn unknown_code_is_parsed_as_internal() {
        let error: ErrorBody = serde_json::from_str(r#"{"code":"later","message":"x"}"#).unwrap();
        assert_eq!(error.code, ErrorCode::Internal);
    }
}
