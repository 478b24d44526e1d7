//! Which files of a folder are taken, and why others are not.

use std::fmt;

use super::FolderFile;
use crate::file_format::FileFormat;
use crate::glob::Glob;
use crate::model_file::{describes_other_weights, has_other_weights, is_pickle};
use crate::signature::Bundle;
use crate::text::quoted;

/// Patterns of paths. Without patterns, the files of the model are taken. With patterns to include, exactly the files that
/// match one are taken, in any format. Files that match a pattern to exclude are never taken. `*` also matches `/`, and a
/// pattern that ends with `/` stands for everything in that folder.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

#[derive(Clone, Debug)]
struct Pattern {
    /// As the user wrote it.
    text: String,
    glob: Glob,
}

/// A pattern that chooses nothing, which its user may not expect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UselessPattern {
    option: &'static str,
    pattern: String,
    why: &'static str,
}

/// A file of the folder that is not a file of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub file: FolderFile,
    pub reason: Reason,
}

/// Why a file is left out. Its text ends with what to do to take it, if that is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// A program is downloading it, or did not end its download.
    Partial,
    /// A record of a download, of a version control system or of a desktop.
    Hidden,
    /// The signature of the model.
    Signature,
    /// A part of its path begins with `-`.
    Dash,
    Excluded,
    /// No pattern to include matches it.
    NotIncluded,
    Pickle,
    /// Weights in another format.
    OtherFormat,
    /// The description of a network whose weights are in another format.
    OfOtherFormat,
    /// An index of pickles.
    IndexOfPickles,
    Gguf,
    /// In a folder of several models, but in none of theirs.
    NoModel,
    /// The folder `original/`, which has the weights once more for other programs.
    Original,
    /// Too large for a file beside weights.
    Large,
}

impl Selection {
    pub fn new<'p>(
        include: impl IntoIterator<Item = &'p str>,
        exclude: impl IntoIterator<Item = &'p str>,
    ) -> Self {
        Self {
            include: include.into_iter().map(Pattern::new).collect(),
            exclude: exclude.into_iter().map(Pattern::new).collect(),
        }
    }

    /// The patterns that match none of these paths, or only files that are never taken.
    pub fn useless<'p>(&self, paths: &(impl Iterator<Item = &'p str> + Clone)) -> Vec<UselessPattern> {
        let include = self.include.iter().map(|pattern| ("--include", pattern));
        let exclude = self.exclude.iter().map(|pattern| ("--exclude", pattern));
        let useless = include.chain(exclude).filter_map(|(option, pattern)| {
            let why = pattern.why_useless(paths, option == "--exclude")?;
            Some(UselessPattern { option, pattern: pattern.text.clone(), why })
        });
        useless.collect()
    }

    /// Whether a pattern excludes the file at this path.
    pub fn excludes(&self, path: &str) -> bool {
        self.exclude.iter().any(|pattern| pattern.glob.matches(path))
    }

    /// Whether patterns say which files are taken.
    pub fn has_includes(&self) -> bool {
        !self.include.is_empty()
    }

    /// Whether there are no patterns.
    pub fn is_default(&self) -> bool {
        self.include.is_empty() && self.exclude.is_empty()
    }

    /// Whether a GGUF file, which is a model of its own, is taken.
    pub fn takes_gguf(&self, file: &FolderFile) -> bool {
        matches!(self.reason_against(file), None | Some(Reason::Gguf | Reason::Original))
    }

    /// Why the file is left out; `None` if it is taken.
    pub fn reason_against(&self, file: &FolderFile) -> Option<Reason> {
        let is_match = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.glob.matches(&file.path));
        if let Some(reason) = never_taken(&file.path) {
            return Some(reason);
        }
        match (self.has_includes(), is_match(&self.include), is_match(&self.exclude)) {
            (_, _, true) => Some(Reason::Excluded),
            (true, false, _) => Some(Reason::NotIncluded),
            (true, true, _) => None,
            (false, ..) => not_by_default(file),
        }
    }
}

impl Pattern {
    fn new(text: &str) -> Self {
        let path = text.strip_prefix("./").unwrap_or(text);
        let glob = match path.ends_with('/') {
            true => Glob::new(&format!("{path}*")),
            false => Glob::new(path),
        };
        Self { text: text.to_owned(), glob }
    }

    fn why_useless<'p>(
        &self,
        paths: &(impl Iterator<Item = &'p str> + Clone),
        excludes: bool,
    ) -> Option<&'static str> {
        let mut matched = paths.clone().filter(|path| self.glob.matches(path)).peekable();
        if matched.peek().is_some() {
            let is_useful = excludes || matched.any(|path| !is_never_taken(path));
            return (!is_useful)
                .then_some("matches only hidden files and unfinished downloads, which are never taken");
        }
        let folder = Self::new(&format!("{}/", self.text));
        Some(match () {
            () if paths.clone().any(|path| folder.glob.matches(path)) => {
                "matches no file; with a `/` at its end it stands for the files in that folder"
            }
            () if self.text.contains(['{', ',']) => {
                "matches no file; braces and commas stand for themselves: give the option once for each pattern"
            }
            () => "matches no file",
        })
    }
}

impl fmt::Display for UselessPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.option, quoted(&self.pattern), self.why)
    }
}

impl Reason {
    /// Whether a pattern says so.
    pub const fn is_by_pattern(self) -> bool {
        matches!(self, Self::Excluded | Self::NotIncluded)
    }

    /// Whether the file has weights that could be taken.
    pub const fn is_weights(self) -> bool {
        matches!(self, Self::Pickle | Self::OtherFormat | Self::Gguf)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Partial => "a download that has not ended",
            Self::Hidden => "a hidden file or a file of the system",
            Self::Signature => "the signature of the model, which `blobd sign MODEL --signature FILE` keeps",
            Self::Dash => "a name that begins with `-`, which programs take for an option: rename it",
            Self::Excluded => "a pattern excludes it",
            Self::NotIncluded => "no pattern includes it",
            Self::Pickle => {
                "a pickle, which is never read; a pattern that includes it stores it whole, and none of its tensors is \
                 shared"
            }
            Self::OtherFormat => {
                "weights of another format; a pattern that includes it stores it whole, and none of its tensors is shared"
            }
            Self::OfOtherFormat => "belongs to weights of another format; a pattern can include both",
            Self::IndexOfPickles => "the index of pickles; a pattern can include it",
            Self::Gguf => "a GGUF file, which is a model of its own: import it by its name",
            Self::NoModel => "in no folder of a model: import it by its path",
            Self::Original => "the same weights for other programs; a pattern can include it",
            Self::Large => "too large for a file beside weights; a pattern can include it",
        })
    }
}

impl LeftOut {
    /// Whether it has weights, and a pattern leaves it out.
    pub(super) fn is_weights_by_pattern(&self) -> bool {
        let path = &self.file.path;
        self.reason.is_by_pattern() && (FileFormat::split_name(path).is_some() || has_other_weights(path))
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.file.path;
        match path.contains(char::is_control) {
            true => write!(f, "{path:?}: {}", self.reason),
            false => write!(f, "{path}: {}", self.reason),
        }
    }
}

/// Whether no pattern can include the file at this path: it is not whole, or hidden, or the signature, or looks like an
/// option.
pub fn is_never_taken(path: &str) -> bool {
    never_taken(path).is_some()
}

/// Files that no pattern can include: they are not whole, or not of a model.
fn never_taken(path: &str) -> Option<Reason> {
    const PARTIAL_ENDS: [&str; 8] = [
        ".incomplete",
        ".downloadinprogress",
        ".tmp",
        ".aria2",
        ".part",
        ".crdownload",
        ".download",
        ".opdownload",
    ];
    const PARTIAL_STARTS: [&str; 2] = ["incomplete-", "downloading_"];
    const SYSTEM: [&str; 3] = ["thumbs.db", "desktop.ini", "cachedir.tag"];
    let path = path.to_ascii_lowercase();
    let mut parts = path.split('/');
    let name = parts.next_back().unwrap_or_default();
    let is_partial = PARTIAL_ENDS.iter().any(|end| name.ends_with(end))
        || PARTIAL_STARTS.iter().any(|start| name.starts_with(start))
        || name.contains(".partial")
        || (name.starts_with('.') && name.ends_with(".shared"))
        || path.split('/').any(|part| part == "._____temp");
    let is_hidden = SYSTEM.contains(&name) || path.split('/').any(is_dot_file);
    match () {
        () if is_partial => Some(Reason::Partial),
        () if is_hidden => Some(Reason::Hidden),
        () if path == Bundle::FILE_NAME => Some(Reason::Signature),
        () if path.split('/').any(|part| part.starts_with('-')) => Some(Reason::Dash),
        () => None,
    }
}

/// Not `..`, which is an error.
fn is_dot_file(part: &str) -> bool {
    part.starts_with('.') && part != "." && part != ".."
}

fn not_by_default(file: &FolderFile) -> Option<Reason> {
    /// Tokenizers have 40 MB.
    const MAX_OTHER_BYTES: u64 = 256 << 20;
    let path = file.path.to_ascii_lowercase();
    let name = path.rsplit('/').next().unwrap_or_default();
    match FileFormat::split_name(name).map(|(_stem, format)| format.tensor_format().is_gguf()) {
        _ if path.split('/').rev().skip(1).any(|part| part == "original") => Some(Reason::Original),
        Some(true) => Some(Reason::Gguf),
        Some(false) => None,
        None if is_pickle(name) => Some(Reason::Pickle),
        None if has_other_weights(name) => Some(Reason::OtherFormat),
        None if describes_other_weights(name) => Some(Reason::OfOtherFormat),
        None if name.ends_with(".json") && name.contains(".bin.index.") => Some(Reason::IndexOfPickles),
        None if file.size > MAX_OTHER_BYTES => Some(Reason::Large),
        None => None,
    }
}
