//! `blobd pull`

use std::sync::{Arc, PoisonError};

use blobd_cli_common::advice::{instead_of_pull, parse_source};
use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::{Connected, client_error, connect_or_create, print_result};
use blobd_cli_common::model_name::parse_new_name;
use blobd_cli_common::output::{
    REUSED, human_bytes, print, print_json, print_stopped, print_text, sum_of_parts,
};
use blobd_cli_common::progress::{Bar, Progress};
use blobd_cli_common::{Global, internal, lost_models, usage};
use blobd_client::error::ClientError;
use blobd_client::process::on_interrupt;
use blobd_client::protocol::event::{Event, Phase, State};
use blobd_client::protocol::naming::LostModel;
use blobd_client::protocol::pull::{PullDone, PullProgress};
use blobd_client::protocol::request::PullParams;
use blobd_store_format::size::parse_rate;
use blobd_store_format::source::{Components, Draft, Projector, PullSource};
use clap::Args;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::outdated::{Followed, followed, nothing_to_compare};
use crate::{ErrorBody, ErrorCode, Reference, pull_report};

/// Download models from registries and Hugging Face, and GGUF files from any URL
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd pull llama3:8b
  blobd pull llama3:8b --limit-rate 20MB
  blobd pull llama3:8b-instruct-q4_K_S --dry-run
  blobd pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
  blobd pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q8_0.gguf
  blobd pull hf.co/ggml-org/gemma-3-4b-it-GGUF --projector F16
  blobd pull hf.co/sentence-transformers/all-MiniLM-L6-v2     safetensors, with all its small files
  blobd pull hf.co/org/model --include 'fp16/*' --revision v1.1
  blobd pull docker.io/smollm2                   a model of Docker Model Runner, in docker.io/ai
  blobd pull https://example.org/models/tiny.gguf --name tiny
  blobd pull --all                               update all models that `blobd outdated` compares
  blobd pull llama3:8b@sha256:365c0bd3c000a25d28ddbf732fe1c6add414de7275464c4e4d1c3b5fcb5d8ad1

Ctrl-C stops the pull with exit code 130. What was downloaded is kept, and the same command resumes.")]
pub(super) struct Params {
    /// [host/][path/…/]model[:tag][@sha256:…], hf.co/USER/REPO/FILE.gguf or https://HOST/PATH/FILE.gguf
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "REF", value_parser = parse_source)]
    sources: Vec<PullSource>,
    /// Pull the newest version of every model that was pulled and is not pinned
    #[arg(long, conflicts_with = "name")]
    all: bool,
    /// Store the model under this name instead
    #[arg(long, value_name = "REF", value_parser = parse_new_name)]
    name: Option<Reference>,
    /// Download at most this many bytes per second, such as 20MB
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    limit_rate: Option<u64>,
    /// Pull no projector with a model of a repository at Hugging Face
    #[arg(long, conflicts_with_all = ["projector", "all"])]
    no_projector: bool,
    /// Pull this projector of the repository: the name of its file, or its quantization such as BF16
    #[arg(long, value_name = "NAME", conflicts_with = "all")]
    projector: Option<String>,
    /// Pull no model for speculative decoding with a model of a repository at Hugging Face
    #[arg(long, conflicts_with = "all")]
    no_draft: bool,
    /// Pull exactly the files of a repository at Hugging Face whose path matches, such as '*.safetensors'
    #[arg(long, value_name = "PATTERN", conflicts_with = "all")]
    include: Vec<String>,
    /// Do not pull the files of the repository whose path matches, such as 'onnx/'
    #[arg(long, value_name = "PATTERN", conflicts_with = "all")]
    exclude: Vec<String>,
    /// Pull this branch, tag or commit of the repository; it becomes the tag of the model's name
    #[arg(long, value_name = "REVISION", conflicts_with = "all")]
    revision: Option<String>,
    /// Show what would be downloaded and reused, and whether there is space for it
    #[arg(long)]
    dry_run: bool,
    /// Replace a model from elsewhere that has the name, or a pinned one; that model goes to the trash
    #[arg(long)]
    force: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.name.is_some() && params.sources.len() > 1 {
        return Err(usage("--name: names one model, but several sources are given"));
    }
    let screen = Arc::new(Mutex::new(Screen::new(global)));
    if !params.dry_run {
        // Opening a large store takes a while.
        lock(&screen).begin(&params.label());
    }
    let connected = connect_or_create(global)?;
    let requests = if params.all {
        followed_models(global, params, &connected)?
    } else {
        let components = params.components();
        let request = |source| params.request(source, params.name.clone(), components.clone());
        params.sources.iter().map(request).collect()
    };
    if params.dry_run {
        return plan_all(global, &connected, &requests);
    }
    let interrupted = Arc::clone(&screen);
    let stop = move || {
        let mut screen = lock(&interrupted);
        screen.print_stopped();
        // Never unlocked, so that nothing is drawn below the last line.
        std::mem::forget(screen);
    };
    on_interrupt(stop).map_err(internal)?;
    let mut batch = Batch::of_lines(global, requests.len());
    for request in &requests {
        lock(&screen).begin(&label(request));
        let done = connected.client.pull(request, |event| lock(&screen).show(event));
        lock(&screen).end_bar();
        let evicted = std::mem::take(&mut lock(&screen).evicted);
        if done.is_err() && !global.hides_reports() {
            // The summary of a successful pull has them.
            print_text(&lost_models::evicted(&evicted))?;
        }
        let done = done.map_err(|error| pull_error(error, lock(&screen).received, &request.source));
        if let Some(done) = batch.add(&request.source, done)
            && !global.hides_reports()
        {
            print_text(&summary(done))?;
        }
    }
    batch.result(["models was not pulled", "models were not pulled"])?;
    lock(&screen).output_failure.take().map_or(Ok(()), Err)
}

impl Params {
    fn request(&self, source: &PullSource, name: Option<Reference>, components: Components) -> PullParams {
        let (source, limit_rate, force) = (source.clone(), self.limit_rate, self.force);
        PullParams { source, name, components, limit_rate, force }
    }

    /// What the first line on the screen is about.
    fn label(&self) -> String {
        match (&self.name, self.sources.as_slice()) {
            (Some(name), _) => name.short(),
            (None, [first, ..]) => first.to_string(),
            (None, []) => "all models".to_owned(),
        }
    }

    fn components(&self) -> Components {
        let projector = match &self.projector {
            Some(name) => Projector::Named(name.clone()),
            None if self.no_projector => Projector::None,
            None => Projector::Nearest,
        };
        let draft = if self.no_draft { Draft::None } else { Draft::Nearest };
        let Self { include, exclude, revision, .. } = self;
        let (include, exclude, revision) = (include.clone(), exclude.clone(), revision.clone());
        Components { projector, draft, include, exclude, revision }
    }
}

/// The newest version of each model that follows a source. A pinned name stays as it is, unless that is forced.
fn followed_models(
    global: &Global,
    params: &Params,
    connected: &Connected,
) -> Result<Vec<PullParams>, ErrorBody> {
    let models = connected.client.models().map_err(client_error)?.models;
    let mut requests = Vec::new();
    let followed: Vec<_> = models.iter().filter_map(|model| Some((model, followed(model)?))).collect();
    if followed.is_empty() && !global.hides_reports() {
        print_text(&nothing_to_compare(models.len(), models.len()))?;
    }
    for (model, Followed { name, source, components }) in followed {
        if !model.pinned || params.force {
            requests.push(params.request(&source, Some(name), components));
        } else if !global.hides_reports() {
            print(&format!("{}: pinned, not updated\n", model.name))?;
        }
    }
    Ok(requests)
}

/// The model's name on the screen.
fn label(request: &PullParams) -> String {
    request.name.as_ref().map_or_else(|| request.source.to_string(), Reference::short)
}

fn plan_all(global: &Global, connected: &Connected, requests: &[PullParams]) -> Result<(), ErrorBody> {
    let mut batch = Batch::<()>::of_lines(global, requests.len());
    let mut download_bytes = Vec::new();
    for request in requests {
        let planned = plan(global, connected, request).map(|bytes| download_bytes.push(bytes));
        batch.add(&request.source, planned);
    }
    if download_bytes.len() > 1 && !global.json {
        print_text(&pull_report::planned_in_all(&download_bytes))?;
    }
    batch.result(["pulls cannot be planned", "pulls cannot be planned"])
}

/// Prints what a pull would do. Returns how many bytes it would download.
fn plan(global: &Global, connected: &Connected, request: &PullParams) -> Result<u64, ErrorBody> {
    let plan = connected.client.plan_pull(request).map_err(client_error)?;
    print_result(global, &plan, pull_report::plan)?;
    Ok(plan.download_bytes)
}

/// Adds a hint: whether the pull can be resumed or, for an unknown model, how to import a file of that name. Most
/// downloaded data is kept if the daemon or the registry fails.
fn pull_error(error: ClientError, received: Received, source: &PullSource) -> ErrorBody {
    let is_closed = matches!(error, ClientError::Closed);
    let body = client_error(error);
    match body.hint {
        None if is_closed => body.with_hint(format!("when the daemon runs again, {}", received.next_time())),
        None if received != Received::Nothing && body.code == ErrorCode::Upstream => {
            body.with_hint(received.next_time())
        }
        _ if received == Received::Nothing
            && matches!(body.code, ErrorCode::NotFound | ErrorCode::Upstream) =>
        {
            match instead_of_pull(source) {
                Some(hint) => body.with_hint(hint),
                None => body,
            }
        }
        _ => body,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    Nothing,
    /// The next pull continues with it.
    Kept,
    /// A part of a file that cannot be resumed.
    Lost,
}

impl Received {
    /// What the same command will do next time.
    const fn next_time(self) -> &'static str {
        match self {
            Self::Nothing => "nothing was received; the same command starts the download",
            Self::Kept => "the same command resumes the download; the data received so far is kept",
            Self::Lost => {
                "the same command downloads this archive from its start, because it is compressed or its server sends \
                 no parts of files; complete files are kept"
            }
        }
    }
}

fn summary(done: &PullDone) -> String {
    let PullDone { name, digest, size, .. } = done;
    let chosen = pull_report::chosen_line(done.chosen.as_ref());
    if done.unchanged {
        return format!("{name} {}: unchanged, nothing downloaded\n{chosen}", digest.short());
    }
    // Stored before as the same file or as tensors of another model: which of the two, `--json` says.
    let reused_bytes = done.reused_bytes.saturating_add(done.already_stored_bytes);
    let parts = [(done.downloaded_bytes, "downloaded"), (reused_bytes, REUSED)];
    let sources = sum_of_parts(&parts);
    let index = done.index.as_ref().map_or_else(String::new, pull_report::index);
    let corrected = pull_report::corrected(&done.corrected);
    let effects = lost_models::effects(&done.effects);
    format!("{name} {}: {}{sources}\n{chosen}{index}{corrected}{effects}", digest.short(), human_bytes(*size))
}

struct Screen {
    json: bool,
    quiet: bool,
    progress: Progress,
    /// That of the model that is pulled.
    bar: Option<ModelBar>,
    received: Received,
    evicted: Vec<LostModel>,
    /// Why a line of JSON could not be written. The pull goes on.
    output_failure: Option<ErrorBody>,
}

struct ModelBar {
    bar: Bar,
    /// The bar never moves back: if a file is downloaded again from its start, the bar waits here.
    highest_bytes: u64,
}

fn lock(screen: &Mutex<Screen>) -> MutexGuard<'_, Screen> {
    // After a panic the screen can still be drawn to.
    screen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Screen {
    fn new(global: &Global) -> Self {
        Self {
            json: global.json,
            quiet: global.quiet,
            progress: Progress::new(global.hides_progress()),
            bar: None,
            received: Received::Nothing,
            evicted: Vec::new(),
            output_failure: None,
        }
    }

    /// Shows a line for a model, before anything is known of it.
    fn begin(&mut self, label: &str) {
        self.received = Received::Nothing;
        self.end_bar();
        let bar = self.progress.bar(label, 0);
        bar.wait("connecting");
        self.bar = Some(ModelBar { bar, highest_bytes: 0 });
    }

    fn show(&mut self, event: Event<PullProgress, PullDone>) {
        if let Event::Progress(progress) = &event {
            self.note_received(progress);
            self.evicted.extend(progress.evicted.iter().cloned());
        }
        if self.quiet && matches!(event, Event::Progress(_)) {
            return;
        }
        if self.json {
            // The command prints a failure itself, as its last line on standard error.
            if !matches!(event, Event::Failed(_))
                && let Err(failure) = print_json(&event)
            {
                self.output_failure = Some(failure);
            }
            return;
        }
        if let Event::Progress(progress) = event {
            self.draw(&progress);
        }
    }

    fn note_received(&mut self, progress: &PullProgress) {
        if progress.restarts {
            self.received = Received::Lost;
        } else if progress.reused.is_none() && progress.completed.is_some_and(|completed| completed > 0) {
            // The last line of a file, which has `reused`, may be about one that was stored before.
            self.received = Received::Kept;
        }
    }

    fn draw(&mut self, progress: &PullProgress) {
        // The summary has them.
        if progress.evicted.is_empty()
            && let Some(bar) = &mut self.bar
        {
            bar.show(progress);
        }
    }

    fn end_bar(&mut self) {
        drop(self.bar.take());
    }

    fn print_stopped(&mut self) {
        self.end_bar();
        let hint = self.received.next_time();
        if self.json {
            return print_stopped(true, "pull", hint);
        }
        let deletion = match self.received {
            Received::Nothing | Received::Lost => "",
            Received::Kept => ", and `blobd gc` deletes it after a week",
        };
        print_stopped(false, "pull", &format!("{hint}{deletion}"));
    }
}

impl ModelBar {
    fn show(&mut self, progress: &PullProgress) {
        let PullProgress { status, state, phase, .. } = progress;
        // Daemons before they sent that say how much of the file has arrived.
        let completed = progress.completed_bytes.or(progress.completed).unwrap_or_default();
        let total = progress.total_bytes.or(progress.total).unwrap_or_default();
        if *state != State::Working {
            return self.bar.wait(status);
        }
        match phase {
            // How much is there already is known when the file's header has arrived.
            Some(Phase::Receiving) | None if self.highest_bytes == 0 && completed == 0 => {
                self.bar.wait("starting");
            }
            Some(Phase::Receiving) | None if total > 0 => {
                self.set(completed, total, progress.bytes_per_second);
            }
            Some(Phase::Receiving | Phase::Resolving) | None => self.bar.wait(status),
            Some(phase) => {
                let counts = progress.phase_completed.zip(progress.phase_total);
                self.bar.enter(*phase, counts.unwrap_or_default());
            }
        }
    }

    fn set(&mut self, completed: u64, total: u64, bytes_per_second: Option<u64>) {
        let is_first = self.highest_bytes == 0;
        self.highest_bytes = self.highest_bytes.max(completed);
        self.bar.set_speed(bytes_per_second);
        if is_first {
            self.bar.begin_at(completed, total);
        } else {
            self.bar.set(self.highest_bytes, total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_never_moves_back() {
        let mut bar = ModelBar { bar: Bar::new("", 10, true), highest_bytes: 0 };
        let shown = [0, 4, 7, 0, 5, 8].map(|completed| {
            bar.set(completed, 10, None);
            bar.bar.position()
        });
        assert_eq!(shown, [0, 4, 7, 7, 7, 8]);
    }

    #[test]
    fn only_received_data_is_kept() {
        let next = |progress: PullProgress| {
            let mut screen = Screen {
                json: false,
                quiet: true,
                progress: Progress::new(true),
                bar: None,
                received: Received::Nothing,
                evicted: Vec::new(),
                output_failure: None,
            };
            screen.note_received(&progress);
            screen.received
        };
        let progress = |completed, reused| PullProgress { completed, reused, ..PullProgress::default() };
        assert_eq!(next(progress(None, None)), Received::Nothing);
        assert_eq!(next(progress(Some(5), Some(5))), Received::Nothing, "it was stored before");
        assert_eq!(next(progress(Some(5), None)), Received::Kept);
        assert_eq!(next(PullProgress { restarts: true, ..progress(Some(5), None) }), Received::Lost);
    }
}
