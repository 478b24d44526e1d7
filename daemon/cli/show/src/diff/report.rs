//! The document of `diff --json`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use blobd_model::diff::{Change, DiffTensor, TensorDiff, TensorPair, diff_metadata};
use blobd_model::metadata_json::Abridger;
use blobd_store_format::gguf::key_text;
use serde::Serialize;
use serde_json::Value as Json;

use super::side::Side;
use crate::Digest;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) a: String,
    pub(super) b: String,
    /// Bytes of tensors that both models have, under any names and also as parts of other tensors. Bytes in different
    /// packed groups are not shared on disk.
    pub(super) shared_bytes: u64,
    pub(super) only_a_bytes: u64,
    pub(super) only_b_bytes: u64,
    /// Bytes of tensors that were not compared, because a model is not pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unknown_bytes: Option<u64>,
    /// With `--values`, how many tensors with other numbers have no `relative_error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) without_error: Option<u64>,
    pub(super) changes: Vec<ChangeSum>,
    pub(super) tensors: Vec<TensorRow>,
    pub(super) metadata: Vec<KeyRow>,
    /// The other files that differ, such as templates and licenses.
    pub(super) layers: Vec<LayerRow>,
    /// Whether a name alone does not say which tensor is meant.
    #[serde(skip)]
    pub(super) repeats_names: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct ChangeSum {
    pub(super) change: Change,
    pub(super) tensors: u64,
    pub(super) a_bytes: u64,
    pub(super) b_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct TensorRow {
    pub(super) name: String,
    /// Its name in B, if it is renamed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) b_name: Option<String>,
    pub(super) change: Change,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) a: Option<TensorForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) b: Option<TensorForm>,
    /// With `--values`, the relative root mean square error of B.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) relative_error: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct TensorForm {
    /// The file that has it, if the model has several files with tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<String>,
    #[serde(rename = "type")]
    pub(super) type_name: String,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
}

/// A key whose values differ; null where there is none.
#[derive(Debug, Serialize)]
pub(super) struct KeyRow {
    pub(super) key: String,
    pub(super) a: Json,
    pub(super) b: Json,
}

#[derive(Debug, Serialize)]
pub(super) struct LayerRow {
    pub(super) component: String,
    pub(super) a: Option<Digest>,
    pub(super) b: Option<Digest>,
}

impl Report {
    pub(super) fn new(a: &Side, b: &Side, diff: &TensorDiff<'_>) -> Self {
        Self {
            a: a.name.clone(),
            b: b.name.clone(),
            shared_bytes: diff.shared_bytes,
            only_a_bytes: diff.only_a_bytes,
            only_b_bytes: diff.only_b_bytes,
            unknown_bytes: None,
            without_error: None,
            changes: sums(&diff.tensors),
            tensors: rows(a, b, &diff.tensors),
            metadata: metadata(a, b),
            layers: layers(a, b),
            repeats_names: repeats_names(&a.tensors) || repeats_names(&b.tensors),
        }
    }

    /// Counts tensors with unknown contents separately: only the others are known to differ.
    pub(super) fn without_contents(mut self) -> Self {
        let sum =
            |change: &dyn Fn(&ChangeSum) -> u64| self.changes.iter().map(change).fold(0, u64::saturating_add);
        let is_unknown = |sum: &ChangeSum| sum.change == Change::Unknown;
        let only_a = sum(&|sum| if is_unknown(sum) { 0 } else { sum.a_bytes });
        let only_b = sum(&|sum| if is_unknown(sum) { 0 } else { sum.b_bytes });
        let unknown = sum(&|sum| if is_unknown(sum) { sum.b_bytes } else { 0 });
        (self.shared_bytes, self.only_a_bytes, self.only_b_bytes) = (0, only_a, only_b);
        self.unknown_bytes = Some(unknown);
        self
    }
}

fn rows(a: &Side, b: &Side, pairs: &[TensorPair<'_>]) -> Vec<TensorRow> {
    let [in_a, in_b] = [a, b].map(Side::has_several_files);
    let form = |has_several_files: bool| {
        move |tensor: &DiffTensor| TensorForm {
            file: has_several_files.then(|| tensor.file.name().to_owned()),
            type_name: tensor.type_name.to_string(),
            shape: tensor.shape.to_vec(),
            bytes: tensor.size,
        }
    };
    let rows = pairs.iter().map(|pair| TensorRow {
        name: pair.name().to_owned(),
        b_name: pair.a.and(pair.b).map(|b| b.name.to_string()).filter(|name| name != pair.name()),
        change: pair.change,
        a: pair.a.map(form(in_a)),
        b: pair.b.map(form(in_b)),
        relative_error: None,
    });
    rows.collect()
}

fn repeats_names(tensors: &[DiffTensor]) -> bool {
    let mut names = BTreeSet::new();
    tensors.iter().any(|tensor| !names.insert(&*tensor.name))
}

fn sums(pairs: &[TensorPair<'_>]) -> Vec<ChangeSum> {
    let mut sums = BTreeMap::new();
    for pair in pairs {
        let change = pair.change;
        let sum = sums.entry(change).or_insert(ChangeSum { change, tensors: 0, a_bytes: 0, b_bytes: 0 });
        sum.tensors += 1;
        sum.a_bytes = sum.a_bytes.saturating_add(pair.a.map_or(0, |tensor| tensor.size));
        sum.b_bytes = sum.b_bytes.saturating_add(pair.b.map_or(0, |tensor| tensor.size));
    }
    sums.into_values().collect()
}

fn metadata(a: &Side, b: &Side) -> Vec<KeyRow> {
    let (Some(a), Some(b)) = (&a.header, &b.header) else { return Vec::new() };
    let mut abridger = Abridger::new();
    let changes = diff_metadata(a, b);
    let row = changes.iter().map(|change| {
        let mut json = |value: &Option<_>| value.as_ref().map_or(Json::Null, |value| abridger.json(value));
        KeyRow { key: key_text(change.key).into_owned(), a: json(&change.a), b: json(&change.b) }
    });
    row.collect()
}

/// The files without tensors that differ. Files of one component are paired in order; local files have none.
fn layers(a: &Side, b: &Side) -> Vec<LayerRow> {
    let (Some(a), Some(b)) = (&a.texts, &b.texts) else { return Vec::new() };
    let mut of_b: BTreeMap<&str, VecDeque<Digest>> = BTreeMap::new();
    for (component, digest) in b {
        of_b.entry(component).or_default().push_back(*digest);
    }
    let mut rows = Vec::new();
    for (component, digest) in a {
        let other = of_b.get_mut(component.as_str()).and_then(VecDeque::pop_front);
        if other != Some(*digest) {
            rows.push(LayerRow { component: component.clone(), a: Some(*digest), b: other });
        }
    }
    for (component, left) in of_b {
        let added = left.into_iter();
        rows.extend(added.map(|digest| LayerRow {
            component: component.to_owned(),
            a: None,
            b: Some(digest),
        }));
    }
    rows
}
