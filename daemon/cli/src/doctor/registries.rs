//! Checks whether registries can be reached, for `--registries`.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use blobd_cli_common::connect::client_error;
use blobd_cli_common::local_server::Settings;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::upkeep::{Check, CheckStatus};
use blobd_store_format::source::{PullSource, PulledSource};

use crate::{Client, ErrorBody, ErrorCode};

/// The daemon repeats requests that fail.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Each is a thread here and a request in the daemon.
const MOST_REGISTRIES: usize = 16;
const DEFAULT_REGISTRY: &str = "registry.ollama.ai";

/// Requests one manifest from each registry, all at the same time: that of a model that was pulled from there. Sends
/// only what a pull would send.
pub(super) fn check(client: &Client, settings: &dyn Settings) -> Vec<Check> {
    let client = client.clone().with_timeout(TIME_LIMIT);
    let registries = sources(&client, settings);
    thread::scope(|scope| {
        let mut asked = Vec::new();
        for (host, source) in &registries {
            let client = client.clone();
            asked.push(scope.spawn(move || ask(&client, host, source)));
        }
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    })
}

fn sources(client: &Client, settings: &dyn Settings) -> BTreeMap<String, PullSource> {
    let models = client.models().map(|list| list.models).unwrap_or_default();
    let origins = models.iter().filter_map(|model| model.origin.as_deref()?.parse::<PulledSource>().ok());
    let sources = origins.map(|pulled| pulled.source);
    let mut sources: BTreeMap<_, _> = sources.map(|source| (source.host().to_owned(), source)).collect();
    let configured = settings.registry_hosts();
    for host in configured.iter().map(String::as_str).chain([DEFAULT_REGISTRY]) {
        // No registry has this model: that it says so is a response.
        if let Ok(source) = format!("{host}/library/blobd-doctor").parse() {
            sources.entry(host.to_owned()).or_insert(source);
        }
    }
    sources.into_iter().take(MOST_REGISTRIES).collect()
}

fn ask(client: &Client, host: &str, source: &PullSource) -> Check {
    let request = PullParams::of_source(source.clone());
    let started = Instant::now();
    let answer = client.resolve(&request).map(drop).map_err(client_error);
    finding(host, answer, started.elapsed())
}

fn finding(host: &str, answer: Result<(), ErrorBody>, took: Duration) -> Check {
    let name = format!("registry {host}");
    let error = match answer {
        Ok(()) => return Check::new(name, CheckStatus::Ok, format!("responds in {} ms", took.as_millis())),
        Err(error) => error,
    };
    match error.code {
        ErrorCode::NotFound => {
            Check::new(name, CheckStatus::Ok, format!("responds in {} ms", took.as_millis()))
        }
        ErrorCode::DeniedByPolicy => {
            Check::new(name, CheckStatus::Ok, format!("not asked: {}", error.message))
        }
        ErrorCode::Denied => {
            Check::new(name, CheckStatus::Note, format!("responds, and denies: {}", error.message))
                .because("private models of this registry cannot be pulled")
                .with_hint(error.hint.unwrap_or_else(|| "log in if you have an account there".to_owned()))
                .mended_by(format!("blobd login {}", blobd_store_format::text::quoted(host)))
        }
        _ => Check::new(name, CheckStatus::Failure, &error.message)
            .because("nothing can be pulled from there; models that are stored work without it")
            .with_hint(error.hint.unwrap_or_else(|| "check the network, the proxy and the name".to_owned()))
            .mended_by(format!(
                "curl -sSI {}",
                blobd_store_format::text::quoted(&format!("https://{host}/v2/"))
            )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registry_that_responds_in_any_way_is_reachable() {
        let found = |code, message: &str| {
            finding("example.org", Err(ErrorBody::new(code, message)), Duration::from_millis(5))
        };
        assert_eq!(finding("h", Ok(()), Duration::from_millis(5)).detail, "responds in 5 ms");
        assert_eq!(found(ErrorCode::NotFound, "no such model").status, CheckStatus::Ok);
        let denied = found(ErrorCode::Denied, "example.org: denied");
        assert_eq!(denied.status, CheckStatus::Note);
        assert_eq!(denied.command.as_deref(), Some("blobd login example.org"));
        let failed = found(ErrorCode::Upstream, "example.org: no address found");
        assert_eq!((failed.status, failed.name.as_str()), (CheckStatus::Failure, "registry example.org"));
    }
}
