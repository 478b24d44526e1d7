//! Addresses of a model's page on a web site, as they are copied from a browser.

use super::SourceError;
use super::hub::hub_page;
use crate::host;
use crate::reference::{Reference, Scheme};

/// The reference that the address of a page means; `None` if the text is no such address.
pub(super) fn model_page(text: &str) -> Option<Result<Reference, SourceError>> {
    if let Some(page) = hub_page(text) {
        return Some(page);
    }
    let (_, rest) = text.split_once("://").filter(|(scheme, _)| *scheme == "https").unwrap_or(("", text));
    let (site, path) = rest.split(['?', '#']).next().unwrap_or_default().split_once('/')?;
    let parts: Vec<&str> = path.trim_end_matches('/').split('/').collect();
    let (site, port) = host::unaliased(site);
    if port.is_some_and(|port| port != Scheme::Https.default_port()) {
        return None;
    }
    let name = match (site.as_str(), &parts[..]) {
        (
            "ollama.com" | "www.ollama.com",
            [user, model] | [user, model, "tags"] | [user, model, "blobs", _],
        ) => {
            format!("{}/{user}/{model}", Reference::DEFAULT_HOST)
        }
        ("hub.docker.com", ["r", user, model] | ["r", user, model, "tags"]) => {
            format!("{}/{user}/{model}", host::DOCKER_HUB)
        }
        _ => return None,
    };
    Some(name.parse().map_err(SourceError::from))
}
