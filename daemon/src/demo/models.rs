//! The demo's models.

use std::path::PathBuf;

use blobd_cli::output::Table;
use blobd_fixtures::model::{self, Dimensions, Experts};
use blobd_store_format::digest::Digest;
use blobd_store_format::size::human_bytes;

use super::error::DemoError;
use super::sandbox::{Sandbox, digest_of_file};

/// The model that is pulled.
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

/// A generated file.
#[derive(Debug)]
pub(super) struct ModelFile {
    /// Its name in the store.
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
