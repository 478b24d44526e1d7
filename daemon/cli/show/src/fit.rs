//! `blobd fit`

use std::process::ExitCode;

use blobd_cli_common::Global;
use blobd_cli_common::connect::print_result;
use blobd_cli_common::described_model::{DescribedFile, DescribedModel};
use blobd_cli_common::model_source::ModelArgs;
use blobd_client::fit::{FitContent, FitFile, FitModel, Room};
use blobd_client::protocol::fit::{FitParams, FitReport};
use blobd_model::estimate::{Basis, CacheType, Settings};
use blobd_store_format::size::parse_size;
use clap::{Args, ValueEnum};
use serde::Serialize;

use self::machine::Machine;
use crate::ErrorBody;

mod machine;
mod render;

/// Estimate the memory that a model needs, and how much of it fits
#[derive(Debug, Args)]
#[command(
    after_help = "Estimates weights, KV cache and computation graph from the headers of a model's GGUF files.
A model that is not in the store is described from its header alone, and nothing is stored; its
name has a host, or --remote is given.

For a model of safetensors files the estimate has the weights, and the KV cache that follows from
its config.json, as transformers, vLLM and their like hold them. What they need for the computation
is not counted.

Without --vram the answer is for this machine: the free memory of its GPUs as nvidia-smi or sysfs
reports it, less 1 GiB each, and the memory that the kernel calls available.

Every answer names its basis. `llama.cpp` is what llama.cpp of October 2026 allocates, which also
runs the models of Ollama since 0.30. `ollama` is Ollama's own estimator of August 2025. A model
without a rule has the basis `weights only`, and never fits.

With --vram the exit code is 0 if everything fits and 1 if not.

Examples:
  blobd fit llama3:8b                                      whether it fits this machine
  blobd fit llama3:8b --ctx 32768 --vram 24GiB             whether it fits, and how many layers
  blobd fit llama3:70b --vram 24GiB --vram 24GiB           two devices
  blobd fit qwen3:30b --vram 8GiB --cpu-moe                the experts stay in memory
  blobd fit gemma3:27b --ctx 0 --cache-type-k q8_0 --cache-type-v q8_0
  blobd fit hf.co/user/repo:Q4_K_M --vram 8GiB --json | jq .max_context"
)]
pub struct Params {
    #[command(flatten)]
    model: ModelArgs,
    /// The context of one sequence, in tokens; 0 for the one that the model was trained for
    /// [default: the model's num_ctx, else the trained one, at most 8192]
    #[arg(long = "ctx", value_name = "TOKENS", verbatim_doc_comment)]
    context: Option<u64>,
    /// The tokens that are processed together
    #[arg(long, value_name = "TOKENS", default_value_t = Settings::default().batch, value_parser = positive())]
    batch: u64,
    /// The sequences that are processed at the same time, each with the whole context
    #[arg(long, value_name = "N", default_value_t = Settings::default().parallel, value_parser = positive())]
    parallel: u64,
    /// The type of keys in the cache: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1 or iq4_nl
    #[arg(long, value_name = "TYPE", default_value_t = Settings::default().cache_type_k)]
    cache_type_k: CacheType,
    /// The type of values in the cache, as for keys
    #[arg(long, value_name = "TYPE", default_value_t = Settings::default().cache_type_v)]
    cache_type_v: CacheType,
    /// The memory of a device, such as 24GiB; for several devices, more than once
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    vram: Vec<u64>,
    /// Leave the experts of a mixture in the machine's memory
    #[arg(long)]
    cpu_moe: bool,
    /// The formulas of the estimate
    #[arg(long)]
    basis: Option<BasisName>,
    /// List the parts of the file with their weights, KV cache and place
    #[arg(long)]
    layers: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BasisName {
    /// Ollama's estimator of August 2025
    Ollama,
    /// KV cache and graph as llama.cpp of October 2026 allocates them
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

fn positive() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

#[derive(Debug, Serialize)]
struct Fit {
    #[serde(flatten)]
    report: FitReport,
    /// Set if no devices were named: the answer is for this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<Machine>,
}

/// Returns exit code 1 if `--vram` is given and the model does not fit.
pub fn run(global: &Global, params: &Params) -> Result<ExitCode, ErrorBody> {
    let (model, _connected) = params.model.describe(global)?;
    let model = fit_model(model)?;
    let machine = params.vram.is_empty().then(Machine::read);
    let room = match &machine {
        None => Room { devices: params.vram.clone(), memory_bytes: None },
        Some(machine) => machine.room(),
    };
    let report = model.report(&params.fit_params(), Some(&room))?;
    let fits = report.answer.as_ref().is_some_and(|answer| answer.fits);
    print_result(global, &Fit { report, machine }, |fit| render::render(fit, params.layers))?;
    let is_refused = !params.vram.is_empty() && !fits;
    Ok(if is_refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl Params {
    fn fit_params(&self) -> FitParams {
        FitParams {
            context: self.context,
            batch: Some(self.batch),
            parallel: Some(self.parallel),
            cache_type_k: Some(self.cache_type_k),
            cache_type_v: Some(self.cache_type_v),
            cpu_moe: self.cpu_moe,
            basis: self.basis.map(|name| match name {
                BasisName::Ollama => Basis::Ollama,
                BasisName::LlamaCpp => Basis::LlamaCpp,
            }),
            ..FitParams::default()
        }
    }
}

fn fit_model(model: DescribedModel) -> Result<FitModel, ErrorBody> {
    let file = |file: DescribedFile| {
        let DescribedFile { media_type, name, size, content, .. } = file;
        let content = FitContent::from_file(&media_type, name.as_deref(), content)?;
        Some(FitFile { media_type, name, size, content })
    };
    FitModel::new(&model.name, model.digest, model.files.into_iter().filter_map(file).collect())
}
