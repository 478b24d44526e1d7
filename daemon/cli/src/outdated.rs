//! `blobd outdated`

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, connect, print_result};
use blobd_cli_common::model_name::is_any;
use blobd_cli_common::output::{Table, printable, terminal_width};
use blobd_cli_common::times::relative;
use blobd_client::error::ClientError;
use blobd_client::protocol::pull::Resolved;
use blobd_client::protocol::request::PullParams;
use blobd_client::protocol::response::ModelSummary;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::origin::Origin;
use blobd_store_format::source::{Components, HubFile, PullSource, PulledSource};
use clap::Args;
use serde::Serialize;
use tracing_mutex::stdsync::Mutex;

use crate::ls::{NO_MATCH, NO_MODELS};
use crate::{Client, Digest, ErrorBody, Reference};

/// List the models whose source has another version now
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd outdated
  blobd outdated llama                         only models whose name contains llama
  blobd outdated --json | jq -r '.models[] | select(.status == \"outdated\").name'
  blobd pull --all                             update them

Only manifests and lists of files are requested. Models that were imported or edited, or are fixed
to a digest or a commit, have no source to compare with. A copy made by `blobd tag` is not compared
either. Of a model that was imported from a cache of Hugging Face, the files that were there are
compared; `blobd pull NAME` updates it, `--all` does not.
The exit code is 1 if a model is outdated or could not be compared.")]
pub(super) struct Params {
    /// Compare only models whose name contains one of these texts or matches one of these patterns
    #[arg(value_name = "TEXT|PATTERN", value_parser = NamePattern::search)]
    names: Vec<NamePattern>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Current,
    Outdated,
    /// The source does not report its version, such as a web server with a file.
    Unknown,
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
    let followed: Vec<_> = wanted.iter().filter_map(|model| Some((*model, comparable(model)?))).collect();
    let report = Report { models: compare_all(&connected.client, &followed) };
    print_result(global, &report, |report| {
        let is_empty = report.models.is_empty();
        if is_empty { nothing_to_compare(listed.len(), wanted.len()) } else { render(report) }
    })?;
    let needs_action = |model: &Compared| matches!(model.status, Status::Outdated | Status::Failed);
    Ok(if report.models.iter().any(needs_action) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A model that was compared, and the pull that updates it.
#[derive(Debug, Serialize)]
struct Update {
    #[serde(flatten)]
    compared: Compared,
    request: PullParams,
}

/// What the page of `blobd web` gets.
#[derive(Debug, Serialize)]
pub(super) struct Updates {
    models: Vec<Update>,
}

/// Compares all models that have a source.
pub(super) fn updates(client: &Client) -> Result<Updates, ClientError> {
    let listed = client.models()?.models;
    let followed: Vec<_> = listed.iter().filter_map(|model| Some((model, comparable(model)?))).collect();
    let compared = compare_all(client, &followed).into_iter();
    let models = compared.filter_map(|compared| {
        let (_, (followed, what)) = followed.iter().find(|(model, _)| model.name == compared.name)?;
        Some(Update { compared, request: followed.pull(*what) })
    });
    Ok(Updates { models: models.collect() })
}

fn comparable(model: &ModelSummary) -> Option<(Followed, Compare)> {
    let pulled = followed(model).map(|followed| (followed, Compare::Model));
    pulled.or_else(|| copied(model).map(|copied| (copied, Compare::FilesHere)))
}

/// A stored model and the source of its newer versions, for `outdated` and `pull --all`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Followed {
    pub(super) name: Reference,
    pub(super) source: PullSource,
    /// The choice at the time of the pull.
    pub(super) components: Components,
}

impl Followed {
    /// The pull of the newest version.
    fn pull(&self, what: Compare) -> PullParams {
        let plain = PullParams::of_source(self.source.clone());
        match what {
            Compare::Model => {
                PullParams { name: Some(self.name.clone()), components: self.components.clone(), ..plain }
            }
            // Its name follows from the source, and the choice of files is that of a pull.
            Compare::FilesHere => plain,
        }
    }
}

/// `None` if the model follows no source, or is in a lower store, which its own administrator updates.
pub(super) fn followed(model: &ModelSummary) -> Option<Followed> {
    if model.store.is_some() {
        return None;
    }
    let PulledSource { source, components } = model.follows.as_deref()?.parse().ok()?;
    Some(Followed { name: model.name.parse().ok()?, source, components })
}

/// What is compared with the source of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compare {
    /// All of it.
    Model,
    /// Only the files that the model has: caches often lack those that their program does not need.
    FilesHere,
}

/// The source of a model that was imported from a cache of the hub, if its name is the one that the repository's default
/// branch has there.
fn copied(model: &ModelSummary) -> Option<Followed> {
    let Origin::Copy(PullSource::Hub(file)) = Origin::parse(model.origin.as_deref()?)? else { return None };
    let name: Reference = model.name.parse().ok()?;
    let is_gguf = FileFormat::GGUF.stem_of(file.path()).is_some();
    let at_hub = match is_gguf {
        true => PullSource::Hub(file).latest()?.name().ok()?,
        false => format!("{}/{}", HubFile::HOST, file.repository()).parse().ok()?,
    };
    let is_followed = model.store.is_none() && name.same_model(&at_hub);
    // Files that an import has chosen are compared too, whatever a pull would choose.
    let include = if is_gguf { Vec::new() } else { vec!["*".to_owned()] };
    let components = Components { include, ..Components::default() };
    is_followed.then(|| Followed { source: PullSource::Registry(name.clone()), name, components })
}

/// Says why no model is compared: the store lists `listed` models, and the user selected `wanted` of them.
pub(super) fn nothing_to_compare(listed: usize, wanted: usize) -> String {
    match (listed, wanted) {
        (0, _) => NO_MODELS.to_owned(),
        (_, 0) => NO_MATCH.to_owned(),
        (_, 1) => {
            "the model has no source to compare with: it was not pulled, or is fixed to a digest or a commit\n".to_owned()
        }
        (_, count) => {
            format!(
                "{count} models, none has a source to compare with: they were not pulled, or are fixed to a digest or a commit\n"
            )
        }
    }
}

/// Compares several models at a time: each is a request to a server that may be slow.
fn compare_all(client: &Client, followed: &[(&ModelSummary, (Followed, Compare))]) -> Vec<Compared> {
    const AT_A_TIME: usize = 8;
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME.min(followed.len()) {
            scope.spawn(|| {
                while let Some((model, (followed, what))) = followed.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let compared = compare(client, model, (followed, *what));
                    done.lock().unwrap_or_else(PoisonError::into_inner).push(compared);
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by(|a, b| a.name.cmp(&b.name));
    done
}

fn compare(client: &Client, model: &ModelSummary, (followed, what): (&Followed, Compare)) -> Compared {
    let components = followed.components.clone();
    let name = (what == Compare::FilesHere).then(|| followed.name.clone());
    let request = PullParams { components, name, ..PullParams::of_source(followed.source.clone()) };
    let (status, remote, error) = match client.resolve(&request) {
        Ok(Resolved { changed: Some(changed), .. }) => {
            (if changed.is_empty() { Status::Current } else { Status::Outdated }, None, None)
        }
        Ok(Resolved { digest: Some(remote), .. }) => {
            (if remote == model.digest { Status::Current } else { Status::Outdated }, Some(remote), None)
        }
        Ok(Resolved { has_new_version: true, .. }) => (Status::Outdated, None, None),
        Ok(Resolved { digest: None, files, .. }) => match has_files(client, followed, &files) {
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

/// Compares a model that has no manifest at its source by the files there.
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
    let rows = of(Status::Outdated).map(|model| {
        let remote = model.remote.map_or_else(|| "other files".to_owned(), Digest::short);
        let note = if model.pinned { "pinned" } else { "-" }.to_owned();
        [model.name.clone(), model.local.short(), remote, relative(&model.modified), note]
    });
    let table = Table::with_rows(&["NAME", "HERE", "AT ITS SOURCE", "SET HERE", "NOTE"], &[], rows);
    let table = table.leaving_out_first(&["NOTE", "SET HERE", "HERE"]);
    let mut text = if table.has_rows() { table.render(terminal_width()) } else { String::new() };
    for model in of(Status::Failed) {
        let message = printable(model.error.as_deref().unwrap_or_default());
        text.push_str(&format!("{}: not compared: {message}\n", model.name));
    }
    for model in of(Status::Unknown) {
        text.push_str(&format!("{}: not compared: {} gives no digest\n", model.name, model.source));
    }
    let count = |status| of(status).count();
    let (current, outdated) = (count(Status::Current), count(Status::Outdated));
    let failed = count(Status::Failed).saturating_add(count(Status::Unknown));
    text.push_str(&format!("{current} current, {outdated} outdated, {failed} not compared\n"));
    text
}
