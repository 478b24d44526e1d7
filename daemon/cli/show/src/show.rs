//! `blobd show`

use blobd_cli_common::connect::print_result;
use blobd_cli_common::model_source::ModelArgs;
use blobd_cli_common::{Global, residency};
use clap::Args;

use self::document::Document;
use self::hash::HashArgs;
use self::texts::Text;
use crate::{ErrorBody, ErrorCode};

mod document;
mod hash;
mod header;
mod render;
mod tensors;
mod texts;

/// Show one model in depth
#[derive(Debug, Args)]
#[command(
    after_help = "A model that is not in the store is described from its headers: a file or a folder, or a source
that `blobd pull` takes. Nothing is stored. A name without a host is looked for in the store only,
unless --remote is given.

Examples:
  blobd show llama3:8b
  blobd show llama3:8b --tensors
  blobd show llama3:8b --template
  blobd show mixtral:8x7b --residency
  blobd show ./model-Q4_K_M.gguf               a file of this machine
  blobd show ./Qwen3-0.6B                      a folder with safetensors files
  blobd show hf.co/user/repo:Q4_K_M            before the download: fetches only the header
  blobd show --remote llama3:8b                the same for a model of the default registry
  blobd show llama3:8b --json | jq '.tensors[0].digest'
  blobd show llama3:8b --full --json           every key of the header with its type and whole value
  blobd show llama3:8b --hash=sha256 > model.sha256
  blobd show llama3:8b --check model.sha256    exit code 5 if a tensor differs"
)]
pub struct Params {
    #[command(flatten)]
    model: ModelArgs,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// List the metadata
    #[arg(long)]
    metadata: bool,
    /// List the layers of the network with their sizes
    #[arg(long)]
    layers: bool,
    /// Show the whole header: its form, and each key with its type and value
    #[arg(long)]
    full: bool,
    /// Print only the prompt template
    #[arg(long, group = "text")]
    template: bool,
    /// Print only the licenses
    #[arg(long, group = "text")]
    license: bool,
    /// Print only the system prompt
    #[arg(long, group = "text")]
    system: bool,
    /// Print only the sampling parameters
    #[arg(long, group = "text")]
    parameters: bool,
    /// Print a Modelfile for Ollama
    #[arg(long, group = "text")]
    modelfile: bool,
    /// Show how much is in memory instead, for each stack of experts and for the rest
    #[arg(long, conflicts_with_all = ["tensors", "metadata", "layers", "full", "text"])]
    residency: bool,
    #[command(flatten)]
    hash: HashArgs,
}

/// Prints what a model consists of.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    if params.residency {
        return residency::show(global, &params.model.name()?);
    }
    if params.hash.is_given() {
        return hash::show(global, &params.model.name()?, &params.hash);
    }
    let described = match params.model.describe(global) {
        Err(error) if error.code == ErrorCode::DeniedByPolicy && params.shows_overview() => {
            params.model.describe_denied(global, error)
        }
        described => described,
    };
    let (model, connected) = described?;
    if let Some(text) = params.text() {
        return texts::print(global, &model, text);
    }
    let mut document = Document::new(&model, connected.as_ref(), params.full)?;
    if params.layers {
        document.network_layers = Some(tensors::network_layers(&document.tensors));
    }
    if global.json && !params.full {
        document.forget_file_offsets();
    }
    print_result(global, &document, |document| render::render(document, &model, params))
}

impl Params {
    /// Whether the parts that are shown need neither headers nor texts.
    fn shows_overview(&self) -> bool {
        self.text().is_none() && !self.full && !self.tensors && !self.metadata && !self.layers
    }

    fn text(&self) -> Option<Text> {
        [
            (self.template, Text::Template),
            (self.license, Text::License),
            (self.system, Text::System),
            (self.parameters, Text::Parameters),
            (self.modelfile, Text::Modelfile),
        ]
        .into_iter()
        .find_map(|(is_wanted, text)| is_wanted.then_some(text))
    }
}

fn invalid(error: impl std::fmt::Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidInput, error)
}
