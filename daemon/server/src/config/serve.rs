//! The section `[serve]`: models for other machines.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::host::canonical;
use blobd_store_format::name_pattern::NamePattern;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::Refusal;
use super::members::{Named, check_names, value};
use super::registries::is_host;
use super::sections::{in_range, number};
use super::values::{self, Value};
use crate::names::Names;
use crate::offer::{Offer, Reader, Tokens};
use crate::principal::Principal;
use crate::tls::{Tls, TlsError};
use crate::user_set::{Member, NameOrNumber};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ServeConfig {
    #[serde(deserialize_with = "values::optional::<TcpAddress, _>")]
    pub(crate) listen: Option<SocketAddr>,
    hub: bool,
    hosts: Vec<OwnHost>,
    models: Vec<NamePattern>,
    user: Option<Named>,
    upstream: Vec<UpstreamHost>,
    upstream_user: Option<Named>,
    #[serde(deserialize_with = "values::optional::<values::AbsolutePath, _>")]
    tokens: Option<PathBuf>,
    #[serde(deserialize_with = "values::optional::<values::AbsolutePath, _>")]
    certificate: Option<PathBuf>,
    #[serde(deserialize_with = "values::optional::<values::AbsolutePath, _>")]
    key: Option<PathBuf>,
    pub(crate) max_connections: usize,
    pub(crate) max_connections_per_client: usize,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            listen: None,
            hub: false,
            hosts: Vec::new(),
            models: "*".parse().into_iter().collect(),
            user: None,
            upstream: Vec::new(),
            upstream_user: None,
            tokens: None,
            certificate: None,
            key: None,
            max_connections: 256,
            max_connections_per_client: 64,
        }
    }
}

struct TcpAddress;

impl Value for TcpAddress {
    type Output = SocketAddr;

    const EXPECTED: &'static str = "an address with a port, such as \"127.0.0.1:5000\" or \"0.0.0.0:5000\"";

    fn from_text(text: &str) -> Option<SocketAddr> {
        text.parse().ok()
    }
}

/// A name of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
struct OwnHost(#[serde(deserialize_with = "values::required::<OwnHost, _>")] String);

impl Value for OwnHost {
    type Output = String;

    const EXPECTED: &'static str = "a name without a port, such as \"models.example.org\"";

    fn from_text(text: &str) -> Option<String> {
        (is_host(text) && !text.contains(':')).then(|| text.to_owned())
    }
}

/// A registry from which models are pulled when they are requested.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
struct UpstreamHost(#[serde(deserialize_with = "values::required::<UpstreamHost, _>")] String);

impl Value for UpstreamHost {
    type Output = String;

    const EXPECTED: &'static str = "a host, such as \"registry.ollama.ai\" or \"registry.example.org:5000\"";

    fn from_text(text: &str) -> Option<String> {
        is_host(text).then(|| text.to_owned())
    }
}

impl ServeConfig {
    pub(super) fn check(&self, names: impl Fn() -> Names) -> Result<(), Refusal> {
        // Each connection takes up to two chunks of memory.
        for (key, connections) in [
            ("serve.max_connections", self.max_connections),
            ("serve.max_connections_per_client", self.max_connections_per_client),
        ] {
            in_range(key, Some(connections as u64), 1..=4096, &number)?;
        }
        match (&self.certificate, &self.key) {
            (Some(_), None) => {
                return Err(Refusal::new("serve.certificate", "expected serve.key beside it".to_owned()));
            }
            (None, Some(_)) => {
                return Err(Refusal::new("serve.key", "expected serve.certificate beside it".to_owned()));
            }
            _ => {}
        }
        let users = [("serve.user", &self.user), ("serve.upstream_user", &self.upstream_user)];
        for (key, user) in users {
            let Some(Named { member, start }) = user else { continue };
            if !matches!(member, Member::User(_)) {
                let what =
                    format!("expected the name or the number of a user, found {:?}", member.to_string());
                return Err(Refusal { start: Some(*start), ..Refusal::new(key, what) });
            }
            check_names([(key, &user.iter().cloned().collect())].into_iter(), &names)?;
        }
        Ok(())
    }

    pub(super) fn values(&self) -> [(&'static str, Json); 12] {
        let path =
            |path: &Option<PathBuf>| path.as_ref().map_or(Json::Null, |path| json!(path.to_string_lossy()));
        let user = |user: &Option<Named>| user.as_ref().map_or(Json::Null, |user| value(&user.member));
        [
            ("serve.listen", self.listen.map_or(Json::Null, |address| json!(address.to_string()))),
            ("serve.hub", json!(self.hub)),
            ("serve.hosts", self.hosts.iter().map(|host| json!(host.0)).collect()),
            ("serve.models", json!(self.models)),
            ("serve.user", user(&self.user)),
            ("serve.upstream", self.upstream.iter().map(|host| json!(host.0)).collect()),
            ("serve.upstream_user", user(&self.upstream_user)),
            ("serve.tokens", path(&self.tokens)),
            ("serve.certificate", path(&self.certificate)),
            ("serve.key", path(&self.key)),
            ("serve.max_connections", json!(self.max_connections)),
            ("serve.max_connections_per_client", json!(self.max_connections_per_client)),
        ]
    }

    /// Keeps the values of `running` for all keys that need a restart.
    pub(super) fn with_fixed_of(self, running: &Self) -> Self {
        let Self { listen, max_connections, max_connections_per_client, .. } = *running;
        Self { listen, max_connections, max_connections_per_client, ..self }
    }

    /// Reads the files of tokens and of the certificate, and uses the name service if a user is named. `place_of` tells where a key is set.
    pub(super) fn offer(&self, place_of: impl Fn(&str) -> String) -> Result<Offer, ErrorBody> {
        let read = |path: &PathBuf| {
            Tokens::read(path).map_err(|error| {
                let (place, path) = (place_of("serve.tokens"), path.display());
                ErrorBody::new(ErrorCode::InvalidRequest, format!("{place}: {path}: {error}")).with_hint(
                    "the file belongs to the daemon's user or root; each of its lines is NAME:TOKEN",
                )
            })
        };
        Ok(Offer {
            models: self.models.clone(),
            reader: user(&self.user).map_or(Reader::EveryUser, Reader::User),
            upstream: self.upstream.iter().map(|host| canonical(&host.0).to_owned()).collect(),
            puller: user(&self.upstream_user),
            hub: self.hub,
            hosts: self.hosts.iter().map(|host| host.0.clone()).collect(),
            tokens: self.tokens.as_ref().map(read).transpose()?,
            tls: self.tls(&place_of)?,
        })
    }

    fn tls(&self, place_of: impl Fn(&str) -> String) -> Result<Option<Tls>, ErrorBody> {
        let (Some(certificate), Some(key)) = (&self.certificate, &self.key) else { return Ok(None) };
        let wrong = |setting: &str, path: &Path| {
            let at = format!("{}: {}", place_of(setting), path.display());
            move |error: TlsError| {
                let body = ErrorBody::new(ErrorCode::InvalidRequest, format!("{at}: {error}"));
                body.with_hint("serve.certificate is a PEM file with the chain of certificates, and serve.key one with the key")
            }
        };
        let certificates =
            Tls::read_certificates(certificate).map_err(wrong("serve.certificate", certificate))?;
        let read = Tls::read_key(key).map_err(wrong("serve.key", key))?;
        Tls::new(certificates, read).map(Some).map_err(wrong("serve.key", key))
    }
}

fn user(named: &Option<Named>) -> Option<Principal> {
    let Some(Named { member: Member::User(user), .. }) = named else { return None };
    let names = Names::system();
    let uid = match user {
        NameOrNumber::Number(uid) => Some(*uid),
        NameOrNumber::Name(name) => names.uid_of(name).ok(),
    };
    // A name that is not known any more means nobody, as in the lists of users.
    let Some(uid) = uid else { return Some(Principal::unknown()) };
    Some(Principal { uid, ..Principal::unknown() }.with_groups_of(&names))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("c"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_is_served_by_default_and_then_all_models() {
        let config = parse("").unwrap();
        assert_eq!(config.serve, ServeConfig::default());
        assert!(config.serve.listen.is_none());
        let offer = parse("[serve]\nlisten = \"127.0.0.1:5000\"").unwrap().offer().unwrap();
        assert!(offer.includes(&"hf.co/Org/Model:Q4".parse().unwrap()));
        assert!(matches!(offer.reader, Reader::EveryUser) && offer.tokens.is_none());
    }

    #[test]
    fn models_are_patterns_and_users_names_or_numbers() {
        let text = "[serve]\nmodels = [\"llama3\", \"hf.co/Org/*\"]\nuser = 7\nhosts = [\"a.example\"]";
        let offer = parse(text).unwrap().offer().unwrap();
        let includes = |name: &str| offer.includes(&name.parse().unwrap());
        assert!(includes("llama3:8b") && includes("hf.co/org/x:1") && !includes("llama3.2:1b"));
        assert!(matches!(&offer.reader, Reader::User(user) if user.uid == 7));
        for (text, error) in [
            ("listen = \"localhost:5000\"", "serve.listen: expected an address with a port"),
            ("hosts = [\"a.example:5000\"]", "serve.hosts: expected a name without a port"),
            ("user = \"@staff\"", "serve.user: expected the name or the number of a user"),
            ("user = \"no-such-user\"", "serve.user: no such user"),
            ("upstream = [\"https://registry.ollama.ai\"]", "serve.upstream: expected a host"),
            ("upstream_user = \"@staff\"", "serve.upstream_user: expected the name or the number of a user"),
            ("max_connections = 0", "serve.max_connections: expected 1 to 4096, found 0"),
            ("tokens = \"here\"", "serve.tokens: expected an absolute path"),
        ] {
            let found = parse(&format!("[serve]\n{text}")).unwrap_err();
            assert!(found.contains(error), "{text}: {found}");
        }
    }

    #[test]
    fn error_about_the_file_of_tokens_names_the_line_of_the_setting() {
        let error = parse("\n[serve]\ntokens = \"/nonexistent\"").unwrap().offer().unwrap_err();
        assert!(error.message.starts_with("c:3: serve.tokens: /nonexistent: cannot read: "), "{error}");
    }
}
