//! Cache of `Authorization` headers that a registry accepted: tokens and credentials, kept for a few minutes.
//!
//! An entry is valid for one origin and repository.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::header::HeaderValue;
use serde::Deserialize;
use serde_json::Value;

use super::credentials::hidden_header;
use super::error::Advice;
use super::origin::Origin;

#[derive(Clone, Debug)]
pub(super) struct Authorization {
    pub(super) header: HeaderValue,
    pub(super) expires: Instant,
    /// The advice in the error if the registry refuses it.
    pub(super) advice: Advice,
}

impl Authorization {
    /// An entry for a credential without an expiry time. It still expires, so that a `logout` takes effect.
    pub(super) fn lasting(header: HeaderValue, advice: Advice) -> Self {
        Self { header, expires: Instant::now() + LONGEST_LIFETIME, advice }
    }

    /// Parses a token service's response.
    pub(super) fn from_response(document: &[u8], advice: Advice) -> Option<Self> {
        #[derive(Deserialize)]
        struct TokenResponse {
            token: Option<String>,
            access_token: Option<String>,
            expires_in: Option<Value>,
        }
        let response: TokenResponse = serde_json::from_slice(document).ok()?;
        let token = response.token.or(response.access_token).filter(|token| !token.is_empty())?;
        let header = hidden_header(&format!("Bearer {token}"))?;
        let lifetime = response.expires_in.and_then(|seconds| seconds.as_u64()).map(Duration::from_secs);
        let lifetime = lifetime.unwrap_or(LONGEST_LIFETIME).min(LONGEST_LIFETIME);
        Some(Self { header, expires: Instant::now() + lifetime, advice })
    }
}

/// Cached headers by registry and repository. An entry is replaced when it has expired or was refused with 401.
#[derive(Default)]
pub(super) struct TokenCache {
    entries: Mutex<HashMap<(Origin, String), Authorization>>,
}

impl TokenCache {
    pub(super) fn get(&self, registry: &Origin, repository: &str) -> Option<Authorization> {
        let entries = self.lock();
        let authorization = entries.get(&(registry.clone(), repository.to_owned()))?;
        (Instant::now() < authorization.expires).then(|| authorization.clone())
    }

    pub(super) fn insert(&self, registry: &Origin, repository: &str, authorization: Authorization) {
        let mut entries = self.lock();
        if entries.len() >= MAX_TOKENS {
            entries.clear();
        }
        entries.insert((registry.clone(), repository.to_owned()), authorization);
    }

    /// Ignores poisoning: no code panics while it holds the lock, so the map is consistent.
    fn lock(&self) -> MutexGuard<'_, HashMap<(Origin, String), Authorization>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TokenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCache").field("count", &self.lock().len()).finish()
    }
}

/// More repositories than a daemon pulls from. Dropping a token costs one request.
const MAX_TOKENS: usize = 1024;
/// When credentials are read again: longer than any request takes, and short enough for a `logout` to take effect soon.
const LONGEST_LIFETIME: Duration = Duration::from_mins(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn authorization(json: &str) -> Option<Authorization> {
        Authorization::from_response(json.as_bytes(), Advice::Credential { place: "x".to_owned() })
    }

    #[test]
    fn token_is_read_under_both_names_and_not_printed() {
        for json in [r#"{"token":"abc"}"#, r#"{"access_token":"abc","expires_in":300.5}"#] {
            let authorization = authorization(json).unwrap();
            assert_eq!(authorization.header, "Bearer abc");
            assert!(!format!("{authorization:?}").contains("abc"));
        }
        for json in ["", "{}", r#"{"token":""}"#, r#"{"token":"a\nb"}"#, r#"{"token":1}"#, "[1]"] {
            assert!(authorization(json).is_none(), "{json}");
        }
    }

    #[test]
    fn tokens_are_kept_for_their_repository_alone_until_they_expire() {
        let origin = |url: &str| Origin::from_url(&url.parse().unwrap()).unwrap();
        let cache = TokenCache::default();
        cache.insert(&origin("https://a"), "l/m", authorization(r#"{"token":"t","expires_in":60}"#).unwrap());
        assert!(cache.get(&origin("https://a:443"), "l/m").is_some());
        assert!(cache.get(&origin("https://a:444"), "l/m").is_none());
        assert!(cache.get(&origin("http://a"), "l/m").is_none());
        assert!(cache.get(&origin("https://a"), "l/n").is_none());
        assert_eq!(format!("{cache:?}"), "TokenCache { count: 1 }");
        cache.insert(&origin("https://a"), "l/m", authorization(r#"{"token":"t","expires_in":0}"#).unwrap());
        assert!(cache.get(&origin("https://a"), "l/m").is_none());
    }
}
