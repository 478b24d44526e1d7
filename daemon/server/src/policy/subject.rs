//! The subject of rules: a model, as far as it is known.

use std::collections::BTreeSet;

use blobd_store_format::host;
use blobd_store_format::reference::{Reference, Scheme};
use blobd_store_format::source::PullSource;

/// Where a model's files came from: a host in its [one spelling](host::spelled) with the port, or this machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Host {
    pub(super) name: String,
    /// Absent for [`Host::LOCAL`].
    pub(super) port: Option<u16>,
}

impl Host {
    /// The registry of a model that was imported from a file.
    pub(super) const LOCAL: &str = "local";

    pub(super) fn new(host: &str, scheme: Scheme) -> Self {
        let (name, port) = host::spelled(host);
        Self { name, port: port.or_else(|| Some(scheme.default_port())) }
    }

    pub(super) fn local() -> Self {
        Self { name: Self::LOCAL.to_owned(), port: None }
    }
}

/// A license text or a format that is not known.
pub(crate) const OTHER: &str = "other";

/// The formats of files with weights. Models without such files are [`OTHER`] too.
pub(crate) const FORMATS: [&str; 4] = ["gguf", "safetensors", "dduf", OTHER];

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ModelName {
    /// `NAMESPACE/MODEL`.
    pub(super) repository: String,
    /// Absent if the name is fixed to a digest: the registry may have that under other tags.
    pub(super) tag: Option<String>,
}

impl ModelName {
    pub(crate) fn new(reference: &Reference) -> Self {
        let namespace = match reference.namespace() {
            host::NO_NAMESPACE => Reference::DEFAULT_NAMESPACE,
            namespace => namespace,
        };
        let repository = format!("{namespace}/{}", reference.model());
        let tag = reference.digest().is_none().then(|| reference.tag().to_owned());
        Self { repository, tag }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Known {
    #[default]
    NotYet,
    Are(BTreeSet<String>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) licenses: Known,
    pub(crate) formats: Known,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) registries: BTreeSet<Host>,
    /// Where another program says that it has the files from. Nothing proves that, so these only matter to rules that deny.
    pub(crate) claimed_registries: BTreeSet<Host>,
    pub(crate) source_names: BTreeSet<ModelName>,
    /// Its names in the store.
    pub(crate) names: BTreeSet<ModelName>,
    pub(crate) terms: Terms,
}

impl Subject {
    pub(crate) fn add_name(&mut self, name: &Reference) {
        self.names.insert(ModelName::new(name));
    }

    pub(crate) fn add_source(&mut self, source: &PullSource) {
        self.registries.insert(Host::new(source.host(), source.scheme()));
        self.source_names.extend(source.name().ok().map(|name| ModelName::new(&name)));
    }

    /// Another program says that it has the files from there.
    pub(crate) fn add_claim(&mut self, source: &PullSource) {
        self.claimed_registries.insert(Host::new(source.host(), source.scheme()));
    }

    /// The files came from the host in a name.
    pub(crate) fn add_host(&mut self, name: &Reference) {
        self.registries.insert(Host::new(name.host(), name.scheme()));
    }

    /// The files came from a user of this machine.
    pub(crate) fn add_local(&mut self) {
        self.registries.insert(Host::local());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_has_the_name_that_its_service_is_known_by() {
        let mut subject = Subject::default();
        subject.add_source(&"https://huggingface.co/acme/x/resolve/main/x.gguf".parse().unwrap());
        assert_eq!(subject.registries, [Host { name: "hf.co".to_owned(), port: Some(443) }].into());
        assert_eq!(subject.source_names.first().unwrap().repository, "acme/x");
    }
}
