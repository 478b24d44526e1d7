//! Mirrors: the servers that replace a host, their order, and when the next one is tried.

use std::collections::BTreeMap;

use blobd_store_format::host;
use blobd_store_format::reference::{Reference, Scheme};
use blobd_store_format::source::{FileUrl, HubFile, without_userinfo};

use super::RegistryPolicy;
use super::error::{RegistryError, Result};
use super::origin::Registry;

#[derive(Debug)]
pub(super) struct Mirrors {
    by_host: BTreeMap<String, Vec<Registry>>,
    insecure: Vec<String>,
}

impl Mirrors {
    pub(super) fn new(policy: &RegistryPolicy) -> Result<Self> {
        let mut by_host: BTreeMap<String, Vec<Registry>> = BTreeMap::new();
        for (host, bases) in &policy.mirrors {
            let unusable = |base: &str| RegistryError::Mirror {
                host: host.clone(),
                base: without_userinfo(base).into_owned(),
            };
            let host_key = key(host);
            let server = |base: &String| Some(Registry::at(base)?.mirroring(&host_key));
            let servers = bases.iter().map(|base| server(base).ok_or_else(|| unusable(base)));
            let servers: Vec<Registry> = servers.collect::<Result<_, _>>()?;
            if servers.is_empty() {
                return Err(unusable(""));
            }
            // A service can have several names; a mirror of one of them serves them all.
            by_host.entry(host_key).or_default().extend(servers);
        }
        Ok(Self { by_host, insecure: policy.insecure.clone() })
    }

    /// The servers for a model, in order; at least one. Mirrors replace the host itself, unless it is listed among
    /// them.
    pub(super) fn for_model(&self, reference: &Reference) -> Result<Vec<Registry>> {
        match self.by_host.get(&key(reference.host())) {
            Some(mirrors) => Ok(mirrors.clone()),
            None => Ok(vec![self.own(reference, false)?]),
        }
    }

    /// The host that a reference names itself, whatever mirrors it has.
    pub(super) fn own(&self, reference: &Reference, is_plain_http: bool) -> Result<Registry> {
        let is_plain_http = is_plain_http || self.is_insecure(reference.host());
        Ok(Registry::named(reference, if is_plain_http { Scheme::Http } else { reference.scheme() })?)
    }

    pub(super) fn for_hub(&self) -> Result<Vec<Registry>> {
        match self.by_host.get(HubFile::HOST) {
            Some(mirrors) => Ok(mirrors.clone()),
            None => server_at(Scheme::Https, HubFile::API_HOST).map(|own| vec![own]),
        }
    }

    /// The servers for a file's URL, in order. Only TLS authenticates a file without a known digest, so plain
    /// HTTP is allowed only to this machine and to configured hosts.
    pub(super) fn for_url(&self, url: &FileUrl) -> Result<Vec<Registry>> {
        if let Some(mirrors) = self.by_host.get(&key(url.host())) {
            return Ok(mirrors.clone());
        }
        let server = server_at(url.scheme(), url.host())?;
        let origin = server.origin();
        if !origin.is_https() && !origin.is_loopback() && !self.is_insecure(url.host()) {
            return Err(RegistryError::PlainHttp { host: url.host().to_owned() });
        }
        Ok(vec![server])
    }

    /// Whether the server is Hugging Face or a mirror of it.
    pub(super) fn is_hub(&self, server: &Registry) -> bool {
        let mirrors = self.by_host.get(HubFile::HOST).map(Vec::as_slice).unwrap_or_default();
        server.origin().is_https() && server.is_of(HubFile::HOST)
            || mirrors.iter().any(|mirror| mirror.origin() == server.origin())
    }

    fn is_insecure(&self, host: &str) -> bool {
        self.insecure.iter().any(|listed| listed.eq_ignore_ascii_case(host))
    }
}

fn key(host: &str) -> String {
    host::canonical(host).to_ascii_lowercase()
}

fn server_at(scheme: Scheme, host: &str) -> Result<Registry> {
    Registry::at(&format!("{}://{host}", scheme.as_str()))
        .ok_or_else(|| RegistryError::Host { host: host.to_owned() })
}

/// Tries the servers in turn until one succeeds, or fails for a reason that applies to all of them. If all fail,
/// returns the most informative error, with the answers of the others as its hint.
pub(super) async fn first_of<'s, T, F: Future<Output = Result<T>>>(
    servers: &'s [Registry],
    host: &str,
    ask: impl Fn(&'s Registry) -> F,
) -> Result<T> {
    let mut failures = Vec::new();
    for server in servers {
        match ask(server).await {
            Err(error) if error.may_be_elsewhere() => {
                tracing::debug!("{error}");
                failures.push((relevance(&error, server.is_of(host)), error));
            }
            Err(error) => return Err(with_others(error, &failures)),
            success => return success,
        }
    }
    // Of equally relevant errors, report that of the first server.
    let best = (0..failures.len()).rev().max_by_key(|place| failures.get(*place).map(|(rank, _)| *rank));
    match best {
        Some(place) => {
            let (_, error) = failures.remove(place);
            Err(with_others(error, &failures))
        }
        None => Err(RegistryError::Host { host: host.to_owned() }),
    }
}

fn with_others(error: RegistryError, others: &[(Relevance, RegistryError)]) -> RegistryError {
    let mut briefs: Vec<String> = Vec::new();
    for brief in others.iter().map(|(_, other)| other.brief()) {
        if !briefs.contains(&brief) {
            briefs.push(brief);
        }
    }
    match briefs.is_empty() {
        true => error,
        false => RegistryError::AllFailed { error: Box::new(error), others: briefs },
    }
}

/// How informative an error of one of several servers is, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Relevance {
    /// This server lacks it, another one may have it.
    Absent,
    /// The server fails or cannot be reached, and might have it.
    Failed,
    /// The connection fails for a reason that the user can change, such as a certificate.
    NotTrusted,
    /// The server may have it, but requires other credentials.
    Denied,
    /// The host that the name belongs to lacks it.
    AbsentAtHost,
    /// The server has the repository, and lists what is in it.
    OthersListed,
}

/// `is_own` is whether the server is the host itself and not a mirror of it.
fn relevance(error: &RegistryError, is_own: bool) -> Relevance {
    match error {
        RegistryError::NoSuchName { .. } | RegistryError::NoSuchTag { latest: Some(_), .. } => {
            Relevance::OthersListed
        }
        RegistryError::NotFound { .. } | RegistryError::NoSuchTag { .. } if is_own => Relevance::AbsentAtHost,
        RegistryError::NotFound { .. }
        | RegistryError::NoSuchTag { .. }
        | RegistryError::BlobMissing { .. } => Relevance::Absent,
        RegistryError::Denied { .. } => Relevance::Denied,
        RegistryError::Unreachable { reason, .. } if reason.is_tls() => Relevance::NotTrusted,
        _ => Relevance::Failed,
    }
}
