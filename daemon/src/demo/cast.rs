//! The models of the play.

use std::path::PathBuf;

use blobd_fixtures::model::{self, Dimensions, Experts};
use blobd_store_format::digest::Digest;

use super::error::DemoError;
use super::stage::{Stage, digest_of_file};
use crate::output::Table;
use crate::size::human_bytes;

/// The model that is pulled.
pub(super) const BASE: &str = "llama3:8b";

/// All of them, as files.
#[derive(Debug)]
pub(super) struct Cast {
    /// Dense; the one that is pulled.
    pub(super) base: ModelFile,
    /// A fine-tune of it.
    pub(super) tuned: ModelFile,
    /// A mixture of experts, one tensor for all experts of a projection.
    pub(super) stacked: ModelFile,
    /// The same mixture, one tensor per expert.
    pub(super) separate: ModelFile,
}

/// A model's file, and what is known of it before blobd sees it.
#[derive(Debug)]
pub(super) struct ModelFile {
    /// The name that the store gives it.
    pub(super) reference: &'static str,
    /// Where it is until it is deleted.
    pub(super) path: PathBuf,
    /// Its length in bytes.
    pub(super) size: u64,
    /// The SHA-256 of the whole file.
    pub(super) digest: Digest,
    /// How many tensors it has.
    pub(super) tensor_count: usize,
    /// Whether nearly all of it is in the store when it is imported.
    pub(super) is_relative: bool,
    remark: &'static str,
}

impl Cast {
    /// Makes the files.
    pub(super) fn make(stage: &Stage) -> Result<Self, DemoError> {
        let base = model::ModelFile::llama("Demo Llama 3 8B", Dimensions::SMALL_LLAMA);
        let tuned = fine_tune(base.clone());
        let mixture =
            |experts| model::ModelFile::mixtral("Demo Mixtral 8x7B", Dimensions::SMALL_MIXTRAL, experts);
        let (stacked, separate) = (mixture(Experts::Stacked), mixture(Experts::Separate));
        let make = |reference, model, is_relative, remark| {
            stage.check_interrupted()?;
            ModelFile::make(stage, reference, &model, is_relative, remark)
        };
        Ok(Self {
            base: make(BASE, base, false, "dense")?,
            tuned: make("llama3-tuned:8b", tuned, true, "8 tensors and the template differ")?,
            stacked: make("mixtral:8x7b", stacked, false, "8 experts, stacked")?,
            separate: make("mixtral-old:8x7b", separate, true, "the same, one tensor per expert")?,
        })
    }

    /// What there is, for people.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&["FILE", "SIZE", "TENSORS", ""], &[1, 2]);
        for model in [&self.base, &self.tuned, &self.stacked, &self.separate] {
            table.row([
                model.file_name(),
                human_bytes(model.size),
                model.tensor_count.to_string(),
                model.remark.to_owned(),
            ]);
        }
        table.render(usize::MAX)
    }
}

impl ModelFile {
    fn make(
        stage: &Stage,
        reference: &'static str,
        model: &model::ModelFile,
        is_relative: bool,
        remark: &'static str,
    ) -> Result<Self, DemoError> {
        let path = stage.path(&format!("{}.gguf", reference.replace(':', "-")));
        let size = model.write_file(&path)?;
        let digest = digest_of_file(&path)?;
        let tensor_count = model.tensors.len();
        Ok(Self { reference, path, size, digest, tensor_count, is_relative, remark })
    }

    /// Its name without the directory.
    pub(super) fn file_name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Deletes the file: the store has it.
    pub(super) fn delete(&self) -> Result<(), DemoError> {
        std::fs::remove_file(&self.path).map_err(DemoError::at(&self.path))
    }
}

/// What merging a small LoRA changes.
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
