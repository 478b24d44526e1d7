//! The expert groups that several shards of a model have tensors of, found from the headers of the shards.

use std::collections::BTreeMap;

use blobd_store_format::file_format::{FormatError, ModelHeader};
use blobd_store_format::file_type::ShardName;
use blobd_store_format::split::{ExpertsOfFiles, SharedGroups};

/// The headers that were read. Only the names of the groups are kept.
#[derive(Default)]
pub(super) struct ShardSets {
    experts: ExpertsOfFiles,
    sets: BTreeMap<SetName, usize>,
}

/// What the names, or the headers, of the shards of one file have in common: the rest of the name, and the number of
/// shards.
type SetName = (String, u64);

impl ShardSets {
    /// Adds a file of `size` bytes, which is known by its number. Returns whether it is a shard.
    pub(super) fn add(
        &mut self,
        (number, name): (usize, &str),
        size: u64,
        header: &dyn ModelHeader,
    ) -> Result<bool, FormatError> {
        let Some(set) = set_of(name, header) else { return Ok(false) };
        let next = self.sets.len();
        let set = *self.sets.entry(set).or_insert(next);
        self.experts.add(set, number, &header.file_layout(size)?);
        Ok(true)
    }

    pub(super) fn shared(self) -> SharedGroups {
        self.experts.shared()
    }
}

/// The set that a file is a shard of: its header says so, or its name.
fn set_of(name: &str, header: &dyn ModelHeader) -> Option<SetName> {
    match header.shard() {
        Some(shard) => (shard.count > 1).then(|| (header.format().name().to_owned(), shard.count)),
        None => {
            let shard = ShardName::from_path(name).filter(|shard| shard.count() > 1)?;
            Some((shard.set().text(), shard.count() as u64))
        }
    }
}
