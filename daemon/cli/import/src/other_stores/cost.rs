//! What an import would do with a model and what that would cost, as far as it is known before the files are read.

use std::collections::BTreeSet;

use blobd_cli_common::output::{counted, human_bytes};
use blobd_store_format::digest::Digest;
use serde::Serialize;

use crate::local_folder::Identity;

/// What an import would do with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ModelState {
    /// It would be stored.
    New,
    /// The store has it.
    Stored,
    /// It is not imported, and nothing is wrong with it.
    LeftOut,
    /// It cannot be imported.
    Unusable,
}

/// What an import would do with one model of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ModelCost {
    pub(crate) state: ModelState,
    /// The most that the store would grow by: the files that it does not have, and that no earlier model of the list has.
    /// Tensors that they share are not known before they are read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_new_bytes: Option<u64>,
    /// The size of the other files: those that the store has by the digests that their program gives them, and those of
    /// earlier models of the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shared_bytes: Option<u64>,
}

/// What an import of all models of a list would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ListCost {
    /// How many bytes it would read; a file of several models counts once.
    pub(crate) read_bytes: u64,
    /// The most that the store would grow by.
    pub(crate) max_new_bytes: u64,
    #[serde(skip)]
    new_models: usize,
}

/// A file of a model that is not read yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnreadFile {
    pub(crate) size: u64,
    pub(crate) identity: Identity,
    /// The digest that its program gives it.
    pub(crate) claimed: Option<Digest>,
}

/// Adds up the models of a list, in its order.
#[derive(Debug, Default)]
pub(crate) struct CostOfList {
    /// The files that take no more space: those of the store and of earlier models.
    digests: BTreeSet<Digest>,
    seen: BTreeSet<Identity>,
    total: ListCost,
}

impl CostOfList {
    /// For a store that has these files.
    pub(crate) fn new(stored: BTreeSet<Digest>) -> Self {
        Self { digests: stored, ..Self::default() }
    }

    /// The cost of the next model.
    pub(crate) fn add(
        &mut self,
        state: ModelState,
        size: u64,
        files: impl Iterator<Item = UnreadFile>,
    ) -> ModelCost {
        let max_new_bytes = match state {
            ModelState::New => {
                self.total.new_models += 1;
                Some(files.map(|file| self.new_bytes(file)).fold(0, u64::saturating_add))
            }
            ModelState::Stored => Some(0),
            ModelState::LeftOut | ModelState::Unusable => None,
        };
        let total = &mut self.total.max_new_bytes;
        *total = total.saturating_add(max_new_bytes.unwrap_or_default());
        let shared_bytes = max_new_bytes.map(|new| size.saturating_sub(new));
        ModelCost { state, max_new_bytes, shared_bytes }
    }

    /// How many bytes of the file are new: 0 if it was counted before.
    fn new_bytes(&mut self, UnreadFile { size, identity, claimed }: UnreadFile) -> u64 {
        let is_new_file = self.seen.insert(identity);
        if is_new_file {
            self.total.read_bytes = self.total.read_bytes.saturating_add(size);
        }
        let is_new_content = claimed.is_none_or(|digest| self.digests.insert(digest));
        if is_new_file && is_new_content { size } else { 0 }
    }

    pub(crate) const fn total(&self) -> ListCost {
        self.total
    }
}

impl ListCost {
    pub(crate) fn text(self) -> String {
        let (read, adds) = (human_bytes(self.read_bytes), at_most(self.max_new_bytes));
        format!("{}: would read {read} and add {adds}\n", counted(self.new_models, "new model"))
    }
}

/// How much the store would grow by, for people.
pub(crate) fn at_most(bytes: u64) -> String {
    if bytes == 0 { "nothing".to_owned() } else { format!("at most {}", human_bytes(bytes)) }
}

/// Why a model may get another name than the one it is listed with. `other` is what has the name, and `becomes` what this
/// model is named then.
pub(crate) fn name_note(other: &str, becomes: &str) -> String {
    format!("{other} has this name: unless both have the same content, this one {becomes}")
}
