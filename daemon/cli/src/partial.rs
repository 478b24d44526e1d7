//! `blobd partial ls`, `blobd partial rm`

use std::time::Duration;

use blobd_cli_common::Global;
use blobd_cli_common::connect::show;
use blobd_cli_common::output::{Table, human_bytes, or_dash, printable, terminal_width};
use blobd_cli_common::times::{parse_period, relative};
use blobd_client::protocol::space::{
    DroppedDownloads, RemovePartialsParams, UnfinishedDownload, UnfinishedDownloads,
};
use clap::{Args, Subcommand};

use crate::{Client, ErrorBody};

/// List and drop unfinished downloads
#[derive(Debug, Args)]
#[command(
    after_help = "A pull that fails or is interrupted keeps the received data, and the next pull continues there.
`blobd gc` drops downloads that were not continued for a week.

Examples:
  blobd partial ls
  blobd partial rm llama3:70b
  blobd partial rm --older-than 2d"
)]
pub(super) struct Params {
    #[command(subcommand)]
    command: PartialCommand,
}

#[derive(Debug, Subcommand)]
enum PartialCommand {
    #[command(alias = "list")]
    Ls(LsParams),
    #[command(aliases = ["remove", "delete", "drop"])]
    Rm(RmParams),
}

/// List unfinished downloads with their models, received bytes, times and users
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd partial ls
  blobd partial ls --json | jq -r '.downloads[].name'")]
struct LsParams {}

/// Drop unfinished downloads; a running pull keeps its own
#[derive(Debug, Args)]
#[command(after_help = "Only administrators may drop downloads of other users.

Examples:
  blobd partial rm llama3:70b                  all files of a model
  blobd partial rm 1f2e3d4c5b6a                one file, by its ID in `blobd partial ls`
  blobd partial rm --older-than 2d             what was not continued for two days
  blobd partial rm --all --json | jq .freed_bytes")]
struct RmParams {
    /// Names of models as they were pulled, patterns of names, URLs, or IDs of files
    #[arg(value_name = "REF|ID", required_unless_present_any = ["all", "older_than"])]
    targets: Vec<String>,
    /// All unfinished downloads
    #[arg(long, conflicts_with = "targets")]
    all: bool,
    /// Only those that have received nothing for this time, such as 12h or 7d
    #[arg(long, value_name = "TIME", value_parser = parse_period)]
    older_than: Option<Duration>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    match &params.command {
        PartialCommand::Ls(LsParams {}) => show(global, Client::unfinished_downloads, list),
        PartialCommand::Rm(params) => {
            let request = RemovePartialsParams {
                targets: params.targets.clone(),
                older_than_seconds: params.older_than.map(|age| age.as_secs()),
            };
            show(
                global,
                |client| client.remove_unfinished_downloads(&request),
                |found| dropped(found, params),
            )
        }
    }
}

const NONE: &str = "no unfinished downloads\n";

fn list(found: &UnfinishedDownloads) -> String {
    if found.downloads.is_empty() {
        return NONE.to_owned();
    }
    let rows = found.downloads.iter().map(|download| {
        let (name, disk_bytes) = (or_dash(download.name.as_ref()), human_bytes(download.disk_bytes));
        [name, download.digest.short(), received(download), disk_bytes, last(download), user(download)]
    });
    let headings = ["NAME", "ID", "RECEIVED", "ON DISK", "LAST", "USER"];
    let table = Table::with_rows(&headings, &[2, 3], rows);
    table.leaving_out_first(&["USER", "LAST", "ON DISK"]).render(terminal_width())
}

/// `47 % of 4.34 GiB`
fn received(download: &UnfinishedDownload) -> String {
    match download.size {
        Some(size) => {
            let percent = u128::from(download.received_bytes).saturating_mul(100).checked_div(size.into());
            format!("{} % of {}", percent.unwrap_or(100), human_bytes(size))
        }
        None => human_bytes(download.received_bytes),
    }
}

fn last(download: &UnfinishedDownload) -> String {
    let last = download.last_received.as_deref().map(relative);
    if download.running { "running".to_owned() } else { or_dash(last) }
}

fn user(download: &UnfinishedDownload) -> String {
    let uid = || download.uid.map(|uid| uid.to_string());
    or_dash(download.user.clone().or_else(uid))
}

fn dropped(dropped: &DroppedDownloads, params: &RmParams) -> String {
    if dropped.removed.is_empty() && dropped.kept.is_empty() {
        let none = if params.older_than.is_some() { "no unfinished download is that old\n" } else { NONE };
        return none.to_owned();
    }
    let name = |name: &Option<String>| printable(name.as_deref().unwrap_or("download"));
    let mut text = String::new();
    for download in &dropped.removed {
        text += &format!("dropped {} {}\n", name(&download.name), download.digest.short());
    }
    for kept in &dropped.kept {
        let reason = printable(&kept.reason);
        text += &format!("kept {} {}: {reason}\n", name(&kept.name), kept.digest.short());
    }
    text + &format!("freed {}\n", human_bytes(dropped.freed_bytes))
}
