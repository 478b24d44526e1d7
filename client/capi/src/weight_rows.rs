//! The Rust side of the tensors of a model with a file per tensor: it owns everything that C gets pointers to.

use std::ffi::CString;
use std::sync::OnceLock;

use blobd_client::model::BlobSlice;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::weights::{ManifestWeights, WeightMap};

use crate::handle::{Failure, c_string, connect, invalid_request, no_expert, no_tensor};

#[derive(Debug)]
pub(crate) struct WeightRows {
    weights: ManifestWeights,
    pub(crate) quant_type: Option<CString>,
    /// Tensors and parts by name.
    pub(crate) rows: Vec<WeightRow>,
    pub(crate) groups: Vec<Group>,
    pub(crate) components: Vec<CString>,
    documents: Vec<Document>,
}

#[derive(Debug)]
pub(crate) struct WeightRow {
    pub(crate) name: CString,
    pub(crate) dtype: CString,
    pub(crate) quant_type: Option<CString>,
    pub(crate) group_size: u32,
    pub(crate) is_quantized: bool,
    pub(crate) is_part: bool,
    pub(crate) map: WeightMap,
}

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: CString,
    /// The indexes of its tensors, in the order of its file.
    pub(crate) members: Vec<usize>,
}

#[derive(Debug)]
struct Document {
    layer: usize,
    path: String,
    map: OnceLock<BlobSlice>,
}

impl WeightRows {
    pub(crate) fn open(
        socket: Option<&str>,
        reference: Option<&str>,
        component: Option<&str>,
    ) -> Result<Self, Failure> {
        let (client, reference) = connect(socket, reference)?;
        let weights = ManifestWeights::open_component(&client, &reference, component.unwrap_or_default())?;
        let names = weights.names().filter_map(|name| Some((name, weights.tensor(name).ok()?)));
        let rows =
            names.map(|(name, map)| WeightRow::new(&weights, name, map)).collect::<Result<Vec<_>, _>>()?;
        let named = weights.names().filter_map(|name| Some((name, weights.group(name)?)));
        let groups =
            named.map(|(name, members)| Group::new(name, members, &rows)).collect::<Result<_, _>>()?;
        let components = weights.components().into_iter().map(c_string).collect::<Result<_, _>>()?;
        let quant_type = weights.quantization().map(c_string).transpose()?;
        let documents = Document::all(&weights);
        Ok(Self { quant_type, rows, groups, components, documents, weights })
    }

    pub(crate) fn group_size(&self) -> u32 {
        self.weights.group_size().unwrap_or(0)
    }

    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        find(&self.rows, name)
    }

    pub(crate) fn expert(&self, index: usize, expert: u64) -> Result<&[u8], Failure> {
        let row = self.rows.get(index).ok_or_else(|| no_tensor(index, self.rows.len()))?;
        let bytes: &[u8] = &row.map;
        let count = row.map.shape().first().copied().unwrap_or(0);
        let stride =
            usize::try_from((bytes.len() as u64).checked_div(count).unwrap_or(0)).unwrap_or(usize::MAX);
        let start = usize::try_from(expert)
            .ok()
            .filter(|_| expert < count)
            .and_then(|expert| expert.checked_mul(stride));
        let found = start.and_then(|start| bytes.get(start..start.checked_add(stride)?));
        found.ok_or_else(|| no_expert(row.map.name(), expert))
    }

    pub(crate) fn document(&self, path: Option<&str>) -> Result<&[u8], Failure> {
        let path = path.ok_or_else(|| invalid_request("path: is null"))?;
        let document = self.documents.iter().find(|document| document.path == path);
        let document = document.ok_or_else(|| Failure {
            code: ErrorCode::NotFound,
            message: format!("file {path:?}: the model has no such JSON file"),
        })?;
        if let Some(map) = document.map.get() {
            return Ok(map);
        }
        let map = self.weights.model().layer_bytes(document.layer)?;
        Ok(document.map.get_or_init(|| map))
    }
}

impl WeightRow {
    fn new(weights: &ManifestWeights, name: &str, map: WeightMap) -> Result<Self, Failure> {
        let quantization = weights.quantization_of(name);
        let is_quantized = quantization.is_some();
        let quantization = quantization.unwrap_or_default();
        Ok(Self {
            name: c_string(name)?,
            dtype: c_string(map.dtype().name())?,
            quant_type: quantization.quant_type.as_deref().map(c_string).transpose()?,
            group_size: quantization.group_size.unwrap_or(0),
            is_quantized,
            is_part: weights.is_part(name),
            map,
        })
    }
}

impl Group {
    fn new(name: &str, members: &[String], rows: &[WeightRow]) -> Result<Self, Failure> {
        let members = members.iter().filter_map(|member| find(rows, member)).collect();
        Ok(Self { name: c_string(name)?, members })
    }
}

impl Document {
    fn all(weights: &ManifestWeights) -> Vec<Self> {
        let layers = weights.model().layers().iter().enumerate();
        let documents = layers.filter(|(_, layer)| layer.media_type.component() == "json");
        let named = documents.filter_map(|(layer, found)| Some((layer, found.name.clone()?)));
        named.map(|(layer, path)| Self { layer, path, map: OnceLock::new() }).collect()
    }
}

fn find(rows: &[WeightRow], name: &str) -> Option<usize> {
    rows.binary_search_by(|row| row.name.as_bytes().cmp(name.as_bytes())).ok()
}
