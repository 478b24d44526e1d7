//! `blobd diff`

use blobd_client::protocol::error::ErrorBody;
use blobd_model::diff::diff_tensors;
use clap::Args;

use self::report::Report;
use self::side::Side;
use super::Global;
use super::connect::{connect, print_result};
use super::model_source::ModelArgs;

mod contents;
mod render;
mod report;
mod side;
mod values;

/// Show how two models differ: tensors, metadata and texts
#[derive(Debug, Args)]
#[command(
    after_help = "Tensors are compared by name. Shared bytes lie on disk once, whatever their names. Of a model that
is not in the store only the header is fetched: types, shapes and metadata are compared, contents
are not.

Examples:
  blobd diff llama3:8b-q4_K_M llama3:8b-q4_K_S
  blobd diff llama3:8b ./model-Q4_K_M.gguf         a model and a file of this machine
  blobd diff llama3:8b hf.co/user/repo:Q4_K_M      before the download
  blobd diff model:f16 model:q4_K_M --values       how far the numbers are apart
  blobd diff base:f16 finetuned:f16 --json | jq '.tensors[] | select(.change != \"shared\")'"
)]
pub(super) struct Params {
    /// The first model: its name, a GGUF file, or a source as `blobd pull` takes it
    #[arg(value_name = "REF|PATH")]
    a: String,
    /// The second model
    #[arg(value_name = "REF|PATH")]
    b: String,
    /// Look only in the store; otherwise a registry is asked for a model that is not there
    #[arg(long)]
    stored: bool,
    /// Compute the relative error of each tensor that differs: the root mean square of the differences, relative to
    /// that of A
    #[arg(long)]
    values: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let models = [&params.a, &params.b].map(|model| ModelArgs::new(model, params.stored));
    let needs_store = models.iter().any(|model| model.path().is_none());
    let connected = if needs_store { Some(connect(global)?) } else { None };
    let connected = connected.as_ref();
    let [a, b] = &models;
    let (a, b) = (Side::read(global, a, connected)?, Side::read(global, b, connected)?);
    let mut diff = diff_tensors(&a.tensors, &b.tensors);
    if !(a.has_contents() && b.has_contents()) {
        diff.forget_contents();
        let report = Report::new(&a, &b, &diff).without_contents();
        return print_result(global, &report, render::render);
    }
    contents::find_equal(connected, &a, &b, &mut diff.tensors)?;
    let mut report = Report::new(&a, &b, &diff);
    if params.values {
        values::add_errors(connected, &a, &b, &diff.tensors, &mut report, global.hides_progress())?;
    }
    print_result(global, &report, render::render)
}
