//! Cache of `Authorization` headers that a registry accepted: tokens and credentials, for some minutes.
//!
//! Each is kept for the origin and repository that asked for it, and is sent nowhere else.

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

/// Authorizes requests for one repository until it expires.
#[derive(Clone, Debug)]
pub(super) struct Authorization {
    /// The `Authorization` of requests for it.
    pub(super) header: HeaderValue,
    /// When to ask anew.
    pub(super) expires: Instant,
    /// What to say if it is not enough.
    pub(super) advice: Advice,
}

impl Authorization {
    /// One that is good until a refusal, but read anew now and then: after a `logout` it goes.
    pub(super) fn lasting(header: HeaderValue, advice: Advice) -> Self {
        Self { header, expires: Instant::now() + LONGEST_LIFETIME, advice }
    }

    /// The token in a token service's answer.
    pub(super) fn from_answer(answer: &[u8], advice: Advice) -> Option<Self> {
        #[derive(Deserialize)]
        struct TokenAnswer {
            token: Option<String>,
            access_token: Option<String>,
            expires_in: Option<Value>,
        }
        let answer: TokenAnswer = serde_json::from_slice(answer).ok()?;
        let token = answer.token.or(answer.access_token).filter(|token| !token.is_empty())?;
        let header = hidden_header(&format!("Bearer {token}"))?;
        let lifetime = answer.expires_in.and_then(|seconds| seconds.as_u64()).map(Duration::from_secs);
        let lifetime = lifetime.unwrap_or(LONGEST_LIFETIME).min(LONGEST_LIFETIME);
        Some(Self { header, expires: Instant::now() + lifetime, advice })
    }
}

/// The entries had so far. One that has expired, by the clock or by a 401, is replaced.
#[derive(Default)]
pub(super) struct TokenCache {
    entries: Mutex<HashMap<(Origin, String), Authorization>>,
}

impl TokenCache {
    /// The authorization for a repository of a registry.
    pub(super) fn get(&self, registry: &Origin, repository: &str) -> Option<Authorization> {
        let entries = self.lock();
        let authorization = entries.get(&(registry.clone(), repository.to_owned()))?;
        (Instant::now() < authorization.expires).then(|| authorization.clone())
    }

    /// Keeps a authorization.
    pub(super) fn insert(&self, registry: &Origin, repository: &str, authorization: Authorization) {
        let mut entries = self.lock();
        if entries.len() >= MAX_TOKENS {
            entries.clear();
        }
        entries.insert((registry.clone(), repository.to_owned()), authorization);
    }

    /// No code can panic while it holds the lock, so a poisoned one is still whole.
    fn lock(&self) -> MutexGuard<'_, HashMap<(Origin, String), Authorization>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for TokenCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenCache").field("count", &self.lock().len()).finish()
    }
}

/// More repositories than anyone pulls from in the life of a daemon; losing a token costs one request.
const MAX_TOKENS: usize = 1024;
/// After this, credentials are looked up again. Long against a request, short against patience.
const LONGEST_LIFETIME: Duration = Duration::from_mins(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn authorization(answer: &str) -> Option<Authorization> {
        Authorization::from_answer(answer.as_bytes(), Advice::Credential { place: "x".to_owned() })
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
        let origin = |url: &str| Origin::of(&url.parse().unwrap()).unwrap();
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
