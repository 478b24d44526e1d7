//! Who may see the data: the one-time token, the key of the session, and checks of each request's head.
//!
//! The token is in the fragment of the address that the command prints. A browser does not send the fragment, so neither
//! a server's log nor a preview of the link uses it up; the page sends it once, and gets the key of the session, which
//! it sends in a header of each further request. There is no cookie: browsers send the cookies of 127.0.0.1 to every port
//! of that address, thus also to a server of another user. A page of another origin can neither read the key nor send
//! that header, because the server permits no requests from other origins.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use hyper::header::{HOST, HeaderMap, HeaderName, ORIGIN};

/// The header with the key of the session.
pub(super) const KEY_HEADER: HeaderName = HeaderName::from_static("x-blobd-key");

/// 128 random bits, in hexadecimal digits: with more, the link would not fit one line of a terminal.
#[derive(Clone)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) const LENGTH: usize = 32;

    pub(crate) fn random() -> io::Result<Self> {
        let mut bytes = [0; Self::LENGTH / 2];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Takes the same time wherever the texts differ, so that nobody can guess one digit after the other.
    fn equals(&self, other: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differences = own.iter().zip(other).fold(0, |sum, (a, b)| black_box(sum | (a ^ b)));
        own.len() == other.len() && differences == 0
    }
}

/// Does not show it.
impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The `Host` is no name of this machine: the page of another site may have been given this address.
    Host,
    /// A page of another origin has sent it.
    Origin,
    /// The token has been used, or is wrong.
    Token,
    /// Without the key of the session.
    Key,
}

/// The token and the session of one server.
#[derive(Debug)]
pub(super) struct Access {
    /// `None` once it has been used.
    token: Mutex<Option<Secret>>,
    key: Secret,
}

impl Access {
    pub(super) fn new(token: Secret, key: Secret) -> Self {
        Self { token: Mutex::new(Some(token)), key }
    }

    /// Exchanges the token for the key of the session, once.
    pub(super) fn redeem(&self, token: &[u8]) -> Result<&Secret, Refusal> {
        let mut expected = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        match &*expected {
            Some(secret) if secret.equals(token) => {
                *expected = None;
                Ok(&self.key)
            }
            _ => Err(Refusal::Token),
        }
    }

    /// Checks that a request for data has the key.
    pub(super) fn check_key(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let key = headers.get(KEY_HEADER).ok_or(Refusal::Key)?;
        if self.key.equals(key.as_bytes()) { Ok(()) } else { Err(Refusal::Key) }
    }
}

/// Checks the `Host`, and the `Origin` if there is one. A site whose name is suddenly given the address 127.0.0.1 (DNS
/// rebinding) still has its own name in both.
pub(super) fn check_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(Refusal::Host) };
    let host = host.to_str().map_err(|_not_ascii| Refusal::Host)?;
    if !is_loopback(host) {
        return Err(Refusal::Host);
    }
    let expected = format!("http://{host}");
    match headers.get_all(ORIGIN).iter().all(|origin| origin.as_bytes() == expected.as_bytes()) {
        true => Ok(()),
        false => Err(Refusal::Origin),
    }
}

/// Whether a `Host` is this machine: `localhost` or an address of loopback, with any port, because a tunnel may have
/// another port than the server.
fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || address.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn headers(list: &[(HeaderName, &str)]) -> HeaderMap {
        let pairs = list.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        pairs.collect()
    }

    fn access() -> (Access, Secret, Secret) {
        let (token, key) = (Secret::random().unwrap(), Secret::random().unwrap());
        (Access::new(token.clone(), key.clone()), token, key)
    }

    #[test]
    fn token_works_once() {
        let (access, token, key) = access();
        let wrong = Secret::random().unwrap();
        for guess in [wrong.as_str(), "", &token.as_str()[1..], key.as_str(), &format!("{}0", token.as_str())]
        {
            assert_eq!(access.redeem(guess.as_bytes()).unwrap_err(), Refusal::Token, "{guess}");
        }
        assert_eq!(access.redeem(token.as_str().as_bytes()).unwrap().as_str(), key.as_str());
        assert_eq!(access.redeem(token.as_str().as_bytes()).unwrap_err(), Refusal::Token);
    }

    #[test]
    fn data_needs_the_key() {
        let (access, token, key) = access();
        assert_eq!(access.check_key(&headers(&[])), Err(Refusal::Key));
        for wrong in ["", token.as_str(), &key.as_str().to_uppercase(), &key.as_str()[..Secret::LENGTH - 1]] {
            assert_eq!(access.check_key(&headers(&[(KEY_HEADER, wrong)])), Err(Refusal::Key), "{wrong}");
        }
        assert_eq!(access.check_key(&headers(&[(KEY_HEADER, key.as_str())])), Ok(()));
    }

    #[test]
    fn secrets_are_long_differ_and_are_not_shown() {
        let (first, second) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert_eq!(first.as_str().len(), Secret::LENGTH);
        assert_ne!(first.as_str(), second.as_str());
        assert!(!format!("{first:?}").contains(first.as_str()));
    }

    #[test]
    fn only_names_of_this_machine_are_hosts() {
        for host in ["127.0.0.1:8080", "localhost:1", "LOCALHOST", "[::1]:80", "127.1.2.3", "localhost:65535"]
        {
            assert_eq!(check_origin(&headers(&[(HOST, host)])), Ok(()), "{host}");
        }
        for host in [
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example:80",
            "10.0.0.1",
            "",
            ":80",
            "0.0.0.0:80",
            "127.0.0.1:x",
            "[::2]:80",
            "user@127.0.0.1",
            "127.0.0.1:80:80",
        ] {
            assert_eq!(check_origin(&headers(&[(HOST, host)])), Err(Refusal::Host), "{host}");
        }
        assert_eq!(check_origin(&headers(&[])), Err(Refusal::Host));
        let mut twice = headers(&[(HOST, "localhost")]);
        twice.append(HOST, HeaderValue::from_static("localhost"));
        assert_eq!(check_origin(&twice), Err(Refusal::Host));
    }

    #[test]
    fn origin_is_that_of_the_host() {
        let origin = |value| check_origin(&headers(&[(HOST, "127.0.0.1:80"), (ORIGIN, value)]));
        assert_eq!(origin("http://127.0.0.1:80"), Ok(()));
        for other in [
            "http://127.0.0.1:81",
            "https://127.0.0.1:80",
            "http://localhost:80",
            "null",
            "",
            "http://evil.example",
        ] {
            assert_eq!(origin(other), Err(Refusal::Origin), "{other}");
        }
    }
}
