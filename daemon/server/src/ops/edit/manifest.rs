//! The manifest of an edited model.

use blobd_client::protocol::edit::TemplateLayer;
use blobd_model::facts::ModelFacts;
use blobd_store::{FileReader, Ingest, Model};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::Header;
use blobd_store_format::manifest::Manifest;

use crate::ops::OpError;

/// The template layer of the new manifest.
pub(super) struct NewLayers<'t> {
    /// The new text.
    text: Option<&'t str>,
    old: Option<Descriptor>,
}

impl<'t> NewLayers<'t> {
    pub(super) fn of(manifest: &Manifest, text: Option<&'t str>) -> Self {
        let is_template = |layer: &&Descriptor| layer.media_type.component() == TEMPLATE;
        Self { text, old: manifest.layers().iter().find(is_template).cloned() }
    }

    pub(super) fn template_change(&self) -> Option<TemplateLayer> {
        match (self.text, &self.old) {
            (None, None) => None,
            (None, Some(_)) => Some(TemplateLayer::Kept),
            (Some(text), Some(old)) if old.digest == Digest::of(text.as_bytes()) => Some(TemplateLayer::Kept),
            (Some(_), Some(_)) => Some(TemplateLayer::Replaced),
            (Some(_), None) => Some(TemplateLayer::Added),
        }
    }

    pub(super) fn new_bytes(&self) -> u64 {
        self.text.map_or(0, |text| text.len() as u64)
    }
}

const TEMPLATE: &str = "template";
const OLLAMA_TEMPLATE: &str = "application/vnd.ollama.image.template";
/// The longest configuration that is adjusted. Ollama's have 500 bytes, Docker's some kilobytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The quantisations that the metadata names, which the configuration repeats.
pub(super) struct QuantizationChange {
    before: Option<String>,
    after: Option<String>,
}

impl QuantizationChange {
    pub(super) fn new(before: &Header, after: &Header) -> Self {
        let quantization = |header: &Header| ModelFacts::from_header(header).quantization;
        Self { before: quantization(before), after: quantization(after) }
    }
}

/// Composes the manifest: that of the source, with the new file and the new template.
pub(super) fn compose_edited(
    ingest: &mut Ingest,
    source: &Model,
    (weights, file, quantizations): (Digest, &Descriptor, &QuantizationChange),
    layers: &NewLayers<'_>,
) -> Result<Manifest, OpError> {
    let manifest = &source.manifest;
    let mut replaced = vec![(weights, file.clone())];
    let mut added = None;
    if let Some(text) = layers.text {
        let (digest, size) = (ingest.add_bytes(text.as_bytes())?, text.len() as u64);
        match &layers.old {
            Some(old) => replaced.push((old.digest, Descriptor { digest, size, ..old.clone() })),
            None => {
                let media_type = MediaType::new(OLLAMA_TEMPLATE);
                added = Some(Descriptor { media_type, digest, size });
            }
        }
    }
    if added.is_none() && replaced.iter().all(|(old, new)| *old == new.digest) {
        return Ok(manifest.clone());
    }
    let config = edited_config(ingest, source, &replaced, added.as_ref(), quantizations)?;
    let new = |layer: &Descriptor| {
        let new = replaced.iter().find(|(old, _)| *old == layer.digest).map(|(_, new)| new);
        let same_type = new.map(|new| Descriptor { media_type: layer.media_type.clone(), ..new.clone() });
        same_type.unwrap_or_else(|| layer.clone())
    };
    let named = manifest.layers().iter().map(new).zip(manifest.names().skip(1));
    let named = named.map(|(layer, name)| (layer, name.map(str::to_owned)));
    let layers = named.chain(added.map(|layer| (layer, None))).collect();
    Ok(Manifest::compose_named(config, layers)?)
}

/// The configuration with the digests and the file type of the new layers. Everything else stays as it is, byte for
/// byte, because it may have fields that blobd does not know.
fn edited_config(
    ingest: &mut Ingest,
    source: &Model,
    replaced: &[(Digest, Descriptor)],
    added: Option<&Descriptor>,
    quantizations: &QuantizationChange,
) -> Result<Descriptor, OpError> {
    let config = source.manifest.config();
    let (Some(stored), 0..=MAX_CONFIG_BYTES) = (source.files.first(), config.size) else {
        return Ok(config.clone());
    };
    let old = FileReader::of(ingest.store().content(), stored).read_range(0..config.size)?;
    let Ok(mut text) = String::from_utf8(old) else { return Ok(config.clone()) };
    for (digest, new) in replaced {
        text = text.replace(&digest.to_string(), &new.digest.to_string());
    }
    if let (Some(added), Some((_, file))) = (added, replaced.first()) {
        let listed = format!("\"{}\"", file.digest);
        text = text.replace(&listed, &format!("{listed},\"{}\"", added.digest));
    }
    if let QuantizationChange { before: Some(before), after: Some(after) } = quantizations {
        text = text.replace(&format!("\"file_type\":\"{before}\""), &format!("\"file_type\":\"{after}\""));
    }
    let digest = ingest.add_bytes(text.as_bytes())?;
    Ok(Descriptor { media_type: config.media_type.clone(), digest, size: text.len() as u64 })
}
