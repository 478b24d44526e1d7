//! The names that blobd gives to models itself: to imported files without `--name`, and to files that are pulled by
//! their address.
//!
//! Two different models never get one name. So a derived name is a list of candidates: first the shortest, from the
//! file's name alone; then those with the file's whole name and with the folders that it is in; one has the model's ID.
//! A commit takes the first that has this model already, otherwise the first that no other model has.
//!
//! Characters that a name may not contain become `-`. A text with letters outside of ASCII becomes `xn--` and its
//! Punycode ([RFC 3492](https://www.rfc-editor.org/rfc/rfc3492)), as in host names, so that different letters stay
//! different. In a text that is too long, the end is replaced by the first digits of the SHA-256 of the whole.

use crate::digest::Digest;
use crate::file_type::{ShardName, split_file_type};
use crate::reference::{Reference, ReferenceError};

/// The names that a model may get, the preferred one first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DerivedName {
    first: Reference,
    others: Vec<Reference>,
    /// How many of `others` have more of the file's own name; those with its folders follow.
    by_file_name: usize,
    id_part: IdPart,
}

/// The part of a name that gets the model's ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdPart {
    Model,
    Tag,
}

impl DerivedName {
    /// The most bytes of one part of a derived name.
    const MAX_BYTES: usize = 80;
    /// How many of a file's folders are used. The model's ID distinguishes the rest.
    pub const MAX_FOLDERS: usize = 3;

    /// Names for the model in a file or in shards, by the path of the file or of any shard: `chain-llama-Q4_K_M.gguf` is `chain-llama:Q4_K_M`. Without a file
    /// type in its name the tag is `latest`.
    pub fn from_path(path: &str) -> Result<Self, ReferenceError> {
        let mut folders: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let file = folders.pop().unwrap_or_default();
        let stem = ShardName::stem_of(file);
        let (model, tag) = split_file_type(stem).unwrap_or((stem, Reference::DEFAULT_TAG));
        let name = |model: &str, tag: &str| {
            let (host, namespace) = (Reference::DEFAULT_HOST, Reference::DEFAULT_NAMESPACE);
            Reference::from_parts(host, namespace, &part(model), tag)
        };
        let mut names = Self::new(name(model, tag)?, IdPart::Model);
        names.add_by_file_name(name(stem, Reference::DEFAULT_TAG));
        for text in with_folders(&folders, model) {
            names.add(name(&text, tag));
        }
        Ok(names)
    }

    /// Names for a model that another program has under this name.
    pub const fn from_program(name: Reference) -> Self {
        Self::new(name, IdPart::Tag)
    }

    pub(crate) const fn new(first: Reference, id_part: IdPart) -> Self {
        Self { first, others: Vec::new(), by_file_name: 0, id_part }
    }

    /// Adds a candidate with more of the file's name, unless it is there already.
    pub(crate) fn add_by_file_name(&mut self, name: Result<Reference, ReferenceError>) {
        let before = self.others.len();
        self.add(name);
        self.by_file_name += self.others.len() - before;
    }

    /// Adds a candidate with a folder. Those with more of the file's name must have been added before.
    pub(crate) fn add(&mut self, name: Result<Reference, ReferenceError>) {
        // A candidate that is not a name is left out: another one is.
        let Ok(name) = name else { return };
        if !self.first.same_model(&name) && !self.others.iter().any(|other| other.same_model(&name)) {
            self.others.push(name);
        }
    }

    /// Adds the candidate with the model's ID. It comes after the ones that distinguish the model from the one that has
    /// the first name now: by the whole names of their files if these differ, otherwise by the folders.
    #[must_use]
    pub fn with_id(mut self, manifest: Digest, file_names_differ: bool) -> Self {
        let id = manifest.short();
        let parts = (self.first.model(), self.first.tag());
        let (model, tag) = match self.id_part {
            IdPart::Model => (part_before(parts.0, &id), parts.1.to_owned()),
            IdPart::Tag => (parts.0.to_owned(), part_before(parts.1, &id)),
        };
        let named = Reference::from_parts(self.first.host(), self.first.namespace(), &model, &tag);
        let (by_file_name, by_folder) = self.others.split_at(self.by_file_name);
        let named = named.into_iter();
        self.others = match file_names_differ {
            true => by_file_name.iter().cloned().chain(named).chain(by_folder.iter().cloned()).collect(),
            false => by_folder.iter().cloned().chain(by_file_name.iter().cloned()).chain(named).collect(),
        };
        self
    }

    /// Without the candidates that `is_allowed` refuses, except the first.
    #[must_use]
    pub fn retaining(mut self, is_allowed: impl Fn(&Reference) -> bool) -> Self {
        self.others.retain(is_allowed);
        self
    }

    pub const fn first(&self) -> &Reference {
        &self.first
    }

    /// The names that are tried if another model has the first one, in this order.
    pub fn others(&self) -> &[Reference] {
        &self.others
    }
}

/// The text behind the name of its nearest folder, of its nearest two folders, and so on.
pub(crate) fn with_folders(folders: &[&str], text: &str) -> Vec<String> {
    let most = folders.len().min(DerivedName::MAX_FOLDERS);
    let nearest = |count: usize| folders.get(folders.len().saturating_sub(count)..).unwrap_or_default();
    (1..=most).map(|count| format!("{}-{text}", nearest(count).join("-"))).collect()
}

/// Makes a text a part of a name; see [the module](self) for how.
pub fn name_part(text: &str) -> String {
    part(text)
}

/// The name of what a repository has at a revision, which is the tag. A revision that cannot be one becomes one: `refs/pr/1`
/// is `refs-pr-1`.
///
/// # Errors
/// When the revision is empty.
pub fn name_at_revision(name: &Reference, revision: &str) -> Result<Reference, ReferenceError> {
    name.with_tag(revision).or_else(|_| name.with_tag(&part(revision)))
}

/// Makes a text a part of a name, `model` and a digest if nothing in it may begin one. Empty only for an empty text.
pub(crate) fn part(text: &str) -> String {
    let allowed = |c: char| if c.is_ascii() && !is_allowed(c) { '-' } else { c };
    let replaced: String = text.chars().map(allowed).skip_while(|c| "-.".contains(*c)).collect();
    if replaced.is_empty() && !text.is_empty() {
        return part_before("model", &Digest::of(text.as_bytes()).short());
    }
    let encoded = match replaced.is_ascii() {
        true => replaced,
        false => format!("xn--{}", idna::punycode::encode_str(&replaced).unwrap_or_default()),
    };
    match encoded.len() > DerivedName::MAX_BYTES || encoded == "xn--" {
        true => part_before(&encoded, &Digest::of(text.as_bytes()).short()),
        false => encoded,
    }
}

/// The text, shortened if necessary, and then the ID. The text is ASCII.
fn part_before(text: &str, id: &str) -> String {
    let kept: String = text.chars().take(DerivedName::MAX_BYTES.saturating_sub(id.len() + 1)).collect();
    format!("{kept}-{id}")
}

fn is_allowed(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.".contains(c)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn first(path: &str) -> String {
        DerivedName::from_path(path).unwrap().first().short()
    }

    #[test]
    fn file_name_gives_model_and_tag() {
        for (file, name) in [
            ("chain-llama-Q4_K_M.gguf", "chain-llama:Q4_K_M"),
            ("/models/Meta-Llama-3-8B.Q8_0.gguf", "Meta-Llama-3-8B:Q8_0"),
            ("gpt-oss-20b-MXFP4.gguf", "gpt-oss-20b:MXFP4"),
            ("Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen3-8B:UD-Q4_K_XL"),
            ("my model (1).gguf", "my-model--1-:latest"),
            ("Model.GGUF", "Model:latest"),
            ("model", "model:latest"),
            ("qwen-中文.gguf", "xn--qwen--9n1h080l:latest"),
            ("модель-Q4_0.gguf", "xn--d1acsbk1g:Q4_0"),
            ("(draft) model-Q4_0.gguf", "draft--model:Q4_0"),
            (" .hidden.gguf", "hidden:latest"),
        ] {
            assert_eq!(first(file), name, "{file}");
        }
        for file in ["..gguf", "--.gguf", "((.gguf", "+++-Q4_0.gguf"] {
            assert!(first(file).starts_with("model-"), "{file}: {}", first(file));
        }
        for file in [".gguf", "", "/"] {
            assert!(DerivedName::from_path(file).is_err(), "{file}");
        }
    }

    fn others(path: &str, file_names_differ: bool) -> Vec<String> {
        let names = DerivedName::from_path(path).unwrap().with_id(Digest::of(b"m"), file_names_differ);
        names.others().iter().map(Reference::short).collect()
    }

    #[test]
    fn what_distinguishes_the_files_comes_before_the_id() {
        let id = Digest::of(b"m").short();
        let [by_id, whole] = [format!("x-{id}:Q4_0"), "x-Q4_0:latest".to_owned()];
        let folders = ["b-x:Q4_0", "a-b-x:Q4_0"].map(str::to_owned);
        let [near, far] = folders;
        assert_eq!(others("/a/b/x-Q4_0.gguf", false), [&near, &far, &whole, &by_id].map(Clone::clone));
        assert_eq!(others("/a/b/x-Q4_0.gguf", true), [whole, by_id, near, far]);
        assert_eq!(others("m.gguf", true), [format!("m-{id}:latest")]);
    }

    #[test]
    fn long_names_that_begin_alike_stay_different() {
        let name = |end: &str| first(&format!("{}-{end}.gguf", "a".repeat(100)));
        assert_ne!(name("one"), name("two"));
        assert_eq!(name("one").len(), DerivedName::MAX_BYTES + ":latest".len());
    }

    /// File names as people have them: words, letters of several scripts, spaces, quants, any length.
    fn file_name() -> impl Strategy<Value = String> {
        let word = prop_oneof![
            "[a-zA-Z0-9]{1,12}",
            "[\u{4e00}-\u{4e40}]{1,4}",
            "[а-я]{1,8}",
            "[éèüßñ]{1,5}",
            "[ぁ-ん]{1,6}",
            "[a-z]{70,120}",
        ];
        let separator = prop_oneof![Just("-"), Just("_"), Just("."), Just(" "), Just(" ("), Just("+")];
        let quant = prop_oneof![Just(""), Just("-Q4_K_M"), Just(".Q8_0"), Just("-q4_k_m")];
        (prop::collection::vec((word, separator), 1..4), quant).prop_map(|(words, quant)| {
            let text: String = words.into_iter().map(|(word, separator)| word + separator).collect();
            format!("{}{quant}.gguf", text.trim_end_matches([' ', '-', '.', '(', '+', '_']))
        })
    }

    /// The name that a commit chooses.
    fn choose(taken: &BTreeMap<String, Digest>, names: &DerivedName, content: Digest) -> String {
        let all: Vec<String> =
            std::iter::once(names.first()).chain(names.others()).map(Reference::canonical).collect();
        let own = all.iter().find(|name| taken.get(*name) == Some(&content));
        own.or_else(|| all.iter().find(|name| !taken.contains_key(*name))).cloned().expect("a free name")
    }

    proptest! {
        // 2,500 files in all, which take two seconds.
        #![proptest_config(ProptestConfig::with_cases(10))]

        #[test]
        fn different_files_get_different_names_and_the_same_ones_again(
            files in prop::collection::vec((file_name(), 0..4usize), 250)
        ) {
            let mut taken = BTreeMap::new();
            let mut given = Vec::new();
            for (file, folder) in &files {
                let path = format!("/models/{}/{file}", ["a", "b", "c/a", "Ä"][*folder]);
                let content = Digest::of(path.as_bytes());
                let names = DerivedName::from_path(&path).unwrap().with_id(content, folder % 2 == 0);
                let name = choose(&taken, &names, content);
                prop_assert!(taken.get(&name).is_none_or(|other| *other == content));
                taken.insert(name.clone(), content);
                given.push((path, names, content, name));
            }
            for (path, names, content, name) in given {
                prop_assert_eq!(choose(&taken, &names, content), name, "{}", path);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn every_file_with_a_stem_has_a_name(stem in "[^/\\x00]{1,60}") {
            let path = format!("/m/{stem}.gguf");
            prop_assert!(DerivedName::from_path(&path).is_ok(), "{}", path);
        }

        #[test]
        fn different_letters_stay_different(one in "[a-zé-ÿ\u{4e00}-\u{4eff}]{1,20}", two in "[a-zé-ÿ\u{4e00}-\u{4eff}]{1,20}") {
            prop_assert_eq!(part(&one) == part(&two), one == two);
        }

        #[test]
        fn any_text_gives_a_name_or_none(path in "\\PC{0,200}") {
            if let Ok(names) = DerivedName::from_path(&path) {
                for name in std::iter::once(names.first()).chain(names.others()) {
                    prop_assert_eq!(name.short().parse::<Reference>().unwrap().short(), name.short());
                }
            }
        }
    }
}
