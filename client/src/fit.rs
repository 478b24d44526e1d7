//! Estimates the memory that a model needs, for `blobd fit` and for `Route::Fit`.

use blobd_model::estimate::{Basis, Estimate, EstimateError, Model, ModelSet, SafetensorsModel, Settings};
use blobd_model::metadata::Metadata;
use blobd_model::tensor_layers::TensorLayers;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::Header;
use blobd_store_format::safetensors;
use blobd_store_format::tensor::TensorFormat;

use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::protocol::fit::{ContextSource, FitParams, FitReport};

mod report;

/// The context of a model that names none.
const UNNAMED_CONTEXT: u64 = 4096;
/// The largest context that is assumed if none is requested.
const DEFAULT_CONTEXT: u64 = 8192;

/// The component of a layer that is a tensor.
const LAYER: &str = "tensor";

/// The file in a model's folder with the numbers of its attention.
const CONFIG: &str = "config.json";
/// A model that is not a language model.
const PIPELINE: &str = "a pipeline of several models";

/// A file of a model.
#[derive(Debug)]
pub struct FitFile {
    /// What the file is.
    pub media_type: MediaType,
    /// Its name in the manifest.
    pub name: Option<String>,
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
    /// The header of a safetensors file.
    Safetensors(safetensors::Header),
    /// All of a short text, such as the parameters.
    Text(Vec<u8>),
    /// Nothing, of a layer that is a tensor: it is missing or damaged, or the model is not stored.
    UnknownLayer,
}

impl FitContent {
    /// The header at the start of a file with tensors; `None` if the file has another format.
    pub fn from_header(start: &[u8]) -> Option<Self> {
        match Header::parse(start) {
            Ok(header) => Some(Self::Header(header)),
            Err(_) => safetensors::Header::parse_start(start).ok().map(Self::Safetensors),
        }
    }

    /// Whether a file of this type is a safetensors file with one tensor, or a few, of a model without larger files.
    pub fn is_layer(media_type: &MediaType) -> bool {
        media_type.component() == LAYER
    }

    /// What is known of a file of this type and name from what was read of it; `None` if an estimate does not need it.
    pub fn from_file(media_type: &MediaType, name: Option<&str>, read: Option<Vec<u8>>) -> Option<Self> {
        match read {
            Some(text) if Self::is_text(media_type, name) => Some(Self::Text(text)),
            read => {
                let header = read.and_then(|start| Self::from_header(&start));
                header.or_else(|| Self::is_layer(media_type).then_some(Self::UnknownLayer))
            }
        }
    }

    /// Whether an estimate needs the text of a file of this type and name.
    pub fn is_text(media_type: &MediaType, name: Option<&str>) -> bool {
        media_type.component() == "params" || (name == Some(CONFIG) && !media_type.holds_tensors())
    }
}

/// A model with at least one file with tensors.
#[derive(Debug)]
pub struct FitModel {
    name: String,
    digest: Option<Digest>,
    weights: Weights,
    /// The size of the files that hold the weights.
    file_bytes: u64,
    /// The part of it before the tensors' data.
    data_offset: u64,
    /// The model's own context.
    num_ctx: Option<u64>,
}

#[derive(Debug)]
enum Weights {
    Gguf(Box<GgufFiles>),
    Safetensors(Box<SafetensorsModel>),
}

/// A model with at least one GGUF file.
#[derive(Debug)]
struct GgufFiles {
    header: SizedHeader,
    other_shards: Vec<SizedHeader>,
    projector: Option<SizedHeader>,
    draft: Option<SizedHeader>,
    adapters: Vec<SizedHeader>,
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

impl FitFile {
    fn is_layer(&self) -> bool {
        FitContent::is_layer(&self.media_type)
    }
}

impl FitModel {
    /// Sorts the files of a model by what they are. A model with GGUF files is estimated from these.
    pub fn new(name: &str, digest: Option<Digest>, files: Vec<FitFile>) -> Result<Self, ErrorBody> {
        let component = MediaType::weights_component(files.iter().map(|file| &file.media_type)).to_owned();
        let of_weights = |file: &&FitFile| file.media_type.component() == component;
        let is_gguf = |file: &FitFile| matches!(file.content, FitContent::Header(_));
        let num_ctx = files.iter().find_map(|file| match &file.content {
            FitContent::Text(text) if file.media_type.component() == "params" => context_of(text),
            _ => None,
        });
        let is_layers = !files.iter().any(|file| of_weights(&file)) && files.iter().any(FitFile::is_layer);
        let (weights, file_bytes, data_offset) = if files.iter().filter(of_weights).any(is_gguf) {
            gguf_weights(files, &component)
        } else if is_layers {
            Some(layer_weights(name, &files)?)
        } else {
            safetensors_weights(&files, &component)
        }
        .ok_or_else(|| {
            let message = format!("{name}: wrong format: expected files of GGUF or safetensors, found none");
            let body = ErrorBody::new(ErrorCode::InvalidInput, message);
            body.with_hint("`blobd show` lists the files with their sizes")
        })?;
        Ok(Self { name: name.to_owned(), digest, weights, file_bytes, data_offset, num_ctx })
    }

    /// The estimate. Whether the model fits is left out if there is no `room` to fit into.
    pub fn report(&self, params: &FitParams, room: Option<&Room>) -> Result<FitReport, ErrorBody> {
        let (context, source) = self.context(params.context)?;
        let settings = settings(params, context);
        let failed = |error| {
            let code = match error {
                EstimateError::TooManyBlocks { .. } => ErrorCode::InvalidInput,
                _ => ErrorCode::InvalidRequest,
            };
            ErrorBody::new(code, format!("{}: {error}", self.name))
        };
        match &self.weights {
            Weights::Gguf(files) => {
                let models = files.models().map_err(failed)?;
                let basis = params.basis.unwrap_or_else(|| models.model.default_basis());
                self.answer(source, room, &settings, |settings| models.estimate(settings, basis))
            }
            Weights::Safetensors(_) if params.basis.is_some() => return Err(self.basis_refused(params.basis)),
            Weights::Safetensors(model) => {
                self.answer(source, room, &settings, |settings| model.estimate(settings))
            }
        }
        .map_err(failed)
    }

    fn answer<'m>(
        &self,
        source: ContextSource,
        room: Option<&Room>,
        settings: &Settings,
        estimate_with: impl Fn(&Settings) -> Result<Estimate<'m>, EstimateError>,
    ) -> Result<FitReport, EstimateError> {
        let estimate = estimate_with(settings)?;
        let trained = self.trained_context();
        let answer = room.map(|room| report::answer(&estimate, trained, &estimate_with, room)).transpose()?;
        let (answer, places) = answer.unzip();
        Ok(report::report(self, source, estimate, answer, places.as_ref()))
    }

    fn basis_refused(&self, basis: Option<Basis>) -> ErrorBody {
        let name = if basis == Some(Basis::Ollama) { "Ollama" } else { "llama.cpp" };
        let message =
            format!("{}: expected no basis for a safetensors model, found that of {name}", self.name);
        let body = ErrorBody::new(ErrorCode::InvalidRequest, message);
        body.with_hint("leave out the basis: these formulas are for GGUF files")
    }

    fn context(&self, requested: Option<u64>) -> Result<(u64, ContextSource), ErrorBody> {
        let trained = self.trained_context();
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

    /// The context for which the model was trained; 0 if it is not known.
    fn trained_context(&self) -> u64 {
        match &self.weights {
            Weights::Gguf(files) => files.metadata().context_length(),
            Weights::Safetensors(model) => model.context_length(),
        }
    }

    const fn format(&self) -> &'static str {
        match self.weights {
            Weights::Gguf(_) => TensorFormat::Gguf.name(),
            Weights::Safetensors(_) => TensorFormat::Safetensors.name(),
        }
    }
}

impl GgufFiles {
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
}

/// The weights, the size of their files, and the bytes before their data.
type FoundWeights = Option<(Weights, u64, u64)>;

fn gguf_weights(files: Vec<FitFile>, component: &str) -> FoundWeights {
    let (mut weights, mut file_bytes, mut data_offset) = (Vec::new(), 0_u64, 0_u64);
    let (mut projector, mut draft, mut adapters) = (None, None, Vec::new());
    for FitFile { media_type, size, content, .. } in files {
        let FitContent::Header(header) = content else { continue };
        match media_type.component() {
            of_weights if of_weights == component => {
                file_bytes = file_bytes.saturating_add(size);
                data_offset = data_offset.saturating_add(header.data_offset());
                weights.push((header, size));
            }
            "projector" => projector = projector.or(Some((header, size))),
            "draft" => draft = draft.or(Some((header, size))),
            "adapter" => adapters.push((header, size)),
            _ => {}
        }
    }
    let mut weights = weights.into_iter();
    let (header, other_shards) = (weights.next()?, weights.collect());
    let files = GgufFiles { header, other_shards, projector, draft, adapters };
    Some((Weights::Gguf(Box::new(files)), file_bytes, data_offset))
}

/// The weights are the files at the root of the model's folder, without those of Mistral's own format, which hold the same
/// weights again. A folder with weights only in folders is a pipeline of several models.
fn safetensors_weights(files: &[FitFile], component: &str) -> FoundWeights {
    let name = |file: &FitFile| file.name.clone().unwrap_or_default();
    let is_main = |file: &FitFile| !name(file).contains('/') && !name(file).starts_with("consolidated");
    let all = || {
        files.iter().filter_map(|file| match &file.content {
            FitContent::Safetensors(header) if file.media_type.component() == component => {
                Some((file, header))
            }
            _ => None,
        })
    };
    let has_main = all().any(|(file, _)| is_main(file));
    let main: Vec<_> = all().filter(|(file, _)| !has_main || is_main(file)).collect();
    let (first, _) = main.first()?;
    let other_kind = if component == "adapter" || name(first).starts_with("adapter_model") {
        Some("an adapter")
    } else {
        (!has_main && name(first).contains('/')).then_some(PIPELINE)
    };
    let model = SafetensorsModel::new(main.iter().map(|(_, header)| *header), config(files), other_kind);
    Some(safetensors_files(model, &main))
}

/// The weights of a model that has a layer for each tensor, or for a few. Names with a slash start with the component of a
/// pipeline.
fn layer_weights(model: &str, files: &[FitFile]) -> Result<(Weights, u64, u64), ErrorBody> {
    let refused = |reason: String| ErrorBody::new(ErrorCode::InvalidInput, format!("{model}: {reason}"));
    let (mut layers, mut main) = (TensorLayers::new(""), Vec::new());
    for (number, file) in files.iter().enumerate().filter(|(_, file)| file.is_layer()) {
        let layer = file.name.as_deref().unwrap_or_default();
        let FitContent::Safetensors(header) = &file.content else {
            let body = refused(format!("layer {layer:?}: expected a header of safetensors, found none"));
            return Err(body.with_hint(
                "an estimate needs all layers in the store: `blobd pull` fetches what is missing",
            ));
        };
        layers.add(layer, number, header).map_err(|error| refused(error.to_string()))?;
        main.push((file, header));
    }
    let is_pipeline =
        main.iter().any(|(file, _)| file.name.as_deref().is_some_and(|name| name.contains('/')));
    let other_kind = is_pipeline.then_some(PIPELINE);
    Ok(safetensors_files(SafetensorsModel::from_layers(&layers, config(files), other_kind), &main))
}

fn config(files: &[FitFile]) -> Option<&[u8]> {
    files.iter().find_map(|file| match &file.content {
        FitContent::Text(text) if file.name.as_deref() == Some(CONFIG) => Some(text.as_slice()),
        _ => None,
    })
}

fn safetensors_files(
    model: SafetensorsModel,
    files: &[(&FitFile, &safetensors::Header)],
) -> (Weights, u64, u64) {
    let file_bytes = files.iter().fold(0, |sum: u64, (file, _)| sum.saturating_add(file.size));
    let data_offset = files.iter().fold(0, |sum: u64, (_, header)| sum.saturating_add(header.data_offset()));
    (Weights::Safetensors(Box::new(model)), file_bytes, data_offset)
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
