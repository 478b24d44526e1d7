//! A quantised tensor of a model with a layer per tensor: its scales and biases are other tensors.

use blobd_client::model::BlobSlice;
use blobd_client::weights::{Dtype, ManifestWeights, WeightMap, WeightsError};
use blobd_model::convert::convert;
use blobd_model::tensor_layers::{PackedTensor, Part, Quantization, UnpackError};

use crate::{ErrorBody, ErrorCode};

#[derive(Clone, Debug)]
pub(super) struct Packed {
    quantization: Quantization,
    scales: (BlobSlice, Dtype),
    biases: Option<(BlobSlice, Dtype)>,
    global_scale: Option<f32>,
}

impl Packed {
    /// `None` if the tensor is not quantised, or has numbers that blobd does not know.
    pub(super) fn of(weights: &ManifestWeights, tensor: &WeightMap) -> Result<Option<Self>, ErrorBody> {
        let name = tensor.name();
        let Some(quantization) = weights.quantization_of(name).filter(|found| found.bits().is_some()) else {
            return Ok(None);
        };
        let part = |suffix: &str| match weights.tensor(&format!("{name}{suffix}")) {
            Ok(part) => Ok(Some((part.mapped().cloned().unwrap_or_default(), part.dtype()))),
            Err(WeightsError::NoTensor { .. }) => Ok(None),
            Err(error) => Err(ErrorBody::new(error.code(), error)),
        };
        let Some(scales) = part("_scale")? else { return Ok(None) };
        let global_scale = part("_global_scale")?.and_then(|(bytes, dtype)| first_number(&bytes, dtype));
        Ok(Some(Self { quantization, scales, biases: part("_qbias")?, global_scale }))
    }

    pub(super) fn type_name(&self) -> String {
        self.quantization.quant_type.clone().unwrap_or_default().to_uppercase()
    }

    /// The dimensions with the elements of a row unpacked.
    pub(super) fn shape(&self, tensor: &WeightMap) -> Vec<u64> {
        let mut shape = tensor.shape().to_vec();
        let per_number = self.quantization.bits().and_then(|bits| tensor.dtype().bits().checked_div(bits));
        if let (Some(row), Some(per_number)) = (shape.last_mut(), per_number) {
            *row = row.saturating_mul(per_number);
        }
        shape
    }

    pub(super) fn expert(self, number: u64, count: u64) -> Result<Self, ErrorBody> {
        let part = |(bytes, dtype): (BlobSlice, Dtype)| {
            let stride = (bytes.len() as u64).checked_div(count).unwrap_or(0);
            let part = bytes.part(number.saturating_mul(stride), stride);
            let missing =
                || ErrorBody::new(ErrorCode::Corrupt, "the tensor's scales are shorter than its experts");
            part.map(|part| (part, dtype)).ok_or_else(missing)
        };
        Ok(Self { scales: part(self.scales)?, biases: self.biases.map(part).transpose()?, ..self })
    }

    pub(super) fn view<'b>(&'b self, name: &str, bytes: &'b [u8]) -> Result<PackedTensor<'b>, ErrorBody> {
        let part = |(bytes, dtype): &'b (BlobSlice, Dtype)| Part { bytes, dtype: *dtype };
        let (scales, biases) = (part(&self.scales), self.biases.as_ref().map(part));
        let packed = PackedTensor::new(&self.quantization, bytes, scales, biases, self.global_scale);
        packed.map_err(|error| refused(name, &error))
    }
}

fn refused(name: &str, error: &UnpackError) -> ErrorBody {
    let message = format!("tensor {name:?}: cannot be unpacked: {error}");
    ErrorBody::new(ErrorCode::InvalidInput, message).with_hint("--dump writes its bytes as they are")
}

fn first_number(bytes: &[u8], dtype: Dtype) -> Option<f32> {
    let size = usize::try_from(dtype.bits() / 8).ok()?;
    let converted = convert(bytes.get(..size)?, dtype, Dtype::F32).ok()?;
    converted.as_slice().try_into().ok().map(f32::from_le_bytes)
}
