//! Reads headers of stored files for descriptions, and decides which files are short texts, such as a template.

use std::io::{self, Read};
use std::ops::Deref;
use std::sync::{LazyLock, PoisonError};

use blobd_client::fit::FitContent;
use blobd_store::{FileReader, Store};
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::file_format::{HeaderReader, MAX_HEADER_BYTES, ModelHeader, stream_header};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use super::layer_info;
use crate::ops::OpError;

/// The bytes of a header that are read at a time: the parser keeps a copy, and the largest headers have 100 MB.
const PART_BYTES: u64 = 1 << 20;

/// Held by the one thread that has a large header in memory: the largest known models have 16 MiB, the limit is 100 MB, and
/// a hundred requests may read one. It protects no data, so it may be held during disk access. A thread that holds it must
/// not read a second header.
pub(in crate::ops) struct HeaderTurn {
    _turn: Option<MutexGuard<'static, ()>>,
}

impl HeaderTurn {
    /// Waits until a header of this size may be read.
    pub(in crate::ops) fn take(size: u64) -> Self {
        const LARGE_FROM_BYTES: u64 = 1 << 20;
        static LARGE: LazyLock<Mutex<()>> = LazyLock::new(Mutex::default);
        let is_large = size >= LARGE_FROM_BYTES;
        Self { _turn: is_large.then(|| LARGE.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

pub(in crate::ops) struct StoredHeader {
    header: Box<dyn ModelHeader>,
    _turn: HeaderTurn,
}

impl Deref for StoredHeader {
    type Target = dyn ModelHeader;

    fn deref(&self) -> &Self::Target {
        &*self.header
    }
}

/// Reads a split file's header, without keeping its bytes; `None` if its recipe has none.
pub(in crate::ops) fn read_header(store: &Store, recipe: &Recipe) -> Result<Option<StoredHeader>, OpError> {
    let Some((digest, size)) = recipe.header() else { return Ok(None) };
    let turn = HeaderTurn::take(size);
    let file = FileReader::for_recipe(store.content(), recipe);
    let mut start = HeaderStream { file, offset: 0, end: size.min(MAX_HEADER_BYTES), result: Ok(()) };
    let header = stream_header(&mut start);
    start.result?;
    // Only an error of the file, which was returned, leaves no header.
    let header = header.ok().transpose().map_err(|source| OpError::Damaged { digest, source })?;
    Ok(header.map(|header| StoredHeader { header, _turn: turn }))
}

/// The start of a stored file.
struct HeaderStream<'s> {
    file: FileReader<'s>,
    offset: u64,
    end: u64,
    /// Why reading has failed.
    result: Result<(), OpError>,
}

impl Read for HeaderStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let end = self.end.min(self.offset.saturating_add(buffer.len() as u64));
        let bytes = self.file.read_range(self.offset..end).map_err(|error| {
            self.result = Err(error.into());
            io::Error::other("the blob cannot be read")
        })?;
        self.offset = end;
        bytes.as_slice().read(buffer)
    }
}

/// Reads a split file's header with its bytes, for a thread that has its turn.
pub(in crate::ops) fn read_in_turn(
    store: &Store,
    recipe: &Recipe,
    _turn: &HeaderTurn,
) -> Result<Option<Box<dyn ModelHeader>>, OpError> {
    let Some((digest, size)) = recipe.header() else { return Ok(None) };
    let damaged = |source| OpError::Damaged { digest, source };
    let mut reader = HeaderReader::new();
    let part = |part: &[u8]| reader.push(part).map(drop).map_err(damaged);
    read_in_parts(&mut FileReader::for_recipe(store.content(), recipe), size, part)?;
    reader.finish().map(Some).map_err(damaged)
}

/// Reads the header at the start of a file, which has `size` bytes, in parts for a parser.
pub(in crate::ops) fn read_in_parts(
    file: &mut FileReader<'_>,
    size: u64,
    mut push: impl FnMut(&[u8]) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let (mut offset, end) = (0, size.min(MAX_HEADER_BYTES));
    while offset < end {
        let next = offset.saturating_add(PART_BYTES).min(end);
        push(&file.read_range(offset..next)?)?;
        offset = next;
    }
    Ok(())
}

/// The most bytes of headers that [`show`](super::show) reads.
pub(crate) fn header_bytes(store: &Store, reference: &Reference) -> Result<u64, OpError> {
    let model = store.names().model(reference)?;
    let contents = model.contents()?;
    let recipes = contents.iter().filter_map(|named| named.file.recipe.as_ref());
    let split = recipes.filter_map(|recipe| recipe.header()).map(|(_, size)| size);
    Ok(split.fold(layer_info::header_bytes(&model), u64::saturating_add))
}

/// The longest text that is read. Templates and licenses have at most some 100 KiB.
pub(in crate::ops) const MAX_TEXT_BYTES: u64 = 128 << 10;
const MAX_TEXTS_BYTES: u64 = 384 << 10;

/// The texts of one model, limited in total.
#[derive(Debug)]
pub(in crate::ops) struct Texts {
    bytes_left: u64,
}

impl Texts {
    pub(in crate::ops) const fn new() -> Self {
        Self { bytes_left: MAX_TEXTS_BYTES }
    }

    /// Whether a file of this type, name and size is a text to be read, and not an image or an archive.
    pub(in crate::ops) fn admit(&mut self, media_type: &MediaType, name: Option<&str>, size: u64) -> bool {
        let texts = ["config", "template", "system", "params", "license", "messages", "json"];
        let is_text = texts.contains(&media_type.component()) || FitContent::is_text(media_type, name);
        let is_admitted = is_text && size <= MAX_TEXT_BYTES && size <= self.bytes_left;
        self.bytes_left -= if is_admitted { size } else { 0 };
        is_admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_others_than_texts_are_left_out() {
        let of = |component: &str| MediaType::new(format!("application/vnd.ollama.image.{component}"));
        let mut texts = Texts::new();
        assert!(texts.admit(&of("template"), None, MAX_TEXT_BYTES));
        assert!(!texts.admit(&of("template"), None, MAX_TEXT_BYTES + 1));
        assert!(!texts.admit(&of("model"), None, 10));
        assert!(
            texts.admit(&of("license"), None, MAX_TEXT_BYTES)
                && texts.admit(&of("license"), None, MAX_TEXT_BYTES)
        );
        assert!(!texts.admit(&of("license"), None, 1), "the total is used up");
        assert!(texts.admit(&of("system"), None, 0));
        let config = MediaType::new(MediaType::PACK_CONFIG);
        let mut texts = Texts::new();
        assert!(texts.admit(&config, Some("config.json"), 10));
        assert!(!texts.admit(&config, Some("tokenizer.json"), 10) && !texts.admit(&config, None, 10));
    }
}
