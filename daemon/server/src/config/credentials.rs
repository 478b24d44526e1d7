//! The section `[credentials]`, and the paths of this user's credentials.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use blobd_client::paths::{default_config, expanded};
use blobd_registry::credentials::{CredentialFile, CredentialPolicy, DockerHelpers, Secret};
use blobd_store_format::source::without_userinfo;
use serde::Deserialize;

use super::registries::is_host;
use super::{Refusal, values};

/// How credentials of registries are found, and to which hosts they may be sent. `docs/SECURITY.md` describes the risk
/// of each exception.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CredentialsConfig {
    #[serde(deserialize_with = "values::optional::<values::AbsolutePath, _>")]
    pub file: Option<PathBuf>,
    pub use_docker_helpers: bool,
    pub insecure_hosts: Vec<String>,
    pub ollama_key_hosts: Vec<String>,
    pub token_services: BTreeMap<String, String>,
}

impl CredentialsConfig {
    /// blobd's own file; `config` is the path of the configuration file. `None` without a configuration file and
    /// without a home directory.
    pub(super) fn file(&self, config: Option<&Path>) -> Option<CredentialFile> {
        let config = config.map(Path::to_path_buf).or_else(default_config);
        let beside = config.map(|config| config.with_file_name("credentials.json"));
        self.file.clone().or(beside).map(CredentialFile::at)
    }

    /// All credentials of this user, found by the environment variables and default paths of other programs.
    pub(super) fn policy(&self, config: Option<&Path>) -> CredentialPolicy {
        // Without HOME there are none: a path relative to the current directory could be another user's.
        let home = variable("HOME");
        let at_home = |name: &str| home.as_ref().map(|home| home.join(name));
        let docker = variable("DOCKER_CONFIG").or_else(|| at_home(".docker"));
        let hub_variable =
            |name: &str| variable(name).map(|path| expanded(path, |name| std::env::var_os(name)));
        let cache = hub_variable("XDG_CACHE_HOME").or_else(|| at_home(".cache"));
        let hugging_face = hub_variable("HF_HOME").or_else(|| cache.map(|cache| cache.join("huggingface")));
        let token = std::env::var("HF_TOKEN").ok().filter(|token| !token.trim().is_empty());
        CredentialPolicy {
            file: self.file(config),
            docker_config: docker.map(|docker| docker.join("config.json")),
            docker_helpers: match self.use_docker_helpers {
                true => DockerHelpers::Run,
                false => DockerHelpers::Ignored,
            },
            hugging_face_token: token.map(|token| Secret::new(token.trim())),
            hugging_face_file: hub_variable("HF_TOKEN_PATH")
                .or_else(|| hugging_face.map(|home| home.join("token"))),
            ollama_key: at_home(".ollama/id_ed25519"),
            ollama_key_hosts: self.ollama_key_hosts.clone(),
            insecure_hosts: self.insecure_hosts.clone(),
            token_services: self.token_services.clone(),
        }
    }

    /// Refuses exceptions that can never apply.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        let has_port =
            |host: &str| host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if let Some(host) = self.insecure_hosts.iter().find(|host| !is_host(host) || !has_port(host)) {
            let what = format!("expected HOST:PORT, found {:?}", without_userinfo(host));
            return Err(Refusal::new("credentials.insecure_hosts", what));
        }
        let mut services = self.token_services.iter().flat_map(|(registry, service)| [registry, service]);
        let in_services =
            services.find(|host| !is_host(host)).map(|host| ("credentials.token_services", host));
        let in_key_hosts = self.ollama_key_hosts.iter().find(|host| !is_host(host));
        match in_key_hosts.map(|host| ("credentials.ollama_key_hosts", host)).or(in_services) {
            None => Ok(()),
            Some((key, host)) => Err(Refusal::new(
                key,
                format!("expected HOST or HOST:PORT, found {:?}", without_userinfo(host)),
            )),
        }
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn file_is_beside_the_configuration_file_by_default() {
        let mut config = CredentialsConfig::default();
        let beside = config.file(Some(Path::new("/etc/blobd/other.toml")));
        assert_eq!(beside.unwrap().path(), Path::new("/etc/blobd/credentials.json"));
        config.file = Some("/x/y".into());
        assert_eq!(config.file(None).unwrap().path(), Path::new("/x/y"));
    }

    #[test]
    fn exceptions_are_read_and_checked() {
        let check = |text: &str| toml::from_str::<Config>(text).unwrap().credentials.check();
        let text = "[credentials]\ninsecure_hosts = [\"lan:5000\"]\nollama_key_hosts = [\"mirror.example\"]\n\
            use_docker_helpers = true\n[credentials.token_services]\n\"registry.gitlab.com\" = \"gitlab.com\"\n";
        assert_eq!(check(text), Ok(()));
        let policy = toml::from_str::<Config>(text).unwrap().credentials.policy(None);
        assert_eq!(policy.docker_helpers, DockerHelpers::Run);
        for (text, what) in [
            ("insecure_hosts = [\"lan\"]", "expected HOST:PORT, found \""),
            ("insecure_hosts = [\"http://lan:5000\"]", "expected HOST:PORT, found \""),
            ("ollama_key_hosts = [\"https://mirror.example\"]", "expected HOST or HOST:PORT, found \""),
            ("token_services = { \"a\" = \"b c\" }", "expected HOST or HOST:PORT, found \""),
        ] {
            let error = check(&format!("[credentials]\n{text}")).unwrap_err();
            assert!(error.what.contains(what), "{error:?}");
        }
    }
}
