//! Authorization: chooses the credentials for repeating a refused request, and the hosts that may receive them.
//!
//! Credentials are sent only after the registry has refused a request, and only those configured for its
//! host: to the registry, or to its token service if [`Challenge`] accepts that service. They are not sent
//! over plain HTTP except to this machine or to hosts that the user configured. Redirects to other origins
//! drop them ([`Shared::follow`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HeaderValue};
use ring::rand::{SecureRandom as _, SystemRandom};
use tracing::Span;
use url::Url;

use super::Shared;
use super::address_scope::AddressScope;
use super::challenge::{Challenge, Challenges};
use super::credentials::{
    Credential, CredentialError, CredentialPolicy, Found, OllamaKey, RegistryHost, Secret, hidden_header,
};
use super::error::{Advice, RegistryError, Result};
use super::origin::{Origin, host_of};
use super::request::{Response, Target};
use super::token_cache::Authorization;
use super::transport::Request;

/// The credentials that the user has for a registry.
enum Configured {
    Password { user: String, password: Secret, place: String },
    Token { token: Secret, place: String },
    Key { key: Box<OllamaKey>, path: PathBuf },
    Nothing { advice: Advice },
}

impl Shared {
    /// Sends the request, with credentials if required, and checks the response's status.
    pub(super) async fn get(&self, target: &Target<'_>) -> Result<Response> {
        self.authorized(target).await?.checked(target, &self.limits).await
    }

    /// Sends a request, and repeats it once with credentials if the registry requires them.
    pub(super) async fn authorized(&self, target: &Target<'_>) -> Result<Response> {
        let authorization = self.tokens.get(target.origin, &target.repository);
        let mut response = self.follow(target, authorization).await?;
        if !requires_credentials(&response, target) {
            return Ok(response);
        }
        match self.authorization(target, &response).await? {
            Outcome::Authorized(authorization) => {
                self.tokens.insert(target.origin, &target.repository, authorization.clone());
                self.follow(target, Some(authorization)).await
            }
            Outcome::Refused(advice) => {
                response.advice = advice;
                Ok(response)
            }
        }
    }

    /// The credentials for repeating a refused request.
    pub(super) async fn authorization(&self, target: &Target<'_>, refusal: &Response) -> Result<Outcome> {
        let Challenges { bearer, basic: accepts_basic, .. } = Challenges::from_headers(refusal.headers());
        let bearer = bearer.map(|challenge| challenge.with_scopes(&target.scopes));
        let reach = refusal.reach;
        match (self.configured(target.origin).await?, bearer) {
            (Configured::Token { token, place }, _) => {
                let header = format!("Bearer {}", token.reveal());
                self.direct(target, &header, place)
            }
            (Configured::Password { user, password, place }, Some(challenge)) => {
                let url = self.token_url(target, &challenge)?;
                self.may_carry(target.origin, &url)?;
                let header = sendable(&basic(&user, &password), &place)?;
                self.token(target, url, reach, Some(header), Advice::Credential { place }).await
            }
            (Configured::Password { user, password, place }, None) if accepts_basic => {
                self.direct(target, &basic(&user, &password), place)
            }
            (Configured::Password { place, .. }, None) => Ok(Outcome::Refused(Advice::Credential { place })),
            (Configured::Key { key, path }, Some(challenge)) => {
                let url = self.signed_url(target, &challenge)?;
                self.may_carry(target.origin, &url)?;
                let place = path.display().to_string();
                self.token(target, url.clone(), reach, key.authorization(&url), Advice::Credential { place })
                    .await
            }
            (Configured::Key { path, .. }, None) => Ok(Outcome::Refused(Advice::OllamaKey { path })),
            (Configured::Nothing { advice }, Some(challenge)) => {
                let url = self.token_url(target, &challenge)?;
                self.token(target, url, reach, None, advice).await
            }
            (Configured::Nothing { advice }, None) => Ok(Outcome::Refused(advice)),
        }
    }

    /// Looks up the credentials on a blocking thread, because that reads files and may run a program.
    async fn configured(&self, origin: &Origin) -> Result<Configured> {
        let (policy, origin, span) = (Arc::clone(&self.credentials), origin.clone(), Span::current());
        let look_up = move || span.in_scope(|| configured(&policy, &origin));
        let looked_up = tokio::task::spawn_blocking(look_up).await;
        match looked_up {
            Ok(configured) => Ok(configured?),
            // Only a panic ends the task: it cannot be cancelled once it runs.
            Err(error) => Err(CredentialError::Interrupted { reason: error.to_string() }.into()),
        }
    }

    fn direct(&self, target: &Target<'_>, header: &str, place: String) -> Result<Outcome> {
        self.may_carry_to(target.origin)?;
        let header = sendable(header, &place)?;
        Ok(Outcome::Authorized(Authorization::lasting(header, Advice::Credential { place })))
    }

    /// Requests a token; follows no redirects.
    async fn token(
        &self,
        target: &Target<'_>,
        url: Url,
        reach: AddressScope,
        authorization: Option<HeaderValue>,
        advice: Advice,
    ) -> Result<Outcome> {
        let headers = authorization.clone().map(|value| (AUTHORIZATION, value)).into_iter().collect();
        let (response, scope) = self.transport.send(Request::get(&url, headers), reach).await?;
        let is_quotable = target.may_quote(&url, scope);
        let advice_here = advice.clone();
        let response =
            Response { response, url, reach, is_quotable, advice: advice_here, authorization, linked: None };
        match response.response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(target.denied(response.host(), response.reason(&self.limits).await, advice));
            }
            _ => {
                let service = format!("token service {}", response.host());
                return Err(response.failed(service, false, &self.limits).await);
            }
        }
        let no_token = || realm_refused(target, "no usable token in its response");
        let document = response.document("token", MAX_TOKEN_BYTES, self.limits.document).await?;
        Authorization::from_response(&document, advice).map(Outcome::Authorized).ok_or_else(no_token)
    }

    fn token_url(&self, target: &Target<'_>, challenge: &Challenge) -> Result<Url> {
        let url = challenge.token_url(target.origin, &self.credentials.token_services);
        url.map_err(|reason| realm_refused(target, &reason))
    }

    fn signed_url(&self, target: &Target<'_>, challenge: &Challenge) -> Result<Url> {
        let services = &self.credentials.token_services;
        let url = challenge.signed_url(target.origin, services, &nonce()?, unix_seconds());
        url.map_err(|reason| realm_refused(target, &reason))
    }

    fn may_carry(&self, registry: &Origin, token_url: &Url) -> Result<()> {
        self.may_carry_to(registry)?;
        match Origin::from_url(token_url) {
            Some(service) => self.may_carry_to(&service),
            None => Err(CredentialError::PlainHttp { host: host_of(token_url) }.into()),
        }
    }

    fn may_carry_to(&self, origin: &Origin) -> Result<()> {
        if self.credentials.may_carry(origin) {
            return Ok(());
        }
        Err(CredentialError::PlainHttp { host: RegistryHost::from_origin(origin).to_string() }.into())
    }
}

pub(super) enum Outcome {
    Authorized(Authorization),
    Refused(Advice),
}

/// Tokens are signed statements of some KiB.
const MAX_TOKEN_BYTES: u64 = 64 << 10;
/// The length of Ollama's own nonces.
const NONCE_BYTES: usize = 16;

/// Whether the registry requires credentials, or other credentials than those sent. Hugging Face responds 403 for gated
/// models even to requests without credentials.
fn requires_credentials(response: &Response, target: &Target<'_>) -> bool {
    let nothing_sent = !matches!(response.advice, Advice::Credential { .. });
    response.is_from(target.origin)
        && match response.response.status() {
            StatusCode::UNAUTHORIZED => true,
            StatusCode::FORBIDDEN => response.is_gated() && nothing_sent,
            _ => false,
        }
}

fn configured(policy: &CredentialPolicy, origin: &Origin) -> Result<Configured, CredentialError> {
    let host = RegistryHost::from_origin(origin);
    let advice = match policy.find(&host)? {
        Found::Credential(Credential::Password { user, password }, place) => {
            return Ok(Configured::Password { user, password, place });
        }
        Found::Credential(Credential::Token(token), place) => return Ok(Configured::Token { token, place }),
        Found::Helper(name) => Advice::Helper { name, host: host.to_string() },
        Found::Nothing => Advice::LogIn { host: host.to_string() },
    };
    let Some(path) = policy.ollama_key_for(origin) else { return Ok(Configured::Nothing { advice }) };
    let path = path.to_owned();
    Ok(match OllamaKey::read(&path)? {
        Some(key) => Configured::Key { key: Box::new(key), path },
        None => Configured::Nothing { advice: Advice::OllamaKey { path } },
    })
}

fn realm_refused(target: &Target<'_>, reason: &str) -> RegistryError {
    RegistryError::unusable(target.origin.host(), format!("token service refused: {reason}"))
}

fn basic(user: &str, password: &Secret) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:{}", password.reveal())))
}

fn sendable(header: &str, place: &str) -> Result<HeaderValue, CredentialError> {
    hidden_header(header).ok_or_else(|| CredentialError::Unsendable { place: place.to_owned() })
}

fn nonce() -> Result<String, CredentialError> {
    let mut bytes = [0; NONCE_BYTES];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|error| CredentialError::Interrupted { reason: error.to_string() })?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
