//! Challenges: which credentials a registry requires, and which token services are accepted.
//!
//! The registry chooses the URL of its realm. The realm is requested, with or without credentials, only if it
//! is on the registry's own host, on one of [`TOKEN_HOSTS`], or on the host that the user configured.

use std::collections::BTreeMap;

use hyper::HeaderMap;
use hyper::header::WWW_AUTHENTICATE;
use url::Url;

use super::credentials::RegistryHost;
use super::origin::Origin;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Challenges {
    pub(super) bearer: Option<Challenge>,
    /// Whether the registry accepts a user and a password.
    pub(super) basic: bool,
    /// Why the registry refused the credentials sent with the request (RFC 6750, section 3).
    pub(super) error: Option<String>,
}

impl Challenges {
    pub(super) fn from_headers(headers: &HeaderMap) -> Self {
        let mut all = Self::default();
        for value in headers.get_all(WWW_AUTHENTICATE) {
            let Some(found) = value.to_str().ok().and_then(challenges) else { continue };
            all.bearer = all.bearer.or(found.bearer);
            all.basic |= found.basic;
            all.error = all.error.or(found.error);
        }
        all
    }
}

/// A `Bearer` challenge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Challenge {
    realm: String,
    service: Option<String>,
    scope: Option<String>,
}

const MALFORMED: &str = "realm is not a URL";
const DOWNGRADE: &str = "realm is http, the registry https";

fn foreign(host: &str) -> String {
    format!(
        "realm host {host:?} is not the registry's; if it should be, name it in credentials.token_services"
    )
}

impl Challenge {
    /// The URL that issues the token, if `registry` may name it. `services` are the configured pairs of a
    /// registry and the host of its token service.
    pub(super) fn token_url(
        &self,
        registry: &Origin,
        services: &BTreeMap<String, String>,
    ) -> Result<Url, String> {
        let mut url = self.realm(registry, services)?;
        url.query_pairs_mut().extend_pairs(self.query());
        Ok(url)
    }

    /// The challenge with these scopes too: a registry asks only for what one request needs.
    pub(super) fn with_scopes(mut self, scopes: &[String]) -> Self {
        let mut all: Vec<&str> = self.scope.iter().flat_map(|scope| scope.split_ascii_whitespace()).collect();
        all.extend(
            scopes.iter().map(String::as_str).filter(|scope| !all.contains(scope)).collect::<Vec<_>>(),
        );
        self.scope = (!all.is_empty()).then(|| all.join(" "));
        self
    }

    /// [`Self::token_url`] with a nonce and a time, which is what the user's key signs. Ollama's registry expects the
    /// parameters sorted by name.
    pub(super) fn signed_url(
        &self,
        registry: &Origin,
        services: &BTreeMap<String, String>,
        nonce: &str,
        unix_seconds: u64,
    ) -> Result<Url, String> {
        let mut url = self.token_url(registry, services)?;
        url.query_pairs_mut().append_pair("nonce", nonce).append_pair("ts", &unix_seconds.to_string());
        let mut pairs: Vec<(String, String)> = url.query_pairs().into_owned().collect();
        pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        url.query_pairs_mut().clear().extend_pairs(pairs);
        Ok(url)
    }

    /// Checks the realm. The error says what is wrong with it.
    fn realm(&self, registry: &Origin, services: &BTreeMap<String, String>) -> Result<Url, String> {
        let realm = Url::parse(&self.realm).map_err(|_invalid| MALFORMED)?;
        let origin = Origin::from_url(&realm).ok_or(MALFORMED)?;
        let is_known = origin.host() == registry.host()
            || TOKEN_HOSTS.contains(&(registry.host(), origin.host()))
            || services.iter().any(|(host, service)| is(host, registry) && is(service, &origin));
        if !is_known {
            return Err(foreign(origin.host()));
        }
        if registry.is_https() && !origin.is_https() {
            return Err(DOWNGRADE.to_owned());
        }
        Ok(realm)
    }

    /// A scope may contain several, separated by spaces; each becomes its own parameter.
    fn query(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let service = self.service.iter().map(|service| ("service", service.as_str()));
        let scopes = self.scope.iter().flat_map(|scope| scope.split_ascii_whitespace());
        service.chain(scopes.map(|scope| ("scope", scope)))
    }
}

fn is(name: &str, origin: &Origin) -> bool {
    name.eq_ignore_ascii_case(RegistryHost::from_origin(origin).as_str())
}

/// Registries with a token service on another host.
const TOKEN_HOSTS: [(&str, &str); 2] =
    [("registry-1.docker.io", "auth.docker.io"), ("hf.co", "huggingface.co")];
/// Real challenges have about 200 bytes.
const MAX_CHALLENGE_BYTES: usize = 4096;

/// Parses `WWW-Authenticate`: schemes, each followed by `name=value` pairs, all separated by commas.
fn challenges(header: &str) -> Option<Challenges> {
    if header.len() > MAX_CHALLENGE_BYTES {
        return None;
    }
    let (mut challenge, mut basic) = (Challenge::default(), false);
    let (mut code, mut description) = (None, None);
    let mut scheme = "";
    let mut rest = header.trim_start_matches(SEPARATORS);
    while !rest.is_empty() {
        let (word, after) = split_word(rest);
        rest = match after.trim_start_matches([' ', '\t']).strip_prefix('=') {
            Some(after) => {
                let (value, after) = split_value(after.trim_start_matches([' ', '\t']))?;
                if word.eq_ignore_ascii_case("error") {
                    code = Some(value);
                } else if word.eq_ignore_ascii_case("error_description") {
                    description = Some(value);
                } else if scheme.eq_ignore_ascii_case("bearer") {
                    challenge.set(word, value);
                }
                after
            }
            // Neither a word nor a separator: malformed.
            None if word.is_empty() => return None,
            None => {
                scheme = word;
                basic |= scheme.eq_ignore_ascii_case("basic");
                after
            }
        };
        rest = rest.trim_start_matches(SEPARATORS);
    }
    let bearer = (!challenge.realm.is_empty()).then_some(challenge);
    Some(Challenges { bearer, basic, error: description.or(code) })
}

impl Challenge {
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

/// Splits off a value, in quotes or not; `None` if the closing quote is missing.
pub(super) fn split_value(text: &str) -> Option<(String, &str)> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(header: &str) -> Option<Challenge> {
        challenges(header).and_then(|found| found.bearer)
    }

    fn challenge(header: &str) -> Option<(String, Option<String>, Option<String>)> {
        bearer(header).map(|challenge| (challenge.realm, challenge.service, challenge.scope))
    }

    fn token_url(registry: &str, header: &str) -> Result<String, String> {
        let registry = Origin::from_url(&registry.parse().unwrap()).unwrap();
        let services = [("gitlab.example".to_owned(), "login.example:444".to_owned())].into();
        bearer(header).unwrap().token_url(&registry, &services).map(|url| url.to_string())
    }

    #[test]
    fn challenges_of_real_registries_are_parsed() {
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
    fn malformed_challenges_are_ignored() {
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
    fn only_the_registrys_own_and_known_token_services_are_accepted() {
        let realm = |url: &str| format!("Bearer realm=\"{url}\"");
        let foreign = |found: &str| Err(super::foreign(found));
        assert!(token_url("https://r.example", &realm("https://R.example:5001/t")).is_ok());
        assert!(token_url("https://registry-1.docker.io", &realm("https://auth.docker.io/token")).is_ok());
        assert!(token_url("https://hf.co", &realm("https://huggingface.co/v2/token")).is_ok());
        assert!(token_url("https://gitlab.example", &realm("https://login.example:444/t")).is_ok());
        assert!(token_url("https://gitlab.example", &realm("https://login.example/t")).is_err());
        assert!(token_url("https://gitlab.example:1", &realm("https://login.example:444/t")).is_err());
        assert_eq!(
            token_url("https://r.example", &realm("https://huggingface.co/")),
            foreign("huggingface.co")
        );
        assert_eq!(
            token_url("https://r.example", &realm("http://169.254.169.254/")),
            foreign("169.254.169.254")
        );
        assert_eq!(token_url("https://r.example", &realm("https://t.r.example/")), foreign("t.r.example"));
        assert_eq!(token_url("https://r.example", &realm("http://r.example/t")), Err(DOWNGRADE.to_owned()));
        assert!(token_url("http://r.example", &realm("http://r.example/t")).is_ok());
        for url in ["/t", "token", "ftp://r.example/", "https://r.example@evil.example/"] {
            assert_eq!(token_url("https://r.example", &realm(url)), Err(MALFORMED.to_owned()), "{url}");
        }
    }

    #[test]
    fn signed_url_has_sorted_parameters() {
        let header =
            r#"Bearer realm="https://r.example/token?zone=1",service="r",scope="repository:l/m:pull""#;
        let registry = Origin::from_url(&"https://r.example".parse().unwrap()).unwrap();
        let url = bearer(header).unwrap().signed_url(&registry, &BTreeMap::new(), "n-_", 17).unwrap();
        let query = "nonce=n-_&scope=repository%3Al%2Fm%3Apull&service=r&ts=17&zone=1";
        assert_eq!(url.to_string(), format!("https://r.example/token?{query}"));
    }

    #[test]
    fn basic_is_found_with_and_without_bearer() {
        for (header, basic) in [
            (r#"Basic realm="x""#, true),
            (r#"Bearer realm="https://a/t", basic realm="x""#, true),
            ("Basic", true),
            (r#"Bearer realm="https://a/t",scope="Basic x""#, false),
            (r#"Negotiate"#, false),
        ] {
            assert_eq!(challenges(header).unwrap().basic, basic, "{header}");
        }
    }
}
