//! Reads metadata and records the keys that a formula needed but did not find.

use crate::metadata::{Metadata, Range};

/// Metadata with a list of the keys that were needed but missing.
#[derive(Debug)]
pub(super) struct Keys<'a> {
    metadata: Metadata<'a>,
    missing: Vec<String>,
}

impl<'a> Keys<'a> {
    pub(super) fn new(metadata: Metadata<'a>) -> Self {
        Self { metadata, missing: Vec::new() }
    }

    pub(super) fn metadata(&self) -> Metadata<'a> {
        self.metadata
    }

    /// A required number; the default if it is missing.
    pub(super) fn number(&mut self, key: &str, default: u64) -> u64 {
        let value = self.optional(key);
        self.or_missing(key, value).unwrap_or(default)
    }

    /// An optional number.
    pub(super) fn optional(&self, key: &str) -> Option<u64> {
        self.metadata.get::<u32>(key).map(u64::from)
    }

    /// Minimum and maximum of a required number, or of one required number per block.
    pub(super) fn range(&mut self, key: &str) -> Option<Range> {
        let value = self.metadata.range(key);
        self.or_missing(key, value)
    }

    /// One number per block: a single number for all blocks, or an array. Blocks beyond the end of an array get its
    /// largest number, and a negative element counts as 0. `None` if the key is missing.
    pub(super) fn per_block(&self, key: &str, blocks: usize) -> Option<Vec<u64>> {
        if let Some(value) = self.optional(key) {
            return Some(vec![value; blocks]);
        }
        let mut values: Vec<u64> = match self.metadata.array::<u32>(key) {
            Some(values) => values.take(blocks).map(u64::from).collect(),
            None => {
                let values = self.metadata.array::<i32>(key)?.take(blocks);
                values.map(|value| u64::try_from(value).unwrap_or(0)).collect()
            }
        };
        let rest = values.iter().copied().max()?;
        values.resize(blocks, rest);
        Some(values)
    }

    /// One flag per block: an array of booleans, or of numbers where 0 means false. Blocks beyond its end get `false`.
    pub(super) fn flags(&self, key: &str, blocks: usize) -> Option<Vec<bool>> {
        let mut flags: Vec<bool> = match self.metadata.array::<bool>(key) {
            Some(flags) => flags.take(blocks).collect(),
            None => match self.metadata.array::<u32>(key) {
                Some(numbers) => numbers.take(blocks).map(|number| number != 0).collect(),
                None => self.metadata.array::<i32>(key)?.take(blocks).map(|number| number != 0).collect(),
            },
        };
        flags.resize(blocks, false);
        Some(flags)
    }

    /// Lists a key as missing.
    pub(super) fn add_missing(&mut self, key: &str) {
        let key = self.metadata.full_key(key).into_owned();
        if !self.missing.contains(&key) {
            self.missing.push(key);
        }
    }

    /// The missing keys under their full names, as the file would have them.
    pub(super) fn into_missing(self) -> Vec<String> {
        self.missing
    }

    fn or_missing<T>(&mut self, key: &str, value: Option<T>) -> Option<T> {
        if value.is_none() {
            self.add_missing(key);
        }
        value
    }
}
