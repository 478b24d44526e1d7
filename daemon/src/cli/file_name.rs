//! The names of exported files.

use blobd_client::protocol::response::OpenLayer;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::manifest::is_file_name;
use blobd_store_format::reference::Reference;

/// A file name has at most 255 bytes, and the longest names of models have more. What follows the stem is shorter than
/// the rest.
const MAX_STEM_BYTES: usize = 200;

/// `llama3-8b.gguf`. If there are several files, each has the name that its registry gives it, or the name of a
/// shard, by which engines find the others.
pub(super) fn file_name(reference: &Reference, layer: &OpenLayer, index: usize, count: usize) -> String {
    let stem = format!("{}-{}", reference.model(), reference.tag());
    let stem = stem.get(..MAX_STEM_BYTES).unwrap_or(&stem);
    let own = layer.name.as_deref().filter(|name| count > 1 && !name.contains('/') && is_file_name(name));
    let number = if index == 0 { String::new() } else { format!("-{}", index + 1) };
    let extension = FileFormat::DEFAULT.extension();
    match layer.media_type.component() {
        _ if own.is_some() => own.unwrap_or_default().to_owned(),
        "model" if count > 1 => format!("{stem}-{:05}-of-{count:05}{extension}", index + 1),
        "model" => format!("{stem}{extension}"),
        part if layer.media_type.holds_tensors() => format!("{stem}-{part}{number}{extension}"),
        part => format!("{stem}-{}{number}", part.replace('/', "-")),
    }
}
