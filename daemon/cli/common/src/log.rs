//! The log, and which messages it contains.

use std::env;
use std::str::FromStr as _;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

use self::format::Format;
pub use self::format::at_error_priority;
use crate::ErrorBody;
use crate::usage;

mod format;
mod journal;

const VARIABLE: &str = "BLOBD_LOG";
/// Used by services if [`VARIABLE`] is not set. It is meant for other programs too, so a value that cannot be parsed is
/// not an error.
const COMMON_VARIABLE: &str = "RUST_LOG";

/// Whether the process writes a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It does.
    Always,
    /// Only if `BLOBD_LOG` is set.
    OnRequest,
    /// It does not, whatever the environment says.
    Never,
}

/// Starts the log with the targets and levels that the environment names. The level of other targets is `info`, or
/// `debug` if `verbose`.
pub fn start(log: Use, verbose: bool) -> Result<(), ErrorBody> {
    if log == Use::Never {
        return Ok(());
    }
    let format = Format::from_environment()?;
    let default = Targets::new().with_default(if verbose { LevelFilter::DEBUG } else { LevelFilter::INFO });
    if let Some(text) = value_of(VARIABLE) {
        let targets = parse(&text, default).map_err(|refusal| {
            usage(format!("{VARIABLE}: {refusal}")).with_hint("for example BLOBD_LOG=info,blobd_store=debug")
        })?;
        start_with(format, targets);
    } else if log == Use::Always {
        // The option is meant for this command, the variable for all programs.
        let common = value_of(COMMON_VARIABLE).filter(|_| !verbose);
        let common = common.map(|text| parse(&text, default.clone())).transpose();
        start_with(format, common.clone().ok().flatten().unwrap_or(default));
        if let Err(refusal) = common {
            tracing::warn!("{COMMON_VARIABLE}: {refusal}; ignored, {VARIABLE} takes precedence over it");
        }
    }
    Ok(())
}

fn value_of(variable: &str) -> Option<String> {
    let value = env::var_os(variable)?.to_string_lossy().into_owned();
    (!value.trim().is_empty()).then_some(value)
}

/// Parses `LEVEL` and `TARGET=LEVEL`, separated by commas. The parser of [`Targets`] takes a misspelt level for
/// the name of a target, and then logs nothing else.
fn parse(text: &str, default: Targets) -> Result<Targets, String> {
    let mut targets = default;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (target, name) = part.split_once('=').map_or((None, part), |(target, name)| (Some(target), name));
        let Some(level) = level(name.trim()) else {
            return Err(format!("expected off, error, warn, info, debug or trace, found {name:?}"));
        };
        targets = match target.map(str::trim) {
            None => targets.with_default(level),
            Some(target) if is_target(target) => targets.with_target(target, level),
            Some(target) => return Err(format!("expected a target such as blobd_store, found {target:?}")),
        };
    }
    Ok(targets)
}

/// Numbers, which [`LevelFilter`] also parses, are refused.
fn level(name: &str) -> Option<LevelFilter> {
    let is_word = !name.is_empty() && name.chars().all(char::is_alphabetic);
    if is_word { LevelFilter::from_str(name).ok() } else { None }
}

fn is_target(name: &str) -> bool {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '-');
    !name.is_empty() && name.chars().all(is_valid)
}

fn start_with(format: Format, targets: Targets) {
    let subscriber = tracing_subscriber::registry().with(format.layer().with_filter(targets));
    // Fails only if a log is already running, as in tests.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    fn parse(text: &str) -> Result<Targets, String> {
        super::parse(text, Targets::new().with_default(LevelFilter::INFO))
    }

    #[test]
    fn levels_apply_to_targets_and_to_the_rest() {
        let targets = parse("warn, blobd_store=debug").unwrap();
        assert!(targets.would_enable("blobd_store::gc", &Level::DEBUG));
        assert!(targets.would_enable("blobd", &Level::WARN) && !targets.would_enable("blobd", &Level::INFO));
        let targets = parse("blobd_registry=TRACE,").unwrap();
        assert!(targets.would_enable("blobd_registry", &Level::TRACE));
        assert!(targets.would_enable("blobd", &Level::INFO), "the rest keeps its default");
        assert!(!parse("off").unwrap().would_enable("blobd", &Level::ERROR));
    }

    #[test]
    fn misspelt_filter_is_refused() {
        for text in ["debgu", "blobd", "blobd_store=", "=debug", "blobd[span]=debug", "3", "info=blobd"] {
            assert!(parse(text).unwrap_err().contains("expected"), "{text}");
        }
    }
}
