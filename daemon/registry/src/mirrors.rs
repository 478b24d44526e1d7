//! Mirrors: which servers are requested instead of a host, in which order, and when the next one is tried.

use std::collections::BTreeMap;

use blobd_store_format::host;
use blobd_store_format::reference::{Reference, Scheme};
use blobd_store_format::source::{FileUrl, HubFile};

use super::RegistryPolicy;
use super::error::RegistryError;
use super::origin::Registry;

#[derive(Debug)]
pub(super) struct Mirrors {
    by_host: BTreeMap<String, Vec<Registry>>,
    insecure: Vec<String>,
}

impl Mirrors {
    pub(super) fn new(policy: &RegistryPolicy) -> Result<Self, RegistryError> {
        let mut by_host: BTreeMap<String, Vec<Registry>> = BTreeMap::new();
        for (host, bases) in &policy.mirrors {
            let unusable = |base: &str| RegistryError::Mirror { host: host.clone(), base: base.to_owned() };
            let servers = bases.iter().map(|base| Registry::at(base).ok_or_else(|| unusable(base)));
            let servers: Vec<Registry> = servers.collect::<Result<_, _>>()?;
            if servers.is_empty() {
                return Err(unusable(""));
            }
            // The mirrors of all names of a service are mirrors of the service.
            by_host.entry(key(host)).or_default().extend(servers);
        }
        Ok(Self { by_host, insecure: policy.insecure.clone() })
    }

    /// The servers for a model, in order; at least one. Mirrors replace the host itself, which is requested
    /// only if it is one of them.
    pub(super) fn of(&self, reference: &Reference) -> Result<Vec<Registry>, RegistryError> {
        match self.by_host.get(&key(reference.host())) {
            Some(mirrors) => Ok(mirrors.clone()),
            None if self.is_insecure(reference.host()) => Ok(vec![Registry::named(reference, Scheme::Http)?]),
            None => Ok(vec![Registry::named(reference, reference.scheme())?]),
        }
    }

    pub(super) fn of_hub(&self) -> Result<Vec<Registry>, RegistryError> {
        match self.by_host.get(HubFile::HOST) {
            Some(mirrors) => Ok(mirrors.clone()),
            None => server_at(Scheme::Https, HubFile::API_HOST).map(|own| vec![own]),
        }
    }

    /// The servers for a file's URL, in order. Only TLS authenticates a file without a known digest, so plain
    /// HTTP is allowed only to this machine and to configured hosts.
    pub(super) fn of_url(&self, url: &FileUrl) -> Result<Vec<Registry>, RegistryError> {
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

    fn is_insecure(&self, host: &str) -> bool {
        self.insecure.iter().any(|listed| listed.eq_ignore_ascii_case(host))
    }
}

fn key(host: &str) -> String {
    host::canonical(host).to_ascii_lowercase()
}

fn server_at(scheme: Scheme, host: &str) -> Result<Registry, RegistryError> {
    Registry::at(&format!("{}://{host}", scheme.as_str()))
        .ok_or_else(|| RegistryError::Host { host: host.to_owned() })
}

/// Tries the servers in turn until one succeeds, or fails in a way that the others would too.
pub(super) async fn first_of<'s, T, F: Future<Output = Result<T, RegistryError>>>(
    servers: &'s [Registry],
    host: &str,
    ask: impl Fn(&'s Registry) -> F,
) -> Result<T, RegistryError> {
    let mut worst: Option<RegistryError> = None;
    for server in servers {
        match ask(server).await {
            Err(error) if error.may_be_elsewhere() => {
                tracing::debug!("{error}");
                // An unreachable server might have had what another one lacks, so its error is kept.
                if worst.as_ref().is_none_or(RegistryError::is_absence) {
                    worst = Some(error);
                }
            }
            outcome => return outcome,
        }
    }
    Err(worst.unwrap_or_else(|| RegistryError::Host { host: host.to_owned() }))
}
