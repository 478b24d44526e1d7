//! `blobd verify` and `blobd reindex`: compare the store with what it should contain

use blobd_cli_common::Global;
use blobd_cli_common::batch::Batch;
use blobd_cli_common::connect::{Connected, client_error, connect, print_result, report};
use blobd_cli_common::model_name::{ModelName, expand};
use blobd_cli_common::output::{Table, counted, human_bytes, terminal_width};
use blobd_cli_common::progress::{Bar, Progress};
use blobd_client::protocol::error::FailedItem;
use blobd_client::protocol::event::Event;
use blobd_client::protocol::request::VerifyParams;
use blobd_client::protocol::upkeep::{CorruptBlob, Reindexed, Unavailable, Verified, VerifyProgress};
use blobd_store_format::text::one_line;
use clap::Args;
use serde::Serialize;

use crate::sign::{self, SignatureArgs};
use crate::{Client, ErrorBody, ErrorCode, Reference};

/// Read the stored data from the disk and compare it with its digests
#[derive(Debug, Args)]
#[command(
    long_about = "Read the stored data from the disk and compare it with its digests\n\nA blob that is wrong when it is read twice is \
moved to quarantine/ in the store's directory; programs that have it mapped keep it. Exit code 5 means that \
damage was found and not repaired."
)]
#[command(after_help = "Examples:
  blobd verify                                 the whole store
  blobd verify llama3:8b mixtral:8x7b          the blobs of these models
  blobd verify --repair                        downloads only the tensors that are damaged
  blobd verify --json | jq -r '.corrupt[].digest'
  blobd verify --signatures --key site.pub     who has signed each model; reads no data")]
pub(super) struct Params {
    /// The models to verify, by name or by pattern; the whole store if omitted
    #[arg(value_name = "REF|PATTERN")]
    models: Vec<ModelName>,
    /// Repair damaged blobs, from the store itself or from the registry that they came from
    #[arg(long)]
    repair: bool,
    #[command(flatten, next_help_heading = "Who has signed models")]
    signatures: SignatureArgs,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.signatures.signatures {
        return sign::verify(global, &params.models, &params.signatures);
    }
    let connected = connect(global)?;
    let models = expand(&connected.client, &params.models)?;
    let mut batch = Batch::new(global, models.len());
    if models.is_empty() {
        batch.add(&"store", verify(global, params, &connected, None));
    }
    let mut labels = Vec::new();
    let count = models.len();
    for model in models {
        let verify = |reference| verify(global, params, &connected, Some(reference));
        batch.add(&model.label, model.reference.and_then(verify));
        labels.push(model.label);
    }
    let verified = sum(batch.done());
    if count > 1 || !batch.done().is_empty() {
        print_result(global, &Report { verified: &verified, failed: batch.failed() }, |_| render(&verified))?;
    }
    let finished = batch.result(["models was not verified", "models were not verified"]);
    match verified.corrupt.iter().filter(|blob| !blob.repaired).count() {
        0 => finished
            .and_then(|()| verified.unavailable.as_ref().map_or(Ok(()), |left| Err(unavailable(left)))),
        count => Err(damaged(count, &labels, params.repair)),
    }
}

/// Compare the index with the disk and correct it
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd reindex                                after files were put into the store by hand
  blobd reindex --json | jq .differences       0: the index was right

The index is a cache: nothing is lost with it, and models can be opened while it is rebuilt.")]
pub(super) struct ReindexArgs {}

pub(super) fn reindex(global: &Global) -> Result<(), ErrorBody> {
    report(global, Client::reindex, reindexed)
}

fn reindexed(done: &Reindexed) -> String {
    let (blobs, recipes, models) = (done.blob_count, done.recipe_count, done.model_count);
    let what = [counted(blobs, "blob"), counted(recipes, "recipe"), counted(models, "model")].join(", ");
    match done.differences {
        0 => format!("{what}: the index was right\n"),
        1 => format!("{what}: 1 wrong entry corrected\n"),
        count => format!("{what}: {count} wrong entries corrected\n"),
    }
}

fn verify(
    global: &Global,
    params: &Params,
    connected: &Connected,
    reference: Option<Reference>,
) -> Result<Verified, ErrorBody> {
    let request = VerifyParams { reference, repair: params.repair };
    let progress = Progress::new(global.hides_progress());
    let mut screen = Screen { progress, status: String::new(), bar: None };
    let verified = connected.client.verify(&request, |event| screen.show(&event));
    screen.clear();
    verified.map_err(client_error)
}

#[derive(Serialize)]
struct Report<'r> {
    #[serde(flatten)]
    verified: &'r Verified,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    failed: &'r [FailedItem],
}

/// The results of several models as one. Blobs that two models share were read for each of them.
fn sum(verified: &[Verified]) -> Verified {
    let mut sum = Verified::default();
    for one in verified {
        if let Some(more) = &one.unavailable {
            let left = sum.unavailable.get_or_insert_with(|| Unavailable { blobs: 0, ..more.clone() });
            left.blobs = left.blobs.saturating_add(more.blobs);
        }
        sum.checked_blobs = sum.checked_blobs.saturating_add(one.checked_blobs);
        sum.checked_bytes = sum.checked_bytes.saturating_add(one.checked_bytes);
        for blob in &one.corrupt {
            // A blob that a later run has repaired or moved is not reported again.
            if sum.corrupt.iter().all(|known| known.digest != blob.digest) {
                sum.corrupt.push(blob.clone());
            }
        }
    }
    sum
}

fn unavailable(Unavailable { blobs, reason }: &Unavailable) -> ErrorBody {
    let blobs = if *blobs == 1 { "1 blob was".to_owned() } else { format!("{blobs} blobs were") };
    let message = format!("{blobs} not verified, because a lower store is left out: {reason}");
    ErrorBody::new(ErrorCode::NotFound, message).with_hint(
        "make the lower store available again, such as by mounting its file system, and verify again",
    )
}

fn damaged(count: usize, names: &[String], is_repaired: bool) -> ErrorBody {
    let subject = match names {
        [] => "store".to_owned(),
        [name] => format!("model {name}"),
        names => format!("models {}", names.join(", ")),
    };
    let blobs = if count == 1 { "blob or recipe is" } else { "blobs or recipes are" };
    let what = format!("{subject}: {count} {blobs} damaged");
    if is_repaired {
        return ErrorBody::new(ErrorCode::Corrupt, format!("{what} and could not be repaired"));
    }
    let words = ["blobd verify --repair".to_owned()].into_iter().chain(names.iter().cloned());
    let hint = format!("run `{}`", words.collect::<Vec<_>>().join(" "));
    ErrorBody::new(ErrorCode::Corrupt, what).with_hint(hint)
}

fn render(verified: &Verified) -> String {
    let Verified { checked_blobs, checked_bytes, corrupt, unavailable: _ } = verified;
    let checked = format!("{}, {}", counted(checked_blobs, "blob"), human_bytes(*checked_bytes));
    if *checked_blobs == 0 && corrupt.is_empty() {
        return "nothing is stored, so there is nothing to verify\n".to_owned();
    }
    if corrupt.is_empty() {
        return format!("{checked}: no damage found\n");
    }
    let table = Table::with_rows(&["DIGEST", "MODELS", "STATE", "REASON"], &[], corrupt.iter().map(row));
    let table = table.with_names_in(&[]).with_texts_in(&[1, 2, 3]);
    format!("{}{checked} read\n", table.render(terminal_width()))
}

const MODELS_WIDTH: usize = 60;

fn row(blob: &CorruptBlob) -> [String; 4] {
    let models = if blob.models.is_empty() { "-".to_owned() } else { one_line(&blob.models, MODELS_WIDTH) };
    let state = match (blob.repaired, blob.fetched_bytes) {
        (true, Some(bytes)) => format!("repaired, {} downloaded", human_bytes(bytes)),
        (true, None) => "repaired".to_owned(),
        (false, _) => "damaged".to_owned(),
    };
    [blob.digest.short(), models, state, blob.reason.clone()]
}

struct Screen {
    progress: Progress,
    status: String,
    bar: Option<Bar>,
}

impl Screen {
    fn show(&mut self, event: &Event<VerifyProgress, Verified>) {
        let Event::Progress(VerifyProgress { status, total, completed, .. }) = event else { return };
        if self.status != *status {
            self.clear();
            self.status.clone_from(status);
        }
        self.bar.get_or_insert_with(|| self.progress.bar(status, *total)).set(*completed, *total);
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;

    #[test]
    fn healthy_store_is_one_line() {
        let verified = Verified { checked_blobs: 7, checked_bytes: 3 << 30, ..Verified::default() };
        assert_eq!(render(&verified), "7 blobs, 3.00 GiB: no damage found\n");
    }

    #[test]
    fn damaged_blob_is_a_row_with_its_models_and_reason() {
        let digest = Digest::of(b"x");
        let models = vec!["a:latest".to_owned(), "b:latest".to_owned()];
        let reason = "is missing".to_owned();
        let blob = CorruptBlob { digest, models, repaired: true, reason, fetched_bytes: Some(2048) };
        let text =
            render(&Verified { checked_blobs: 7, checked_bytes: 0, corrupt: vec![blob], unavailable: None });
        for part in [&digest.short(), "a:latest, b:latest", "repaired, 2.00 KiB downloaded", "is missing"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
