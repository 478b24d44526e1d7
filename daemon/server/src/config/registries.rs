//! Hosts of registries, and the base URLs of their mirrors.

use std::borrow::Cow;

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
    pub(super) urls: Vec<PeerUrl>,
}

/// The base URL of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct PeerUrl(#[serde(deserialize_with = "values::required::<Mirrors, _>")] pub(super) String);

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
    fn no_error_has_a_password() {
        for (text, part) in [
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
