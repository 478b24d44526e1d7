//! Hosts of registries, and the base URLs of their mirrors.

use std::borrow::Cow;
use std::collections::BTreeMap;

use blobd_registry::RegistryPolicy;
use blobd_registry::credentials::RegistryHost;
use blobd_store_format::source::without_userinfo;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::values::{self, OneOrMore, Value};

/// A registry's host as names of models have it, with at most a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub(super) struct Host(#[serde(deserialize_with = "values::required::<Host, _>")] pub(super) String);

impl Value for Host {
    type Output = String;

    const EXPECTED: &'static str = "a host such as \"registry.example.org\" or \"10.0.0.7:5000\"";

    fn from_text(text: &str) -> Option<String> {
        is_host(text).then(|| text.to_owned())
    }

    fn shown(text: &str) -> Cow<'_, str> {
        without_userinfo(text)
    }
}

pub(super) fn is_host(text: &str) -> bool {
    !text.contains('/') && text.parse::<RegistryHost>().is_ok()
}

/// The base URLs of a host's mirrors, in their order; at least one. They name no user: passwords belong into the file of
/// `blobd login`, which others cannot read.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct Mirrors(
    #[serde(deserialize_with = "values::one_or_more::<Mirrors, _>")] pub(super) OneOrMore<String>,
);

impl Value for Mirrors {
    type Output = String;

    const EXPECTED: &'static str =
        "a URL such as \"https://mirror.example.org\" without a user, a query or a fragment";
    const NOUN: &'static str = "URL";

    fn from_text(text: &str) -> Option<String> {
        RegistryPolicy::is_base_url(text).then(|| text.to_owned())
    }

    fn shown(text: &str) -> Cow<'_, str> {
        without_userinfo(text)
    }
}

impl Mirrors {
    pub(super) fn value(&self) -> Json {
        match &self.0 {
            OneOrMore::One(only) => json!(only),
            OneOrMore::More(all) => json!(all),
        }
    }
}

/// The machines that are asked first, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct PeersConfig {
    pub(super) urls: Vec<ServerUrl>,
}

/// The base URL of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub(super) struct ServerUrl(#[serde(deserialize_with = "values::required::<Mirrors, _>")] pub(super) String);

/// Headers that are added to the requests to a server, by its base URL.
pub(super) type ServerHeaders = BTreeMap<ServerUrl, BTreeMap<HeaderName, HeaderValue>>;

/// The name of a header that may be added.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub(super) struct HeaderName(
    #[serde(deserialize_with = "values::required::<HeaderName, _>")] pub(super) String,
);

impl Value for HeaderName {
    type Output = String;

    const EXPECTED: &'static str = "the name of a header such as \"X-Dragonfly-Registry\", and not one of the connection or with \
                                    credentials, which `blobd login` saves";

    fn from_text(text: &str) -> Option<String> {
        RegistryPolicy::is_header_name(text).then(|| text.to_owned())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct HeaderValue(
    #[serde(deserialize_with = "values::required::<HeaderValue, _>")] pub(super) String,
);

impl Value for HeaderValue {
    type Output = String;

    const EXPECTED: &'static str = "the text of a header, without control characters";

    fn from_text(text: &str) -> Option<String> {
        RegistryPolicy::is_header_value(text).then(|| text.to_owned())
    }
}

/// The headers as plain text, by the base URL.
pub(super) fn headers_as_text(headers: &ServerHeaders) -> BTreeMap<String, BTreeMap<String, String>> {
    let fields = |own: &BTreeMap<HeaderName, HeaderValue>| {
        own.iter().map(|(name, value)| (name.0.clone(), value.0.clone())).collect()
    };
    headers.iter().map(|(url, own)| (url.0.clone(), fields(own))).collect()
}

/// The text without the users and passwords in its URLs.
pub(super) fn without_passwords(text: &str) -> String {
    let shown = |word| if str::contains(word, "://") { without_userinfo(word) } else { Cow::Borrowed(word) };
    text.split(' ').map(shown).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    fn error(text: &str) -> String {
        Config::parse(Path::new("c"), text).unwrap_err().to_string()
    }

    #[test]
    fn wrong_hosts_and_mirrors_are_named_with_their_place() {
        let (host, url) = ("a host such as \"registry.example.org\"", "a URL such as \"https://mirror");
        for (text, message) in [
            (
                "insecure_registries = [\"lan:5000\", \"http://x/y\"]",
                format!("c:1:36: insecure_registries: expected {host}"),
            ),
            ("insecure_registries = [5]", format!("c:1:24: insecure_registries: expected {host}")),
            ("[mirrors]\n\"bad host\" = \"http://m\"", format!("c:2:1: mirrors: expected {host}")),
            ("[mirrors]\nx = \"ftp://y\"", format!("c:2:5: mirrors.x: expected {url}")),
            ("[mirrors]\nx = [\"http://m\", \"http://m?q\"]", format!("c:2:18: mirrors.x: expected {url}")),
            (
                "[mirrors]\nx = []",
                "c:2:5: mirrors.x: expected at least one URL, found an empty list".to_owned(),
            ),
            ("[mirrors]\nx = 1", "c:2:5: mirrors.x: expected a URL or a list of URLs, found 1".to_owned()),
        ] {
            let found = error(text);
            assert!(found.starts_with(&message), "{text}: {found}");
        }
    }

    #[test]
    fn wrong_headers_are_named_with_their_place() {
        let (url, name) = ("a URL such as", "the name of a header such as");
        for (text, message) in [
            ("[headers.x]\na = \"b\"", format!("c:1:10: headers: expected {url}")),
            ("[headers.\"http://m\"]\nCookie = \"b\"", format!("c:2:1: headers.http://m: expected {name}")),
            (
                "[headers.\"http://m\"]\na = \"b\\n\"",
                "c:2:5: headers.http://m.a: expected the text of a header".to_owned(),
            ),
        ] {
            let found = error(text);
            assert!(found.starts_with(&message), "{text}: {found}");
        }
    }

    #[test]
    fn no_error_has_a_password() {
        for (text, part) in [
            ("[headers.\"https://me:s3cret@m.example\"]", "found \"https://…@m.example\""),
            ("[mirrors]\nx = \"https://me:s3cret@m.example/p\"", "found \"https://…@m.example/p\""),
            ("[mirrors]\nx = [\"https://me:s3/cret@m\"]", "\"https://…@m\""),
            ("[mirrors]\n\"me:s3cret@x\" = \"http://m\"", "\"…@x\""),
            ("insecure_registries = [\"me:s3cret@x:1\"]", "\"…@x:1\""),
            ("ca_files = [\"https://me:s3cret@x/ca.pem\"]", "\"https://…@x/ca.pem\""),
            ("[credentials]\ninsecure_hosts = [\"me:s3cret@x:1\"]", "\"…@x:1\""),
            ("[credentials]\nollama_key_hosts = [\"https://me:s3cret@x\"]", "\"https://…@x\""),
            ("[credentials.token_services]\nx = \"me:s3cret@x\"", "\"…@x\""),
        ] {
            let found = error(text);
            assert!(
                found.contains(part) && !found.contains("s3") && !found.contains("cret"),
                "{text}: {found}"
            );
        }
    }
}
