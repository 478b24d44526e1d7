//! `blobd diff`

use blobd_client::protocol::error::ErrorBody;
use blobd_store_format::model_diff::diff_tensors;
use clap::Args;

use self::report::Report;
use self::side::Side;
use super::Global;
use super::connect::{connect, note_name, print_result};
use super::model_name::{ModelName, only};

mod contents;
mod render;
mod report;
mod side;
mod values;

/// Show how two models differ: tensors, metadata and texts
#[derive(Debug, Args)]
#[command(after_help = "Tensors are compared by name. Shared bytes lie on disk once, whatever their names.

Examples:
  blobd diff llama3:8b-q4_K_M llama3:8b-q4_K_S
  blobd diff model:f16 model:q4_K_M --values       how far the numbers are apart
  blobd diff base:f16 finetuned:f16 --json | jq '.tensors[] | select(.change != \"shared\")'")]
pub(super) struct Params {
    /// The first model
    #[arg(value_name = "A")]
    a: ModelName,
    /// The second model
    #[arg(value_name = "B")]
    b: ModelName,
    /// Compute the relative error of each tensor that differs: the root mean square of the differences, relative to
    /// that of A
    #[arg(long)]
    values: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let read = |model| Side::read(&connected, &only(global, &connected.client, model)?);
    let (a, b) = (read(&params.a)?, read(&params.b)?);
    for side in [&a, &b] {
        note_name(global, &side.reference, &side.details.name);
    }
    let mut diff = diff_tensors(&a.tensors, &b.tensors);
    contents::find_equal(&connected, &a, &b, &mut diff.tensors)?;
    let mut report = Report::new(&a, &b, &diff);
    if params.values {
        values::add_errors(&connected, &a, &b, &diff.tensors, &mut report, global.hides_progress())?;
    }
    print_result(global, &report, render::render)
}
