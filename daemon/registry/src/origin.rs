//! Where requests go: origins, and the base of a registry's URLs.

use std::net::IpAddr;

use blobd_store_format::reference::{Reference, Scheme};
use hyper::Uri;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC};

/// What is escaped in a query and in a part of a path: all but RFC 3986's unreserved characters (section 2.3).
pub(super) const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Scheme, host and port: what must stay the same for a token to be sent along.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    scheme: Scheme,
    host: String,
    port: u16,
}

impl Origin {
    /// The origin of an absolute URL; none for other schemes and for a URL that names a user.
    pub(super) fn of(uri: &Uri) -> Option<Self> {
        let scheme = match uri.scheme_str()? {
            "https" => Scheme::Https,
            "http" => Scheme::Http,
            _ => return None,
        };
        if names_user(uri) {
            return None;
        }
        let host = uri.host()?.to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(match scheme {
            Scheme::Https => 443,
            Scheme::Http => 80,
        });
        (!host.is_empty()).then_some(Self { scheme, host, port })
    }

    /// Whether requests go over TLS.
    pub(super) fn is_https(&self) -> bool {
        self.scheme == Scheme::Https
    }

    /// The host without the port, in lower case.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// The port, also where it is the scheme's own.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Whether the host can be nothing but this machine. Other names may resolve to anything, and
    /// to something else the next time.
    pub(super) fn is_loopback(&self) -> bool {
        let literal = self.host.trim_start_matches('[').trim_end_matches(']');
        self.host == "localhost" || literal.parse().is_ok_and(|address: IpAddr| address.is_loopback())
    }
}

/// Whether a URL holds a user name: `https://registry.ollama.ai@evil.example/` is not what it seems.
pub(super) fn names_user(uri: &Uri) -> bool {
    uri.authority().is_some_and(|authority| authority.as_str().contains('@'))
}

/// The host and port of a URL, for messages; never its path or query.
pub(super) fn host_of(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    authority.rsplit_once('@').map_or(authority, |(_user, host)| host).to_owned()
}

/// A host that makes no URL.
#[derive(Debug)]
pub(super) struct InvalidHost {
    pub(super) host: String,
}

/// A registry as the user or the configuration names it.
#[derive(Clone, Debug)]
pub(super) struct Registry {
    base: String,
    origin: Origin,
}

impl Registry {
    /// The registry of a reference, spoken to by `scheme`.
    pub(super) fn named(reference: &Reference, scheme: Scheme) -> Result<Self, InvalidHost> {
        let (_, host) = *API_HOSTS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(reference.host()))
            .unwrap_or(&("", reference.host()));
        Self::at(&format!("{}://{host}", scheme.as_str()))
            .ok_or_else(|| InvalidHost { host: reference.host().to_owned() })
    }

    /// The registry at a base URL, which may have a path but no query.
    pub(super) fn at(base: &str) -> Option<Self> {
        let uri: Uri = base.parse().ok()?;
        let origin = Origin::of(&uri)?;
        let well_formed = uri.query().is_none() && !base.contains('#');
        well_formed.then(|| Self { base: base.trim_end_matches('/').to_owned(), origin })
    }

    /// Scheme, host and port.
    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The URL of `path` under this registry's `/v2/`.
    pub(super) fn url(&self, path: &str) -> Result<Uri, InvalidHost> {
        self.url_at(&format!("/v2/{path}"))
    }

    /// The URL of a path with a leading `/`, and of a query if it has one, under the base.
    pub(super) fn url_at(&self, path: &str) -> Result<Uri, InvalidHost> {
        let url = format!("{}{path}", self.base);
        url.parse().map_err(|_invalid| InvalidHost { host: self.origin.host.clone() })
    }
}

/// Docker Hub's name is a web site; its registry answers elsewhere.
const API_HOSTS: [(&str, &str); 2] =
    [("docker.io", "registry-1.docker.io"), ("index.docker.io", "registry-1.docker.io")];

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(url: &str) -> Option<Origin> {
        Origin::of(&url.parse().unwrap())
    }

    #[test]
    fn default_ports_and_case_do_not_make_another_origin() {
        assert_eq!(origin("https://Hf.co/a"), origin("https://hf.co:443/b?c"));
        assert_eq!(origin("http://hf.co/"), origin("http://hf.co:80/"));
        assert_ne!(origin("http://hf.co/"), origin("https://hf.co/"));
        assert_ne!(origin("https://hf.co/"), origin("https://hf.co:444/"));
        assert_ne!(origin("https://hf.co/"), origin("https://cdn.hf.co/"));
    }

    #[test]
    fn urls_without_an_origin() {
        for url in ["/path", "ftp://hf.co/", "https://hf.co@evil.example/", "https://a:b@hf.co/"] {
            assert_eq!(origin(url), None, "{url}");
        }
    }

    #[test]
    fn reference_names_its_registry() {
        for (reference, url) in [
            ("llama3:8b", "https://registry.ollama.ai/v2/x"),
            ("http://127.0.0.1:4711/a/b", "http://127.0.0.1:4711/v2/x"),
            ("docker.io/smollm2", "https://registry-1.docker.io/v2/x"),
            ("Index.docker.io/ai/smollm2", "https://registry-1.docker.io/v2/x"),
        ] {
            let reference: Reference = reference.parse().unwrap();
            let registry = Registry::named(&reference, reference.scheme()).unwrap();
            assert_eq!(registry.url("x").unwrap(), url);
        }
        let registry = Registry::named(&"lan:5000/a/b".parse().unwrap(), Scheme::Http).unwrap();
        assert_eq!(registry.url("x").unwrap(), "http://lan:5000/v2/x");
        let reference = "a:b:c/d/e".parse().unwrap();
        assert!(matches!(Registry::named(&reference, Scheme::Https), Err(InvalidHost { .. })));
    }

    #[test]
    fn mirrors_have_an_absolute_url_without_a_query() {
        assert_eq!(Registry::at("http://m/p/").unwrap().url("x").unwrap(), "http://m/p/v2/x");
        for base in
            ["", "m", "/m", "ftp://m", "http://", "http://m?q", "http://m#f", "http://u@m", "http://m m"]
        {
            assert!(Registry::at(base).is_none(), "{base}");
        }
    }
}
