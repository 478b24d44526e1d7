//! Estimates the memory that a model needs, for `blobd fit` and for `Route::Fit`.

use blobd_model::estimate::{EstimateError, Model, ModelSet, Settings};
use blobd_model::metadata::Metadata;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::Header;
use blobd_store_format::size::human_bytes;

use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::protocol::fit::{ContextSource, FitParams, FitReport};

mod report;

/// The context of a model that names none.
const UNNAMED_CONTEXT: u64 = 4096;
/// The largest context that is taken unasked.
const DEFAULT_CONTEXT: u64 = 8192;

/// A file of a model.
#[derive(Debug)]
pub struct FitFile {
    /// What the file is.
    pub media_type: MediaType,
    /// Its size in bytes.
    pub size: u64,
    /// What is known of it.
    pub content: FitContent,
}

/// What is known of a file.
#[derive(Debug)]
pub enum FitContent {
    /// The header of a GGUF file.
    Header(Header),
    /// All of a short text, such as the parameters.
    Text(Vec<u8>),
}

/// A model with at least one GGUF file.
#[derive(Debug)]
pub struct FitModel {
    name: String,
    digest: Option<Digest>,
    header: SizedHeader,
    other_shards: Vec<SizedHeader>,
    projector: Option<SizedHeader>,
    draft: Option<SizedHeader>,
    adapters: Vec<SizedHeader>,
    /// The size of the files that hold the weights.
    file_bytes: u64,
    /// The model's own context.
    num_ctx: Option<u64>,
}

/// The header of a file and the size of the file in bytes.
type SizedHeader = (Header, u64);

/// Into what a model should fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// The memory of each device.
    pub devices: Vec<u64>,
    /// The memory of the machine, if it is limited.
    pub memory_bytes: Option<u64>,
}

impl FitModel {
    /// Sorts the files of a model by what they are.
    pub fn new(name: &str, digest: Option<Digest>, files: Vec<FitFile>) -> Result<Self, ErrorBody> {
        let component = MediaType::weights_component(files.iter().map(|file| &file.media_type)).to_owned();
        let (mut weights, mut file_bytes, mut num_ctx) = (Vec::new(), 0_u64, None);
        let (mut projector, mut draft, mut adapters) = (None, None, Vec::new());
        let all_weights = files.iter().filter(|file| file.media_type.component() == component);
        let weights_bytes = all_weights.fold(0_u64, |sum, file| sum.saturating_add(file.size));
        for FitFile { media_type, size, content } in files {
            match (media_type.component(), content) {
                (of_weights, FitContent::Header(header)) if of_weights == component => {
                    file_bytes = file_bytes.saturating_add(size);
                    weights.push((header, size));
                }
                ("projector", FitContent::Header(header)) => projector = projector.or(Some((header, size))),
                ("draft", FitContent::Header(header)) => draft = draft.or(Some((header, size))),
                ("adapter", FitContent::Header(header)) => adapters.push((header, size)),
                ("params", FitContent::Text(text)) => num_ctx = num_ctx.or_else(|| context_of(&text)),
                _ => {}
            }
        }
        let mut weights = weights.into_iter();
        let header = weights.next().ok_or_else(|| {
            let message = format!("{name}: has no GGUF header; only GGUF models can be estimated");
            let body = ErrorBody::new(ErrorCode::InvalidInput, message);
            match weights_bytes {
                0 => body,
                bytes => body.with_hint(format!("its weights alone take {}", human_bytes(bytes))),
            }
        })?;
        let (name, other_shards) = (name.to_owned(), weights.collect());
        Ok(Self { name, digest, header, other_shards, projector, draft, adapters, file_bytes, num_ctx })
    }

    /// The estimate. Whether the model fits is left out if there is no `room` to fit into.
    pub fn report(&self, params: &FitParams, room: Option<&Room>) -> Result<FitReport, ErrorBody> {
        let (context, source) = self.context(params.context)?;
        self.estimate(params, context, source, room).map_err(|error| {
            let code = match error {
                EstimateError::TooManyBlocks { .. } => ErrorCode::InvalidInput,
                _ => ErrorCode::InvalidRequest,
            };
            ErrorBody::new(code, format!("{}: {error}", self.name))
        })
    }

    fn estimate(
        &self,
        params: &FitParams,
        context: u64,
        source: ContextSource,
        room: Option<&Room>,
    ) -> Result<FitReport, EstimateError> {
        let models = self.models()?;
        let basis = params.basis.unwrap_or_else(|| models.model.default_basis());
        let estimate = models.estimate(&settings(params, context), basis)?;
        let answer = room.map(|room| report::answer(&models, &estimate, basis, room)).transpose()?;
        let (answer, places) = answer.unzip();
        Ok(report::report(self, source, estimate, answer, places.as_ref()))
    }

    fn context(&self, requested: Option<u64>) -> Result<(u64, ContextSource), ErrorBody> {
        let trained = self.metadata().context_length();
        Ok(match requested {
            Some(0) if trained == 0 => {
                let message =
                    format!("{}: the file does not say for which context the model was trained", self.name);
                let body = ErrorBody::new(ErrorCode::InvalidRequest, message);
                return Err(body.with_hint("request a number of tokens (--ctx TOKENS)"));
            }
            Some(0) => (trained, ContextSource::Trained),
            Some(context) => (context, ContextSource::Option),
            None => match self.num_ctx.filter(|tokens| *tokens > 0) {
                Some(context) => (context, ContextSource::Model),
                None if trained == 0 => (UNNAMED_CONTEXT, ContextSource::Default),
                None => (trained.min(DEFAULT_CONTEXT), ContextSource::Default),
            },
        })
    }

    fn models(&self) -> Result<ModelSet<'_>, EstimateError> {
        let alone = |file| Model::of_files(sized(file), []);
        Ok(ModelSet {
            model: Model::of_files(sized(&self.header), self.other_shards.iter().map(sized))?,
            projector: self.projector.as_ref().map(alone).transpose()?,
            draft: self.draft.as_ref().map(alone).transpose()?,
            adapters: self.adapters.iter().map(alone).collect::<Result<_, _>>()?,
        })
    }

    fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.header.0)
    }

    fn data_offset(&self) -> u64 {
        let headers = self.other_shards.iter().chain([&self.header]);
        headers.map(|(header, _)| header.data_offset()).fold(0, u64::saturating_add)
    }
}

fn sized(file: &SizedHeader) -> (&Header, Option<u64>) {
    (&file.0, Some(file.1))
}

fn settings(params: &FitParams, context: u64) -> Settings {
    let default = Settings::default();
    Settings {
        context,
        batch: params.batch.unwrap_or(default.batch),
        parallel: params.parallel.unwrap_or(default.parallel),
        cache_type_k: params.cache_type_k.unwrap_or(default.cache_type_k),
        cache_type_v: params.cache_type_v.unwrap_or(default.cache_type_v),
        experts_in_memory: params.cpu_moe,
    }
}

/// `num_ctx` among a model's parameters.
fn context_of(parameters: &[u8]) -> Option<u64> {
    let parameters: serde_json::Value = serde_json::from_slice(parameters).ok()?;
    parameters.get("num_ctx")?.as_u64()
}
