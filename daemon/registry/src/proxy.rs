//! The user's proxies, from the environment.
//!
//! A malformed value is reported by every request that would use it. It never means "no proxy": the connection would
//! then bypass the proxy, which the user does not want.

use std::env;
use std::ffi::OsString;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::Uri;
use hyper::header::HeaderValue;
use hyper_util::client::proxy::matcher::Matcher;
use percent_encoding::percent_decode_str;
use url::Host;

use super::credentials::hidden_header;

/// The proxies for requests over TLS and over plain HTTP, and the hosts that are requested without one.
#[derive(Debug, Default)]
pub struct Proxies {
    https: Option<Result<Proxy, ProxyFault>>,
    http: Option<Result<Proxy, ProxyFault>>,
    excluded: Vec<Excluded>,
}

/// An environment variable with a malformed proxy. The message never contains its value, which may include a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{variable}: not understood: expected [http|https|socks4|socks4a|socks5|socks5h]://[USER:PASSWORD@]HOST[:PORT], \
     found {found}"
)]
pub struct ProxyFault {
    variable: &'static str,
    found: String,
}

/// A proxy from an environment variable.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Proxy {
    pub(super) variable: &'static str,
    pub(super) protocol: Protocol,
    /// Where to connect to: `http`, or `https` if TLS is used to the proxy.
    pub(super) uri: Uri,
    /// The user and the password.
    pub(super) user: Option<(String, String)>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({:?} {} from {})", self.protocol, self.uri, self.variable)
    }
}

/// The protocol between this client and a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// `CONNECT` for requests over TLS, otherwise requests with the whole URL.
    Http,
    Socks4(Resolver),
    Socks5(Resolver),
}

/// Which machine resolves host names: this one or the proxy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resolver {
    Machine,
    Proxy,
}

/// The variables for requests over TLS; the first that is set is used.
const FOR_HTTPS: [&str; 4] = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
const FOR_HTTP: [&str; 4] = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
const EXCLUDED: [&str; 2] = ["NO_PROXY", "no_proxy"];
/// The limit of SOCKS 5 for a user name and for a password.
const MAX_SOCKS_BYTES: usize = 255;

impl Proxies {
    /// All environment variables that this module reads.
    pub const VARIABLES: [&str; 8] = [
        "HTTPS_PROXY",
        "https_proxy",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
        "NO_PROXY",
        "no_proxy",
    ];

    /// Reads the environment of this process.
    pub fn from_environment() -> Self {
        Self::from_variables(|name| env::var_os(name))
    }

    /// Reads the variables. Empty ones are ignored.
    pub(super) fn from_variables(value: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| value(name).filter(|value| !value.is_empty());
        // In a CGI program, a client can set `HTTP_PROXY` by sending a header `Proxy`.
        let is_usable = |name: &str| name != "HTTP_PROXY" || set("REQUEST_METHOD").is_none();
        let first = |names: [&'static str; 4]| {
            let mut named = names.into_iter().filter(|name| is_usable(name));
            named.find_map(|name| set(name).map(|value| Proxy::parse(name, &value)))
        };
        let excluded = EXCLUDED.into_iter().find_map(set).unwrap_or_default();
        Self {
            https: first(FOR_HTTPS),
            http: first(FOR_HTTP),
            excluded: Excluded::list(&excluded.to_string_lossy()),
        }
    }

    /// The proxy for a URL, if there is one.
    ///
    /// A registry on this machine over plain HTTP is requested directly: to the proxy, "this machine" is another one.
    pub(super) fn for_target(&self, target: &Uri) -> Result<Option<&Proxy>, &ProxyFault> {
        let is_https = target.scheme_str() == Some("https");
        let chosen = if is_https { &self.https } else { &self.http };
        let Some(chosen) = chosen else { return Ok(None) };
        if !is_https && is_this_machine(target)
            || self.excluded.iter().any(|excluded| excluded.matches(target))
        {
            return Ok(None);
        }
        chosen.as_ref().map(Some)
    }

    /// The malformed variables.
    pub fn faults(&self) -> impl Iterator<Item = &ProxyFault> {
        let faults =
            [&self.https, &self.http].map(|proxy| proxy.as_ref().and_then(|proxy| proxy.as_ref().err()));
        let [https, http] = faults;
        https.into_iter().chain(http.filter(|http| Some(*http) != https))
    }
}

fn is_this_machine(target: &Uri) -> bool {
    match target.host().map(Host::parse) {
        Some(Ok(Host::Domain(name))) => name == "localhost" || name.ends_with(".localhost"),
        Some(Ok(Host::Ipv4(address))) => address.is_loopback(),
        Some(Ok(Host::Ipv6(address))) => address.is_loopback(),
        _ => false,
    }
}

impl Proxy {
    fn parse(variable: &'static str, value: &OsString) -> Result<Self, ProxyFault> {
        let value = value.to_str().ok_or_else(|| "bytes that are not UTF-8".to_owned());
        value
            .and_then(|value| Self::parse_text(variable, value))
            .map_err(|found| ProxyFault { variable, found })
    }

    /// Parses a proxy; the error describes the malformed part. The last `@` ends the user and the password, which may
    /// contain `@` themselves.
    fn parse_text(variable: &'static str, value: &str) -> Result<Self, String> {
        let (scheme, rest) = split_scheme(value.trim());
        let (protocol, is_tls, default_port) = match scheme.as_str() {
            "http" => (Protocol::Http, false, 80),
            "https" => (Protocol::Http, true, 443),
            "socks4" => (Protocol::Socks4(Resolver::Machine), false, 1080),
            "socks4a" => (Protocol::Socks4(Resolver::Proxy), false, 1080),
            // `socks` is GNOME's word for it.
            "socks5" | "socks" => (Protocol::Socks5(Resolver::Machine), false, 1080),
            "socks5h" => (Protocol::Socks5(Resolver::Proxy), false, 1080),
            other => return Err(format!("the scheme {other}")),
        };
        let (user, place) = match rest.rsplit_once('@') {
            Some((user, place)) => (Some(split_user(user)?), place),
            None => (None, rest),
        };
        match (protocol, &user) {
            (Protocol::Socks4(_), Some(_)) => {
                return Err("a user for SOCKS 4, which only socks5 has".to_owned());
            }
            (Protocol::Socks5(_), Some((user, password)))
                if user.len().max(password.len()) > MAX_SOCKS_BYTES =>
            {
                return Err(format!("a user or password of more than {MAX_SOCKS_BYTES} bytes"));
            }
            _ => {}
        }
        let (host, port) = split_port(place)?;
        let scheme = if is_tls { "https" } else { "http" };
        let uri = format!("{scheme}://{host}:{}/", port.unwrap_or(default_port)).parse();
        Ok(Self { variable, protocol, uri: uri.map_err(|_invalid| no_host())?, user })
    }

    /// `Proxy-Authorization` for HTTP.
    pub(super) fn basic_authorization(&self) -> Option<HeaderValue> {
        let (user, password) = self.user.as_ref()?;
        hidden_header(&format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))))
    }

    /// Whether requests to `target` are sent to the proxy itself.
    pub(super) fn forwards(&self, target: &Uri) -> bool {
        self.protocol == Protocol::Http && target.scheme_str() == Some("http")
    }
}

/// The scheme in lower case, and the rest. The scheme defaults to `http`, as in other programs.
fn split_scheme(value: &str) -> (String, &str) {
    let is_scheme = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    };
    match value.split_once("://") {
        Some((scheme, rest)) if is_scheme(scheme) => (scheme.to_ascii_lowercase(), rest),
        _ => ("http".to_owned(), value),
    }
}

fn split_user(text: &str) -> Result<(String, String), String> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(std::borrow::Cow::into_owned);
    match (decoded(user), decoded(password)) {
        (Ok(user), Ok(password)) => Ok((user, password)),
        _ => Err("a user or password with escapes that are not UTF-8".to_owned()),
    }
}

/// The host as it is written in a URL, and the port.
fn split_port(place: &str) -> Result<(String, Option<u16>), String> {
    let end = place.find(['/', '?', '#']).unwrap_or(place.len());
    let (authority, path) = place.split_at(end);
    if !matches!(path, "" | "/") {
        return Err("a path".to_owned());
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = port.filter(|port| !port.is_empty()).map(|port| {
        port.parse::<u16>()
            .ok()
            .filter(|number| *number > 0 && is_port(port))
            .ok_or("a port that is not a number up to 65535")
    });
    let host = Host::parse(host).map_err(|_invalid| no_host())?;
    Ok((host.to_string(), parsed.transpose()?))
}

fn no_host() -> String {
    "no host name or address".to_owned()
}

/// An entry of `NO_PROXY`: a name and all names below it, an address, a network, or `*`, perhaps with a port.
#[derive(Debug)]
struct Excluded {
    /// Matches everything except the entry.
    matcher: Matcher,
    port: Option<u16>,
}

impl Excluded {
    fn list(value: &str) -> Vec<Self> {
        let entries = value.split([',', ' ', '\t', ';']).map(str::trim).filter(|entry| !entry.is_empty());
        entries.map(Self::new).collect()
    }

    fn new(entry: &str) -> Self {
        let (host, port) = match entry.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => match port.parse() {
                Ok(port) => (host, Some(port)),
                Err(_not_a_port) => (entry, None),
            },
            _ => (entry, None),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let host = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        Self { matcher: Matcher::builder().all("http://any").no(host).build(), port }
    }

    fn matches(&self, target: &Uri) -> bool {
        let default = if target.scheme_str() == Some("https") { 443 } else { 80 };
        let port = target.port_u16().unwrap_or(default);
        self.port.is_none_or(|only| only == port) && self.matcher.intercept(target).is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        Proxies::from_variables(|name| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.into())
        })
    }

    fn parsed(value: &str) -> Result<String, String> {
        let proxy = Proxy::parse_text("ALL_PROXY", value)?;
        let user = proxy.user.map_or_else(String::new, |(user, password)| format!(" {user} {password}"));
        Ok(format!("{:?} {}{user}", proxy.protocol, proxy.uri))
    }

    fn chosen(proxies: &Proxies, url: &str) -> Option<String> {
        proxies.for_target(&url.parse().unwrap()).unwrap().map(|proxy| proxy.uri.to_string())
    }

    #[test]
    fn proxy_addresses_in_common_forms_are_parsed() {
        for (value, expected) in [
            ("http://proxy:3128", "Http http://proxy:3128/"),
            ("http://proxy", "Http http://proxy:80/"),
            ("proxy.example:3128", "Http http://proxy.example:3128/"),
            ("me:pw@proxy:3128", "Http http://proxy:3128/ me pw"),
            ("HTTPS://Proxy/", "Http https://proxy:443/"),
            ("socks4://p", "Socks4(Machine) http://p:1080/"),
            ("socks4a://p:9", "Socks4(Proxy) http://p:9/"),
            ("socks5://p", "Socks5(Machine) http://p:1080/"),
            ("socks5h://127.0.0.1:9050", "Socks5(Proxy) http://127.0.0.1:9050/"),
            ("socks://127.0.0.1:1080/", "Socks5(Machine) http://127.0.0.1:1080/"),
            ("socks5h://[::1]:9", "Socks5(Proxy) http://[::1]:9/"),
            ("http://[::1]", "Http http://[::1]:80/"),
            ("http://dom\\user:p@ss@h", "Http http://h:80/ dom\\user p@ss"),
            ("http://user:p%40ss%3A@h:1", "Http http://h:1/ user p@ss:"),
            ("http://user:a/b?c#d@h:1", "Http http://h:1/ user a/b?c#d"),
            ("http://user:100%@h", "Http http://h:80/ user 100%"),
            ("http://user@h", "Http http://h:80/ user "),
            ("user:a://b@h", "Http http://h:80/ user a://b"),
            (" http://h:8080\n", "Http http://h:8080/"),
            ("http://h:", "Http http://h:80/"),
        ] {
            assert_eq!(parsed(value).as_deref(), Ok(expected), "{value}");
        }
    }

    #[test]
    fn values_that_are_not_understood_are_refused_without_their_secret() {
        for value in [
            "ftp://me:secret@h",
            "socks5s://me:secret@h",
            "http://",
            "http://me:secret@",
            "http://me:secret@h:port",
            "http://me:secret@h:0",
            "http://me:secret@h:70000",
            "http://me:secret@h:+80",
            "http://me:secret@h/proxy.pac",
            "http://me:secret@a b",
            "http://me:secret@::1:8080",
            "\"http://me:secret@h\"",
            "socks4://me:secret@h",
            "http://me:%ffsecret@h",
            "//h:80",
            "http:h:80",
            &format!("socks5://secret{}:x@h", "x".repeat(256)),
        ] {
            let proxies = proxies(&[("all_proxy", value)]);
            let error = proxies.for_target(&"https://hf.co/".parse().unwrap()).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("all_proxy: not understood: expected [http|"), "{value}: {text}");
            assert!(
                !text.contains("secret") && !format!("{proxies:?}").contains("secret"),
                "{value}: {text}"
            );
            assert_eq!(proxies.faults().count(), 1);
        }
        let bytes = |name: &str| (name == "HTTPS_PROXY").then(|| OsString::from_vec(b"http://\xff".to_vec()));
        assert!(Proxies::from_variables(bytes).for_target(&"https://hf.co/".parse().unwrap()).is_err());
    }

    #[test]
    fn variable_for_the_scheme_is_used_before_that_for_all() {
        let all =
            [("ALL_PROXY", "http://all"), ("HTTPS_PROXY", "http://tls"), ("http_proxy", "http://plain")];
        let all = proxies(&all);
        assert_eq!(chosen(&all, "https://hf.co/").as_deref(), Some("http://tls:80/"));
        assert_eq!(chosen(&all, "http://hf.co/").as_deref(), Some("http://plain:80/"));
        let empty =
            proxies(&[("HTTPS_PROXY", ""), ("https_proxy", "http://lower"), ("all_proxy", "socks5://all")]);
        assert_eq!(chosen(&empty, "https://hf.co/").as_deref(), Some("http://lower:80/"));
        assert_eq!(chosen(&empty, "http://hf.co/").as_deref(), Some("http://all:1080/"));
        assert_eq!(chosen(&proxies(&[]), "https://hf.co/"), None);
        let cgi = proxies(&[("HTTP_PROXY", "http://evil"), ("REQUEST_METHOD", "GET")]);
        assert_eq!(chosen(&cgi, "http://hf.co/"), None);
    }

    #[test]
    fn this_machine_is_requested_directly_over_plain_http_only() {
        let all = proxies(&[("ALL_PROXY", "socks5h://p")]);
        for host in
            ["localhost:5000", "LOCALHOST", "a.localhost", "127.0.0.1:4711", "127.9.9.9", "[::1]:5000"]
        {
            assert_eq!(chosen(&all, &format!("http://{host}/x")), None, "{host}");
            assert!(chosen(&all, &format!("https://{host}/x")).is_some(), "{host}");
        }
        for host in ["lan:5000", "192.168.1.1", "localhost.example", "10.0.0.1"] {
            assert!(chosen(&all, &format!("http://{host}/x")).is_some(), "{host}");
        }
    }

    #[test]
    fn excluded_hosts_are_requested_directly() {
        let direct = |list: &str, url: &str| {
            let set =
                [("HTTPS_PROXY", "ftp://not understood"), ("http_proxy", "http://p"), ("no_proxy", list)];
            proxies(&set).for_target(&url.parse().unwrap()).is_ok_and(|proxy| proxy.is_none())
        };
        for (list, url) in [
            ("hf.co", "https://hf.co/"),
            ("hf.co", "https://CDN.hf.co/"),
            (".hf.co", "https://cdn.hf.co/"),
            ("*.hf.co", "https://cdn.hf.co/"),
            ("a, b ,hf.co", "https://hf.co/"),
            ("a hf.co", "https://hf.co/"),
            ("*", "https://hf.co/"),
            ("lan:5000", "http://lan:5000/"),
            ("hf.co:443", "https://hf.co/"),
            ("10.0.0.0/8", "http://10.2.3.4:5000/"),
            ("192.168.1.1", "http://192.168.1.1/"),
            ("fd00::/8", "http://[fd12::1]/"),
            ("[fd12::1]:5000", "http://[fd12::1]:5000/"),
        ] {
            assert!(direct(list, url), "{list} {url}");
        }
        for (list, url) in [
            ("hf.co", "https://notof.hf.co.example/"),
            ("hf.co", "https://xhf.co/"),
            ("lan:5000", "http://lan:5001/"),
            ("hf.co:80", "https://hf.co/"),
            ("", "https://hf.co/"),
            ("10.0.0.0/8", "http://11.0.0.1/"),
        ] {
            assert!(!direct(list, url), "{list} {url}");
        }
    }
}
