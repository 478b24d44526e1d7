//! `blobd tensor`
//!
//! The numbers are computed in this process from the mapped blob; the daemon does not convert them.

use std::ops::Range;
use std::path::{Path, PathBuf};

use blobd_cli_common::connect::{connect, print_result};
use blobd_cli_common::model_name::only;
use blobd_cli_common::model_source::{Lookup, ModelArgs};
use blobd_cli_common::output::print_json;
use blobd_cli_common::output_file::{Existing, refuse_terminal};
use blobd_cli_common::{Global, usage};
use blobd_model::quant;
use clap::Args;

use self::source::StoredTensor;
use crate::ErrorBody;
use crate::tensor_choice::WantedTensor;

mod packed;
mod source;
mod statistics;
mod values;
mod write;

/// Show one tensor: statistics, single values, or all of it as a file
#[derive(Debug, Args)]
#[command(
    after_help = "Quantised tensors are converted to float32, also those whose scales are tensors of their own
(int4, int8, nvfp4, mxfp4, mxfp8), and BF16 and the floats of 8, 6 and 4 bits. Statistics are those
of the finite values, of complex numbers those of both parts; elements are numbered from 0 in the
order of the file.

If several files of a model have a tensor of the name, that of the model's own weights is meant
before those of its projector and its draft. Other files are chosen with --file, or by their name in
front of the tensor's.

A model at a registry has to be pulled first: one of its tensors alone cannot be verified.

Examples:
  blobd tensor llama3:8b blk.0.attn_q.weight                 statistics and a histogram
  blobd tensor ./model-Q4_K_M.gguf output_norm.weight        of a file of this machine
  blobd tensor llama3:8b output_norm.weight --values 0..16
  blobd tensor sdxl vae/conv_in.weight                       of the files in vae/
  blobd tensor qwen3:8b output_norm.weight --file draft
  blobd tensor mixtral:8x7b blk.3.ffn_up_exps.weight --expert 5
  blobd tensor llama3:8b token_embd.weight --npy -o embeddings.npy
  blobd tensor llama3:8b token_embd.weight --dump | sha256sum
  blobd tensor llama3:8b blk.0.attn_q.weight --json | jq .std"
)]
pub struct Params {
    /// The model: its name in the store, or the path of a file or folder
    #[arg(value_name = "REF|PATH")]
    model: String,
    /// The tensor's name, as `blobd show --tensors` lists it
    #[arg(value_name = "[FILE/]NAME")]
    name: String,
    /// The file of the model that has it: its path, a folder that it is in, or what it is, such as draft
    #[arg(long, value_name = "FILE")]
    file: Option<String>,
    /// Use only this expert of a stack of experts, numbered from 0
    #[arg(long, value_name = "N")]
    expert: Option<u64>,
    /// Show minimum, maximum, mean, deviation and a histogram; the default
    #[arg(long, group = "form")]
    stats: bool,
    /// Show the elements from A up to B, without B
    #[arg(long, group = "form", value_name = "A..B", value_parser = parse_range)]
    values: Option<Range<u64>>,
    /// Write the raw bytes as they are stored
    #[arg(long, group = "form")]
    dump: bool,
    /// Write a file for numpy: float32, or the type itself if numpy has it
    #[arg(long, group = "form")]
    npy: bool,
    /// Where --dump and --npy write to; - is standard output, the default
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace the file if it exists, and write to a terminal
    #[arg(long)]
    force: bool,
}

/// Prints statistics or values of a tensor, or writes it to a file.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.output.is_some() && !params.dump && !params.npy {
        return Err(usage("-o: only --dump and --npy write a file"));
    }
    let tensor = open(global, params)?;
    let tensor = match params.expert {
        Some(number) => tensor.expert(number)?,
        None => tensor,
    };
    if params.dump || params.npy {
        return write(global, params, &tensor);
    }
    match &params.values {
        Some(range) => print_result(global, &values::of(&tensor, range)?, values::render),
        None => print_result(global, &statistics::of(&tensor)?, statistics::render),
    }
}

fn open(global: &Global, params: &Params) -> Result<StoredTensor, ErrorBody> {
    let model = ModelArgs::new(&params.model, Lookup::STORED);
    let wanted = WantedTensor::new(&params.name, params.file.as_deref());
    if let Some(path) = model.path() {
        return StoredTensor::of_file(&path, &wanted);
    }
    let name = model.name()?;
    let connected = connect(global)?;
    let reference = only(global, &connected.client, &name)?;
    StoredTensor::open(&connected.client, &reference, &wanted)
}

fn write(global: &Global, params: &Params, tensor: &StoredTensor) -> Result<(), ErrorBody> {
    if !params.force {
        refuse_terminal(params.output.as_deref())?;
    }
    let path = params.output.as_deref().filter(|path| *path != Path::new("-"));
    let content = if params.npy { write::Content::npy(tensor)? } else { write::Content::raw(tensor) };
    let Some(path) = path else { return write::to_stdout(&content) };
    let existing = if params.force { Existing::Replace } else { Existing::Keep };
    write::to_file(&content, path, existing)?;
    if !global.json {
        return Ok(());
    }
    let (path, size) = (path.display().to_string(), content.size());
    print_json(&serde_json::json!({ "name": tensor.name, "path": path, "size": size }))
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let (start, end) = text.split_once("..").ok_or("expected A..B, such as 0..16")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?}: {error}"));
    let (start, end) = (number(start)?, number(end)?);
    if start < end { Ok(start..end) } else { Err(format!("{start}..{end} has no elements")) }
}

fn quant_error(name: &str, error: &quant::QuantError) -> ErrorBody {
    use blobd_client::protocol::error::ErrorCode;
    let message = format!("tensor {name:?}: {error}");
    match error {
        quant::QuantError::UnknownType { .. } => ErrorBody::new(ErrorCode::InvalidRequest, message)
            .with_hint("--dump writes its bytes as they are"),
        _ => ErrorBody::new(ErrorCode::Corrupt, message).with_hint("run `blobd verify`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_a_start_and_an_end() {
        assert_eq!(parse_range("0..16"), Ok(0..16));
        for text in ["", "5", "..4", "4..", "4..4", "5..4", "a..b", "-1..4", "0..99999999999999999999"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }
}
