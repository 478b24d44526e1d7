//! `blobd login`

use std::io::{self, IsTerminal as _, Read as _};

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_registry::credentials::{Credential, CredentialError, RegistryHost, Secret};
use blobd_store_format::text::printable;
use clap::Args;

use super::Global;
use super::connect::{load_config, print_report};
use super::prompt::{Echo, ask};
use crate::config::ConfigError;

/// Save credentials for a registry
///
/// They are saved for the current user, and used by that user's commands and by a daemon that runs as
/// that user. They are sent when the registry asks for them during a pull; nothing is sent now.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd login hf.co                                    asks for a token
  blobd login ghcr.io -u me                            asks for a password
  blobd login ghcr.io -u me --password-stdin < secret
  blobd login hf.co --token-stdin < ~/token")]
pub(super) struct Params {
    /// The registry's host, with its port unless that is 443
    #[arg(value_name = "HOST")]
    host: String,
    /// The user name
    #[arg(short, long, value_name = "USER", conflicts_with = "token_stdin")]
    user: Option<String>,
    /// Read the password from standard input
    #[arg(long, requires = "user", conflicts_with = "token_stdin")]
    password_stdin: bool,
    /// Read a token, sent without a user name, from standard input
    #[arg(long)]
    token_stdin: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let host: RegistryHost = params.host.parse().map_err(super::usage)?;
    let file = load_config(global)?.credential_file().map_err(ConfigError::body)?;
    let credential = credential(params, &host)?;
    file.set(&host, &credential).map_err(|error| file_error(&error))?;
    let path = file.path().display().to_string();
    let saved = serde_json::json!({ "host": host.as_str(), "path": path });
    print_report(global, &saved, |_| {
        format!("{}: credentials saved in {}\n", printable(host.as_str()), printable(&path))
    })
}

pub(super) fn file_error(error: &CredentialError) -> ErrorBody {
    ErrorBody::new(ErrorCode::Denied, error)
}

fn credential(params: &Params, host: &RegistryHost) -> Result<Credential, ErrorBody> {
    if params.token_stdin {
        return Ok(Credential::Token(from_stdin()?));
    }
    if params.user.is_none() && host.is_hugging_face() {
        let question = "Token (https://huggingface.co/settings/tokens): ";
        return Ok(Credential::Token(checked(&ask(question, Echo::Off)?)?));
    }
    let user = match &params.user {
        Some(user) => user.clone(),
        None => ask(&format!("User at {host}: "), Echo::On)?,
    };
    if user.is_empty() || user.contains(':') {
        return Err(super::usage(format!("user: expected a non-empty name without ':', found {user:?}")));
    }
    let password = match params.password_stdin {
        true => from_stdin()?,
        false => checked(&ask(&format!("Password of {user} at {host}: "), Echo::Off)?)?,
    };
    Ok(Credential::Password { user, password })
}

/// Reads all of standard input and removes the line break at its end.
fn from_stdin() -> Result<Secret, ErrorBody> {
    if io::stdin().is_terminal() {
        return Err(super::usage("standard input: is a terminal, which would display the secret").with_hint(
            "leave out --password-stdin or --token-stdin to get a prompt, or redirect standard input",
        ));
    }
    let mut text = String::new();
    let read = io::stdin().take(MAX_SECRET_BYTES).read_to_string(&mut text);
    read.map_err(|error| super::usage(format!("standard input: {error}")))?;
    checked(text.trim_end_matches(['\n', '\r']))
}

/// Signed tokens (JWT) take a few KiB.
const MAX_SECRET_BYTES: u64 = 16 << 10;

fn checked(text: &str) -> Result<Secret, ErrorBody> {
    match text {
        "" => Err(super::usage("secret: is empty: expected a password or a token")),
        _ if text.chars().any(char::is_control) => {
            Err(super::usage("secret: expected one line of text, found control characters"))
        }
        _ => Ok(Secret::new(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_must_be_one_line_and_is_not_in_error_messages() {
        assert_eq!(checked("hunter2").unwrap().reveal(), "hunter2");
        for text in ["", "hunter2\nhunter3", "hunter2\u{1b}"] {
            assert!(!checked(text).unwrap_err().message.contains("hunter"));
        }
    }
}
