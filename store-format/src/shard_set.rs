//! Finds the shards of a model when one of them is given: which files of its folder they are, and whether they belong
//! together.
//!
//! Names say where to look; `split.no` and `split.count` in the headers say what a file is. Only headers are needed, so
//! that nothing else is read of files that do not belong together.
//!
//! ```
//! use blobd_store_format::shard_set::FolderShards;
//!
//! let names = ["a-Q8_0-00002-of-00002.gguf", "a-Q4_0.gguf", "a-Q8_0-00001-of-00002.gguf"];
//! let shards = FolderShards::new(names[0], names)?;
//! assert_eq!(shards.by_name()?, ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]);
//! # Ok::<(), blobd_store_format::shard_set::ShardSetError>(())
//! ```

use std::collections::BTreeMap;

use crate::file_format::{FileFormat, ModelHeader, Shard};
use crate::file_type::ShardName;
use crate::gguf::Header;
use crate::text::quoted;

/// A file of a folder, and the names of all files beside it.
#[derive(Clone, Debug)]
pub struct FolderShards<'n> {
    given: &'n str,
    names: Vec<&'n str>,
}

/// What the header of a file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardHeader {
    shard: Option<Shard>,
    tensor_count: u64,
    /// Many shards other than the first have none.
    architecture: Option<String>,
    /// The names of the tensors of a GGUF file.
    tensors: Vec<String>,
}

impl ShardHeader {
    pub fn new(header: &dyn ModelHeader) -> Self {
        let gguf = header.as_gguf();
        Self {
            shard: header.shard(),
            tensor_count: header.tensor_count(),
            architecture: gguf.and_then(Header::architecture).map(str::to_owned),
            tensors: gguf.map_or_else(Vec::new, |gguf| {
                gguf.tensors().map(|tensor| tensor.name().to_owned()).collect()
            }),
        }
    }

    pub const fn shard(&self) -> Option<Shard> {
        self.shard
    }
}

impl<'n> FolderShards<'n> {
    /// # Errors
    /// [`ShardSetError::Part`] when the file is a part of a file that was cut, which has no header of its own.
    pub fn new(given: &'n str, names: impl IntoIterator<Item = &'n str>) -> Result<Self, ShardSetError> {
        let mut names: Vec<&str> = names.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        match Part::from_name(given) {
            Some(part) => Err(ShardSetError::Part { name: given.to_owned(), command: part.join(&names) }),
            None => Ok(Self { given, names }),
        }
    }

    /// The file alone, or the files of the same model by their names, in order.
    ///
    /// # Errors
    /// [`ShardSetError::Missing`].
    pub fn by_name(&self) -> Result<Vec<&'n str>, ShardSetError> {
        let Some(shard) = ShardName::from_path(self.given) else { return Ok(vec![self.given]) };
        let mut found: BTreeMap<usize, &str> = BTreeMap::new();
        for name in &self.names {
            if let Some(number) = same_model(name, self.given) {
                let first = found.entry(number).or_insert(name);
                if name != first {
                    return Err(twice(number as u64, first, name));
                }
            }
        }
        found.insert(shard.number(), self.given);
        let missing = (1..).zip(shard.all()).filter(|(number, _)| !found.contains_key(number));
        let missing: Vec<String> = missing.map(|(_, name)| name).collect();
        match missing.is_empty() {
            true => Ok(found.into_values().collect()),
            false => Err(missing_shards(shard.count() as u64, missing.len() as u64, missing)),
        }
    }

    /// The files whose headers must be read, given that of the file itself. They are more than [`by_name`](Self::by_name)
    /// if the name does not agree with the header.
    ///
    /// # Errors
    /// [`ShardSetError::Missing`].
    pub fn to_inspect(&self, shard: Option<Shard>) -> Result<Vec<&'n str>, ShardSetError> {
        match shard {
            Some(shard) if !self.is_named_so(shard) => {
                let is_gguf = |name: &&&str| FileFormat::GGUF.stem_of(name).is_some();
                let others = self.names.iter().filter(is_gguf).filter(|name| **name != self.given);
                Ok([self.given].into_iter().chain(others.copied()).collect())
            }
            _ => self.by_name(),
        }
    }

    /// The files of the model in order, given the headers of those [`to_inspect`](Self::to_inspect).
    ///
    /// # Errors
    /// [`ShardSetError`] when they are not exactly the shards of one model.
    pub fn resolve(&self, headers: &BTreeMap<&'n str, ShardHeader>) -> Result<Vec<&'n str>, ShardSetError> {
        let own = headers.get(self.given).and_then(|header| header.shard);
        let Some(own) = own else { return self.without_keys(headers) };
        let mut shards = Vec::new();
        if self.is_named_so(own) {
            for name in self.by_name()? {
                shards.push((name, self.named_shard(name, own, headers)?));
            }
        } else {
            // Files beside it that have nothing to do with it are not an error: their names do not claim it.
            let with_count = headers.iter().filter_map(|(name, header)| Some((*name, header.shard?, header)));
            let same = with_count.filter(|(_, shard, _)| {
                (shard.count, shard.total_tensor_count) == (own.count, own.total_tensor_count)
            });
            shards.extend(same.map(|(name, _, header)| (name, header)));
        }
        let ordered = in_order(&shards, own)?;
        check_contents(&shards)?;
        Ok(ordered)
    }

    /// Files of another splitter: their names are all that there is.
    fn without_keys(&self, headers: &BTreeMap<&'n str, ShardHeader>) -> Result<Vec<&'n str>, ShardSetError> {
        let names = self.by_name()?;
        let with_key = names.iter().find_map(|name| Some((*name, headers.get(name)?.shard?)));
        match with_key {
            None => {
                let known = names.iter().filter_map(|name| Some((*name, headers.get(name)?)));
                check_contents(&known.collect::<Vec<_>>())?;
                Ok(names)
            }
            Some((other, shard)) => Err(ShardSetError::Foreign {
                name: self.given.to_owned(),
                expected: format!("a shard of {}, as {other:?}", shard.count),
                found: "a file that is not a shard".to_owned(),
            }),
        }
    }

    fn named_shard<'h>(
        &self,
        name: &str,
        own: Shard,
        headers: &'h BTreeMap<&'n str, ShardHeader>,
    ) -> Result<&'h ShardHeader, ShardSetError> {
        let header = headers.get(name);
        let found = match header.map(|header| header.shard) {
            Some(Some(shard)) if shard.count == own.count => None,
            Some(Some(shard)) => Some(format!("a shard of {}", shard.count)),
            Some(None) => Some("a file that is not a shard".to_owned()),
            None => Some("a file without a header".to_owned()),
        };
        match (found, header) {
            (None, Some(header)) => Ok(header),
            (found, _) => Err(ShardSetError::Foreign {
                name: name.to_owned(),
                expected: format!("a shard of {}, as {:?}", own.count, self.given),
                found: found.unwrap_or_default(),
            }),
        }
    }

    fn is_named_so(&self, shard: Shard) -> bool {
        ShardName::from_path(self.given).is_some_and(|name| name.count() as u64 == shard.count)
    }
}

/// Why files are not the shards of one model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardSetError {
    #[error("{name:?}: expected a whole file, found a part of one")]
    Part {
        name: String,
        /// What joins the parts.
        command: String,
    },
    #[error("missing shards: expected {count}; missing are {}", named(missing, *total))]
    Missing {
        count: u64,
        /// The names of the first few, or their numbers from 1 if the names are not known.
        missing: Vec<String>,
        /// How many are missing.
        total: u64,
    },
    #[error("{first:?} and {second:?}: both are shard {number}")]
    Twice { number: u64, first: String, second: String },
    #[error("{name:?}: does not belong to the others: expected {expected}, found {found}")]
    Foreign { name: String, expected: String, found: String },
    #[error("{name:?}: wrong shard number: expected 1 to {count}, found {}", number_text(*number))]
    Number { name: String, number: Option<u64>, count: u64 },
    #[error("tensor {tensor:?}: expected in one shard, found in {first:?} and {second:?}")]
    TensorTwice { tensor: String, first: String, second: String },
    #[error("wrong number of tensors in all shards: expected {expected}, found {found}")]
    TensorCount { expected: u64, found: u64 },
}

impl ShardSetError {
    /// What a user can do about it.
    pub fn advice(&self) -> String {
        match self {
            Self::Part { command, .. } => format!("join the parts: `{command}`"),
            Self::Missing { .. } => "download the missing shards into the same folder".to_owned(),
            Self::Twice { .. } => {
                "move the one that does not belong to the model to another folder".to_owned()
            }
            Self::Foreign { .. }
            | Self::Number { .. }
            | Self::TensorTwice { .. }
            | Self::TensorCount { .. } => {
                "a shard is of another model or version: download all shards again from one place".to_owned()
            }
        }
    }
}

/// Checks that the shards are parts of one model: they have the same architecture, and each tensor is in one of them.
fn check_contents(shards: &[(&str, &ShardHeader)]) -> Result<(), ShardSetError> {
    let mut architectures =
        shards.iter().filter_map(|(name, header)| Some((*name, header.architecture.as_deref()?)));
    if let Some((first, expected)) = architectures.next()
        && let Some((name, found)) = architectures.find(|(_, found)| *found != expected)
    {
        return Err(ShardSetError::Foreign {
            name: name.to_owned(),
            expected: format!("architecture {expected:?}, as {first:?}"),
            found: format!("{found:?}"),
        });
    }
    let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, header) in shards {
        for tensor in &header.tensors {
            if let Some(first) = holders.insert(tensor, name) {
                return Err(ShardSetError::TensorTwice {
                    tensor: tensor.clone(),
                    first: first.to_owned(),
                    second: (*name).to_owned(),
                });
            }
        }
    }
    Ok(())
}

/// Checks that these are all the shards, once each.
fn in_order<'n>(shards: &[(&'n str, &ShardHeader)], own: Shard) -> Result<Vec<&'n str>, ShardSetError> {
    let mut found: BTreeMap<u64, &str> = BTreeMap::new();
    for (name, header) in shards {
        let number = header.shard.and_then(|shard| shard.number);
        let Some(place) = number.filter(|number| *number < own.count) else {
            let number = number.map(|number| number.saturating_add(1));
            return Err(ShardSetError::Number { name: (*name).to_owned(), number, count: own.count });
        };
        if let Some(first) = found.insert(place, name) {
            return Err(twice(place.saturating_add(1), first, name));
        }
    }
    if (found.len() as u64) < own.count {
        let missing = (0..own.count).filter(|number| !found.contains_key(number));
        let missing = missing.map(|number| number.saturating_add(1).to_string());
        return Err(missing_shards(own.count, own.count.saturating_sub(found.len() as u64), missing));
    }
    let tensors = shards.iter().fold(0, |sum: u64, (_, header)| sum.saturating_add(header.tensor_count));
    let declared = shards.iter().filter_map(|(_, header)| header.shard?.total_tensor_count);
    match declared.into_iter().find(|declared| *declared != tensors) {
        Some(expected) => Err(ShardSetError::TensorCount { expected, found: tensors }),
        None => Ok(found.into_values().collect()),
    }
}

/// A header may claim any number of shards.
const MAX_NAMED: usize = 8;

fn twice(number: u64, first: &str, second: &str) -> ShardSetError {
    ShardSetError::Twice { number, first: first.to_owned(), second: second.to_owned() }
}

fn missing_shards(count: u64, total: u64, missing: impl IntoIterator<Item = String>) -> ShardSetError {
    ShardSetError::Missing { count, missing: missing.into_iter().take(MAX_NAMED).collect(), total }
}

fn named(missing: &[String], total: u64) -> String {
    let first: Vec<String> = missing.iter().map(|name| format!("{name:?}")).collect();
    match total.saturating_sub(missing.len() as u64) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

fn number_text(number: Option<u64>) -> String {
    number.map_or_else(|| "none".to_owned(), |number| number.to_string())
}

/// The number of a shard, from 1, if it is one of the model that the other shard is of.
fn same_model(name: &str, other: &str) -> Option<usize> {
    let (shard, other_shard) = (ShardName::from_path(name)?, ShardName::from_path(other)?);
    (shard.set() == other_shard.set()).then(|| shard.number())
}

/// If one of the files is a part of a file that was cut: its name, and the command that joins the parts.
pub fn first_part(names: &[&str]) -> Option<(String, String)> {
    let part = |name: &&str| Some(((*name).to_owned(), Part::from_name(name)?.join(names)));
    names.iter().find_map(part)
}

/// A part of a file that was cut, by its name: `x.gguf.part1of2`, `x.gguf-split-a`.
struct Part<'n> {
    whole: &'n str,
    /// Between the name of the whole file and what distinguishes the parts.
    mark: &'static str,
}

impl<'n> Part<'n> {
    fn from_name(name: &'n str) -> Option<Self> {
        ["-split-", ".part"].into_iter().find_map(|mark| {
            let (whole, end) = name.rsplit_once(mark)?;
            let is_letter =
                mark == "-split-" && end.len() == 1 && end.bytes().all(|byte| byte.is_ascii_lowercase());
            let is_number = mark == ".part" && numbers(end).is_some();
            let is_weights = FileFormat::split_name(whole).is_some();
            (is_weights && (is_letter || is_number)).then_some(Self { whole, mark })
        })
    }

    /// The command that joins those parts that are there, in order.
    fn join(&self, names: &[&str]) -> String {
        let start = format!("{}{}", self.whole, self.mark);
        let ends = names.iter().filter_map(|name| Some((name.strip_prefix(&start)?, *name)));
        let mut parts: Vec<_> = ends.map(|(end, name)| (numbers(end), name)).collect();
        parts.sort_unstable();
        let parts: Vec<String> = parts.into_iter().map(|(_, name)| quoted(name)).collect();
        format!("cat {} > {}", parts.join(" "), quoted(self.whole))
    }
}

/// Number and count of `2of3`.
fn numbers(end: &str) -> Option<(u32, u32)> {
    let (number, count) = end.split_once("of")?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shard(number: u64, count: u64, tensor_count: u64, total: u64) -> ShardHeader {
        let shard = Shard { number: Some(number), count, total_tensor_count: Some(total) };
        ShardHeader { shard: Some(shard), tensor_count, ..ShardHeader::default() }
    }

    const NO_SHARD: ShardHeader =
        ShardHeader { shard: None, tensor_count: 3, architecture: None, tensors: Vec::new() };

    /// Finds the shards of a file as an importer does.
    fn find(given: &str, files: &[(&str, ShardHeader)]) -> Result<Vec<String>, ShardSetError> {
        let all: BTreeMap<&str, ShardHeader> = files.iter().cloned().collect();
        let shards = FolderShards::new(given, all.keys().copied())?;
        let inspected = shards.to_inspect(all.get(given).and_then(|header| header.shard))?;
        let headers = inspected.into_iter().filter_map(|name| Some((name, all.get(name)?.clone())));
        let found = shards.resolve(&headers.collect())?;
        Ok(found.into_iter().map(str::to_owned).collect())
    }

    fn refused(given: &str, files: &[(&str, ShardHeader)]) -> String {
        find(given, files).unwrap_err().to_string()
    }

    const ONE: &str = "x-Q8_0-00001-of-00002.gguf";
    const TWO: &str = "x-Q8_0-00002-of-00002.gguf";

    #[test]
    fn any_shard_finds_the_others() {
        // Two quantisations in one folder, and a first shard without tensors.
        let files = [
            (ONE, shard(0, 2, 0, 5)),
            (TWO, shard(1, 2, 5, 5)),
            ("x-Q4_0-00001-of-00002.gguf", shard(0, 2, 4, 5)),
            ("x-Q4_0-00002-of-00002.gguf", shard(1, 2, 1, 5)),
            ("x.gguf", NO_SHARD),
        ];
        for given in [ONE, TWO] {
            assert_eq!(find(given, &files).unwrap(), [ONE, TWO]);
        }
        assert_eq!(find("x.gguf", &files).unwrap(), ["x.gguf"]);
    }

    #[test]
    fn files_that_are_not_shards_are_taken_alone() {
        for name in
            ["best-of-breed-Q8_0.gguf", "x-00001-of-00001.gguf", "x-1-of-2.gguf", "x-00003-of-00002.gguf"]
        {
            assert_eq!(find(name, &[(name, NO_SHARD), ("y.gguf", NO_SHARD)]).unwrap(), [name]);
        }
    }

    #[test]
    fn headers_decide_and_not_names() {
        // The names are in another order than the numbers.
        let swapped = [(ONE, shard(1, 2, 1, 3)), (TWO, shard(0, 2, 2, 3))];
        assert_eq!(find(ONE, &swapped).unwrap(), [TWO, ONE]);
        // Renamed files: all files beside them are inspected.
        let renamed = [
            ("b.gguf", shard(0, 2, 1, 3)),
            ("a.gguf", shard(1, 2, 2, 3)),
            ("c.gguf", NO_SHARD),
            ("d-00001-of-00003.gguf", shard(0, 3, 2, 9)),
            ("e.gguf", shard(0, 2, 2, 4)),
        ];
        assert_eq!(find("a.gguf", &renamed).unwrap(), ["b.gguf", "a.gguf"]);
        assert!(refused("e.gguf", &renamed).contains("missing are \"2\""));
        let text = refused("a.gguf", &[("a.gguf", shard(0, 65_535, 1, 3))]);
        assert!(
            text.ends_with(
                "missing are \"2\", \"3\", \"4\", \"5\", \"6\", \"7\", \"8\", \"9\" and 65526 more"
            ),
            "{text}"
        );
        let twice = [("a.gguf", shard(0, 2, 1, 3)), ("b.gguf", shard(0, 2, 1, 3))];
        assert!(refused("a.gguf", &twice).contains("\"a.gguf\" and \"b.gguf\": both are shard 1"));
    }

    #[test]
    fn shards_without_keys_are_those_of_their_names() {
        assert_eq!(find(TWO, &[(ONE, NO_SHARD), (TWO, NO_SHARD)]).unwrap(), [ONE, TWO]);
        let mixed = [(ONE, shard(0, 2, 1, 2)), (TWO, NO_SHARD)];
        for given in [ONE, TWO] {
            let text = refused(given, &mixed);
            assert!(
                text.starts_with(&format!("{TWO:?}: does not belong")) && text.contains("not a shard"),
                "{text}"
            );
        }
        let safetensors = ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"];
        assert_eq!(find(safetensors[1], &safetensors.map(|name| (name, NO_SHARD))).unwrap(), safetensors);
    }

    #[test]
    fn missing_double_foreign_and_inconsistent_shards_are_named() {
        let missing = "x-Q8_0-00003-of-00003.gguf";
        let text = refused(
            missing,
            &[(missing, shard(2, 3, 1, 3)), ("x-Q8_0-00002-of-00003.gguf", shard(1, 3, 1, 3))],
        );
        assert_eq!(text, "missing shards: expected 3; missing are \"x-Q8_0-00001-of-00003.gguf\"");
        let double = [(ONE, shard(0, 2, 1, 2)), (TWO, shard(0, 2, 1, 2))];
        assert_eq!(refused(ONE, &double), format!("{ONE:?} and {TWO:?}: both are shard 1"));
        let upper = TWO.replace(".gguf", ".GGUF");
        let files = [(ONE, shard(0, 2, 1, 2)), (TWO, shard(1, 2, 1, 2)), (&*upper, shard(1, 2, 1, 2))];
        assert!(refused(ONE, &files).contains("both are shard 2"));
        let foreign = [(ONE, shard(0, 2, 1, 2)), (TWO, shard(1, 3, 1, 2))];
        assert!(refused(ONE, &foreign).contains("expected a shard of 2, as"), "{}", refused(ONE, &foreign));
        let number = [(ONE, shard(0, 2, 1, 2)), (TWO, shard(7, 2, 1, 2))];
        assert!(refused(ONE, &number).ends_with("wrong shard number: expected 1 to 2, found 8"));
        let tensors = [(ONE, shard(0, 2, 1, 5)), (TWO, shard(1, 2, 1, 5))];
        assert_eq!(refused(TWO, &tensors), "wrong number of tensors in all shards: expected 5, found 2");
        let many = [("a.gguf", shard(0, u64::MAX, 1, 5))];
        assert!(refused("a.gguf", &many).contains("\"9\""));
        for error in [find(ONE, &double), find(ONE, &tensors), find(missing, &[(missing, NO_SHARD)])] {
            assert!(!error.unwrap_err().advice().is_empty());
        }
    }

    #[test]
    fn shards_of_other_architectures_or_with_the_same_tensor_are_named() {
        let with = |number, architecture: Option<&str>, tensors: &[&str]| ShardHeader {
            architecture: architecture.map(str::to_owned),
            tensors: tensors.iter().map(|name| (*name).to_owned()).collect(),
            ..shard(number, 2, tensors.len() as u64, 2)
        };
        let llama = with(0, Some("llama"), &["a"]);
        assert!(find(ONE, &[(ONE, llama.clone()), (TWO, with(1, None, &["b"]))]).is_ok());
        let foreign = [(ONE, llama.clone()), (TWO, with(1, Some("qwen2"), &["b"]))];
        let expected = format!(
            "{TWO:?}: does not belong to the others: expected architecture \"llama\", as {ONE:?}, found \"qwen2\""
        );
        assert_eq!(refused(TWO, &foreign), expected);
        let twice = [(ONE, llama), (TWO, with(1, None, &["a"]))];
        assert_eq!(
            refused(ONE, &twice),
            format!("tensor \"a\": expected in one shard, found in {ONE:?} and {TWO:?}")
        );
        let without_keys = twice.map(|(name, header)| (name, ShardHeader { shard: None, ..header }));
        assert!(matches!(find(ONE, &without_keys), Err(ShardSetError::TensorTwice { .. })));
    }

    #[test]
    fn parts_of_files_are_to_be_joined() {
        let names: Vec<String> = (1..=11).map(|number| format!("a b.gguf.part{number}of11")).collect();
        let shards = FolderShards::new(&names[3], names.iter().map(String::as_str));
        let error = shards.unwrap_err();
        assert!(error.to_string().contains("expected a whole file, found a part"), "{error}");
        let advice = error.advice();
        assert!(
            advice.starts_with("join the parts: `cat 'a b.gguf.part1of11' 'a b.gguf.part2of11'"),
            "{advice}"
        );
        assert!(advice.ends_with("'a b.gguf.part11of11' > 'a b.gguf'`"), "{advice}");
        let names = ["x.gguf-split-a", "x.gguf-split-b"];
        let advice = FolderShards::new(names[1], names).unwrap_err().advice();
        assert_eq!(advice, "join the parts: `cat x.gguf-split-a x.gguf-split-b > x.gguf`");
        for name in ["x.gguf.part1", "x.part1of2", "x.gguf-split-ab", "x-split-a.gguf"] {
            assert!(FolderShards::new(name, [name]).is_ok(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn complete_set_is_found_from_each_shard_and_no_subset_is(
            (order, given) in (1..20_usize).prop_flat_map(|count| {
                (Just((0..count).collect::<Vec<_>>()).prop_shuffle(), 0..count)
            }),
            is_named in any::<bool>(),
            removed in any::<prop::sample::Index>(),
        ) {
            let count = order.len();
            let name = |number: usize| match is_named {
                true => format!("m-{:05}-of-{count:05}.gguf", number + 1),
                false => format!("{}.gguf", order[number]),
            };
            let names: Vec<String> = (0..count).map(name).collect();
            let header = |number: usize| match count {
                1 => ShardHeader { tensor_count: 2, ..ShardHeader::default() },
                _ => shard(number as u64, count as u64, 2, 2 * count as u64),
            };
            let mut files: Vec<_> = names.iter().enumerate().map(|(number, name)| (name.as_str(), header(number))).collect();
            prop_assert_eq!(find(&names[given], &files).unwrap(), names.clone());
            let removed = removed.index(count);
            if removed != given {
                files.remove(removed);
                let is_missing = matches!(find(&names[given], &files), Err(ShardSetError::Missing { .. }));
                prop_assert!(is_missing);
            }
        }
    }
}
