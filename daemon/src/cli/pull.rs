//! `blobd pull`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullDone, PullEvent, PullProgress};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use clap::Args;

use super::Global;
use super::connect::{client_error, connect};
use super::output::{human_bytes, print, print_json};
use super::progress::Bar;
use crate::size::parse_size;

/// Fetch models from their registries
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd pull llama3:8b
  blobd pull llama3:8b --limit-rate 20MB
  blobd pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
  blobd pull llama3:8b@sha256:365c0bd3c000a25d28ddbf732fe1c6add414de7275464c4e4d1c3b5fcb5d8ad1")]
pub(super) struct Params {
    /// [host/][namespace/]model[:tag][@sha256:…]
    #[arg(required = true, value_name = "REF")]
    references: Vec<Reference>,
    /// The most that may come over the network per second, such as 20MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit_rate: Option<u64>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    for reference in &params.references {
        let request = PullParams { limit_rate: params.limit_rate, ..PullParams::new(reference.clone()) };
        let mut screen = Screen { json: global.json, bar: None };
        let done = connected.client.pull(&request, |event| screen.show(event));
        screen.end_bar();
        let done = done.map_err(client_error)?;
        if !global.json {
            print(&summary(&done))?;
        }
    }
    Ok(())
}

fn summary(done: &PullDone) -> String {
    let PullDone { name, digest, downloaded_bytes, reused_bytes, .. } = done;
    let (downloaded, reused) = (human_bytes(*downloaded_bytes), human_bytes(*reused_bytes));
    format!("{name} {}: {downloaded} downloaded, {reused} there already\n", digest.short())
}

/// Turns events into bars or lines.
struct Screen {
    json: bool,
    bar: Option<(Digest, Bar)>,
}

impl Screen {
    fn show(&mut self, event: PullEvent) {
        if self.json {
            // An error becomes the last line on standard error, from the command's own end.
            if !matches!(event, PullEvent::Failed(_)) {
                let _ = print_json(&event);
            }
            return;
        }
        if let PullEvent::Progress(progress) = event {
            self.draw(&progress);
        }
    }

    fn draw(&mut self, progress: &PullProgress) {
        let (Some(digest), Some(total)) = (progress.digest, progress.total) else { return };
        if self.bar.as_ref().is_none_or(|(current, _)| *current != digest) {
            self.end_bar();
            self.bar = Some((digest, Bar::new(&progress.status, total, false)));
        }
        if let Some((_, bar)) = &self.bar {
            bar.set(progress.completed.unwrap_or_default(), total);
        }
    }

    fn end_bar(&mut self) {
        if let Some((_, bar)) = self.bar.take() {
            bar.keep();
        }
    }
}
