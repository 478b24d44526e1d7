//! Anonymous tokens: the challenge that asks for one, who may hand it out, and the tokens had.
//!
//! The realm in a challenge is a URL that the registry chooses. It is asked only if it is on the
//! registry's own host or on one of [`TOKEN_HOSTS`], and no credentials are sent to it. A token
//! is kept for the origin and repository that it was made for, and goes nowhere else.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hyper::header::{HeaderValue, WWW_AUTHENTICATE};
use hyper::{HeaderMap, Uri};
use serde::Deserialize;

use super::error::RealmRefusal;
use super::origin::Origin;

/// What a registry wants to see a token for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Challenge {
    realm: String,
    service: Option<String>,
    scope: Option<String>,
}

impl Challenge {
    /// The first `Bearer` challenge of an answer, if it has one that is well-formed.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        headers.get_all(WWW_AUTHENTICATE).iter().find_map(|value| bearer(value.to_str().ok()?))
    }

    /// The URL to ask for a token, if `registry` may name it.
    pub(super) fn token_url(&self, registry: &Origin) -> Result<Uri, RealmRefusal> {
        let realm: Uri = self.realm.parse().map_err(|_invalid| RealmRefusal::Malformed)?;
        let origin = Origin::of(&realm).ok_or(RealmRefusal::Malformed)?;
        if origin.host() != registry.host() && !TOKEN_HOSTS.contains(&(registry.host(), origin.host())) {
            return Err(RealmRefusal::ForeignHost { found: origin.host().to_owned() });
        }
        if registry.is_https() && !origin.is_https() {
            return Err(RealmRefusal::Downgrade);
        }
        let mut url = realm.to_string();
        for (name, value) in self.query() {
            url.push(if url.contains('?') { '&' } else { '?' });
            url.push_str(name);
            url.push('=');
            push_encoded(&mut url, value);
        }
        url.parse().map_err(|_invalid| RealmRefusal::Malformed)
    }

    /// A scope may list several, parted by spaces; each becomes a parameter of its own.
    fn query(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let service = self.service.iter().map(|service| ("service", service.as_str()));
        let scopes = self.scope.iter().flat_map(|scope| scope.split_ascii_whitespace());
        service.chain(scopes.map(|scope| ("scope", scope)))
    }
}

/// The header that shows the token in a token service's answer.
pub(super) fn bearer_header(answer: &[u8]) -> Option<HeaderValue> {
    #[derive(Deserialize)]
    struct TokenAnswer {
        token: Option<String>,
        access_token: Option<String>,
    }
    let answer: TokenAnswer = serde_json::from_slice(answer).ok()?;
    let token = answer.token.or(answer.access_token).filter(|token| !token.is_empty())?;
    let mut header = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// The tokens had so far. They expire, which shows in a 401; then a new one takes its place.
#[derive(Default)]
pub(super) struct TokenCache {
    tokens: Mutex<HashMap<(Origin, String), HeaderValue>>,
}

impl TokenCache {
    /// The token for a repository of a registry.
    pub(super) fn get(&self, registry: &Origin, repository: &str) -> Option<HeaderValue> {
        self.lock().get(&(registry.clone(), repository.to_owned())).cloned()
    }

    /// Keeps a token.
    pub(super) fn insert(&self, registry: &Origin, repository: &str, token: HeaderValue) {
        let mut tokens = self.lock();
        if tokens.len() >= MAX_TOKENS {
            tokens.clear();
        }
        tokens.insert((registry.clone(), repository.to_owned()), token);
    }

    /// No code can panic while it holds the lock, so a poisoned one is still whole.
    fn lock(&self) -> MutexGuard<'_, HashMap<(Origin, String), HeaderValue>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TokenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCache").field("count", &self.lock().len()).finish()
    }
}

/// Registries whose token service is known to be on another host.
const TOKEN_HOSTS: [(&str, &str); 2] =
    [("registry-1.docker.io", "auth.docker.io"), ("hf.co", "huggingface.co")];
/// More repositories than anyone pulls from in the life of a daemon; losing a token costs one request.
const MAX_TOKENS: usize = 1024;
/// Real challenges have some 200 bytes.
const MAX_CHALLENGE_BYTES: usize = 4096;

/// Reads `WWW-Authenticate`: schemes, each followed by `name=value` pairs, all parted by commas.
fn bearer(header: &str) -> Option<Challenge> {
    if header.len() > MAX_CHALLENGE_BYTES {
        return None;
    }
    let mut challenge = Challenge::default();
    let mut scheme = "";
    let mut rest = header.trim_start_matches(SEPARATORS);
    while !rest.is_empty() {
        let (word, after) = split_word(rest);
        rest = match after.trim_start_matches([' ', '\t']).strip_prefix('=') {
            Some(after) => {
                let (value, after) = split_value(after.trim_start_matches([' ', '\t']))?;
                if scheme.eq_ignore_ascii_case("bearer") {
                    challenge.set(word, value);
                }
                after
            }
            // A character that is neither of a word nor a separator: no header of this form.
            None if word.is_empty() => return None,
            None => {
                scheme = word;
                after
            }
        };
        rest = rest.trim_start_matches(SEPARATORS);
    }
    (!challenge.realm.is_empty()).then_some(challenge)
}

impl Challenge {
    /// The first of several values counts.
    fn set(&mut self, name: &str, value: String) {
        match name.to_ascii_lowercase().as_str() {
            "realm" if self.realm.is_empty() => self.realm = value,
            "service" => drop(self.service.get_or_insert(value)),
            "scope" => drop(self.scope.get_or_insert(value)),
            _ => {}
        }
    }
}

const SEPARATORS: [char; 3] = [' ', '\t', ','];

fn split_word(text: &str) -> (&str, &str) {
    text.split_at(text.find([' ', '\t', ',', '=', '"']).unwrap_or(text.len()))
}

/// Splits off a value, in quotes or not; none if the quotes are not closed.
fn split_value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = text.split_at(text.find(SEPARATORS).unwrap_or(text.len()));
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut characters = quoted.chars();
    loop {
        match characters.next()? {
            '"' => return Some((value, characters.as_str())),
            '\\' => value.push(characters.next()?),
            character => value.push(character),
        }
    }
}

/// Appends `value` as it stands in a query (RFC 3986, section 2.1).
fn push_encoded(url: &mut String, value: &str) {
    for &byte in value.as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => url.push(byte.into()),
            _ => url.push_str(&format!("%{byte:02X}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn challenge(header: &str) -> Option<(String, Option<String>, Option<String>)> {
        bearer(header).map(|challenge| (challenge.realm, challenge.service, challenge.scope))
    }

    fn token_url(registry: &str, header: &str) -> Result<String, RealmRefusal> {
        let registry = Origin::of(&registry.parse().unwrap()).unwrap();
        bearer(header).unwrap().token_url(&registry).map(|url| url.to_string())
    }

    #[test]
    fn challenges_as_registries_write_them() {
        let docker = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:ai/x:pull,push""#;
        let expected = (
            "https://auth.docker.io/token".to_owned(),
            Some("registry.docker.io".to_owned()),
            Some("repository:ai/x:pull,push".to_owned()),
        );
        assert_eq!(challenge(docker), Some(expected.clone()));
        assert_eq!(challenge(&docker.replace("Bearer", "Basic realm=\"x\", bearer")), Some(expected.clone()));
        assert_eq!(
            challenge(&docker.replace(',', " , ").replace("pull , push", "pull,push")),
            Some(expected)
        );
        assert_eq!(challenge("Bearer realm=https://a/t"), Some(("https://a/t".to_owned(), None, None)));
        let escaped = challenge(r#"Bearer error="a \"quoted\" word",realm="https://a/t""#);
        assert_eq!(escaped, Some(("https://a/t".to_owned(), None, None)));
    }

    #[test]
    fn challenges_that_are_none() {
        for header in [
            "",
            "Bearer",
            "Bearer realm=",
            "Bearer realm=\"https://a/t",
            "Bearer realm=\"https://a/t\\",
            "Basic realm=\"https://a/t\"",
            "\"Bearer\" realm=\"https://a/t\"",
            "realm=\"https://a/t\"",
            ",,,",
            &format!("Bearer realm=\"{}\"", "x".repeat(MAX_CHALLENGE_BYTES)),
        ] {
            assert_eq!(challenge(header), None, "{header}");
        }
    }

    #[test]
    fn token_url_carries_service_and_each_scope() {
        let header = r#"Bearer realm="https://r.example/t?a=b",service="a&b",scope="repository:l/m:pull x""#;
        assert_eq!(
            token_url("https://r.example", header).unwrap(),
            "https://r.example/t?a=b&service=a%26b&scope=repository%3Al%2Fm%3Apull&scope=x"
        );
    }

    #[test]
    fn only_the_registrys_own_and_known_token_services_are_asked() {
        let realm = |url: &str| format!("Bearer realm=\"{url}\"");
        let foreign = |found: &str| Err(RealmRefusal::ForeignHost { found: found.to_owned() });
        assert!(token_url("https://r.example", &realm("https://R.example:5001/t")).is_ok());
        assert!(token_url("https://registry-1.docker.io", &realm("https://auth.docker.io/token")).is_ok());
        assert!(token_url("https://hf.co", &realm("https://huggingface.co/v2/token")).is_ok());
        assert_eq!(
            token_url("https://r.example", &realm("https://huggingface.co/")),
            foreign("huggingface.co")
        );
        assert_eq!(
            token_url("https://r.example", &realm("http://169.254.169.254/")),
            foreign("169.254.169.254")
        );
        assert_eq!(token_url("https://r.example", &realm("https://t.r.example/")), foreign("t.r.example"));
        assert_eq!(
            token_url("https://r.example", &realm("http://r.example/t")),
            Err(RealmRefusal::Downgrade)
        );
        assert!(token_url("http://r.example", &realm("http://r.example/t")).is_ok());
        for url in ["/t", "token", "ftp://r.example/", "https://r.example@evil.example/"] {
            assert_eq!(token_url("https://r.example", &realm(url)), Err(RealmRefusal::Malformed), "{url}");
        }
    }

    #[test]
    fn token_is_read_under_both_names_and_not_printed() {
        for json in [r#"{"token":"abc"}"#, r#"{"access_token":"abc","expires_in":300}"#] {
            let header = bearer_header(json.as_bytes()).unwrap();
            assert_eq!(header, "Bearer abc");
            assert!(!format!("{header:?}").contains("abc"));
        }
        for json in ["", "{}", r#"{"token":""}"#, r#"{"token":"a\nb"}"#, r#"{"token":1}"#, "[1]"] {
            assert!(bearer_header(json.as_bytes()).is_none(), "{json}");
        }
    }

    #[test]
    fn tokens_are_kept_for_their_repository_alone() {
        let origin = |url: &str| Origin::of(&url.parse().unwrap()).unwrap();
        let cache = TokenCache::default();
        cache.insert(&origin("https://a"), "l/m", HeaderValue::from_static("Bearer t"));
        assert!(cache.get(&origin("https://a:443"), "l/m").is_some());
        assert!(cache.get(&origin("https://a:444"), "l/m").is_none());
        assert!(cache.get(&origin("http://a"), "l/m").is_none());
        assert!(cache.get(&origin("https://a"), "l/n").is_none());
        assert_eq!(format!("{cache:?}"), "TokenCache { count: 1 }");
    }
}
