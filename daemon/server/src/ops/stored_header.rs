//! The headers of files in the store.

use std::ops::Deref;
use std::sync::{LazyLock, PoisonError};

use blobd_store::{FileReader, Store};
use blobd_store_format::file_format::{HeaderReader, MAX_HEADER_BYTES, ModelHeader};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use super::{OpError, layer_info};

/// How much of a header is read at a time: the parser keeps a copy, and the largest headers have 100 MB.
const PART_BYTES: u64 = 1 << 20;

/// Headers from this size on are in memory one at a time: those of the largest known models have 16 MiB, the limit is
/// 100 MB, and a hundred requests may read one.
const LARGE_FROM_BYTES: u64 = 1 << 20;

/// Held by the one thread that has a large header in memory. It protects no data, so it may be held during disk access.
/// A thread that holds it must not read a second header.
pub(super) struct HeaderTurn {
    _turn: Option<MutexGuard<'static, ()>>,
}

impl HeaderTurn {
    /// Waits until a header of this size may be read.
    pub(super) fn take(size: u64) -> Self {
        static LARGE: LazyLock<Mutex<()>> = LazyLock::new(Mutex::default);
        let is_large = size >= LARGE_FROM_BYTES;
        Self { _turn: is_large.then(|| LARGE.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

/// A header that was read.
pub(super) struct StoredHeader {
    header: Box<dyn ModelHeader>,
    _turn: HeaderTurn,
}

impl Deref for StoredHeader {
    type Target = dyn ModelHeader;

    fn deref(&self) -> &Self::Target {
        &*self.header
    }
}

/// Reads a split file's header; `None` if its recipe has none.
pub(super) fn read_header(store: &Store, recipe: &Recipe) -> Result<Option<StoredHeader>, OpError> {
    let turn = HeaderTurn::take(recipe.header().map_or(0, |(_, size)| size));
    let header = read_in_turn(store, recipe, &turn)?;
    Ok(header.map(|header| StoredHeader { header, _turn: turn }))
}

/// Reads a split file's header for a thread that has its turn.
pub(super) fn read_in_turn(
    store: &Store,
    recipe: &Recipe,
    _turn: &HeaderTurn,
) -> Result<Option<Box<dyn ModelHeader>>, OpError> {
    let Some((digest, size)) = recipe.header() else { return Ok(None) };
    let damaged = |source| OpError::Damaged { digest, source };
    let mut reader = HeaderReader::new();
    let part = |part: &[u8]| reader.push(part).map(drop).map_err(damaged);
    read_in_parts(&mut FileReader::of_recipe(store.content(), recipe), size, part)?;
    reader.finish().map(Some).map_err(damaged)
}

/// Reads the header at the start of a file, which has `size` bytes, for a parser.
pub(super) fn read_in_parts(
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

/// At most how many bytes [`show`](super::show) reads of the headers of a model's files.
pub(crate) fn header_bytes(store: &Store, reference: &Reference) -> Result<u64, OpError> {
    let model = store.names().model(reference)?;
    let contents = model.contents()?;
    let recipes = contents.iter().filter_map(|named| named.file.recipe.as_ref());
    let split = recipes.filter_map(|recipe| recipe.header()).map(|(_, size)| size);
    Ok(split.fold(layer_info::header_bytes(&model), u64::saturating_add))
}
