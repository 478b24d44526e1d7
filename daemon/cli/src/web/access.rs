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
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, ORIGIN};
use tracing_mutex::stdsync::Mutex;

pub(super) const KEY_HEADER: HeaderName = HeaderName::from_static("x-blobd-key");
/// What a browser says about the page that sends a request. Scripts cannot set it.
const SITE_HEADER: HeaderName = HeaderName::from_static("sec-fetch-site");

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

    /// Whether a request for data comes from this page, and has the key.
    pub(super) fn check_question(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        check_page(headers)?;
        self.check_key(headers)
    }

    /// Whether an action comes from this page, and has the key. Browsers add the origin to every POST, and a form cannot send
    /// this type.
    pub(super) fn check_action(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        self.check_question(headers)?;
        let is_json = headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes() == b"application/json");
        match is_json && headers.contains_key(ORIGIN) {
            true => Ok(()),
            false => Err(Refusal::CrossSiteRequest(CrossSiteRequest::Origin)),
        }
    }

    fn check_key(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let key = headers.get(KEY_HEADER).ok_or(Refusal::Key)?;
        if self.key.equals(key.as_bytes()) { Ok(()) } else { Err(Refusal::Key) }
    }
}

/// Whether a page of this server has sent a request, as far as the browser says. Programs that are not browsers say nothing.
pub(super) fn check_page(headers: &HeaderMap) -> Result<(), Refusal> {
    match headers.get_all(SITE_HEADER).iter().all(|site| site.as_bytes() == b"same-origin") {
        true => Ok(()),
        false => Err(Refusal::CrossSiteRequest(CrossSiteRequest::Origin)),
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
    fn requests_of_other_sites_are_refused_even_with_the_key() {
        let (access, _token, key) = access();
        let key = (KEY_HEADER, key.as_str());
        for site in ["cross-site", "same-site", "none", ""] {
            let headers = headers(&[key.clone(), (SITE_HEADER, site)]);
            assert!(access.check_question(&headers).is_err() && check_page(&headers).is_err(), "{site}");
        }
        assert_eq!(access.check_question(&headers(&[key.clone(), (SITE_HEADER, "same-origin")])), Ok(()));
        let (origin, json) = ((ORIGIN, "http://127.0.0.1:1"), (CONTENT_TYPE, "application/json"));
        let action = |list: &[_]| access.check_action(&headers(list));
        assert_eq!(action(&[key.clone(), origin.clone(), json.clone()]), Ok(()));
        assert!(action(&[key.clone(), json.clone()]).is_err(), "no origin");
        assert!(action(&[origin.clone(), json.clone()]) == Err(Refusal::Key), "no key");
        for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""] {
            assert!(action(&[key.clone(), origin.clone(), (CONTENT_TYPE, kind)]).is_err(), "{kind}");
        }
    }

    #[test]
    fn secrets_are_long_differ_and_are_not_shown() {
        let (first, second) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert_eq!(first.as_str().len(), Secret::LENGTH);
        assert_ne!(first.as_str(), second.as_str());
        assert!(!format!("{first:?}").contains(first.as_str()));
    }
}
