//! The host for which credentials are configured.

use std::fmt;
use std::str::FromStr;

use blobd_store_format::host;
use blobd_store_format::source::without_userinfo;

use super::CredentialError;
use crate::origin::{Origin, Registry};

/// A registry's host, and its port unless that is 443. All names of one service compare equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegistryHost(String);

impl RegistryHost {
    /// The host of an origin. With plain HTTP the port is included even if it is 80, so credentials are never
    /// shared with the same host over TLS.
    pub(crate) fn from_origin(origin: &Origin) -> Self {
        let host = origin.host();
        match (origin.is_https(), origin.port()) {
            (true, 443) => Self(host::canonical(host).to_owned()),
            (_, port) => Self(format!("{host}:{port}")),
        }
    }

    /// The host as written in the credential file.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn is_hugging_face(&self) -> bool {
        self.0 == HUGGING_FACE
    }
}

impl FromStr for RegistryHost {
    type Err = CredentialError;

    /// Parses `HOST[:PORT]`. A scheme and a path, as in Docker's configuration, are ignored.
    fn from_str(text: &str) -> Result<Self, CredentialError> {
        let host = text.split_once("://").map_or(text, |(_scheme, rest)| rest);
        let host = host.split('/').next().unwrap_or_default();
        let registry = Registry::at(&format!("https://{host}"));
        registry
            .map(|registry| Self::from_origin(registry.origin()))
            .ok_or_else(|| CredentialError::Host { found: without_userinfo(text).into_owned() })
    }
}

impl fmt::Display for RegistryHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

const HUGGING_FACE: &str = "hf.co";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_service_are_one_host() {
        for (text, name) in [
            ("Registry.Example", "registry.example"),
            ("registry.example:443", "registry.example"),
            ("registry.example:5000", "registry.example:5000"),
            ("https://index.docker.io/v1/", "docker.io"),
            ("registry-1.docker.io", "docker.io"),
            ("huggingface.co", "hf.co"),
            ("www.huggingface.co", "hf.co"),
            ("https://ollama.com/x", "registry.ollama.ai"),
            ("[::1]:5000", "[::1]:5000"),
        ] {
            assert_eq!(text.parse::<RegistryHost>().unwrap().as_str(), name, "{text}");
        }
        for text in ["", "a b", "user@host", "https://", "host?x", "host#x"] {
            assert!(text.parse::<RegistryHost>().is_err(), "{text}");
        }
    }

    #[test]
    fn plain_http_is_another_host() {
        let host = |url: &str| RegistryHost::from_origin(&Origin::from_url(&url.parse().unwrap()).unwrap()).0;
        assert_eq!(host("https://r.example/"), "r.example");
        assert_eq!(host("http://r.example/"), "r.example:80");
        assert_eq!(host("http://huggingface.co/"), "huggingface.co:80");
    }
}
