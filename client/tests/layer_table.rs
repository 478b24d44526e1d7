//! The Rust client reads the models of the table that the tests of all clients read.
#![allow(clippy::unwrap_used)]

#[path = "daemon/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "daemon/layer_table.rs"]
#[allow(dead_code)]
mod layer_table;

use std::collections::BTreeMap;
use std::sync::Arc;

use blobd_client::weights::{ManifestWeights, WeightsError};
use fake::FakeModel;
use layer_table::{Found, FoundTensor, Opened, data, model, table};

fn open(model: &Arc<FakeModel>, component: &str) -> Result<ManifestWeights, WeightsError> {
    let model = Arc::clone(model);
    let client = fake::client_of(move |call| model.serve(call));
    ManifestWeights::open_component(&client, &"tiny".parse().unwrap(), component)
}

#[test]
fn every_model_is_read_as_the_table_says() {
    let table = table();
    assert_eq!(table.models.len(), 22);
    for entry in table.models {
        let fake = Arc::new(model(&entry.layers, &entry.json));
        for opened in entry.opened {
            match opened {
                Opened::Failed { component, error, words } => {
                    let found = open(&fake, &component).unwrap_err();
                    assert_eq!(found.code().name(), error, "{}: {found}", entry.name);
                    assert!(found.to_string().contains(&words), "{}: {found}", entry.name);
                }
                Opened::Found(expected) => {
                    let weights = open(&fake, &expected.component).unwrap();
                    assert_eq!(weights.components(), entry.components, "{}", entry.name);
                    check(&entry.name, &weights, &expected);
                    for (path, document) in &entry.json {
                        assert_eq!(weights.json(path).unwrap().as_ref(), Some(document), "{path}");
                    }
                }
            }
        }
    }
}

fn check(model: &str, weights: &ManifestWeights, expected: &Found) {
    let found = (weights.quantization().map(str::to_owned), weights.group_size());
    assert_eq!(found, expected.quantization, "{model}");
    let mut names: Vec<_> = expected.tensors.keys().chain(expected.groups.keys()).collect();
    names.sort();
    names.dedup();
    assert_eq!(weights.names().collect::<Vec<_>>(), names, "{model}");
    for (name, members) in &expected.groups {
        assert_eq!(weights.group(name).unwrap(), members, "{model}: {name}");
    }
    for (name, tensor) in &expected.tensors {
        check_tensor(&format!("{model}: {name}"), weights, name, tensor);
    }
}

fn check_tensor(what: &str, weights: &ManifestWeights, name: &str, expected: &FoundTensor) {
    let tensor = weights.tensor(name).unwrap();
    assert_eq!((tensor.dtype().name(), tensor.shape()), (&*expected.dtype, &*expected.shape), "{what}");
    let bytes = data(expected.layer, expected.start, expected.size);
    assert_eq!(tensor[..], bytes, "{what}");
    assert_eq!(weights.is_part(name), expected.part, "{what}");
    let found = weights.quantization_of(name).map(|found| (found.quant_type, found.group_size));
    assert_eq!(found, expected.quantization, "{what}");
    if let Some(count) = expected.shape.first() {
        let experts: Vec<_> = (0..*count).map(|index| tensor.expert_bytes(index).unwrap().to_vec()).collect();
        assert_eq!(experts.concat(), bytes, "{what}");
    }
}

#[test]
fn every_invalid_file_is_refused() {
    for refused in table().refused {
        let fake = Arc::new(model([&refused.layer()], &BTreeMap::new()));
        let error = open(&fake, "").unwrap_err();
        assert!(matches!(error, WeightsError::Layer { .. }), "{}: {error}", refused.what);
        assert_eq!(error.code().name(), "invalid_input", "{}", refused.what);
        assert!(error.to_string().starts_with("layer \"w\": safetensors: "), "{}: {error}", refused.what);
    }
}
