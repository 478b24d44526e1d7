//! Edits the metadata of a GGUF header without changing its data section.
//!
//! The order of the keys, the alignment and the table of tensors stay as they are; new keys are appended. Keys
//! that describe the tensors or the file are refused, because an edit changes neither.

#[cfg(test)]
mod tests;
mod value;

use blobd_store_format::gguf::{ALIGNMENT_KEY, Encoder, GgufError, Header, MetadataValue, Value, printable};

use std::collections::{HashMap, HashSet};

use crate::entries::Entries;
use crate::rewrite::SPLIT_PREFIX;
pub use value::EditType;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyEdit {
    pub key: String,
    pub change: Change,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The key gets a value, given as text.
    Set {
        /// Its type; `None` to keep the key's type, or for a new key to derive it from the text.
        value_type: Option<EditType>,
        /// The value: a number, `true` or `false`, any text for a string, JSON for an array.
        text: String,
    },
    Unset,
}

/// A header with changed metadata.
#[derive(Clone, Debug)]
pub struct EditedHeader {
    pub header: Header,
    /// The keys whose value or type changed, in the order of the edits.
    pub changed: Vec<String>,
    /// The keys that were to be removed but did not exist.
    pub absent: Vec<String>,
}

impl EditedHeader {
    /// Applies the edits to a header.
    ///
    /// ```
    /// use blobd_model::edit::{Change, EditedHeader, KeyEdit};
    /// use blobd_store_format::gguf::{GgufWriter, Header};
    ///
    /// let mut writer = GgufWriter::new();
    /// writer.metadata("llama.context_length", 4096_u32)?;
    /// let header = Header::parse(&writer.header()?)?;
    /// let change = Change::Set { value_type: None, text: "8192".to_owned() };
    /// let edited = EditedHeader::new(&header, &[KeyEdit { key: "llama.context_length".to_owned(), change }])?;
    /// assert_eq!(edited.header.value("llama.context_length").unwrap().as_u64(), Some(8192));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(source: &Header, edits: &[KeyEdit]) -> Result<Self, EditError> {
        let (mut entries, mut absent) = (Entries::from_header(source), Vec::new());
        let mut seen = HashSet::new();
        for KeyEdit { key, change } in edits {
            if !seen.insert(key) {
                return Err(EditError::Twice { key: key.clone() });
            }
            check_key(source, key)?;
            match change {
                Change::Set { value_type, text } => {
                    let value = value::resolve(*value_type, text, source.value(key));
                    let value = value.map_err(|value_type| EditError::Value {
                        key: key.clone(),
                        text: printable(text.as_bytes()),
                        value_type,
                    })?;
                    check_vocabulary(source, key, Some(&value))?;
                    entries.set(key.as_bytes(), value);
                }
                Change::Unset if source.value(key).is_none() => absent.push(key.clone()),
                Change::Unset => {
                    check_vocabulary(source, key, None)?;
                    entries.retain(|other| other != key.as_bytes());
                }
            }
        }
        let mut out = Encoder::new(source.byte_order());
        out.preamble(source.version(), source.tensors().len(), entries.len());
        entries.write(&mut out);
        out.raw(source.raw_tensors());
        let header = out.finish()?;
        let (before, after): (HashMap<_, _>, HashMap<_, _>) =
            (source.raw_metadata().collect(), header.raw_metadata().collect());
        let is_changed = |key: &String| before.get(key.as_bytes()) != after.get(key.as_bytes());
        let changed = edits.iter().map(|edit| &edit.key).filter(|key| is_changed(key)).cloned().collect();
        Ok(Self { changed, absent, header })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EditError {
    #[error("metadata key {key:?}: cannot be edited: it {reason}")]
    Reserved { key: String, reason: &'static str },
    #[error("metadata key {key:?}: is edited twice")]
    Twice { key: String },
    #[error("metadata key {key:?}: {text:?} is not a value of type {value_type}{}", hint(value_type))]
    Value { key: String, text: String, value_type: EditType },
    #[error(
        "metadata key {key:?}: wrong number of elements: expected {expected}, one for each token, found {found}"
    )]
    Tokens { key: String, found: usize, expected: usize },
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

fn check_key(header: &Header, key: &str) -> Result<(), EditError> {
    let reserved = |reason| Err(EditError::Reserved { key: key.to_owned(), reason });
    if key.is_empty() {
        return Err(GgufError::EmptyKey { offset: 0 }.into());
    }
    if key.as_bytes().starts_with(SPLIT_PREFIX) {
        return reserved(
            "describes the shards of the file; `export --merge` and `--split-max-size` change them",
        );
    }
    if key == ALIGNMENT_KEY {
        return reserved("describes where the tensors lie; `export --alignment` changes it");
    }
    if key == ARCHITECTURE_KEY {
        return reserved("is the prefix of other keys and says what the tensors mean");
    }
    let own = header.architecture().and_then(|prefix| key.strip_prefix(prefix)?.strip_prefix('.'));
    if own.is_some_and(|own| SHAPE_KEYS.contains(&own)) {
        return reserved("describes the shapes of the tensors, which stay as they are");
    }
    Ok(())
}

/// Refuses arrays that have one element per token if the number of tokens would change.
fn check_vocabulary(header: &Header, key: &str, to: Option<&Value>) -> Result<(), EditError> {
    if !TOKEN_KEYS.contains(&key) {
        return Ok(());
    }
    let count = |value: MetadataValue<'_>| value.as_array().map(|array| array.len());
    let Some(expected) = TOKEN_KEYS.iter().find_map(|key| count(header.value(key)?)) else { return Ok(()) };
    let found = match to {
        Some(Value::Array(array)) => Some(array.values().len()),
        Some(_) => None,
        // Every reader needs the tokens themselves; the other arrays may be removed.
        None if key != TOKENS_KEY => return Ok(()),
        None => None,
    };
    match found == Some(expected) {
        true => Ok(()),
        false => Err(EditError::Tokens { key: key.to_owned(), found: found.unwrap_or(0), expected }),
    }
}

const ARCHITECTURE_KEY: &str = "general.architecture";
const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
/// Arrays with one element per token.
const TOKEN_KEYS: [&str; 3] = [TOKENS_KEY, "tokenizer.ggml.scores", "tokenizer.ggml.token_type"];
/// Keys under the architecture's prefix from which loaders compute the shapes of tensors.
const SHAPE_KEYS: [&str; 4] = ["block_count", "embedding_length", "feed_forward_length", "expert_count"];

fn hint(value_type: &EditType) -> &'static str {
    if value_type.is_array() { ", which is written as JSON, such as [1,2]" } else { "" }
}
