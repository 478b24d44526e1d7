//! `blobd mount`

use std::path::PathBuf;
use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use clap::Args;
use serde::Serialize;

use super::Global;
use super::connect::connect;
use super::interrupt::StopSignals;
use super::serve::{raise_descriptor_limit, start_log};
use crate::mount::{self, Audience, Mount};
use crate::output::{print, print_json, printable};

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

/// What unmounts if a mount's process dies
#[derive(Debug, Args)]
pub(super) struct GuardParams {
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

#[derive(Serialize)]
struct Mounted<'m> {
    mounted: &'m std::path::Path,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    /// A daemon that is silent for longer is as good as away: programs wait for this.
    const TIMEOUT: Duration = Duration::from_secs(30);
    start_log();
    raise_descriptor_limit();
    let connected = connect(global)?;
    if connected.is_embedded() {
        let body = ErrorBody::new(ErrorCode::InvalidRequest, "mount: no daemon is running");
        return Err(body.with_hint("start `blobd serve` first: a mount is one of its clients"));
    }
    let audience = if params.allow_other { Audience::Everybody } else { Audience::Owner };
    let client = connected.client.with_timeout(TIMEOUT);
    let internal = |error: std::io::Error| ErrorBody::new(ErrorCode::Internal, error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(internal)?;
    let stop = {
        let _context = runtime.enter();
        // Before anything is mounted: a signal that ended the process then would leave the mount.
        StopSignals::listen().map_err(internal)?
    };
    let mount = Mount::start(&client, &params.directory, audience).map_err(mount::MountError::body)?;
    announce(global, &mount)?;
    runtime.block_on(serve(mount, stop)).map_err(internal)
}

pub(super) fn run_guard(params: &GuardParams) -> Result<(), ErrorBody> {
    mount::watch(&params.directory);
    Ok(())
}

fn announce(global: &Global, mount: &Mount) -> Result<(), ErrorBody> {
    let directory = mount.directory();
    if global.json {
        return print_json(&Mounted { mounted: directory });
    }
    print(&format!("{}: mounted; Ctrl-C unmounts\n", printable(&directory.display().to_string())))
}

async fn serve(mut mount: Mount, mut stop: StopSignals) -> std::io::Result<()> {
    tokio::select! {
        ended = mount.ended() => return ended,
        () = stop.received() => {}
    }
    mount.unmount();
    Ok(())
}
