//! `blobd serve`

use blobd_client::protocol::error::ErrorBody;
use clap::Args;

use super::Global;

/// Run the daemon
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd serve
  blobd serve --root /srv/models --socket /run/blobd/blobd.sock
  BLOBD_LOG=debug blobd serve                      log more
  BLOBD_LOG=warn,blobd_registry=debug blobd serve  log more of the registries and less of the rest

The log goes to standard error. BLOBD_LOG, or else RUST_LOG, is LEVEL or TARGET=LEVEL, or
several of them separated by commas. Levels: off, error, warn, info, debug, trace.
Targets: blobd, blobd_store, blobd_registry. BLOBD_LOG_FORMAT is text, json or journal.

As a service of systemd, it ends with exit code 78 if the configuration or the store must be
corrected before a start can succeed.")]
pub(super) struct Params {}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
    global.server.serve(&global.paths)
}
