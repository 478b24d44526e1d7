//! What the loopback registry offers: a model in the form of Ollama's own.

use std::path::Path;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use serde::Serialize;

use super::error::DemoError;
use super::registry::Catalogue;

/// A catalogue with one model, and how many bytes pulling it moves. The weights are the file at
/// `path`, `file` bytes of this digest.
pub(super) fn offer(
    reference: &Reference,
    path: &Path,
    digest: Digest,
    size: u64,
) -> Result<(Catalogue, u64), DemoError> {
    let mut catalogue = Catalogue::default();
    catalogue.add_file(digest, path).map_err(DemoError::at(path))?;
    let mut layers = vec![layer("model", digest, size)];
    for (component, text) in [("license", LICENSE), ("template", TEMPLATE), ("params", PARAMS)] {
        layers.push(layer(component, Digest::of(text.as_bytes()), text.len() as u64));
        catalogue.add_blob(text);
    }
    let config = config(&layers)?;
    let media_type = MediaType::new(MediaType::DOCKER_CONFIG);
    let descriptor = Descriptor { media_type, digest: Digest::of(&config), size: config.len() as u64 };
    catalogue.add_blob(config);
    let manifest = Manifest::compose(descriptor, layers)?;
    catalogue.add_manifest(reference, manifest.raw().to_vec());
    Ok((catalogue, manifest.size()))
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

#[cfg(test)]
mod tests {
    use blobd_registry::{RegistryClient, RegistryPolicy};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn offer_can_be_pulled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, b"GGUF").unwrap();
        let reference: Reference = "llama3:8b".parse().unwrap();
        let (catalogue, size) = offer(&reference, &path, Digest::of(b"GGUF"), 4).unwrap();
        let registry = super::super::registry::LoopbackRegistry::start(catalogue).await.unwrap();
        let mirrors = [(Reference::DEFAULT_HOST.to_owned(), vec![registry.url()])].into();
        let policy = RegistryPolicy { mirrors, ..RegistryPolicy::default() };
        let client = RegistryClient::new(&policy).unwrap();
        let manifest = client.manifest(&reference).await.unwrap();
        assert_eq!(manifest.size(), size);
        for file in manifest.files() {
            let mut stream = client.blob(&reference, file).await.unwrap();
            let mut bytes = Vec::new();
            while let Some(chunk) = stream.next().await.unwrap() {
                bytes.extend_from_slice(&chunk);
            }
            assert_eq!(Digest::of(&bytes), file.digest);
        }
        assert_eq!(registry.bytes_served(), size);
    }
}
