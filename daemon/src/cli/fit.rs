//! `blobd fit`

use std::process::ExitCode;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::estimate::{Basis, CacheType, EstimateError, Model, ModelSet, Settings};
use blobd_store_format::gguf::Header;
use clap::{Args, ValueEnum};

use self::report::{Devices, Report};
use super::Global;
use super::connect::print_result;
use super::model_source::{DescribedModel, ModelArgs};
use crate::size::parse_size;

mod render;
mod report;

/// Estimate the memory that a model needs, and how much of it fits
#[derive(Debug, Args)]
#[command(
    after_help = "Estimates weights, KV cache and computation graph from the headers of a model's GGUF files.
A model that is not in the store is described from its header alone, and nothing is stored.

Every answer names its basis. `ollama` is Ollama's estimator of August 2025; it is the default
if keys and values have one type, f16, q8_0 or q4_0. `llama.cpp` takes the KV cache as llama.cpp
of October 2026 allocates it: types for keys and values, sliding windows, latent attention,
recurrent layers. It is the default otherwise.

With --vram the exit code is 0 if everything fits and 1 if not.

Examples:
  blobd fit llama3:8b                                      what it needs
  blobd fit llama3:8b --ctx 32768 --vram 24GiB             whether it fits, and how many layers
  blobd fit llama3:70b --vram 24GiB --vram 24GiB           two devices
  blobd fit gemma3:27b --basis llama.cpp --cache-type-k q8_0 --cache-type-v q4_0
  blobd fit hf.co/user/repo:Q4_K_M --vram 8GiB --json | jq .max_context"
)]
pub(super) struct Params {
    #[command(flatten)]
    model: ModelArgs,
    /// The context of one sequence, in tokens
    #[arg(long = "ctx", value_name = "TOKENS", default_value_t = Settings::default().context)]
    context: u64,
    /// The tokens that are processed together
    #[arg(long, value_name = "TOKENS", default_value_t = Settings::default().batch)]
    batch: u64,
    /// The sequences that are processed at the same time, each with the whole context
    #[arg(long, value_name = "N", default_value_t = Settings::default().parallel)]
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
    /// The formulas of the estimate
    #[arg(long)]
    basis: Option<BasisName>,
    /// List the layers with their weights and KV cache
    #[arg(long)]
    layers: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BasisName {
    /// Ollama's estimator of August 2025
    Ollama,
    /// KV cache as llama.cpp of October 2026 allocates it
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

/// Returns exit code 1 if `--vram` is given and the model does not fit.
pub(super) fn run(global: &Global, params: &Params) -> Result<ExitCode, ErrorBody> {
    let (model, _connected) = params.model.describe(global)?;
    let headers = Headers::of(&model)?;
    let models = headers.models().map_err(|error| estimate_error(&model, &error))?;
    let report = params.report(&model, &models).map_err(|error| estimate_error(&model, &error))?;
    print_result(global, &report, |report| render::render(report, params.layers))?;
    Ok(if report.fits() == Some(false) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl Params {
    fn report<'a>(
        &self,
        described: &'a DescribedModel,
        models: &'a ModelSet<'_>,
    ) -> Result<Report<'a>, EstimateError> {
        let (settings, basis) = (self.settings(), self.basis());
        let estimate = models.estimate(&settings, basis)?;
        let devices = match self.vram.as_slice() {
            [] => None,
            vram => {
                let largest = models.largest_context(&settings, basis, vram)?;
                Some(Devices::new(&estimate.place(vram), largest))
            }
        };
        Ok(Report::new(described, models.model.metadata(), estimate, devices))
    }

    fn settings(&self) -> Settings {
        let Self { context, batch, parallel, cache_type_k, cache_type_v, .. } = *self;
        Settings { context, batch, parallel, cache_type_k, cache_type_v }
    }

    fn basis(&self) -> Basis {
        match self.basis {
            Some(BasisName::Ollama) => Basis::Ollama,
            Some(BasisName::LlamaCpp) => Basis::LlamaCpp,
            None if self.settings().is_known_to_ollama() => Basis::Ollama,
            None => Basis::LlamaCpp,
        }
    }
}

/// The parsed headers of a model's files.
struct Headers {
    model: Header,
    other_shards: Vec<Header>,
    projector: Option<Header>,
    draft: Option<Header>,
}

impl Headers {
    fn of(model: &DescribedModel) -> Result<Self, ErrorBody> {
        let mut weights = model.weights().map(|(_file, header)| header);
        let first = weights.next().ok_or_else(|| {
            let message = format!("{}: has no GGUF header; only GGUF models can be estimated", model.name);
            ErrorBody::new(ErrorCode::InvalidInput, message)
        })?;
        let first_of = |component| model.headers(component).next().map(|(_file, header)| header);
        Ok(Self {
            model: first,
            other_shards: weights.collect(),
            projector: first_of("projector"),
            draft: first_of("draft"),
        })
    }

    fn models(&self) -> Result<ModelSet<'_>, EstimateError> {
        Ok(ModelSet {
            model: Model::new(&self.model, &self.other_shards)?,
            projector: alone(self.projector.as_ref())?,
            draft: alone(self.draft.as_ref())?,
        })
    }
}

fn alone(header: Option<&Header>) -> Result<Option<Model<'_>>, EstimateError> {
    header.map(|header| Model::new(header, [])).transpose()
}

fn estimate_error(model: &DescribedModel, error: &EstimateError) -> ErrorBody {
    let code = match error {
        EstimateError::TooManyBlocks { .. } => ErrorCode::InvalidInput,
        _ => ErrorCode::InvalidRequest,
    };
    ErrorBody::new(code, format!("{}: {error}", model.name))
}
