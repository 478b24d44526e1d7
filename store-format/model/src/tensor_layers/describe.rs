//! Describes tensors as Ollama does: a quantised tensor is one entry with the shape of its unpacked elements, and its
//! scales and biases are omitted.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::quantization::unpacked;
use super::{LayerTensor, Quantization, TensorLayers};

/// A tensor without its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedTensor<'t> {
    pub name: &'t str,
    /// Its element type in the file, or how it is quantised, in capital letters: `BF16`, `NVFP4`.
    pub type_name: Cow<'t, str>,
    /// The dimensions of its unpacked elements, the slowest first.
    pub shape: Vec<u64>,
    /// The tensor with its packed elements.
    pub stored: &'t LayerTensor,
    /// The bits of an element, without its share of the scales; `None` for elements that are not real numbers.
    bits: Option<u64>,
}

/// The sum over all tensors of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The number of unpacked elements.
    pub parameters: u64,
    /// The type with the fewest bits per element; if several have as few, the one with the most elements.
    pub quantization: Option<String>,
}

impl TensorLayers {
    /// All tensors by name, without scales and biases; `index` is the content of `model_index.json`.
    pub fn describe(&self, index: &Quantization) -> impl Iterator<Item = DescribedTensor<'_>> + use<'_> {
        let model = self.quantization(index);
        let tensors = self.tensors.iter().filter(|(name, _)| !self.is_part(name));
        tensors.map(move |(name, tensor)| {
            let quantization = self.quantization_of(name, &model).unwrap_or_default();
            described(name, tensor, &quantization)
        })
    }
}

impl Totals {
    /// Adds up tensors.
    pub fn from_tensors<'t>(tensors: impl IntoIterator<Item = DescribedTensor<'t>>) -> Self {
        let (mut parameters, mut types) = (0_u64, BTreeMap::<(u64, Cow<'t, str>), u64>::new());
        for DescribedTensor { type_name, shape, bits, .. } in tensors {
            let elements = shape.iter().fold(1, |product: u64, dimension| product.saturating_mul(*dimension));
            parameters = parameters.saturating_add(elements);
            if let Some(bits) = bits {
                let sum = types.entry((bits, type_name)).or_default();
                *sum = sum.saturating_add(elements);
            }
        }
        let fewest = types.keys().next().map(|(bits, _)| *bits);
        let lowest = types.into_iter().filter(|((bits, _), _)| Some(*bits) == fewest);
        let quantization =
            lowest.max_by_key(|(_, elements)| *elements).map(|((_, name), _)| name.into_owned());
        Self { parameters, quantization }
    }
}

fn described<'t>(name: &'t str, tensor: &'t LayerTensor, quantization: &Quantization) -> DescribedTensor<'t> {
    let bits = quantization.bits();
    let row = tensor.shape().last().and_then(|columns| unpacked(*columns, tensor.dtype(), bits?));
    let (Some(quant_type), Some(row)) = (&quantization.quant_type, row) else {
        let bits = tensor.dtype().is_float().then(|| tensor.dtype().bits());
        let (type_name, shape) = (Cow::Borrowed(tensor.dtype().name()), tensor.shape().to_vec());
        return DescribedTensor { name, type_name, shape, stored: tensor, bits };
    };
    let mut shape = tensor.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = row;
    }
    DescribedTensor { name, type_name: quant_type.to_uppercase().into(), shape, stored: tensor, bits }
}
