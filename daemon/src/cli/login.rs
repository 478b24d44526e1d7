//! `blobd login`

use std::io::{self, IsTerminal as _, Read as _};

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_registry::credentials::{Credential, CredentialError, RegistryHost, Secret};
use clap::Args;
use serde::Serialize;

use super::Global;
use super::connect::load_config;
use super::prompt::{Echo, ask};
use crate::output::{print, print_json, printable};

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

/// What was kept, and where; never the secret.
#[derive(Serialize)]
struct Kept<'a> {
    host: &'a str,
    path: String,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let host: RegistryHost = params.host.parse().map_err(super::usage)?;
    let file = load_config(global)?.credential_file();
    let credential = credential(params, &host)?;
    file.set(&host, &credential).map_err(|error| denied(&error))?;
    let kept = Kept { host: host.as_str(), path: file.path().display().to_string() };
    if global.json {
        return print_json(&kept);
    }
    print(&format!("{}: credentials kept in {}\n", printable(kept.host), printable(&kept.path)))
}

/// A credential file that cannot be used, as the command line reports it.
pub(super) fn denied(error: &CredentialError) -> ErrorBody {
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
        return Err(super::usage(format!("user {user:?}: a name without ':' expected")));
    }
    let password = match params.password_stdin {
        true => from_stdin()?,
        false => checked(&ask(&format!("Password of {user} at {host}: "), Echo::Off)?)?,
    };
    Ok(Credential::Password { user, password })
}

/// All of standard input without the line's end.
fn from_stdin() -> Result<Secret, ErrorBody> {
    if io::stdin().is_terminal() {
        return Err(super::usage("standard input: a terminal, which would show the secret").with_hint(
            "leave out --password-stdin or --token-stdin to be asked, or redirect standard input",
        ));
    }
    let mut text = String::new();
    let read = io::stdin().take(MAX_SECRET_BYTES).read_to_string(&mut text);
    read.map_err(|error| super::usage(format!("standard input: {error}")))?;
    checked(text.trim_end_matches(['\n', '\r']))
}

/// Tokens are signed statements of some KiB at the most.
const MAX_SECRET_BYTES: u64 = 16 << 10;

fn checked(text: &str) -> Result<Secret, ErrorBody> {
    match text {
        "" => Err(super::usage("secret: empty, a password or a token expected")),
        _ if text.chars().any(char::is_control) => {
            Err(super::usage("secret: holds control characters; one line expected"))
        }
        _ => Ok(Secret::new(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_one_line_and_not_repeated_in_errors() {
        assert_eq!(checked("hunter2").unwrap().reveal(), "hunter2");
        for text in ["", "hunter2\nhunter3", "hunter2\u{1b}"] {
            assert!(!checked(text).unwrap_err().message.contains("hunter"));
        }
    }
}
