//! Hosts in the names of models: their form, which names are one service, and their defaults.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The namespace of a repository that has none, as `localhost:5000/model`. No registry has a namespace of this
/// name, because names of repositories start with a letter or a digit.
pub const NO_NAMESPACE: &str = "_";
pub const DOCKER_HUB: &str = "docker.io";

/// The name that is used for a service with several host names: in the store, for mirrors and for credentials.
pub fn canonical(host: &str) -> &str {
    let alias = ALIASES.iter().find(|(alias, _)| alias.eq_ignore_ascii_case(host));
    alias.map_or(host, |(_, name)| name)
}

/// The one spelling of a host, and its port if the text has one, for comparisons that another spelling must not
/// escape: the name of its service, in lower case, without a final dot, and addresses in their usual form, of which
/// the URL standard (section 3.5, host parsing) allows many.
pub fn spelled(text: &str) -> (String, Option<u16>) {
    let (name, port) = unaliased(text);
    (canonical(&name).to_owned(), port)
}

/// Like [`spelled`], but with the name that the text has.
pub(crate) fn unaliased(text: &str) -> (String, Option<u16>) {
    if let Some((address, port)) = bracketed(text) {
        let name =
            address.to_ipv4_mapped().map_or_else(|| format!("[{address}]"), |mapped| mapped.to_string());
        return (name, port.and_then(|port| port.parse().ok()));
    }
    let (name, port) = match text.rsplit_once(':').map(|(name, port)| (name, port.parse())) {
        Some((name, Ok(port))) => (name, Some(port)),
        _ => (text, None),
    };
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    (numeric_address(&name).map_or(name, |address| address.to_string()), port)
}

/// Whether a URL with this host leads to the service, at the default port of the URL's scheme.
pub(crate) fn is_of(service: &str, default_port: u16, text: &str) -> bool {
    let (name, port) = spelled(text);
    name == service && port.is_none_or(|port| port == default_port)
}

/// All names of the service with this canonical name.
pub fn names_of(canonical: &str) -> impl Iterator<Item = &str> {
    let others = ALIASES.iter().filter(move |(_, name)| *name == canonical).map(|(alias, _)| *alias);
    std::iter::once(canonical).chain(others)
}

/// The IPv4 address that the URL standard reads in a host: up to four numbers, each decimal, octal or hexadecimal, the
/// last of which stands for all bytes that remain.
fn numeric_address(host: &str) -> Option<Ipv4Addr> {
    let parts: Vec<&str> = host.split('.').collect();
    let numbers = parts.iter().map(|part| number(part)).collect::<Option<Vec<u32>>>()?;
    let (last, first) = numbers.split_last().filter(|(_, first)| first.len() < 4)?;
    let bytes = first.iter().map(|number| u8::try_from(*number).ok()).collect::<Option<Vec<u8>>>()?;
    let left = u32::try_from(bytes.len()).ok().map(|count| 32_u32.saturating_sub(count.saturating_mul(8)))?;
    if left < 32 && last.checked_shr(left)? != 0 {
        return None;
    }
    let mut octets = last.to_be_bytes();
    octets.iter_mut().zip(&bytes).for_each(|(octet, byte)| *octet = *byte);
    Some(Ipv4Addr::from(octets))
}

fn number(text: &str) -> Option<u32> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some("") => return Some(0),
        Some(digits) => (digits, 16),
        None if text.len() > 1 && text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    // The standard library would accept a sign.
    let are_digits = digits.bytes().all(|byte| byte.is_ascii_alphanumeric());
    are_digits.then(|| u32::from_str_radix(digits, radix).ok()).flatten()
}

/// Whether the host is surely this machine: other names may resolve to any address.
pub fn is_loopback(host: &str) -> bool {
    if let Some((address, _port)) = bracketed(host) {
        return address.is_loopback();
    }
    let name = host.split(':').next().unwrap_or_default();
    name.eq_ignore_ascii_case("localhost")
        || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
}

/// The namespace of a name that has a host but no namespace. At Hugging Face the oldest repositories, such as `gpt2`, have
/// no owner in their names.
pub(crate) fn default_namespace(host: &str) -> &'static str {
    match canonical(host) {
        OLLAMA => "library",
        DOCKER_HUB => "ai",
        _ => NO_NAMESPACE,
    }
}

/// Whether the first of two parts of a name is a host, as programs for containers decide too: it has a dot or a port.
pub fn is_evident(text: &str) -> bool {
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| {
        !port.is_empty() && port.len() <= MAX_PORT_DIGITS && port.bytes().all(|digit| digit.is_ascii_digit())
    });
    has_port || text.contains('.') || bracketed(text).is_some()
}

/// Whether the text is an IPv6 address in brackets, perhaps with a port.
pub(crate) fn is_bracketed_address(text: &str) -> bool {
    bracketed(text).is_some_and(|(_, port)| port.is_none_or(|port| port.parse::<u16>().is_ok()))
}

fn bracketed(text: &str) -> Option<(Ipv6Addr, Option<&str>)> {
    let (address, rest) = text.strip_prefix('[')?.split_once(']')?;
    let port = if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) };
    Some((address.parse().ok()?, port))
}

pub const HUGGING_FACE: &str = "hf.co";
const OLLAMA: &str = "registry.ollama.ai";
const MAX_PORT_DIGITS: usize = 5;
/// Other host names of a service, and the name used for it.
const ALIASES: [(&str, &str); 6] = [
    ("huggingface.co", HUGGING_FACE),
    ("www.huggingface.co", HUGGING_FACE),
    ("index.docker.io", DOCKER_HUB),
    ("registry-1.docker.io", DOCKER_HUB),
    ("ollama.com", OLLAMA),
    ("www.ollama.com", OLLAMA),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_service_have_one_canonical_name() {
        for (host, name) in [
            ("HuggingFace.co", "hf.co"),
            ("hf.co", "hf.co"),
            ("registry-1.docker.io", "docker.io"),
            ("ollama.com", "registry.ollama.ai"),
            ("huggingface.co.example", "huggingface.co.example"),
            ("huggingface.co:444", "huggingface.co:444"),
        ] {
            assert_eq!(canonical(host), name, "{host}");
        }
    }

    #[test]
    fn every_spelling_of_a_host_is_one() {
        for (text, name, port) in [
            ("HuggingFace.co", "hf.co", None),
            ("hf.co.", "hf.co", None),
            ("www.huggingface.co.:443", "hf.co", Some(443)),
            ("registry-1.docker.io:5000", "docker.io", Some(5000)),
            ("lan", "lan", None),
            ("a:b:80", "a:b", Some(80)),
            ("10.0.0.7:65535", "10.0.0.7", Some(65535)),
            ("167772167", "10.0.0.7", None),
            ("0x0A000007:80", "10.0.0.7", Some(80)),
            ("012.0.0.7.", "10.0.0.7", None),
            ("10.7", "10.0.0.7", None),
            ("0xa.0x0.7", "10.0.0.7", None),
            ("1.2.3.4.5", "1.2.3.4.5", None),
            ("256.1.1.1", "256.1.1.1", None),
            ("1.2.3.256", "1.2.3.256", None),
            ("1.2.256", "1.2.1.0", None),
            ("4294967296", "4294967296", None),
            ("09.1.1.1", "09.1.1.1", None),
            ("[::ffff:10.0.0.7]:80", "10.0.0.7", Some(80)),
            ("[::FFFF:a00:7]", "10.0.0.7", None),
            ("[0:0:0:0:0:0:0:1]", "[::1]", None),
        ] {
            assert_eq!(spelled(text), (name.to_owned(), port), "{text}");
        }
        assert!(names_of("docker.io").eq(["docker.io", "index.docker.io", "registry-1.docker.io"]));
    }

    #[test]
    fn only_addresses_of_this_machine_are_loopback() {
        for host in ["localhost", "LOCALHOST:5000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "128.0.0.1", "[::2]:80", "[::1", "::1", "127.0.0.1.example", ""] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn hosts_are_distinguished_from_namespaces() {
        for host in [
            "localhost:5000",
            "lan:80",
            "127.0.0.1",
            "[::1]",
            "docker.io",
            "Ollama.com",
            "hf.co",
            "123456789012.dkr.ecr.eu-central-1.amazonaws.com",
            "models.azurecr.io",
        ] {
            assert!(is_evident(host), "{host}");
        }
        for namespace in ["me", "localhost", "a:b", "a:", "lan:123456", ""] {
            assert!(!is_evident(namespace), "{namespace}");
        }
    }
}
