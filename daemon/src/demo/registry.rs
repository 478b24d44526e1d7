//! Publishes a model in the demo's registry, in the form that Ollama uses.

use blobd_fixtures::registry::FakeRegistry;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::error::DemoError;
use super::models::ModelFile;

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
