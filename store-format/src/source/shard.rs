//! The names of shards.

use crate::file_format::FileFormat;

/// The name of one shard: `STEM-00002-of-00003.gguf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'n> {
    stem: &'n str,
    number: usize,
    count: usize,
    extension: &'static str,
}

impl<'n> ShardName<'n> {
    /// The most shards of a model; a server is asked for each.
    pub const MAX_COUNT: usize = 512;

    /// Parses the path of a shard; `None` for another file.
    #[must_use]
    pub fn of(path: &'n str) -> Option<Self> {
        let (stem, format) = FileFormat::split_name(path)?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let read = |digits: &str| {
            let is_number = digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
            is_number.then(|| digits.parse::<usize>().ok()).flatten()
        };
        let (number, count) = (read(number)?, read(count)?);
        let is_one = (1..=count).contains(&number) && count <= Self::MAX_COUNT;
        is_one.then_some(Self { stem, number, count, extension: format.extension() })
    }

    /// The number of the shard, from 1.
    #[must_use]
    pub const fn number(&self) -> usize {
        self.number
    }

    /// How many shards the model has.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// The paths of all shards of this model, in order.
    #[must_use]
    pub fn all(&self) -> Vec<String> {
        let Self { stem, count, extension, .. } = self;
        (1..=*count).map(|number| format!("{stem}-{number:05}-of-{count:05}{extension}")).collect()
    }

    /// A file name without extension and shard number.
    #[must_use]
    pub fn stem_of(name: &str) -> &str {
        match ShardName::of(name) {
            Some(shard) => shard.stem,
            None => FileFormat::split_name(name).map_or(name, |(stem, _format)| stem),
        }
    }
}
