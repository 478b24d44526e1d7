//! Hosts in the names of models: their form, which names are one service, and their defaults.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The namespace of a repository that has none, as `localhost:5000/model`. No registry has a namespace of this
/// name, because names of repositories start with a letter or a digit.
pub const NO_NAMESPACE: &str = "_";
/// The host of Docker Hub's models in names.
pub const DOCKER_HUB: &str = "docker.io";

/// The name that is used for a service with several host names: in the store, for mirrors and for credentials.
#[must_use]
pub fn canonical(host: &str) -> &str {
    let alias = ALIASES.iter().find(|(alias, _)| alias.eq_ignore_ascii_case(host));
    alias.map_or(host, |(_, name)| name)
}

/// Whether the host is surely this machine: other names may resolve to any address.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    if let Some((address, _port)) = bracketed(host) {
        return address.is_loopback();
    }
    let name = host.split(':').next().unwrap_or_default();
    name.eq_ignore_ascii_case("localhost")
        || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
}

/// The namespace of a name that has a host but no namespace; `None` where each model needs one.
pub(crate) fn default_namespace(host: &str) -> Option<&'static str> {
    match canonical(host) {
        HUGGING_FACE => None,
        OLLAMA => Some("library"),
        DOCKER_HUB => Some("ai"),
        _ => Some(NO_NAMESPACE),
    }
}

/// Whether the first of two parts of a name is a host. A namespace has neither a dot nor a colon. A host with a
/// dot and without a port counts only if it is known, so that a path is not taken for a host.
pub(crate) fn is_evident(text: &str) -> bool {
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| {
        !port.is_empty() && port.len() <= MAX_PORT_DIGITS && port.bytes().all(|digit| digit.is_ascii_digit())
    });
    let is_known = || {
        ALIASES.iter().any(|(alias, name)| [alias, name].iter().any(|host| host.eq_ignore_ascii_case(text)))
    };
    let is_address = || text.contains('.') && is_loopback(text);
    has_port || bracketed(text).is_some() || is_known() || is_address()
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

const HUGGING_FACE: &str = "hf.co";
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
    fn only_addresses_of_this_machine_are_loopback() {
        for host in ["localhost", "LOCALHOST:5000", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "128.0.0.1", "[::2]:80", "[::1", "::1", "127.0.0.1.example", ""] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn hosts_are_told_from_namespaces() {
        for host in ["localhost:5000", "lan:80", "127.0.0.1", "[::1]", "docker.io", "Ollama.com", "hf.co"] {
            assert!(is_evident(host), "{host}");
        }
        for namespace in ["me", "localhost", "models.d", "a:b", "a:", "lan:123456", ""] {
            assert!(!is_evident(namespace), "{namespace}");
        }
    }
}
