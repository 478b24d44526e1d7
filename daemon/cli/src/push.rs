//! `blobd push`

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, connect, print_report, print_result};
use blobd_cli_common::model_name::{ModelName, only, parse_new_name};
use blobd_cli_common::output::{counted, human_bytes, print_json, printable, sum_of_parts};
use blobd_cli_common::progress::{Bar, Progress};
use blobd_client::protocol::event::{Event, Phase, WorkProgress};
use blobd_client::protocol::push::{
    ArtifactDelivery, FileDelivery, Publication, PushForm, PushParams, Pushed, PushedIndex, PushedSignature,
};
use blobd_store_format::size::parse_rate;
use clap::{Args, ValueEnum};

use crate::{ErrorBody, Reference};

/// Upload a model to a registry
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd push registry.example/team/tiny:q4              to the registry of its name
  blobd push tiny:q4 registry.example/team/tiny:q4      under another name
  blobd push tiny:q4 localhost:5000/tiny --dry-run      what the registry lacks
  blobd push tiny:q4 lan:5000/tiny --insecure --limit-rate 20MB
  blobd push tiny:q4 lan:5000/ai/tiny --as docker       for Docker Model Runner
  blobd push tiny:q4 lan:5000/img/tiny --as image       for image volumes of Kubernetes
  blobd push tiny:q4 lan:5000/team/tunes:q4 --tensors   for blobds alone, each tensor once

The manifest that the registry gets has the same bytes as in the store, unless --as names another
form; for an image, all files are read once before anything is sent. Files that the registry has
already are not sent. Beside it go its signatures, and an index of
its tensors, under 0.05 % of its size.
`blobd login HOST` stores credentials. Ctrl-C stops with exit code 130.")]
pub(super) struct Params {
    /// The model
    #[arg(value_name = "REF")]
    model: ModelName,
    /// Publish it as [host/][path/…/]model[:tag] instead of its own name
    #[arg(value_name = "DEST", value_parser = parse_new_name)]
    destination: Option<Reference>,
    /// Connect to the registry over plain HTTP
    #[arg(long)]
    insecure: bool,
    /// Upload at most this many bytes per second, such as 20MB
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    limit_rate: Option<u64>,
    /// Show what the registry has already, and upload nothing
    #[arg(long)]
    dry_run: bool,
    /// Publish no tensor index beside the model
    #[arg(long)]
    no_index: bool,
    /// Publish it in this form: with the stored manifest, with one for the programs of another publisher, or as an
    /// ordinary container image with the files under /models
    #[arg(long = "as", value_name = "FORM", default_value = "original")]
    form: Form,
    /// Publish a layer for each tensor, which only blobds can pull; models there share equal tensors
    #[arg(long, conflicts_with_all = ["form", "no_index"])]
    tensors: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    Original,
    Modelpack,
    Docker,
    Image,
}

impl From<Form> for PushForm {
    fn from(form: Form) -> Self {
        match form {
            Form::Original => Self::Original,
            Form::Modelpack => Self::Modelpack,
            Form::Docker => Self::Docker,
            Form::Image => Self::Image,
        }
    }
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let reference = only(global, &connected.client, &params.model)?;
    let Params { insecure, limit_rate, dry_run, no_index, .. } = *params;
    let destination = params.destination.clone();
    let form = if params.tensors { PushForm::Tensors } else { params.form.into() };
    let request = PushParams { reference, destination, insecure, limit_rate, dry_run, no_index, form };
    let mut shown = Sending::new(global, dry_run);
    let pushed = connected.client.push(&request, |event| shown.show(event)).map_err(client_error);
    shown.end()?;
    let pushed = pushed?;
    let print = if params.dry_run { print_result } else { print_report };
    print(global, &pushed, |pushed: &Pushed| render(&pushed.publication, form_of(pushed)))
}

/// The progress of a push on the terminal, or as lines of JSON.
pub(super) struct Sending {
    progress: Progress,
    /// The bar of the current phase.
    bar: Option<(Bar, Option<Phase>)>,
    prints_lines: bool,
    printed: Result<(), ErrorBody>,
}

impl Sending {
    pub(super) fn new(global: &Global, is_dry_run: bool) -> Self {
        let progress = Progress::new(global.hides_progress());
        let prints_lines = global.json && !global.quiet && !is_dry_run;
        Self { progress, bar: None, prints_lines, printed: Ok(()) }
    }

    pub(super) fn show<D>(&mut self, event: Event<WorkProgress, D>) {
        match event {
            Event::Progress(event) if self.prints_lines => self.printed = print_json(&event),
            Event::Progress(WorkProgress {
                total: Some(total), completed: Some(completed), phase, ..
            }) => {
                if self.bar.as_ref().is_none_or(|(_, of)| *of != phase) {
                    // The last one leaves the screen first.
                    self.bar = None;
                    let label = if phase == Some(Phase::Hashing) { "reading" } else { "pushing" };
                    self.bar = Some((self.progress.bar(label, total), phase));
                }
                self.bar.iter().for_each(|(bar, _)| bar.set(completed, total));
            }
            _ => {}
        }
    }

    /// Removes the bar.
    pub(super) fn end(self) -> Result<(), ErrorBody> {
        self.printed
    }
}

/// What was published, for a person. `form` follows the manifest's digest.
pub(super) fn render(pushed: &Publication, form: &str) -> String {
    let Publication { destination, digest, size, .. } = pushed;
    let destination = printable(destination);
    let missing = pushed.files.iter().filter(|file| file.delivery == FileDelivery::Sent).count() as u64;
    let sent = match pushed.dry_run {
        true => format!("to send in {}", counted(missing, "file")),
        false => "sent".to_owned(),
    };
    let parts = [
        (pushed.sent_bytes, &*sent),
        (pushed.mounted_bytes, "mounted"),
        (pushed.present_bytes, "there before"),
    ];
    let sources = sum_of_parts(&parts);
    let replaced = match (&pushed.replaced, pushed.dry_run) {
        (Some(before), true) => format!("  would replace {} there\n", before.short()),
        (Some(before), false) => format!("  replaced {} there\n", before.short()),
        (None, _) if pushed.unchanged => "  the name meant this model before\n".to_owned(),
        (None, _) => String::new(),
    };
    let index = pushed.index.as_ref().map_or_else(String::new, render_index);
    let signatures = render_signatures(&pushed.signatures);
    let (digest, size) = (digest.short(), human_bytes(*size));
    format!("{destination} {digest}{form}: {size}{sources}\n{replaced}{index}{signatures}")
}

fn form_of(pushed: &Pushed) -> &'static str {
    match pushed.form {
        PushForm::Modelpack => " as modelpack",
        PushForm::Docker => " as docker",
        PushForm::Image => " as image",
        PushForm::Tensors => " as tensors",
        _ => "",
    }
}

/// Lines about the signatures, unless the registry had them.
fn render_signatures(signatures: &[PushedSignature]) -> String {
    let sent = signatures.iter().filter(|signature| signature.delivery == ArtifactDelivery::Sent).count();
    let sent = match sent {
        0 => String::new(),
        sent => format!("  with {}\n", counted(sent, "signature")),
    };
    let refused = signatures.iter().filter_map(|signature| signature.reason.as_ref());
    let refused = refused.map(|reason| format!("  without a signature: {}\n", printable(reason)));
    sent + &refused.collect::<String>()
}

/// A line about the tensor index, unless there is nothing to do about it.
fn render_index(index: &PushedIndex) -> String {
    match (index.delivery, &index.reason) {
        (ArtifactDelivery::Refused, Some(reason)) => {
            format!("  without a tensor index: {}\n", printable(reason))
        }
        (ArtifactDelivery::Sent, _) => format!("  with a tensor index of {}\n", human_bytes(index.size)),
        _ => String::new(),
    }
}
