//! `blobd mount`

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use blobd_client::process::{Signals, first_of, listen_for_end, raise_descriptor_limit};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::text::printable;
use clap::Args;

use super::Global;
use super::connect::{connect, print_result};
use crate::mount::{self, Mount, Readers};

/// Mount the models as ordinary files, for programs that take a path
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd mount /mnt/models &
  llama-server -m /mnt/models/llama3/8b.gguf
  OLLAMA_MODELS=/mnt/models/ollama ollama serve
  umount /mnt/models                           or Ctrl-C, or kill")]
pub(super) struct Params {
    /// An empty directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Let other users read the files too
    #[arg(long)]
    allow_other: bool,
}

/// Unmount if the mount's process dies
#[derive(Debug, Args)]
pub(super) struct GuardParams {
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    /// Programs that open files wait for the daemon, so they must get an error if it hangs.
    const TIMEOUT: Duration = Duration::from_secs(30);
    raise_descriptor_limit();
    let connected = connect(global)?;
    if !connected.has_daemon() {
        let body = ErrorBody::new(ErrorCode::InvalidRequest, "mount: no daemon is running");
        return Err(body.with_hint("start `blobd serve` first: the mount reads models through the daemon"));
    }
    let readers = if params.allow_other { Readers::Everybody } else { Readers::Owner };
    let client = connected.client.with_timeout(TIMEOUT);
    let internal = |error: std::io::Error| ErrorBody::new(ErrorCode::Internal, error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(internal)?;
    let stop = {
        let _context = runtime.enter();
        // Before mounting: a signal that ends the process would leave the mount behind.
        listen_for_end().map_err(internal)?
    };
    let mount = Mount::start(&client, &params.directory, readers).map_err(mount::MountError::body)?;
    let directory = mount.directory().display().to_string();
    print_result(global, &BTreeMap::from([("mounted", mount.directory())]), |_| {
        format!("{}: mounted; Ctrl-C unmounts\n", printable(&directory))
    })?;
    runtime.block_on(serve(mount, stop)).map_err(internal)
}

pub(super) fn run_guard(params: &GuardParams) -> Result<(), ErrorBody> {
    mount::watch(&params.directory);
    Ok(())
}

async fn serve(mut mount: Mount, mut stop: Signals) -> std::io::Result<()> {
    tokio::select! {
        ended = mount.ended() => return ended,
        _kind = first_of(&mut stop) => {}
    }
    mount.unmount();
    Ok(())
}
