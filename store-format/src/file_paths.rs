//! The paths that a model's files get when they become files again: in an export, in the mount, in lists of hashes.
//!
//! A plan as a value: [`paths`] gives each file its own path from the manifest, made safe, or a name made from
//! the model's; [`check`] finds what cannot be written side by side. Nothing here touches a disk.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::descriptor::MediaType;
use crate::digest::Digest;
use crate::file_format::FileFormat;
use crate::manifest::is_file_name;

/// A file of a model, as far as its path depends on it.
#[derive(Clone, Copy, Debug)]
pub struct ListedFile<'f> {
    pub media_type: &'f MediaType,
    /// Its name in the manifest.
    pub name: Option<&'f str>,
    /// Its digest. A manifest may name a file several times.
    pub digest: Digest,
    /// The extension of its content, with the dot, if that is known.
    pub extension: Option<&'f str>,
}

/// The path of each file below a folder: its own from the manifest, with its folders, or [`names`].
pub fn paths(stem: &str, files: &[ListedFile<'_>]) -> Vec<String> {
    let own: Vec<Option<String>> = files.iter().map(own_path).collect();
    let unnamed = files.iter().zip(&own).filter(|(_, own)| own.is_none());
    let unnamed: Vec<_> = unnamed.map(|(file, _)| ListedFile { name: None, ..*file }).collect();
    let mut made = names(stem, &unnamed).into_iter();
    own.into_iter().map(|own| own.or_else(|| made.next()).unwrap_or_default()).collect()
}

/// A name for each file, made from the model's: `8b.gguf`, or `8b-00001-of-00003.gguf` and so on, by which engines find
/// the other shards; `mmproj-8b.gguf`, by which llama.cpp and LM Studio find a projector; `8b-adapter.gguf`, a second
/// `8b-adapter-2.gguf`, `8b-template`. A file that is listed several times has one name.
pub fn names(stem: &str, files: &[ListedFile<'_>]) -> Vec<String> {
    let mut groups: BTreeMap<(&str, &str), Vec<Digest>> = BTreeMap::new();
    for file in files {
        let group = groups.entry((file.media_type.component(), extension(file))).or_default();
        if !group.contains(&file.digest) {
            group.push(file.digest);
        }
    }
    let numbers_are_distinct = have_distinct_numbers(files);
    let name = |file: &ListedFile<'_>| {
        let (part, extension) = (file.media_type.component(), extension(file));
        let group = groups.get(&(part, extension)).map_or(&[][..], Vec::as_slice);
        let place = group.iter().position(|digest| *digest == file.digest).unwrap_or(0);
        let count = group.len();
        match part {
            WEIGHTS if count <= 1 => format!("{stem}{extension}"),
            WEIGHTS => match file.name.and_then(shard_suffix).filter(|_| numbers_are_distinct) {
                Some(suffix) => format!("{stem}{suffix}{extension}"),
                None => format!("{stem}-{:05}-of-{count:05}{extension}", place.saturating_add(1)),
            },
            _ => {
                let number = if place == 0 { String::new() } else { format!("-{}", place.saturating_add(1)) };
                match part {
                    PROJECTOR => format!("mmproj-{stem}{number}{extension}"),
                    _ => format!("{stem}-{}{number}{extension}", plain(part)),
                }
            }
        }
    };
    files.iter().map(name).collect()
}

/// Whether the files of weights have different shard numbers in their names.
fn have_distinct_numbers(files: &[ListedFile<'_>]) -> bool {
    let mut seen: BTreeMap<&str, Digest> = BTreeMap::new();
    let weights = files.iter().filter(|file| file.media_type.component() == WEIGHTS);
    let mut numbered = weights.filter_map(|file| Some((file.name.and_then(shard_suffix)?, file.digest)));
    numbered.all(|(suffix, digest)| *seen.entry(suffix).or_insert(digest) == digest)
}

/// Why files cannot be written side by side.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathClash {
    #[error("{path}: two files have this path, {first} and {second}")]
    Same { path: String, first: Digest, second: Digest },
    #[error("{path}: this file and the folder of {other} have one path")]
    FileAndFolder { path: String, other: String },
}

/// Checks that files with these paths and digests can be written side by side where case matters.
///
/// # Errors
/// [`PathClash`] for the first path that is needed twice.
pub fn check<'p>(files: impl IntoIterator<Item = (&'p str, Digest)>) -> Result<(), PathClash> {
    let mut by_path: BTreeMap<&str, Digest> = BTreeMap::new();
    for (path, digest) in files {
        match by_path.insert(path, digest) {
            Some(first) if first != digest => {
                return Err(PathClash::Same { path: path.to_owned(), first, second: digest });
            }
            _ => {}
        }
    }
    for other in by_path.keys() {
        if let Some(path) = folders(other).find(|folder| by_path.contains_key(folder)) {
            return Err(PathClash::FileAndFolder { path: path.to_owned(), other: (*other).to_owned() });
        }
    }
    Ok(())
}

/// Two paths, or folders in them, that are the same to a file system that ignores case.
pub fn case_twins<'p>(paths: impl IntoIterator<Item = &'p str>) -> Option<(String, String)> {
    let paths: BTreeSet<&str> = paths.into_iter().collect();
    let all: BTreeSet<&str> = paths.iter().flat_map(|path| folders(path).chain([*path])).collect();
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    all.into_iter().find_map(|path| {
        let twin = seen.insert(path.to_lowercase(), path)?;
        Some((twin.to_owned(), path.to_owned()))
    })
}

/// The paths of the folders in which a file is: `a` and `a/b` of `a/b/c`.
fn folders(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').filter_map(|(end, _)| path.get(..end))
}

const WEIGHTS: &str = "model";
const PROJECTOR: &str = "projector";

/// A file's own path, if the manifest gives one that is safe. Hidden files and names that look like options are
/// renamed: a model must not put a `.profile` into somebody's home.
fn own_path(file: &ListedFile<'_>) -> Option<String> {
    let own = file.name.filter(|name| is_file_name(name))?;
    let safe = |part: &str| match part.starts_with(['.', '-']) {
        true => format!("_{part}"),
        false => part.to_owned(),
    };
    let mut path = own.split('/').map(safe).collect::<Vec<_>>().join("/");
    // These names are those of a tensor, and of a folder that was packed.
    let missing = match file.media_type.component() {
        "tensor" => Some(".safetensors"),
        _ => packed_extension(file.media_type),
    };
    if let Some(missing) = missing.filter(|missing| !path.ends_with(missing)) {
        path.push_str(missing);
    }
    // With what was added, it may be longer than a name can be.
    is_file_name(&path).then_some(path)
}

/// The extension of a file without a name of its own.
fn extension<'f>(file: &ListedFile<'f>) -> &'f str {
    const TYPES: [(&str, &str); 3] = [("safetensors", ".safetensors"), ("dduf", ".dduf"), ("gguf", ".gguf")];
    let media_type = file.media_type.as_str();
    if let Some(packed) = packed_extension(file.media_type) {
        return packed;
    }
    if file.media_type.component() == "tensor" {
        return ".safetensors";
    }
    if !file.media_type.holds_tensors() {
        return "";
    }
    let named = TYPES.iter().find(|(name, _)| media_type.contains(name)).map(|(_, extension)| *extension);
    file.extension.or(named).unwrap_or(FileFormat::DEFAULT.extension())
}

fn packed_extension(media_type: &MediaType) -> Option<&'static str> {
    const ENDS: [(&str, &str); 7] = [
        (".tar", ".tar"),
        (".tar+gzip", ".tar.gz"),
        (".tar.gzip", ".tar.gz"),
        (".tar.gz", ".tar.gz"),
        (".tar+zstd", ".tar.zst"),
        (".tar.zstd", ".tar.zst"),
        (".tar.zst", ".tar.zst"),
    ];
    ENDS.iter().find(|(end, _)| media_type.as_str().ends_with(end)).map(|(_, extension)| *extension)
}

/// A component as part of a file's name. A registry may send any text as a media type.
fn plain(part: &str) -> String {
    const MAX_CHARS: usize = 64;
    let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '_') { c } else { '-' };
    part.chars().take(MAX_CHARS).map(safe).collect()
}

/// `-00002-of-00003` of `x-00002-of-00003.gguf`.
fn shard_suffix(name: &str) -> Option<&str> {
    const FORM: &str = "-00000-of-00000";
    let (stem, _format) = FileFormat::split_name(name)?;
    let suffix = stem.get(stem.len().checked_sub(FORM.len())?..)?;
    let fits = |(found, form): (u8, u8)| if form == b'0' { found.is_ascii_digit() } else { found == form };
    suffix.bytes().zip(FORM.bytes()).all(fits).then_some(suffix)
}

/// The indices of the files to write: of several with one path and digest, the first.
pub fn distinct<'p>(files: impl IntoIterator<Item = (&'p str, Digest)>) -> Vec<usize> {
    let mut seen = HashSet::new();
    let files = files.into_iter().enumerate();
    files.filter(|(_, file)| seen.insert(*file)).map(|(place, _)| place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = MediaType::OLLAMA_MODEL;
    const RAW: &str = "application/vnd.cncf.model.weight.v1.raw";
    const ADAPTER: &str = "application/vnd.ollama.image.adapter";

    /// Media type, name, content, extension of the content.
    type Row = (&'static str, Option<&'static str>, u8, Option<&'static str>);

    fn with<T>(rows: &[Row], f: impl FnOnce(&[ListedFile<'_>]) -> T) -> T {
        let types: Vec<MediaType> = rows.iter().map(|(media_type, ..)| MediaType::new(*media_type)).collect();
        let files = rows.iter().zip(&types).map(|((_, name, content, extension), media_type)| ListedFile {
            media_type,
            name: *name,
            digest: Digest::of(&[*content]),
            extension: *extension,
        });
        f(&files.collect::<Vec<_>>())
    }

    fn paths_of(rows: &[Row]) -> Vec<String> {
        with(rows, |files| paths("m-1", files))
    }

    fn clash(files: &[(&str, u8)]) -> Option<PathClash> {
        check(files.iter().map(|(path, content)| (*path, Digest::of(&[*content])))).err()
    }

    #[test]
    fn files_keep_their_own_paths_with_folders() {
        for media_type in [MODEL, RAW, "application/vnd.docker.ai.safetensors"] {
            assert_eq!(
                paths_of(&[
                    (media_type, Some("unet/model.safetensors"), 1, None),
                    (media_type, Some("vae/model.safetensors"), 2, None),
                ]),
                ["unet/model.safetensors", "vae/model.safetensors"]
            );
        }
        assert_eq!(paths_of(&[(RAW, Some("plain.safetensors"), 1, None)]), ["plain.safetensors"]);
        assert_eq!(
            paths_of(&[(MODEL, Some("BF16/a-00001-of-00002.gguf"), 1, None)]),
            ["BF16/a-00001-of-00002.gguf"]
        );
    }

    #[test]
    fn names_are_made_for_files_without_a_safe_one() {
        assert_eq!(paths_of(&[(MODEL, None, 1, None)]), ["m-1.gguf"]);
        for unsafe_name in ["/etc/passwd", "../x", "a/../../x", "a\\b", "a\nb", "a//b", "", "."] {
            assert_eq!(
                paths_of(&[(MODEL, Some(unsafe_name), 1, Some(".gguf"))]),
                ["m-1.gguf"],
                "{unsafe_name:?}"
            );
        }
        let long: &'static str = Box::leak("x".repeat(256).into_boxed_str());
        assert_eq!(paths_of(&[(RAW, Some(long), 1, Some(".safetensors"))]), ["m-1.safetensors"]);
        assert_eq!(
            paths_of(&[(MODEL, None, 1, None), (MODEL, None, 2, None)]),
            ["m-1-00001-of-00002.gguf", "m-1-00002-of-00002.gguf"]
        );
        assert_eq!(
            paths_of(&[(MODEL, None, 1, None), (RAW, Some("x.gguf"), 2, None)]),
            ["m-1.gguf", "x.gguf"]
        );
        let unsafe_shards = ["/a-00002-of-00002.gguf", "/a-00001-of-00002.gguf"];
        let [first, second] = unsafe_shards.map(Some);
        assert_eq!(
            paths_of(&[(MODEL, first, 1, None), (MODEL, second, 2, None)]),
            ["m-1-00001-of-00002.gguf", "m-1-00002-of-00002.gguf"],
            "nothing of an unsafe name is used"
        );
    }

    #[test]
    fn extension_is_that_of_the_content() {
        for (media_type, content, expected) in [
            ("application/vnd.docker.ai.safetensors", None, "m-1.safetensors"),
            ("application/vnd.docker.ai.dduf", None, "m-1.dduf"),
            (RAW, Some(".safetensors"), "m-1.safetensors"),
            (RAW, Some(".pt"), "m-1.pt"),
            (RAW, Some(".gguf"), "m-1.gguf"),
            ("application/vnd.cncf.model.weight.v1.tar", None, "m-1.tar"),
            ("application/vnd.cncf.model.doc.v1.tar+gzip", None, "m-1-doc.tar.gz"),
            ("application/vnd.ollama.image.template", None, "m-1-template"),
            (MediaType::DOCKER_CONFIG, None, "m-1-config"),
        ] {
            assert_eq!(paths_of(&[(media_type, None, 1, content)]), [expected], "{media_type}");
        }
        let doc = "application/vnd.cncf.model.doc.v1.tar";
        assert_eq!(
            paths_of(&[(doc, Some("docs"), 1, None), (doc, Some("x.tar"), 2, None)]),
            ["docs.tar", "x.tar"]
        );
        let tensor = "application/vnd.ollama.image.tensor";
        assert_eq!(paths_of(&[(tensor, Some("a/b.weight"), 1, None)]), ["a/b.weight.safetensors"]);
    }

    #[test]
    fn hidden_files_and_options_are_renamed() {
        for (own, expected) in [
            (".ssh/authorized_keys", "_.ssh/authorized_keys"),
            (".profile", "_.profile"),
            ("a/.b/.c", "a/_.b/_.c"),
            ("-rf", "_-rf"),
            ("...", "_..."),
        ] {
            assert_eq!(paths_of(&[(RAW, Some(own), 1, None)]), [expected]);
        }
    }

    #[test]
    fn media_type_that_a_registry_made_up_gives_a_safe_name() {
        let hostile: &'static str = Box::leak(format!("../../{}\n", "x".repeat(500)).into_boxed_str());
        let [name] = paths_of(&[(hostile, None, 1, None)]).try_into().unwrap();
        assert!(is_file_name(&name) && !name.contains('/'), "{name}");
    }

    #[test]
    fn file_that_is_listed_twice_has_one_name() {
        assert_eq!(paths_of(&[(MODEL, None, 1, None), (MODEL, None, 1, None)]), ["m-1.gguf", "m-1.gguf"]);
        let three = [(ADAPTER, None, 1, None), (ADAPTER, None, 1, None), (ADAPTER, None, 2, None)];
        assert_eq!(paths_of(&three), ["m-1-adapter.gguf", "m-1-adapter.gguf", "m-1-adapter-2.gguf"]);
        let all = paths_of(&three);
        let files = all.iter().map(String::as_str).zip([1, 1, 2].map(|content| Digest::of(&[content])));
        assert_eq!(distinct(files), [0, 2]);
        let projector = MediaType::OLLAMA_PROJECTOR;
        let two = [(projector, None, 1, None), (projector, None, 2, None)];
        assert_eq!(paths_of(&two), ["mmproj-m-1.gguf", "mmproj-m-1-2.gguf"]);
        let twice = [(RAW, Some("a.gguf"), 1, None), (RAW, Some("b.gguf"), 1, None)];
        assert_eq!(paths_of(&twice), ["a.gguf", "b.gguf"]);
    }

    #[test]
    fn paths_that_are_needed_twice_are_refused() {
        assert_eq!(clash(&[("a", 1), ("b", 2), ("a", 1), ("c/a", 3)]), None);
        assert!(matches!(clash(&[("a", 1), ("a", 2)]), Some(PathClash::Same { .. })));
        for files in [[("a/b", 1), ("a", 2)], [("a", 1), ("a/b/c", 2)], [("x/a", 1), ("x/a/c", 1)]] {
            assert!(matches!(clash(&files), Some(PathClash::FileAndFolder { .. })), "{files:?}");
        }
        assert_eq!(clash(&[("ab", 1), ("a/b", 2), ("a.b", 3)]), None);
    }

    #[test]
    fn paths_that_differ_in_case_only_are_found() {
        assert_eq!(case_twins(["a/b", "a/c", "x"]), None);
        assert_eq!(case_twins(["A", "b", "a"]), Some(("A".to_owned(), "a".to_owned())));
        assert_eq!(case_twins(["Unet/a", "unet/b"]), Some(("Unet".to_owned(), "unet".to_owned())));
        assert!(case_twins(["Größe", "GRÖßE"]).is_some());
    }

    #[test]
    fn suffix_of_a_shard_is_found_in_any_text() {
        assert_eq!(shard_suffix("a-00001-of-00002.gguf"), Some("-00001-of-00002"));
        for text in ["", "a.gguf", "-0001-of-00002.gguf", "ä0001-of-00002.gguf", "a-00001-of-0000x.gguf"] {
            assert_eq!(shard_suffix(text), None, "{text}");
        }
    }
}
