//! The layers of a model after an edit, and the manifest that they make.

use blobd_client::protocol::naming::TemplateLayer;
use blobd_store::{FileReader, Ingest, Model};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;

use super::ChangedFacts;
use crate::ops::OpError;
use crate::ops::new_model::{NewFile, NewModel, recorded};

/// In the order of the manifest.
pub(super) struct EditedLayers<'m> {
    pub(super) model: &'m Model,
    pub(super) layers: Vec<EditedLayer>,
}

pub(super) struct EditedLayer {
    /// The digest of the file in the source; absent if the file is added.
    pub(super) old: Option<Digest>,
    pub(super) descriptor: Descriptor,
    /// Its path in the model.
    pub(super) name: Option<String>,
    /// The content, if it is new.
    pub(super) content: Option<Vec<u8>>,
}

impl<'m> EditedLayers<'m> {
    /// The layers of the model itself.
    pub(super) fn of(model: &'m Model) -> Self {
        let layers = model.manifest.layers().iter().zip(model.manifest.names().skip(1));
        let layer = |(descriptor, name): (&Descriptor, Option<&str>)| EditedLayer {
            old: Some(descriptor.digest),
            descriptor: descriptor.clone(),
            name: name.map(str::to_owned),
            content: None,
        };
        Self { model, layers: layers.map(layer).collect() }
    }

    /// Replaces the file with this digest.
    pub(super) fn replace(&mut self, old: Digest, new: &Descriptor) {
        for layer in self.layers.iter_mut().filter(|layer| layer.descriptor.digest == old) {
            (layer.descriptor.digest, layer.descriptor.size) = (new.digest, new.size);
        }
    }

    /// Sets the text of the template layer, which is added after the others if there is none.
    pub(super) fn set_template(&mut self, text: Option<&str>) -> Option<TemplateLayer> {
        const OLLAMA_TEMPLATE: &str = "application/vnd.ollama.image.template";
        let mut layers = self.layers.iter_mut();
        let old = layers.find(|layer| layer.descriptor.media_type.component() == "template");
        match (text, old) {
            (None, old) => old.map(|_| TemplateLayer::Kept),
            (Some(text), Some(layer)) => match layer.set(text.as_bytes().to_vec()) {
                true => Some(TemplateLayer::Replaced),
                false => Some(TemplateLayer::Kept),
            },
            (Some(text), None) => {
                let media_type = MediaType::new(OLLAMA_TEMPLATE);
                self.layers.push(EditedLayer::added(None, media_type, text.as_bytes().to_vec()));
                Some(TemplateLayer::Added)
            }
        }
    }

    /// The sizes of the new files.
    pub(super) fn new_bytes(&self) -> impl Iterator<Item = u64> {
        self.layers.iter().filter(|layer| layer.content.is_some()).map(|layer| layer.descriptor.size)
    }

    /// Whether a manifest has these files, in this order.
    pub(super) fn are_those_of(&self, manifest: &Manifest) -> bool {
        let files = manifest.layers().iter().zip(manifest.names().skip(1));
        files.eq(self.layers.iter().map(|layer| (&layer.descriptor, layer.name.as_deref())))
    }

    /// Stores the new files and composes the manifest, which is that of the source if nothing has changed.
    pub(super) fn compose(self, ingest: &mut Ingest, facts: &ChangedFacts) -> Result<Manifest, OpError> {
        if self.are_those_of(&self.model.manifest) {
            facts
                .weights
                .iter()
                .for_each(|weights| ingest.note_facts(recorded(&self.model.manifest, weights)));
            return Ok(self.model.manifest.clone());
        }
        for content in self.layers.iter().filter_map(|layer| layer.content.as_deref()) {
            ingest.add_bytes(content)?;
        }
        let config = self.config(ingest, &facts.quantizations)?;
        let files = self.layers.into_iter().map(|layer| (layer.descriptor, layer.name));
        let Some(weights) = &facts.weights else {
            return Ok(Manifest::compose_named(config, files.collect())?);
        };
        let files = files.map(|(descriptor, name)| NewFile::new(descriptor, name.as_deref())).collect();
        NewModel::new(self.model.reference.short(), files).compose_with(ingest, config, weights)
    }

    /// The configuration with the digests and the file type of the new layers. Everything else stays as it is, byte for
    /// byte, because it may have fields that blobd does not know.
    fn config(
        &self,
        ingest: &mut Ingest,
        quantizations: &[Option<String>; 2],
    ) -> Result<Descriptor, OpError> {
        /// The longest configuration that is adjusted. Ollama's have 500 bytes, Docker's some kilobytes; each file adds 74.
        const MAX_CONFIG_BYTES: u64 = 1 << 20;
        let config = self.model.manifest.config();
        let (Some(stored), 0..=MAX_CONFIG_BYTES) = (self.model.files.first(), config.size) else {
            return Ok(config.clone());
        };
        let old = FileReader::new(ingest.store().content(), stored).read_range(0..config.size)?;
        let Ok(mut text) = String::from_utf8(old) else { return Ok(config.clone()) };
        text = self.replaced_digests(&text);
        if let [Some(before), Some(after)] = quantizations {
            text =
                text.replace(&format!("\"file_type\":\"{before}\""), &format!("\"file_type\":\"{after}\""));
        }
        let digest = ingest.add_bytes(text.as_bytes())?;
        Ok(Descriptor { media_type: config.media_type.clone(), digest, size: text.len() as u64 })
    }

    /// The text of a configuration with the digests of the new layers. It may list all layers, or some.
    fn replaced_digests(&self, text: &str) -> String {
        let before: Vec<Digest> = self.model.manifest.layers().iter().map(|layer| layer.digest).collect();
        let after: Vec<Digest> = self.layers.iter().map(|layer| layer.descriptor.digest).collect();
        let all = quoted(&before);
        if text.contains(&all) {
            return text.replace(&all, &quoted(&after));
        }
        let mut text = text.to_owned();
        let replaced = self.layers.iter().filter_map(|layer| Some((layer.old?, layer.descriptor.digest)));
        // Two files may have been the same.
        for (old, new) in replaced.filter(|(old, _)| !after.contains(old)) {
            text = text.replace(&old.to_string(), &new.to_string());
        }
        let added = self.layers.iter().filter(|layer| layer.old.is_none());
        let added: Vec<Digest> = added.map(|layer| layer.descriptor.digest).collect();
        if let (Some(first), false) = (after.first(), added.is_empty()) {
            let listed = quoted(&[*first]);
            text = text.replace(&listed, &format!("{listed},{}", quoted(&added)));
        }
        text
    }
}

impl EditedLayer {
    pub(super) fn added(name: Option<String>, media_type: MediaType, content: Vec<u8>) -> Self {
        let (digest, size) = (Digest::of(&content), content.len() as u64);
        Self { old: None, descriptor: Descriptor { media_type, digest, size }, name, content: Some(content) }
    }

    /// Sets the content, and says whether it is another one.
    pub(super) fn set(&mut self, content: Vec<u8>) -> bool {
        let digest = Digest::of(&content);
        let is_other = self.descriptor.digest != digest;
        if is_other {
            (self.descriptor.digest, self.descriptor.size) = (digest, content.len() as u64);
            self.content = Some(content);
        }
        is_other
    }
}

/// The elements of a list as they are in JSON.
fn quoted(digests: &[Digest]) -> String {
    digests.iter().map(|digest| format!("\"{digest}\"")).collect::<Vec<_>>().join(",")
}
