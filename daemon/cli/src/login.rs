//! `blobd login` and `blobd logout`

use std::io::{self, IsTerminal as _, Read as _};

use blobd_cli_common::connect::{load_settings, print_report};
use blobd_cli_common::output::printable;
use blobd_cli_common::{Global, usage};
use blobd_store_format::host::HUGGING_FACE;
use clap::Args;

use crate::prompt::{Echo, ask};
use crate::{ErrorBody, ErrorCode};

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
    let host = (global.server.registry_host)(&params.host)?;
    let settings = load_settings(global)?;
    let path = settings.credential_file()?.display().to_string();
    let Credential { user, secret } = credential(params, &host)?;
    settings.save_credential(&host, user.as_deref(), &secret)?;
    let saved = serde_json::json!({ "host": host, "path": path });
    print_report(global, &saved, |_| {
        format!("{}: credentials saved in {}\n", printable(&host), printable(&path))
    })
}

/// Delete the saved credentials for a registry
///
/// Deletes what `blobd login` has saved. A running daemon may use them for up to five more minutes.
/// Credentials of Docker, Hugging Face and Ollama are not deleted.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd logout hf.co
  blobd logout registry.example.org:5000")]
pub(super) struct LogoutArgs {
    /// The registry, as given to `blobd login`
    #[arg(value_name = "HOST")]
    host: String,
}

pub(super) fn logout(global: &Global, args: &LogoutArgs) -> Result<(), ErrorBody> {
    let host = (global.server.registry_host)(&args.host)?;
    let settings = load_settings(global)?;
    if !settings.delete_credential(&host)? {
        let message = format!("{host}: no credentials in {}", settings.credential_file()?.display());
        return Err(ErrorBody::new(ErrorCode::NotFound, message));
    }
    print_report(global, &serde_json::json!({ "host": host }), |_| {
        format!("{}: credentials deleted\n", printable(&host))
    })
}

/// A password, or a token if there is no user. It has no `Debug`, so that it is never printed.
struct Credential {
    user: Option<String>,
    secret: String,
}

fn credential(params: &Params, host: &str) -> Result<Credential, ErrorBody> {
    if params.token_stdin {
        return Ok(Credential { user: None, secret: from_stdin()? });
    }
    if params.user.is_none() && host == HUGGING_FACE {
        let question = "Token (https://huggingface.co/settings/tokens): ";
        return Ok(Credential { user: None, secret: checked(&ask(question, Echo::Off)?)? });
    }
    let user = match &params.user {
        Some(user) => user.clone(),
        None => ask(&format!("User at {host}: "), Echo::On)?,
    };
    if user.is_empty() || user.contains(':') {
        return Err(usage(format!("user: expected a non-empty name without ':', found {user:?}")));
    }
    if params.password_stdin {
        return Ok(Credential { user: Some(user), secret: from_stdin()? });
    }
    let secret = checked(&ask(&format!("Password of {user} at {host}: "), Echo::Off)?)?;
    Ok(Credential { user: Some(user), secret })
}

/// Reads all of standard input and removes the line break at its end.
fn from_stdin() -> Result<String, ErrorBody> {
    if io::stdin().is_terminal() {
        let hint = "leave out --password-stdin or --token-stdin to get a prompt, or redirect standard input";
        return Err(usage("standard input: is a terminal, which would display the secret").with_hint(hint));
    }
    let mut text = String::new();
    let read = io::stdin().take(MAX_SECRET_BYTES).read_to_string(&mut text);
    read.map_err(|error| usage(format!("standard input: {error}")))?;
    checked(text.trim_end_matches(['\n', '\r']))
}

/// Signed tokens (JWT) take a few KiB.
const MAX_SECRET_BYTES: u64 = 16 << 10;

fn checked(text: &str) -> Result<String, ErrorBody> {
    match text {
        "" => Err(usage("secret: is empty: expected a password or a token")),
        _ if text.chars().any(char::is_control) => {
            Err(usage("secret: expected one line of text, found control characters"))
        }
        _ => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_must_be_one_line_and_is_not_in_error_messages() {
        assert_eq!(checked("hunter2").unwrap(), "hunter2");
        for text in ["", "hunter2\nhunter3", "hunter2\u{1b}"] {
            assert!(!checked(text).unwrap_err().message.contains("hunter"));
        }
    }
}
