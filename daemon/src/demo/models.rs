//! The demo's models, and their publication in the demo's registry in the form that Ollama uses.

use std::path::PathBuf;

use blobd_cli_common::output::Table;
use blobd_fixtures::model::{self, Dimensions, Experts};
use blobd_fixtures::registry::FakeRegistry;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::size::human_bytes;

use super::DemoError;
use super::sandbox::{Sandbox, digest_of_file};

pub(super) const BASE: &str = "llama3:8b";

#[derive(Debug)]
pub(super) struct DemoModels {
    /// Dense; the one that is pulled.
    pub(super) base: ModelFile,
    /// A fine-tune of `base`.
    pub(super) tuned: ModelFile,
    /// A mixture of experts: one tensor for all experts of a projection.
    pub(super) stacked: ModelFile,
    /// The same mixture: one tensor per expert.
    pub(super) separate: ModelFile,
}

#[derive(Debug)]
pub(super) struct ModelFile {
    pub(super) reference: &'static str,
    pub(super) path: PathBuf,
    pub(super) size: u64,
    pub(super) digest: Digest,
    pub(super) tensor_count: usize,
    /// Whether most of its tensors are already stored when it is imported.
    pub(super) is_relative: bool,
    note: &'static str,
}

impl DemoModels {
    pub(super) fn generate(sandbox: &Sandbox) -> Result<Self, DemoError> {
        let base = model::ModelFile::llama("Demo Llama 3 8B", Dimensions::SMALL_LLAMA);
        let tuned = fine_tune(base.clone());
        let mixture =
            |experts| model::ModelFile::mixtral("Demo Mixtral 8x7B", Dimensions::SMALL_MIXTRAL, experts);
        let (stacked, separate) = (mixture(Experts::Stacked), mixture(Experts::Separate));
        let generate = |reference, model, is_relative, note| {
            sandbox.check_interrupted()?;
            ModelFile::generate(sandbox, reference, &model, is_relative, note)
        };
        Ok(Self {
            base: generate(BASE, base, false, "dense")?,
            tuned: generate("llama3-tuned:8b", tuned, true, "8 tensors and the template differ")?,
            stacked: generate("mixtral:8x7b", stacked, false, "8 experts, stacked in one tensor")?,
            separate: generate("mixtral-old:8x7b", separate, true, "the same experts, one tensor each")?,
        })
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&["FILE", "SIZE", "TENSORS", ""], &[1, 2]);
        for model in [&self.base, &self.tuned, &self.stacked, &self.separate] {
            table.row([
                model.file_name(),
                human_bytes(model.size),
                model.tensor_count.to_string(),
                model.note.to_owned(),
            ]);
        }
        table.render(usize::MAX)
    }
}

impl ModelFile {
    fn generate(
        sandbox: &Sandbox,
        reference: &'static str,
        model: &model::ModelFile,
        is_relative: bool,
        note: &'static str,
    ) -> Result<Self, DemoError> {
        let path = sandbox.path(&format!("{}.gguf", reference.replace(':', "-")));
        let size = model.write_file(&path)?;
        let digest = digest_of_file(&path)?;
        let tensor_count = model.tensors.len();
        Ok(Self { reference, path, size, digest, tensor_count, is_relative, note })
    }

    pub(super) fn file_name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub(super) fn delete(&self) -> Result<(), DemoError> {
        std::fs::remove_file(&self.path).map_err(DemoError::at(&self.path))
    }
}

/// Changes what merging a small LoRA would change: eight tensors and the chat template.
fn fine_tune(base: model::ModelFile) -> model::ModelFile {
    const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
        {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let blocks = [30, 31].into_iter();
    let tensors = blocks.flat_map(|block| {
        ["attn_q", "attn_k", "attn_v", "attn_output"].map(|part| format!("blk.{block}.{part}.weight"))
    });
    tensors.fold(base, |model, tensor| model.with_changed(&tensor)).with("tokenizer.chat_template", TEMPLATE)
}

/// Publishes a model under the reference's namespace, model and tag. Returns how many bytes a pull of it
/// downloads.
pub(super) fn publish(
    registry: &FakeRegistry,
    reference: &Reference,
    file: &ModelFile,
) -> Result<u64, DemoError> {
    registry.add_blob_file(file.digest, &file.path).map_err(DemoError::at(&file.path))?;
    let mut layers = vec![layer("model", file.digest, file.size)];
    for (component, text) in [("license", LICENSE), ("template", TEMPLATE), ("params", PARAMS)] {
        layers.push(layer(component, registry.add_blob(text), text.len() as u64));
    }
    let config = config(&layers);
    let (media_type, size) = (MediaType::new(MediaType::DOCKER_CONFIG), config.len() as u64);
    let descriptor = Descriptor { media_type, digest: registry.add_blob(config), size };
    let manifest = Manifest::compose(descriptor, layers)?;
    let model = format!("{}/{}:{}", reference.namespace(), reference.model(), reference.tag());
    registry.add_manifest(&model, manifest.raw());
    Ok(manifest.size())
}

fn layer(component: &str, digest: Digest, size: u64) -> Descriptor {
    let media_type = MediaType::new(format!("application/vnd.ollama.image.{component}"));
    Descriptor { media_type, digest, size }
}

/// With its keys in Ollama's order.
fn config(layers: &[Descriptor]) -> String {
    let diff_ids = layers.iter().map(|layer| format!("\"{}\"", layer.digest)).collect::<Vec<_>>().join(",");
    format!(
        r#"{{"model_format":"gguf","model_family":"llama","model_families":["llama"],"model_type":"8.0B","file_type":"Q4_K_M","architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":[{diff_ids}]}}}}"#
    ) + "\n"
}

const LICENSE: &str = "The weights of this model are pseudo-random numbers. Do with them what you like.\n";
const PARAMS: &str = concat!(
    r#"{"num_keep":24,"stop":["\u003c|start_header_id|\u003e","\u003c|end_header_id|\u003e","#,
    r#""\u003c|eot_id|\u003e"]}"#,
    "\n"
);
const TEMPLATE: &str = "{{ if .System }}<|start_header_id|>system<|end_header_id|>\n\n{{ .System }}<|eot_id|>\
    {{ end }}{{ if .Prompt }}<|start_header_id|>user<|end_header_id|>\n\n{{ .Prompt }}<|eot_id|>{{ end }}\
    <|start_header_id|>assistant<|end_header_id|>\n\n{{ .Response }}<|eot_id|>";
