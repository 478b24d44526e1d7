//! Which files of a repository make a model.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The files that were chosen of a repository at Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChosenFiles {
    /// The files, the weights first, shards in order.
    pub files: Vec<ChosenFile>,
    /// How many files of weights the repository has.
    pub listed: u64,
}

/// A file that was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChosenFile {
    /// What it is in the model: `model`, `projector` or `draft`.
    pub component: String,
    /// Its path in the repository.
    pub path: String,
}

/// `chose a-Q4_K_M.gguf with mmproj-F16.gguf of 23 GGUF files`. Of shards, the first is named.
impl fmt::Display for ChosenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = "chose ";
        let mut rest = self.files.as_slice();
        while let Some(first) = rest.first() {
            let is_same = |file: &ChosenFile| file.component == first.component;
            let (same, others) = rest.split_at(rest.iter().take_while(|file| is_same(file)).count());
            write!(f, "{before}{}", first.path)?;
            if same.len() > 1 {
                write!(f, " ({} shards)", same.len())?;
            }
            (rest, before) = (others, if before == "chose " { " with " } else { " and " });
        }
        match self.listed {
            1 => f.write_str(", the only GGUF file"),
            listed => write!(f, " of {listed} GGUF files"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(files: &[(&str, &str)], listed: u64) -> String {
        let file = |(component, path): &(&str, &str)| ChosenFile {
            component: (*component).to_owned(),
            path: (*path).to_owned(),
        };
        ChosenFiles { files: files.iter().map(file).collect(), listed }.to_string()
    }

    #[test]
    fn chosen_files_are_named_with_how_many_there_were() {
        let (model, projector, draft) =
            (("model", "a.gguf"), ("projector", "mmproj.gguf"), ("draft", "mtp-a.gguf"));
        assert_eq!(text(&[model], 1), "chose a.gguf, the only GGUF file");
        assert_eq!(text(&[model, projector], 23), "chose a.gguf with mmproj.gguf of 23 GGUF files");
        assert_eq!(
            text(&[model, projector, draft], 3),
            "chose a.gguf with mmproj.gguf and mtp-a.gguf of 3 GGUF files"
        );
        let shards = [("model", "b-00001-of-00002.gguf"), ("model", "b-00002-of-00002.gguf"), draft];
        let expected = "chose b-00001-of-00002.gguf (2 shards) with mtp-a.gguf of 9 GGUF files";
        assert_eq!(text(&shards, 9), expected);
    }
}
