//! What the registry of the demo offers: a model in the form of Ollama's own.

use blobd_fixtures::registry::FakeRegistry;
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use serde::Serialize;

use super::cast::ModelFile;
use super::error::DemoError;

/// Offers a model under its reference's namespace, model and tag; the reference's host does not matter.
/// Answers how many bytes pulling it moves.
pub(super) fn offer(
    registry: &FakeRegistry,
    reference: &Reference,
    file: &ModelFile,
) -> Result<u64, DemoError> {
    registry.add_blob_file(file.digest, &file.path).map_err(DemoError::at(&file.path))?;
    let mut layers = vec![layer("model", file.digest, file.size)];
    for (component, text) in [("license", LICENSE), ("template", TEMPLATE), ("params", PARAMS)] {
        layers.push(layer(component, registry.add_blob(text), text.len() as u64));
    }
    let config = config(&layers)?;
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

/// The configuration, with its keys in Ollama's order.
#[derive(Serialize)]
struct Config {
    model_format: &'static str,
    model_family: &'static str,
    model_families: [&'static str; 1],
    model_type: &'static str,
    file_type: &'static str,
    architecture: &'static str,
    os: &'static str,
    rootfs: RootFs,
}

#[derive(Serialize)]
struct RootFs {
    r#type: &'static str,
    diff_ids: Vec<Digest>,
}

fn config(layers: &[Descriptor]) -> Result<Vec<u8>, DemoError> {
    let config = Config {
        model_format: "gguf",
        model_family: "llama",
        model_families: ["llama"],
        model_type: "8.0B",
        file_type: "Q4_K_M",
        architecture: "amd64",
        os: "linux",
        rootfs: RootFs { r#type: "layers", diff_ids: layers.iter().map(|layer| layer.digest).collect() },
    };
    let mut json =
        serde_json::to_vec(&config).map_err(std::io::Error::from).map_err(DemoError::io("config"))?;
    json.push(b'\n');
    Ok(json)
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
