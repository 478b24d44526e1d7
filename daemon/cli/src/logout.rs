//! `blobd logout`

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::text::printable;
use clap::Args;

use super::Global;
use super::connect::{load_settings, print_report};

/// Delete the saved credentials for a registry
///
/// Deletes what `blobd login` has saved. A running daemon may use them for up to five more minutes.
/// Credentials of Docker, Hugging Face and Ollama are not deleted.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd logout hf.co
  blobd logout registry.example.org:5000")]
pub(super) struct Params {
    /// The registry, as given to `blobd login`
    #[arg(value_name = "HOST")]
    host: String,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let host = global.server.registry_host(&params.host)?;
    let settings = load_settings(global)?;
    if !settings.delete_credential(&host)? {
        let message = format!("{host}: no credentials in {}", settings.credential_file()?.display());
        return Err(ErrorBody::new(ErrorCode::NotFound, message));
    }
    print_report(global, &serde_json::json!({ "host": host }), |_| {
        format!("{}: credentials deleted\n", printable(&host))
    })
}
