//! Tensors of one name in several files of a model: how a user names a file, and which one a name means.

use blobd_cli_common::described_model::DescribedFile;
use blobd_cli_common::usage;
use blobd_client::protocol::response::{LayerSummary, ModelTensor, OpenLayer};
use blobd_model::diff::TensorFile;
use blobd_store_format::descriptor::MediaType;

use crate::{ErrorBody, ErrorCode};

/// The files that a message lists at most.
const SHOWN_FILES: usize = 4;

/// A file of a model as a user names it.
pub(crate) fn tensor_file(media_type: &MediaType, name: Option<&str>) -> TensorFile {
    TensorFile::new(media_type.component(), name.map(str::to_owned))
}

pub(crate) fn file_of_described(file: &DescribedFile) -> TensorFile {
    tensor_file(&file.media_type, file.name.as_deref())
}

pub(crate) fn file_of_layer(layer: &LayerSummary) -> TensorFile {
    tensor_file(&layer.media_type, layer.name.as_deref())
}

pub(crate) fn file_of_open(layer: &OpenLayer) -> TensorFile {
    tensor_file(&layer.media_type, layer.name.as_deref())
}

/// The layer that has a stored tensor; `None` if the daemon does not say it.
pub(crate) fn layer_of<'l>(tensor: &ModelTensor, layers: &'l [LayerSummary]) -> Option<&'l LayerSummary> {
    layers.get(usize::try_from(tensor.layer?).ok()?)
}

/// A tensor's name, and its file if that is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedTensor {
    pub(crate) name: String,
    /// Its path in the model, a folder that it is in, or what it is, such as `draft`.
    pub(crate) file: Option<String>,
}

impl WantedTensor {
    pub(crate) fn new(name: &str, file: Option<&str>) -> Self {
        Self { name: name.to_owned(), file: file.map(str::to_owned) }
    }

    /// What a name that no tensor has can mean: FILE/NAME for each slash in it, the shortest file first.
    pub(crate) fn with_file_in_name(&self) -> impl Iterator<Item = Self> {
        let slashes = self.name.match_indices('/').filter(|_| self.file.is_none());
        let split = slashes.filter_map(|(place, _)| self.name.split_at_checked(place));
        split.map(|(file, name)| Self::new(name.trim_start_matches('/'), Some(file)))
    }

    pub(crate) fn is_in(&self, file: &TensorFile) -> bool {
        self.file.as_deref().is_none_or(|wanted| file.is_named(wanted))
    }

    /// The index of the file that is meant, of the files with a tensor of this name. Without a file in the name, the
    /// model's own weights come before what belongs to it, such as a draft.
    pub(crate) fn choose(&self, model: &str, files: &[TensorFile]) -> Result<usize, ErrorBody> {
        let mut chosen: Vec<_> = files.iter().enumerate().filter(|(_, file)| self.is_in(file)).collect();
        let of_weights = |(_, file): &(usize, &TensorFile)| file.component() == "model";
        if self.file.is_none() && chosen.iter().any(of_weights) {
            chosen.retain(of_weights);
        }
        match chosen.as_slice() {
            [(index, _)] => Ok(*index),
            [] => Err(self.not_in_file(model, files)),
            several => Err(self.ambiguous(model, several.iter().map(|(_, file)| *file))),
        }
    }

    fn not_in_file(&self, model: &str, files: &[TensorFile]) -> ErrorBody {
        let Self { name, file } = self;
        let file = file.as_deref().unwrap_or_default();
        let message = format!("model {model}: no tensor {name:?} in {file:?}");
        let hint = format!("it is in {}", listed(files.iter().map(TensorFile::name)));
        ErrorBody::new(ErrorCode::NotFound, message).with_hint(hint)
    }

    fn ambiguous<'f>(&self, model: &str, files: impl Iterator<Item = &'f TensorFile> + Clone) -> ErrorBody {
        let count = files.clone().count();
        let message = format!("model {model}: tensor {:?}: expected one file, found {count}", self.name);
        let options = listed(files.map(TensorFile::name));
        usage(message).with_hint(format!("choose one with --file: {options}"))
    }
}

fn listed<'n>(names: impl Iterator<Item = &'n str> + Clone) -> String {
    let shown: Vec<_> = names.clone().take(SHOWN_FILES).collect();
    let left = names.count().saturating_sub(shown.len());
    let more = if left > 0 { format!(" and {left} more") } else { String::new() };
    shown.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(path: &str) -> TensorFile {
        TensorFile::new("model", Some(path.to_owned()))
    }

    #[test]
    fn file_is_read_from_the_name() {
        let readings: Vec<_> = WantedTensor::new("a/b/c", None).with_file_in_name().collect();
        assert_eq!(readings, [WantedTensor::new("b/c", Some("a")), WantedTensor::new("c", Some("a/b"))]);
        assert_eq!(WantedTensor::new("a/b", Some("f")).with_file_in_name().count(), 0);
    }

    #[test]
    fn one_file_is_chosen_or_the_files_are_named() {
        let files = [model("unet/m.safetensors"), model("vae/m.safetensors"), TensorFile::new("draft", None)];
        let chosen = |file| WantedTensor::new("w", file).choose("d:1", &files);
        assert_eq!([chosen(Some("vae")), chosen(Some("draft"))], [Ok(1), Ok(2)]);
        let error = chosen(None).unwrap_err();
        assert_eq!(error.message, "model d:1: tensor \"w\": expected one file, found 2");
        let hint = error.hint.unwrap();
        assert_eq!(hint, "choose one with --file: unet/m.safetensors, vae/m.safetensors");
        assert_eq!(chosen(Some("te")).unwrap_err().code, ErrorCode::NotFound);
        let with_draft = [TensorFile::new("draft", None), model("m.gguf")];
        assert_eq!(WantedTensor::new("w", None).choose("m", &with_draft), Ok(1));
    }
}
