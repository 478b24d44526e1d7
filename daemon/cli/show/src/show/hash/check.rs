//! Comparison with the output of `gguf-hash`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Line;
use super::hashes::Algorithm;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Comparison {
    Ok,
    Mismatch,
    NotFound,
}

impl Comparison {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "Ok",
            Self::Mismatch => "Mismatch",
            Self::NotFound => "Not Found",
        }
    }
}

/// Lines such as `sha256    ba78…  model.gguf:token_embd.weight`. Others are ignored.
pub(super) struct Manifest {
    entries: BTreeMap<(Algorithm, String), String>,
}

impl Manifest {
    /// `None` if no line is an entry.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let entries: BTreeMap<_, _> = text.lines().filter_map(parse_line).collect();
        (!entries.is_empty()).then_some(Self { entries })
    }

    pub(super) fn algorithms(&self) -> Vec<Algorithm> {
        let mut algorithms: Vec<_> = self.entries.keys().map(|(algorithm, _)| *algorithm).collect();
        algorithms.dedup();
        algorithms
    }

    /// Sets the result of each line, and returns the labels of tensors that only the manifest has.
    ///
    /// The manifest may have been made from a file with another name: if the model has one file, the part of a label
    /// before the tensor's name is not compared.
    pub(super) fn compare(&self, lines: &mut [Line]) -> Vec<String> {
        let renamed = self.other_name(lines);
        let label = |line: &Line| match (&renamed, &line.tensor) {
            (Some(file), Some(tensor)) => format!("{file}:{tensor}"),
            (Some(file), None) => file.clone(),
            (None, _) => line.label(),
        };
        let mut rest: BTreeMap<_, _> = self.entries.iter().collect();
        for line in lines.iter_mut() {
            let key = (line.algorithm, label(line));
            rest.remove(&key);
            line.result = Some(match self.entries.get(&key) {
                None => Comparison::NotFound,
                Some(hash) if hash.eq_ignore_ascii_case(&line.hash) => Comparison::Ok,
                Some(_) => Comparison::Mismatch,
            });
        }
        let computed: Vec<Algorithm> = lines.iter().map(|line| line.algorithm).collect();
        let files: Vec<String> =
            lines.iter().filter(|line| line.tensor.is_none()).map(|line| label(line) + ":").collect();
        let is_missing = |(algorithm, label): &&(Algorithm, String)| {
            computed.contains(algorithm) && files.iter().any(|file| label.starts_with(file.as_str()))
        };
        rest.into_keys().filter(is_missing).map(|(_, label)| label.clone()).collect()
    }

    /// The manifest's name for the only file of the lines, if it is another one: the part before the name of the first
    /// tensor that both have.
    fn other_name(&self, lines: &[Line]) -> Option<String> {
        let file = &lines.first()?.file;
        let is_known = |line: &Line| self.entries.contains_key(&(line.algorithm, line.label()));
        if lines.iter().any(|line| line.file != *file || is_known(line)) {
            return None;
        }
        let mut tensors = lines.iter().filter_map(|line| line.tensor.as_ref());
        let of_tensor = |tensor: &String| {
            let suffix = format!(":{tensor}");
            self.entries.keys().find_map(|(_, label)| label.strip_suffix(&suffix).map(str::to_owned))
        };
        tensors.find_map(of_tensor).or_else(|| {
            // A manifest of the whole alone.
            let mut labels = self.entries.keys().map(|(_, label)| label);
            let first = labels.next()?;
            labels.all(|label| label == first).then(|| first.clone())
        })
    }
}

/// The label may have spaces. `--check` of `gguf-hash` appends a result.
fn parse_line(line: &str) -> Option<((Algorithm, String), String)> {
    let (name, rest) = line.trim_end().split_once(char::is_whitespace)?;
    let (hash, label) = rest.trim_start().split_once(char::is_whitespace)?;
    let label = label.trim_start();
    let results = [Comparison::Ok, Comparison::Mismatch, Comparison::NotFound];
    let bare = results.into_iter().find_map(|result| label.strip_suffix(&format!("  -  {}", result.name())));
    let label = bare.unwrap_or(label);
    Some(((Algorithm::from_name(name)?, label.to_owned()), hash.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(hashes: &[(&str, Option<&str>)]) -> Vec<Line> {
        let line = |(hash, tensor): &(&str, Option<&str>)| Line {
            algorithm: Algorithm::Xxh64,
            hash: (*hash).to_owned(),
            file: "m.gguf".to_owned(),
            tensor: tensor.map(str::to_owned),
            result: None,
        };
        hashes.iter().map(line).collect()
    }

    fn compare(manifest: &str, lines: &mut [Line]) -> (Vec<Comparison>, Vec<String>) {
        let missing = Manifest::parse(manifest).unwrap().compare(lines);
        (lines.iter().filter_map(|line| line.result).collect(), missing)
    }

    #[test]
    fn each_line_is_compared_with_its_entry() {
        use Comparison::{Mismatch, NotFound, Ok};
        let mut own = lines(&[("01", Some("a")), ("02", Some("b:c")), ("03", Some("d")), ("04", None)]);
        let manifest = "xxh64     01  m.gguf:a\nxxh64  ff  m.gguf:b:c\n# other\nxxh64 04 m.gguf  -  Ok\n";
        assert_eq!(compare(manifest, &mut own), (vec![Ok, Mismatch, NotFound, Ok], vec![]));
        let renamed = manifest.replace("m.gguf", "/a dir/other.gguf");
        assert_eq!(compare(&renamed, &mut own), (vec![Ok, Mismatch, NotFound, Ok], vec![]));
        assert_eq!(compare("xxh64 04 other.gguf", &mut own).0[3], Ok);
    }

    #[test]
    fn tensors_that_only_the_manifest_has_are_reported() {
        let mut own = lines(&[("01", Some("a")), ("04", None)]);
        let manifest = "xxh64 01 m.gguf:a\nxxh64 05 m.gguf:gone\nsha1 05 m.gguf:gone\nxxh64 06 else.gguf:a";
        assert_eq!(compare(manifest, &mut own).1, ["m.gguf:gone"]);
    }

    #[test]
    fn file_without_hashes_is_not_a_manifest() {
        for text in ["", "md5 01 a", "xxh64", "xxh64 01", "hello world, how are you"] {
            assert!(Manifest::parse(text).is_none(), "{text}");
        }
        let manifest = Manifest::parse("uuid 1 a\nsha1 2 a\nsha1 3 b").unwrap();
        assert_eq!(manifest.algorithms(), [Algorithm::Sha1, Algorithm::Uuid]);
    }
}
