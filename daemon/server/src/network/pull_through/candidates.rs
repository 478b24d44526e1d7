//! Which models at the configured registries the name of a repository may mean.

use blobd_store_format::host::{HUGGING_FACE, NO_NAMESPACE, canonical, is_evident};
use blobd_store_format::reference::Reference;

pub(super) fn is_upstream(upstream: &[String], host: &str) -> bool {
    upstream.iter().any(|listed| canonical(listed).eq_ignore_ascii_case(canonical(host)))
}

/// The models that a name means, the first to be asked for first. `host` is the registry that the client would have asked
/// otherwise. A name without a host may be one of any of the registries; one with another host is none.
pub(super) fn candidates(upstream: &[String], name: &str, tag: &str, host: Option<&str>) -> Vec<Reference> {
    let of_host = |host: &str, name: &str| {
        let is_default = canonical(host).eq_ignore_ascii_case(Reference::DEFAULT_HOST);
        let text = if is_default { format!("{name}:{tag}") } else { format!("{host}/{name}:{tag}") };
        let model: Reference = text.parse().ok()?;
        // Hugging Face has no repositories without an owner.
        let is_at_hub = canonical(model.host()).eq_ignore_ascii_case(HUGGING_FACE);
        let is_possible = !(is_at_hub && model.namespace() == NO_NAMESPACE);
        (is_upstream(upstream, model.host()) && model.digest().is_none() && is_possible).then_some(model)
    };
    if let Some(host) = host {
        return of_host(host, name).into_iter().collect();
    }
    match name.split_once('/') {
        Some((host, rest)) if is_upstream(upstream, host) => of_host(host, rest).into_iter().collect(),
        Some((host, _)) if is_evident(host) => Vec::new(),
        _ => upstream.iter().filter_map(|host| of_host(host, name)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(upstream: &[&str], name: &str, host: Option<&str>) -> Vec<String> {
        let upstream: Vec<String> = upstream.iter().map(|host| (*host).to_owned()).collect();
        candidates(&upstream, name, "1", host).iter().map(Reference::short).collect()
    }

    #[test]
    fn names_mean_models_of_the_listed_registries_only() {
        let both = ["registry.ollama.ai", "hf.co"];
        for (name, host, models) in [
            ("tiny", None, &["tiny:1"][..]),
            ("library/tiny", None, &["tiny:1", "hf.co/library/tiny:1"]),
            ("org/m", None, &["org/m:1", "hf.co/org/m:1"]),
            ("hf.co/org/m", None, &["hf.co/org/m:1"]),
            ("huggingface.co/org/m", None, &["hf.co/org/m:1"]),
            ("registry.ollama.ai/library/tiny", None, &["tiny:1"]),
            ("ghcr.io/org/m", None, &[]),
            ("127.0.0.1:5000/org/m", None, &[]),
            ("org/m", Some("hf.co"), &["hf.co/org/m:1"]),
            ("org/m", Some("ghcr.io"), &[]),
            ("../m", None, &[]),
            ("", None, &[]),
        ] {
            assert_eq!(found(&both, name, host), models, "{name} {host:?}");
        }
        assert_eq!(found(&["127.0.0.1:5000"], "org/m", None), ["127.0.0.1:5000/org/m:1"]);
        assert!(found(&[], "tiny", None).is_empty());
    }
}
