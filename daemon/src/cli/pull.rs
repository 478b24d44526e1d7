//! `blobd pull`

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{PullDone, PullEvent, PullProgress};
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use clap::Args;

use super::connect::{client_error, connect};
use super::output::{human_bytes, print, print_json};
use super::progress::Bar;
use super::{Global, pull_plan, usage};
use crate::size::parse_size;

/// Fetch models from their registries, or GGUF files from where they are
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd pull llama3:8b
  blobd pull llama3:8b --limit-rate 20MB
  blobd pull llama3:8b-instruct-q4_K_S --dry-run
  blobd pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
  blobd pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q8_0.gguf
  blobd pull docker.io/smollm2                   Docker Model Runner's, in docker.io/ai
  blobd pull https://example.org/models/tiny.gguf --name tiny
  blobd pull llama3:8b@sha256:365c0bd3c000a25d28ddbf732fe1c6add414de7275464c4e4d1c3b5fcb5d8ad1")]
pub(super) struct Params {
    /// [host/][namespace/]model[:tag][@sha256:…], hf.co/USER/REPO/FILE.gguf or https://HOST/PATH/FILE.gguf
    #[arg(required = true, value_name = "REF")]
    sources: Vec<PullSource>,
    /// What to call the model instead
    #[arg(long, value_name = "REF")]
    name: Option<Reference>,
    /// The most that may come over the network per second, such as 20MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit_rate: Option<u64>,
    /// Only say what would move, and why not more
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.name.is_some() && params.sources.len() > 1 {
        return Err(usage("--name: is for one model; several were named"));
    }
    let connected = connect(global)?;
    for source in &params.sources {
        let request =
            PullParams { source: source.clone(), name: params.name.clone(), limit_rate: params.limit_rate };
        if params.dry_run {
            let plan = connected.client.plan_pull(&request).map_err(client_error)?;
            if global.json {
                print_json(&plan)?;
            } else {
                print(&pull_plan::render(&plan))?;
            }
            continue;
        }
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
    /// With what it is about.
    bar: Option<(String, Bar)>,
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
        let Some(total) = progress.total else { return };
        if self.bar.as_ref().is_none_or(|(current, _)| *current != progress.status) {
            self.end_bar();
            self.bar = Some((progress.status.clone(), Bar::new(&progress.status, total, false)));
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
