//! Headers that the configuration adds to every request to a server, such as those by which Dragonfly chooses a registry.

use std::collections::BTreeMap;

use blobd_store_format::source::without_userinfo;
use hyper::HeaderMap;
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION,
    TE, TRANSFER_ENCODING, UPGRADE,
};
use url::Url;

use super::error::{RegistryError, Result};
use super::origin::{Origin, Registry};

/// Would change what a request means to the connection, or carry a secret, which `blobd login` keeps.
const REFUSED: [HeaderName; 9] = [
    AUTHORIZATION,
    CONNECTION,
    CONTENT_LENGTH,
    COOKIE,
    HOST,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// The name of a header that the configuration may add.
pub(super) fn name(text: &str) -> Option<HeaderName> {
    let name = HeaderName::from_bytes(text.as_bytes()).ok()?;
    (!REFUSED.contains(&name)).then_some(name)
}

pub(super) fn value(text: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(text).ok()
}

#[derive(Debug, Default)]
pub(super) struct ServerHeaders(Vec<(Origin, HeaderMap)>);

impl ServerHeaders {
    /// `configured` has the names and values of headers, by the base URL of each server.
    pub(super) fn new(configured: &BTreeMap<String, BTreeMap<String, String>>) -> Result<Self> {
        let unusable = |what: &str| RegistryError::Header { found: without_userinfo(what).into_owned() };
        let mut all = Vec::new();
        for (base, listed) in configured {
            let server = Registry::at(base).ok_or_else(|| unusable(base))?;
            let mut headers = HeaderMap::new();
            for (field, text) in listed {
                let pair = name(field).zip(value(text));
                headers.extend([pair.ok_or_else(|| unusable(field))?]);
            }
            all.push((server.origin().clone(), headers));
        }
        Ok(Self(all))
    }

    /// Adds those of the URL's server. What the request itself says stays.
    pub(super) fn add_to(&self, headers: &mut HeaderMap, url: &Url) {
        if self.0.is_empty() {
            return;
        }
        let origin = Origin::from_url(url);
        let own = self.0.iter().filter(|(server, _)| Some(server) == origin.as_ref());
        for (name, value) in own.flat_map(|(_, own)| own) {
            headers.entry(name).or_insert_with(|| value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::{ACCEPT, RANGE};

    use super::*;

    #[test]
    fn headers_are_for_their_server_alone_and_replace_nothing() {
        let listed = [("X-Dragonfly-Registry", "https://r.example"), ("accept", "*/*")];
        let listed = listed.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let configured = [("http://127.0.0.1:4001/base".to_owned(), listed.into())].into();
        let added = ServerHeaders::new(&configured).unwrap();
        let sent = |url: &str| {
            let mut headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static("text/plain"))]);
            added.add_to(&mut headers, &Url::parse(url).unwrap());
            headers
        };
        let own = sent("http://127.0.0.1:4001/v2/?ns=r.example");
        assert_eq!(
            (own.len(), &own["x-dragonfly-registry"]),
            (2, &HeaderValue::from_static("https://r.example"))
        );
        assert_eq!(own[ACCEPT], "text/plain");
        for other in ["https://127.0.0.1:4001/", "http://127.0.0.1:4002/", "http://localhost:4001/"] {
            assert_eq!(sent(other).len(), 1, "{other}");
        }
    }

    #[test]
    fn headers_of_the_connection_and_of_credentials_are_refused() {
        assert_eq!(name("RANGE"), Some(RANGE));
        for refused in ["Authorization", "cookie", "Host", "Content-Length", "", "a b", "a:b", "ä"] {
            assert_eq!(name(refused), None, "{refused}");
        }
        assert!(value("a b").is_some() && value("a\r\nb: c").is_none());
    }
}
