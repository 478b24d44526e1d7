//! `blobd fit`

use std::process::ExitCode;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::estimate::{Basis, CacheType, EstimateError, Model, ModelSet, Settings};
use blobd_store_format::gguf::Header;
use blobd_store_format::metadata::Metadata;
use clap::{Args, ValueEnum};

use self::machine::Machine;
use self::report::{Answer, ContextSource, Report, Subject};
use super::Global;
use super::connect::print_result;
use super::model_source::{DescribedModel, ModelArgs};
use crate::size::parse_size;

mod machine;
mod notes;
mod render;
mod report;

/// The context of a model that names none.
const UNNAMED_CONTEXT: u64 = 4096;
/// The largest context that is taken unasked.
const DEFAULT_CONTEXT: u64 = 8192;

/// Estimate the memory that a model needs, and how much of it fits
#[derive(Debug, Args)]
#[command(
    after_help = "Estimates weights, KV cache and computation graph from the headers of a model's GGUF files.
A model that is not in the store is described from its header alone, and nothing is stored.

Without --vram the answer is for this machine: its GPUs, of which nvidia-smi or sysfs tells the
free memory, less 1 GiB each, and the memory that the kernel calls available.

Every answer names its basis. `llama.cpp` is what llama.cpp of October 2026 allocates, which also
runs the models of Ollama since 0.30. `ollama` is Ollama's own estimator of August 2025. A file
that neither has a rule for has the basis `weights only`, and never fits.

With --vram the exit code is 0 if everything fits and 1 if not.

Examples:
  blobd fit llama3:8b                                      whether it fits this machine
  blobd fit llama3:8b --ctx 32768 --vram 24GiB             whether it fits, and how many layers
  blobd fit llama3:70b --vram 24GiB --vram 24GiB           two devices
  blobd fit qwen3:30b --vram 8GiB --cpu-moe                the experts stay in memory
  blobd fit gemma3:27b --ctx 0 --cache-type-k q8_0 --cache-type-v q8_0
  blobd fit hf.co/user/repo:Q4_K_M --vram 8GiB --json | jq .max_context"
)]
pub(super) struct Params {
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

/// Returns exit code 1 if `--vram` is given and the model does not fit.
pub(super) fn run(global: &Global, params: &Params) -> Result<ExitCode, ErrorBody> {
    let (model, _connected) = params.model.describe(global)?;
    let headers = Headers::of(&model)?;
    let models = headers.models().map_err(|error| estimate_error(&model, &error))?;
    let context = params.context(&model, models.model.metadata().context_length())?;
    let report = params.report(&headers.subject(&model), &models, context);
    let report = report.map_err(|error| estimate_error(&model, &error))?;
    print_result(global, &report, |report| render::render(report, params.layers))?;
    let is_refused = !params.vram.is_empty() && !report.answer.fits;
    Ok(if is_refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl Params {
    fn report<'a>(
        &self,
        subject: &Subject<'a>,
        models: &'a ModelSet<'_>,
        (context, source): (u64, ContextSource),
    ) -> Result<Report<'a>, EstimateError> {
        let settings = self.settings(context);
        let basis = match self.basis {
            Some(BasisName::Ollama) => Basis::Ollama,
            Some(BasisName::LlamaCpp) => Basis::LlamaCpp,
            None => models.model.default_basis(),
        };
        let estimate = models.estimate(&settings, basis)?;
        let machine = self.vram.is_empty().then(Machine::read);
        let answer = match &machine {
            None => Answer::on_devices(models, &estimate, basis, &self.vram, None)?,
            Some(machine) if machine.gpus.is_empty() => {
                Answer::in_memory(models, &estimate, basis, machine.available_bytes)?
            }
            Some(machine) => {
                let gpus = machine.usable_gpu_bytes();
                Answer::on_devices(models, &estimate, basis, &gpus, machine.available_bytes)?
            }
        };
        Ok(Report::new(*subject, source, estimate, answer, machine))
    }

    fn settings(&self, context: u64) -> Settings {
        let Self { batch, parallel, cache_type_k, cache_type_v, cpu_moe, .. } = *self;
        Settings { context, batch, parallel, cache_type_k, cache_type_v, experts_in_memory: cpu_moe }
    }

    fn context(&self, model: &DescribedModel, trained: u64) -> Result<(u64, ContextSource), ErrorBody> {
        let of_model = || parameter(model, "num_ctx").filter(|tokens| *tokens > 0);
        Ok(match self.context {
            Some(0) if trained == 0 => {
                let message = format!(
                    "{}: the file does not say for which context the model was trained; use --ctx TOKENS",
                    model.name
                );
                return Err(ErrorBody::new(ErrorCode::InvalidRequest, message));
            }
            Some(0) => (trained, ContextSource::Trained),
            Some(context) => (context, ContextSource::Option),
            None => match of_model() {
                Some(context) => (context, ContextSource::Model),
                None if trained == 0 => (UNNAMED_CONTEXT, ContextSource::Default),
                None => (trained.min(DEFAULT_CONTEXT), ContextSource::Default),
            },
        })
    }
}

/// A number among the model's parameters.
fn parameter(model: &DescribedModel, name: &str) -> Option<u64> {
    let parameters: serde_json::Value = serde_json::from_str(model.text("params")?).ok()?;
    parameters.get(name)?.as_u64()
}

/// The parsed headers of a model's files.
struct Headers {
    model: Header,
    other_shards: Vec<Header>,
    projector: Option<Header>,
    draft: Option<Header>,
    adapters: Vec<Header>,
    /// The size of the files that hold the weights.
    file_bytes: u64,
}

impl Headers {
    fn of(model: &DescribedModel) -> Result<Self, ErrorBody> {
        let mut file_bytes = 0_u64;
        let mut weights = model.weights().map(|(file, header)| {
            file_bytes = file_bytes.saturating_add(file.size);
            header
        });
        let first = weights.next().ok_or_else(|| {
            let message = format!("{}: has no GGUF header; only GGUF models can be estimated", model.name);
            ErrorBody::new(ErrorCode::InvalidInput, message)
        })?;
        let first_of = |component| model.headers(component).next().map(|(_file, header)| header);
        let other_shards = weights.collect();
        Ok(Self {
            model: first,
            other_shards,
            file_bytes,
            adapters: model.headers("adapter").map(|(_file, header)| header).collect(),
            projector: first_of("projector"),
            draft: first_of("draft"),
        })
    }

    fn subject<'a>(&'a self, described: &'a DescribedModel) -> Subject<'a> {
        let headers = self.other_shards.iter().chain([&self.model]);
        Subject {
            name: &described.name,
            digest: described.digest,
            metadata: Metadata::new(&self.model),
            file_bytes: self.file_bytes,
            data_offset: headers.map(Header::data_offset).fold(0, u64::saturating_add),
        }
    }

    fn models(&self) -> Result<ModelSet<'_>, EstimateError> {
        Ok(ModelSet {
            model: Model::new(&self.model, &self.other_shards)?,
            projector: alone(self.projector.as_ref())?,
            draft: alone(self.draft.as_ref())?,
            adapters: self
                .adapters
                .iter()
                .map(|adapter| Model::new(adapter, []))
                .collect::<Result<_, _>>()?,
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
