//! The experts of a mixture-of-experts model, stacked or separate.

use blobd_store_format::expert::separate_expert;

use super::{BlobSlice, OpenModel};
use crate::error::ModelError;
use crate::protocol::response::TensorLocation;

/// The mapped part of one expert in one tensor.
#[derive(Clone, Debug)]
pub struct ExpertPart {
    tensor: TensorLocation,
    bytes: BlobSlice,
}

impl ExpertPart {
    /// The tensor's name: a stack's, such as `blk.3.ffn_up_exps.weight`, or the expert's own, such as
    /// `blk.3.ffn_up.7.weight`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.tensor.name
    }

    /// The name of its ggml type.
    #[must_use]
    pub fn type_name(&self) -> &str {
        &self.tensor.type_name
    }

    /// The expert's dimensions in GGUF order, the fastest first: those of the tensor, without the
    /// last one of a stack.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        let of_all = &self.tensor.shape;
        let last = of_all.len().saturating_sub(usize::from(self.tensor.experts.is_some()));
        of_all.get(..last).unwrap_or_default()
    }

    /// The expert's bytes of this tensor.
    #[must_use]
    pub const fn bytes(&self) -> &BlobSlice {
        &self.bytes
    }
}

impl OpenModel {
    /// Maps expert `number` (from 0 on) of all tensors whose name starts with `prefix`, such as
    /// `blk.3.`, in table order: of each stack its range, and tensors that are this expert alone.
    /// Tensors without experts are left out, so nothing may be found.
    ///
    /// Only address space is taken. To open no more than some experts need, open with
    /// [`TensorSelection::Experts`](crate::protocol::request::TensorSelection::Experts).
    ///
    /// # Errors
    /// Those of [`map_tensor`](Self::map_tensor).
    pub fn expert(&self, prefix: &str, number: u64) -> Result<Vec<ExpertPart>, ModelError> {
        let named = self.tensors.iter().filter(|tensor| tensor.name.starts_with(prefix));
        named.filter_map(|tensor| self.expert_part(tensor, number).transpose()).collect()
    }

    fn expert_part(&self, tensor: &TensorLocation, number: u64) -> Result<Option<ExpertPart>, ModelError> {
        let map = || self.map_tensor(tensor);
        let bytes = match tensor.experts {
            Some(_) => map()?.expert_bytes(number),
            None if separate_expert(&tensor.name) == Some(number) => Some(map()?.bytes),
            None => None,
        };
        Ok(bytes.map(|bytes| ExpertPart { tensor: tensor.clone(), bytes }))
    }
}
