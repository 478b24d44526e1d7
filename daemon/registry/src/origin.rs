//! Origins, and the base of a registry's URLs.

use blobd_store_format::host;
use blobd_store_format::reference::{Reference, Scheme};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC};
use url::{Host, Position, Url};

/// Characters escaped in a part of a path: all but RFC 3986's unreserved characters (section 2.3).
pub(super) const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Scheme, host and port. Credentials for one origin are not sent to another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    scheme: Scheme,
    /// In lower case; an IPv6 address in brackets.
    host: String,
    port: u16,
}

impl Origin {
    /// `None` for other schemes than HTTP, and for a URL with a user name: `https://registry.ollama.ai@evil.example/` is misleading.
    pub(super) fn from_url(url: &Url) -> Option<Self> {
        let scheme = match url.scheme() {
            "https" => Scheme::Https,
            "http" => Scheme::Http,
            _ => return None,
        };
        let (host, port) = (url.host_str()?.to_owned(), url.port_or_known_default()?);
        (!names_user(url)).then_some(Self { scheme, host, port })
    }

    pub(super) fn is_https(&self) -> bool {
        self.scheme == Scheme::Https
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// The port, even if it is the scheme's default.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Whether the host is certainly this machine. Any other name may resolve to any address, and to another one the
    /// next time.
    pub(super) fn is_loopback(&self) -> bool {
        match Host::parse(&self.host) {
            Ok(Host::Domain(name)) => name == "localhost",
            Ok(Host::Ipv4(address)) => address.is_loopback(),
            Ok(Host::Ipv6(address)) => address.is_loopback(),
            Err(_unparsed) => false,
        }
    }
}

pub(super) fn names_user(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

/// The host and port of a URL, for messages; never its path or query.
pub(super) fn host_of(url: &Url) -> String {
    url[Position::BeforeHost..Position::AfterPort].to_owned()
}

#[derive(Debug)]
pub(super) struct InvalidHost {
    pub(super) host: String,
}

/// The base URL of a registry.
#[derive(Clone, Debug)]
pub(super) struct Registry {
    base: String,
    origin: Origin,
    /// The host that it is a mirror of.
    mirrored: Option<String>,
}

impl Registry {
    pub(super) fn named(reference: &Reference, scheme: Scheme) -> Result<Self, InvalidHost> {
        Self::at(&format!("{}://{}", scheme.as_str(), api_host(reference.host())))
            .ok_or_else(|| InvalidHost { host: reference.host().to_owned() })
    }

    /// The base URL may have a path but no query.
    pub(super) fn at(base: &str) -> Option<Self> {
        let url = Url::parse(base).ok()?;
        let origin = Origin::from_url(&url)?;
        let well_formed = url.query().is_none() && url.fragment().is_none();
        let base = url.as_str().trim_end_matches('/').to_owned();
        well_formed.then_some(Self { base, origin, mirrored: None })
    }

    /// A server that replaces `host`. Unless it is that host itself, each URL of its registry says the host (`?ns=`), as those
    /// of containerd do: a mirror of several registries knows by it which one is meant, and others ignore it.
    pub(super) fn mirroring(self, host: &str) -> Self {
        let mirrored = (!self.is_of(host)).then(|| host.to_owned());
        Self { mirrored, ..self }
    }

    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The host, and the port if it is not the scheme's default. Used in messages and to distinguish servers.
    pub(super) fn name(&self) -> &str {
        let authority = self.base.split_once("://").map_or(self.base.as_str(), |(_, rest)| rest);
        authority.split('/').next().unwrap_or(authority)
    }

    /// Whether this is the registry at `host` itself (a name with an optional port) and not a mirror of it.
    pub(super) fn is_of(&self, host: &str) -> bool {
        let own = Self::at(&format!("{}://{}", self.origin.scheme.as_str(), api_host(host)));
        let names_it = || host::canonical(&self.origin.host).eq_ignore_ascii_case(host::canonical(host));
        own.is_some_and(|own| own.origin == self.origin) || names_it()
    }

    /// The path and query of a URL relative to the base; `None` if the URL is not below the base.
    pub(super) fn path_of(&self, url: &Url) -> Option<String> {
        let base = Url::parse(&self.base).ok()?;
        let is_own = Origin::from_url(url).as_ref() == Some(&self.origin);
        let path = url[Position::BeforePath..Position::AfterQuery]
            .strip_prefix(base.path().trim_end_matches('/'))?;
        (is_own && path.starts_with('/')).then(|| path.to_owned())
    }

    /// The URL of `path` under this registry's `/v2/`.
    pub(super) fn url(&self, path: &str) -> Result<Url, InvalidHost> {
        let mut url = self.url_at(&format!("/v2/{path}"))?;
        if let Some(host) = &self.mirrored {
            url.query_pairs_mut().append_pair("ns", host);
        }
        Ok(url)
    }

    /// The URL below the base for a path with a leading `/` and perhaps a query.
    pub(super) fn url_at(&self, path: &str) -> Result<Url, InvalidHost> {
        let url = Url::parse(&format!("{}{path}", self.base));
        url.map_err(|_invalid| InvalidHost { host: self.origin.host.clone() })
    }
}

fn api_host(name: &str) -> &str {
    match host::canonical(name) {
        host if host.eq_ignore_ascii_case(host::DOCKER_HUB) => DOCKER_HUB_API,
        host => host,
    }
}

/// Docker Hub's name belongs to its web site; its registry has another host.
const DOCKER_HUB_API: &str = "registry-1.docker.io";

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(url: &str) -> Option<Origin> {
        Origin::from_url(&url.parse().unwrap())
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
    fn urls_of_other_schemes_or_with_credentials_have_no_origin() {
        for url in ["ftp://hf.co/", "data:x", "https://hf.co@evil.example/", "https://a:b@hf.co/"] {
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
            ("[::1]:5000/x", "http://[::1]:5000/v2/x"),
            ("localhost:5000/x", "http://localhost:5000/v2/x"),
        ] {
            let reference: Reference = reference.parse().unwrap();
            let registry = Registry::named(&reference, reference.scheme()).unwrap();
            assert_eq!(registry.url("x").unwrap().as_str(), url);
        }
        let registry = Registry::named(&"lan:5000/a/b".parse().unwrap(), Scheme::Http).unwrap();
        assert_eq!(registry.url("x").unwrap().as_str(), "http://lan:5000/v2/x");
        let reference = "a:b:c/d/e".parse().unwrap();
        assert!(matches!(Registry::named(&reference, Scheme::Https), Err(InvalidHost { .. })));
    }

    #[test]
    fn registry_of_a_host_is_distinguished_from_its_mirrors() {
        let is_of = |base: &str, host: &str| Registry::at(base).unwrap().is_of(host);
        assert!(is_of("https://registry.ollama.ai", "Registry.Ollama.ai"));
        assert!(is_of("https://registry-1.docker.io/", "docker.io"));
        assert!(is_of("https://huggingface.co", "hf.co") && is_of("https://hf.co", "huggingface.co"));
        assert!(is_of("http://127.0.0.1:4711", "127.0.0.1:4711"));
        assert!(!is_of("https://mirror.example", "registry.ollama.ai"));
        assert!(!is_of("http://127.0.0.1:4711", "127.0.0.1:4712"));
        assert!(!is_of("https://mirror.example", "a:b:c"));
    }

    #[test]
    fn mirrors_are_told_the_host_and_the_host_itself_is_not() {
        let url = |base: &str, host: &str, path: &str| {
            Registry::at(base).unwrap().mirroring(host).url(path).unwrap().to_string()
        };
        assert_eq!(url("http://m/p", "registry.ollama.ai", "x"), "http://m/p/v2/x?ns=registry.ollama.ai");
        assert_eq!(url("http://m", "r.example:5000", "x?n=1"), "http://m/v2/x?n=1&ns=r.example%3A5000");
        assert_eq!(url("https://ghcr.io", "ghcr.io", "x"), "https://ghcr.io/v2/x");
        assert_eq!(
            url("https://registry-1.docker.io", "docker.io", "x"),
            "https://registry-1.docker.io/v2/x"
        );
        let mirror = Registry::at("http://m").unwrap().mirroring("hf.co");
        assert_eq!(mirror.url_at("/api/models/x").unwrap().as_str(), "http://m/api/models/x");
    }

    #[test]
    fn paths_are_those_below_the_base() {
        let path = |base: &str, url: &str| Registry::at(base).unwrap().path_of(&url.parse().unwrap());
        assert_eq!(path("http://m/p/", "http://m/p/x?a=b").as_deref(), Some("/x?a=b"));
        assert_eq!(path("http://m", "http://M:80/x").as_deref(), Some("/x"));
        for url in ["http://m/x", "http://m/px", "https://m/p/x", "http://m:81/p/x", "http://u@m/p/x"] {
            assert_eq!(path("http://m/p", url), None, "{url}");
        }
    }

    #[test]
    fn mirrors_have_an_absolute_url_without_a_query() {
        assert_eq!(Registry::at("http://m/p/").unwrap().url("x").unwrap().as_str(), "http://m/p/v2/x");
        for (base, name) in
            [("https://M:443/p/q", "m"), ("http://[::1]:80", "[::1]"), ("http://m:81/", "m:81")]
        {
            assert_eq!(Registry::at(base).unwrap().name(), name);
        }
        for base in
            ["", "m", "/m", "ftp://m", "http://", "http://m?q", "http://m#f", "http://u@m", "http://m m"]
        {
            assert!(Registry::at(base).is_none(), "{base}");
        }
    }
}
