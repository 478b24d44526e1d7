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
use std::sync::PoisonError;

use blobd_client::loopback::CrossSiteRequest;
use hyper::header::{HeaderMap, HeaderName};
use tracing_mutex::stdsync::Mutex;

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

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A page of another site may have sent it.
    CrossSiteRequest(CrossSiteRequest),
    /// The token has been used, or is wrong.
    Token,
    Key,
}

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

    pub(super) fn check_key(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let key = headers.get(KEY_HEADER).ok_or(Refusal::Key)?;
        if self.key.equals(key.as_bytes()) { Ok(()) } else { Err(Refusal::Key) }
    }
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
}
