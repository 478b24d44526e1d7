//! `blobd outdated`

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::{ModelSummary, Resolved};
use blobd_store_format::digest::Digest;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::text::printable;
use clap::Args;
use serde::Serialize;
use tracing_mutex::stdsync::Mutex;

use super::Global;
use super::connect::{client_error, connect, print_result};
use super::model_name::is_any;
use super::upstream::{Followed, followed, nothing_to_compare};
use crate::output::{Table, terminal_width};
use crate::times::relative;

/// List the models whose source has another version now
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd outdated
  blobd outdated llama                         only models whose name contains llama
  blobd outdated --json | jq -r '.models[] | select(.status == \"outdated\").name'
  blobd pull --all                             update them

Only manifests and lists of files are requested. Models that were imported or edited, or are fixed
to a digest or a commit, have no source to compare with. A copy made by `blobd tag` is not compared
either.
The exit code is 1 if a model is outdated or could not be compared.")]
pub(super) struct Params {
    /// Compare only models whose name contains one of these texts or matches one of these patterns
    #[arg(value_name = "TEXT|PATTERN", value_parser = NamePattern::search)]
    names: Vec<NamePattern>,
}

/// How a model compares with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Current,
    Outdated,
    /// The source does not say what it has, as a file on a web server.
    Unknown,
    /// The comparison failed.
    Failed,
}

#[derive(Debug, Serialize)]
struct Compared {
    name: String,
    source: String,
    status: Status,
    local: Digest,
    /// The manifest's digest at the source; absent if it has no manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<Digest>,
    /// When the name was set here.
    modified: String,
    pinned: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    models: Vec<Compared>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<ExitCode, ErrorBody> {
    let connected = connect(global)?;
    let listed = connected.client.models().map_err(client_error)?.models;
    let is_wanted = |model: &&ModelSummary| is_any(&params.names, &model.name);
    let wanted: Vec<_> = listed.iter().filter(is_wanted).collect();
    let followed: Vec<_> = wanted.iter().filter_map(|model| Some((*model, followed(model)?))).collect();
    let report = Report { models: compare_all(&connected.client, &followed) };
    print_result(global, &report, |report| match report.models.is_empty() {
        true => nothing_to_compare(listed.len(), wanted.len()),
        false => render(report),
    })?;
    Ok(exit_code(&report))
}

/// Compares several models at a time: each is a request to a server that may be slow.
fn compare_all(client: &Client, followed: &[(&ModelSummary, Followed)]) -> Vec<Compared> {
    const AT_A_TIME: usize = 8;
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME.min(followed.len()) {
            scope.spawn(|| {
                while let Some((model, followed)) = followed.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compared = compare(client, model, followed);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push(compared);
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by(|a, b| a.name.cmp(&b.name));
    done
}

fn compare(client: &Client, model: &ModelSummary, followed: &Followed) -> Compared {
    let components = followed.components.clone();
    let request = PullParams { components, ..PullParams::of_source(followed.source.clone()) };
    let (status, remote, error) = match client.resolve(&request) {
        Ok(Resolved { digest: Some(remote), .. }) => {
            (if remote == model.digest { Status::Current } else { Status::Outdated }, Some(remote), None)
        }
        Ok(Resolved { digest: None, files }) => match has_files(client, followed, &files) {
            Ok(status) => (status, None, None),
            Err(error) => (Status::Failed, None, Some(client_error(error).message)),
        },
        Err(error) => (Status::Failed, None, Some(client_error(error).message)),
    };
    Compared {
        name: model.name.clone(),
        source: followed.source.to_string(),
        status,
        local: model.digest,
        remote,
        modified: model.modified.clone(),
        pinned: model.pinned,
        error,
    }
}

/// Whether a model without a manifest at its source has the files that are there.
fn has_files(client: &Client, followed: &Followed, files: &[Digest]) -> Result<Status, ClientError> {
    if files.is_empty() {
        return Ok(Status::Unknown);
    }
    let stored = client.model(&followed.name)?;
    let stored: BTreeSet<Digest> = stored.layers.iter().map(|layer| layer.digest).collect();
    Ok(if files.iter().all(|file| stored.contains(file)) { Status::Current } else { Status::Outdated })
}

fn render(report: &Report) -> String {
    let of = |status: Status| report.models.iter().filter(move |model| model.status == status);
    let mut table = Table::new(&["NAME", "HERE", "AT ITS SOURCE", "SET HERE", "NOTE"], &[]);
    for model in of(Status::Outdated) {
        let remote = model.remote.map_or_else(|| "other files".to_owned(), Digest::short);
        let note = if model.pinned { "pinned" } else { "-" }.to_owned();
        table.row([model.name.clone(), model.local.short(), remote, relative(&model.modified), note]);
    }
    let mut text = String::new();
    if of(Status::Outdated).next().is_some() {
        text.push_str(&table.render(terminal_width()));
    }
    for model in of(Status::Failed) {
        let message = printable(model.error.as_deref().unwrap_or_default());
        text.push_str(&format!("{}: not compared: {message}\n", model.name));
    }
    for model in of(Status::Unknown) {
        text.push_str(&format!("{}: not compared: {} says no digest\n", model.name, model.source));
    }
    let count = |status| of(status).count();
    let (current, outdated) = (count(Status::Current), count(Status::Outdated));
    let failed = count(Status::Failed).saturating_add(count(Status::Unknown));
    text.push_str(&format!("{current} current, {outdated} outdated, {failed} not compared\n"));
    text
}

/// Whether something is to be done.
fn exit_code(report: &Report) -> ExitCode {
    let is_open = |model: &Compared| matches!(model.status, Status::Outdated | Status::Failed);
    if report.models.iter().any(is_open) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
