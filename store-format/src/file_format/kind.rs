//! What a file is that has no format that blobd splits, and what to do about it.
//!
//! One table: a row for each kind, recognised by its first bytes. People mostly meet these files as failed
//! downloads, or as models in other formats.

use std::fmt;

use crate::safetensors::Header;

/// The bytes by which all kinds are distinguished: a tar archive has its name at byte 257.
pub(super) const START_BYTES: usize = 512;

/// A kind of file that blobd does not split.
pub struct FileKind {
    name: &'static str,
    extension: Option<&'static str>,
    /// What to do with such a file on this machine.
    advice: &'static str,
    /// What to do if such a file comes from an address.
    advice_for_downloads: &'static str,
    is_start: fn(&[u8]) -> bool,
}

impl FileKind {
    /// With an article, such as `a safetensors file`.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The file name extension, with the dot, if files of this kind have one.
    pub const fn extension(&self) -> Option<&'static str> {
        self.extension
    }

    /// The kind of a file that starts with these bytes: the first 512, or all of a shorter file.
    pub fn from_start(start: &[u8]) -> &'static Self {
        KINDS.iter().find(|kind| (kind.is_start)(start)).unwrap_or(&OTHER)
    }
}

/// The name instead of the pointer to a function.
impl fmt::Debug for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for FileKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for FileKind {}

/// Where a file comes from, which decides what a user can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOrigin {
    Disk,
    /// It is downloaded from an address that the user gave.
    Download,
}

/// A file that has none of the formats that blobd splits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundFile {
    kind: &'static FileKind,
    start: Vec<u8>,
}

impl FoundFile {
    pub(super) fn new(start: &[u8]) -> Self {
        Self { kind: FileKind::from_start(start), start: start.to_vec() }
    }

    pub const fn kind(&self) -> &'static FileKind {
        self.kind
    }

    pub const fn advice(&self, origin: FileOrigin) -> &'static str {
        match origin {
            FileOrigin::Disk => self.kind.advice,
            FileOrigin::Download => self.kind.advice_for_downloads,
        }
    }
}

impl fmt::Display for FoundFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_BYTES: usize = 4;
        f.write_str(self.kind.name)?;
        if *self.kind == OTHER {
            let first = self.start.get(..SHOWN_BYTES).unwrap_or(&self.start);
            return write!(f, " that starts with \"{}\"", first.escape_ascii());
        }
        match server_message(&self.start) {
            Some(message) => write!(f, " that says {message:?}"),
            None => Ok(()),
        }
    }
}

/// What a file server says in a short XML or JSON document, such as `AccessDenied`.
fn server_message(start: &[u8]) -> Option<String> {
    const SHOWN_CHARS: usize = 80;
    let text = std::str::from_utf8(start).ok()?;
    let message = match text.split_once("<Code>") {
        Some((_, rest)) => rest.split_once("</Code>")?.0.to_owned(),
        None => {
            let document: serde_json::Value = serde_json::from_str(text).ok()?;
            ["error", "message"].iter().find_map(|key| document.get(key)?.as_str().map(str::to_owned))?
        }
    };
    Some(message.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS).collect())
}

/// In the order in which they are tried.
static KINDS: [FileKind; 27] = [
    FileKind {
        name: "an empty file",
        extension: None,
        advice: "it was never downloaded or copied, or the disk was full: download it again",
        advice_for_downloads: "its server has nothing there: check the address",
        is_start: <[u8]>::is_empty,
    },
    FileKind {
        name: "a file that starts with zeros only",
        extension: None,
        advice: "a download reserved its space and did not end: download it again",
        advice_for_downloads: "the file at this address is incomplete: only its publisher can correct this",
        is_start: |start| start.len() >= 64 && start.iter().all(|byte| *byte == 0),
    },
    FileKind {
        name: "an old ggml file",
        extension: Some(".bin"),
        advice: "the ggml, ggmf, ggjt and ggla formats ended in August 2023: convert the original model again with a \
                 current llama.cpp, or pull a GGUF file of it",
        advice_for_downloads: "the ggml, ggmf, ggjt and ggla formats ended in August 2023: look for a GGUF file of the \
                               model",
        // They wrote their name as a little-endian number.
        is_start: |start| {
            const NAMES: [&[u8]; 4] = [b"ggml", b"ggmf", b"ggjt", b"ggla"];
            let first = start.get(..4).unwrap_or_default();
            NAMES.iter().any(|name| *name == first || name.iter().rev().eq(first))
        },
    },
    FileKind {
        name: "a GGUF file with swapped bytes",
        extension: None,
        advice: "a program has reversed each group of four bytes: copy or download it again",
        advice_for_downloads: "only its publisher can correct this",
        is_start: |start| start.starts_with(b"FUGG"),
    },
    FileKind {
        name: "a Git LFS pointer",
        extension: None,
        advice: "the file itself was not downloaded: run `git lfs pull` in its repository",
        advice_for_downloads: "the address is that of the pointer: use that of the file, which at hf.co has /resolve/ in \
                               place of /raw/",
        is_start: |start| {
            start.starts_with(b"version https://git-lfs.github.com/spec/")
                || start.starts_with(b"version https://hawser.github.com/spec/")
        },
    },
    FileKind {
        name: "a Xet pointer",
        extension: None,
        advice: "the file itself was not downloaded: fetch it with the program that made the pointer, or download it with \
                 its link",
        advice_for_downloads: "the address is that of the pointer: use that of the file, which at hf.co has /resolve/ in \
                               place of /raw/",
        is_start: |start| start.starts_with(b"# xet version"),
    },
    FileKind {
        name: "a web page",
        extension: Some(".html"),
        advice: "the download got a page, such as one that asks for a login, in place of the file: download it again, \
                 from the link of the file itself",
        advice_for_downloads: "use the address of the file itself; if the page asks for a login, the file needs one",
        is_start: |start| begins_with_tag(start, &["!doctype html", "html", "head", "body", "script"]),
    },
    FileKind {
        name: "an XML document",
        extension: Some(".xml"),
        advice: "it is an error message of a file server, or no model: download the file again",
        advice_for_downloads: "its server sent this in place of a file: check the address, and whether the link has \
                               expired",
        is_start: |start| begins_with_tag(start, &["?xml", "error", "listbucketresult"]),
    },
    FileKind {
        name: "the index of a sharded safetensors model",
        extension: Some(".json"),
        advice: "it only names the files with the weights: import those",
        advice_for_downloads: "it only names the files with the weights: use their addresses",
        is_start: |start| is_json(start) && contains(start, &[b"\"weight_map\"", b"\"total_size\""]),
    },
    without_weights("a JSON document", ".json", is_json),
    to_unpack(
        "a file compressed with gzip",
        ".gz",
        "unpack it first: `gunzip`, or `tar -xf` for a .tar.gz",
        |start| start.starts_with(b"\x1f\x8b"),
    ),
    to_unpack(
        "a file compressed with zstd",
        ".zst",
        "unpack it first: `unzstd`, or `tar -xf` for a .tar.zst",
        |start| start.starts_with(b"\x28\xb5\x2f\xfd"),
    ),
    to_unpack(
        "a file compressed with xz",
        ".xz",
        "unpack it first: `unxz`, or `tar -xf` for a .tar.xz",
        |start| start.starts_with(b"\xfd7zXZ\0"),
    ),
    to_unpack(
        "a file compressed with bzip2",
        ".bz2",
        "unpack it first: `bunzip2`, or `tar -xf` for a .tar.bz2",
        |start| start.starts_with(b"BZh") && start.get(3).is_some_and(u8::is_ascii_digit),
    ),
    to_unpack("a file compressed with lz4", ".lz4", "unpack it first: `unlz4`", |start| {
        start.starts_with(b"\x04\x22\x4d\x18")
    }),
    to_unpack("a 7z archive", ".7z", "unpack it first: `7z x`", |start| {
        start.starts_with(b"7z\xbc\xaf\x27\x1c")
    }),
    to_unpack("a rar archive", ".rar", "unpack it first: `unrar x`", |start| {
        start.starts_with(b"Rar!\x1a\x07")
    }),
    to_unpack("a tar archive", ".tar", "unpack it first: `tar -xf`", |start| {
        start.get(257..262) == Some(b"ustar")
    }),
    to_convert("a PyTorch checkpoint", ".pt", |start| {
        let is_zip = start.starts_with(b"PK\x03\x04") && contains(start, &[b"/data.pkl", b"/byteorder"]);
        is_zip || is_pickle(start)
    }),
    to_unpack(
        "a zip archive",
        ".zip",
        "unpack it first: `unzip`; a DDUF file is a folder of diffusers in such an archive, and \
         `blobd import FOLDER --include '*.dduf'` stores it whole, so that nothing of it is shared",
        |start| start.starts_with(b"PK\x03\x04") || start.starts_with(b"PK\x05\x06"),
    ),
    to_convert("an HDF5 file", ".h5", |start| start.starts_with(b"\x89HDF\r\n\x1a\n")),
    to_convert("a numpy array", ".npy", |start| start.starts_with(b"\x93NUMPY")),
    to_convert("a TensorFlow Lite model", ".tflite", |start| start.get(4..8) == Some(b"TFL3")),
    FileKind {
        name: "a llamafile",
        extension: Some(".llamafile"),
        advice: "the GGUF file is inside of it: extract it with `unzip` and import that",
        advice_for_downloads: "the GGUF file is inside of it: download it with another program, extract it with `unzip`, \
                               and import that",
        is_start: |start| start.starts_with(b"MZqFpD='") || start.starts_with(b"jartsr='"),
    },
    FileKind {
        name: "a program",
        extension: None,
        advice: "if it is a llamafile, the GGUF file is inside of it: extract it with `unzip` and import that",
        advice_for_downloads: "if it is a llamafile, the GGUF file is inside of it: download it with another program, \
                               extract it with `unzip`, and import that",
        is_start: |start| start.starts_with(b"\x7fELF") || start.starts_with(b"MZ"),
    },
    without_weights("a PDF document", ".pdf", |start| start.starts_with(b"%PDF-")),
    without_weights("a text", ".txt", is_text),
];

static OTHER: FileKind = FileKind {
    name: "a file",
    extension: None,
    advice: "blobd imports GGUF and safetensors files; if it should be one, it is damaged: copy or download it again",
    advice_for_downloads: "blobd pulls GGUF and safetensors files; if it should be one, only its publisher can correct \
                           it",
    is_start: |_start| true,
};

/// A row of a packed file.
const fn to_unpack(
    name: &'static str,
    extension: &'static str,
    advice: &'static str,
    is_start: fn(&[u8]) -> bool,
) -> FileKind {
    FileKind {
        name,
        extension: Some(extension),
        advice,
        advice_for_downloads: "download it with another program, unpack it, and import the GGUF file in it with \
                               `blobd import`",
        is_start,
    }
}

/// A row of weights in another format.
const fn to_convert(name: &'static str, extension: &'static str, is_start: fn(&[u8]) -> bool) -> FileKind {
    FileKind {
        name,
        extension: Some(extension),
        advice: "convert the original model with llama.cpp's convert_hf_to_gguf.py and import the result, or pull a \
                 GGUF file of it; `blobd import FOLDER --include PATTERN` stores the file whole, and nothing of it is shared",
        advice_for_downloads: "look for a GGUF file of the model",
        is_start,
    }
}

const fn without_weights(
    name: &'static str,
    extension: &'static str,
    is_start: fn(&[u8]) -> bool,
) -> FileKind {
    FileKind {
        name,
        extension: Some(extension),
        advice: "it has no weights: name the file that has them, or leave it out of its folder with `--exclude PATTERN`",
        advice_for_downloads: "it has no weights: use the address of the file that has them",
        is_start,
    }
}

/// The length of a header in JSON, and its first character after any number of spaces. The format has no signature. A length
/// over the limit takes two characters, so that the error says that it is over the limit.
pub(super) fn is_safetensors(start: &[u8]) -> bool {
    let Some((length, rest)) = start.split_first_chunk() else { return false };
    let length = u64::from_le_bytes(*length);
    let json = rest.trim_ascii_start();
    let is_json = json.starts_with(b"{") || (json.is_empty() && start.len() >= START_BYTES);
    match length {
        0..2 => false,
        2..=Header::MAX_BYTES => is_json,
        _ => rest.starts_with(b"{\""),
    }
}

fn is_json(start: &[u8]) -> bool {
    let start = without_mark(start).trim_ascii_start();
    let Some((first, rest)) = start.split_first() else { return false };
    let next = rest.trim_ascii_start().first();
    match first {
        b'{' => next.is_some_and(|next| matches!(next, b'"' | b'}')),
        b'[' => next.is_some_and(|next| matches!(next, b'"' | b'{' | b'[' | b']' | b'-' | b'0'..=b'9')),
        _ => false,
    }
}

/// A pickle of protocol 2 to 5 starts with its protocol, and then has an opcode, which is not 0. No text starts so.
fn is_pickle(start: &[u8]) -> bool {
    matches!(start, [0x80, 2..=5, 1..=u8::MAX, ..])
}

/// Whether the first tag of a document, after comments' and declarations' spaces, is one of these in lower case.
fn begins_with_tag(start: &[u8], tags: &[&str]) -> bool {
    let Some((b'<', rest)) = without_mark(start).trim_ascii_start().split_first() else { return false };
    tags.iter().any(|tag| {
        let found = rest.get(..tag.len()).unwrap_or_default();
        let next = rest.get(tag.len());
        found.eq_ignore_ascii_case(tag.as_bytes()) && next.is_none_or(|next| !next.is_ascii_alphanumeric())
    })
}

/// Whether all of it can be printed. The last character may be cut off.
fn is_text(start: &[u8]) -> bool {
    const LONGEST_CHARACTER: usize = 4;
    let start = without_mark(start);
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        Err(error) if start.len().saturating_sub(error.valid_up_to()) < LONGEST_CHARACTER => start
            .get(..error.valid_up_to())
            .and_then(|valid| std::str::from_utf8(valid).ok())
            .unwrap_or_default(),
        Err(_) => return false,
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t'))
}

fn without_mark(start: &[u8]) -> &[u8] {
    start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start)
}

fn contains(start: &[u8], parts: &[&[u8]]) -> bool {
    parts.iter().any(|part| start.windows(part.len()).any(|window| window == *part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zip_of(name: &str) -> Vec<u8> {
        [b"PK\x03\x04", &[0; 26][..], name.as_bytes(), b"data"].concat()
    }

    /// Each common kind, with the first bytes of a real file.
    fn samples() -> Vec<(Vec<u8>, &'static str)> {
        let mut tar = vec![b'a'; 512];
        tar[257..263].copy_from_slice(b"ustar\0");
        let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4661211424\n";
        vec![
            (Vec::new(), "an empty file"),
            (vec![0; 512], "a file that starts with zeros only"),
            (vec![0; 64], "a file that starts with zeros only"),
            (b"lmgg\0\0\0\0".to_vec(), "an old ggml file"),
            (b"tjgg\x03\0\0\0".to_vec(), "an old ggml file"),
            (b"fmgg\x01\0\0\0".to_vec(), "an old ggml file"),
            (b"algg\x01\0\0\0".to_vec(), "an old ggml file"),
            (b"ggjt".to_vec(), "an old ggml file"),
            (b"FUGG\0\0\0\x03".to_vec(), "a GGUF file with swapped bytes"),
            (lfs.to_vec(), "a Git LFS pointer"),
            (b"# xet version 0\nfilesize = 3\nhash = 'a'\n".to_vec(), "a Xet pointer"),
            (b"<!DOCTYPE html>\n<html><head>".to_vec(), "a web page"),
            (b"\xef\xbb\xbf  \n<HTML lang=\"en\">".to_vec(), "a web page"),
            (b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>".to_vec(), "an XML document"),
            (b"<Error><Code>NoSuchKey</Code></Error>".to_vec(), "an XML document"),
            (
                br#"{"metadata":{"total_size":9},"weight_map":{}}"#.to_vec(),
                "the index of a sharded safetensors model",
            ),
            (br#"{ "error": "Entry not found" }"#.to_vec(), "a JSON document"),
            (b"[1, 2]".to_vec(), "a JSON document"),
            (b"{}".to_vec(), "a JSON document"),
            (b"\x1f\x8b\x08\0".to_vec(), "a file compressed with gzip"),
            (b"\x28\xb5\x2f\xfd\0".to_vec(), "a file compressed with zstd"),
            (b"\xfd7zXZ\0\0".to_vec(), "a file compressed with xz"),
            (b"BZh91AY".to_vec(), "a file compressed with bzip2"),
            (b"\x04\x22\x4d\x18d".to_vec(), "a file compressed with lz4"),
            (b"7z\xbc\xaf\x27\x1c\0\x04".to_vec(), "a 7z archive"),
            (b"Rar!\x1a\x07\x01\0".to_vec(), "a rar archive"),
            (tar, "a tar archive"),
            (zip_of("archive/data.pkl"), "a PyTorch checkpoint"),
            (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), "a PyTorch checkpoint"),
            (b"\x80\x04\x95\0\0".to_vec(), "a PyTorch checkpoint"),
            (zip_of("readme.txt"), "a zip archive"),
            (b"\x89HDF\r\n\x1a\n".to_vec(), "an HDF5 file"),
            (b"\x93NUMPY\x01\0".to_vec(), "a numpy array"),
            (b"\x1c\0\0\0TFL3".to_vec(), "a TensorFlow Lite model"),
            (b"MZqFpD='\n".to_vec(), "a llamafile"),
            (b"\x7fELF\x02\x01".to_vec(), "a program"),
            (b"MZ\x90\0".to_vec(), "a program"),
            (b"%PDF-1.7\n".to_vec(), "a PDF document"),
            (b"buy milk\n".to_vec(), "a text"),
            ("größe ".repeat(100).into_bytes()[..511].to_vec(), "a text"),
            // The text ends within a character.
            ("größe ".repeat(100).into_bytes()[..507].to_vec(), "a text"),
            (b"a1b2c3\n0123abcd\n1732500000.5\n".to_vec(), "a text"),
            (b"\x01\x02\x03\x04\x05\x06\x07\x08".to_vec(), "a file"),
            (vec![0; 8], "a file"),
            (b"G".to_vec(), "a text"),
        ]
    }

    #[test]
    fn every_kind_is_recognised_by_its_first_bytes() {
        for (start, expected) in samples() {
            let found = FileKind::from_start(&start);
            assert_eq!(found.name(), expected, "{}", start.escape_ascii());
        }
        for kind in &KINDS {
            assert!(samples().iter().any(|(_, name)| *name == kind.name), "no sample of {}", kind.name);
        }
    }

    #[test]
    fn kinds_that_people_export_have_their_usual_extension() {
        for (start, extension) in [
            (zip_of("archive/data.pkl"), Some(".pt")),
            (b"\x1f\x8b\x08\0".to_vec(), Some(".gz")),
            (b"lmgg\0\0\0\0".to_vec(), Some(".bin")),
            (b"buy milk\n".to_vec(), Some(".txt")),
            (b"FUGG\0\0\0\x03".to_vec(), None),
        ] {
            let kind = FileKind::from_start(&start);
            assert_eq!(kind.extension(), extension, "{}", kind.name());
        }
    }

    #[test]
    fn advice_does_not_contradict_the_kind() {
        for kind in KINDS.iter().chain([&OTHER]) {
            for advice in [kind.advice, kind.advice_for_downloads] {
                assert!(advice.len() > 20, "{}", kind.name);
                assert!(!advice.contains("damaged or incomplete"), "{}", kind.name);
                assert!(!advice.contains("  "), "{}: {advice}", kind.name);
            }
            assert!(kind.extension.is_none_or(|extension| extension.starts_with('.')), "{}", kind.name);
        }
    }

    #[test]
    fn messages_of_servers_are_quoted_without_control_characters() {
        let shown = |start: &[u8]| FoundFile::new(start).to_string();
        assert_eq!(
            shown(
                b"<?xml version=\"1.0\"?>\n<Error><Code>Access\x1bDenied</Code><Message>x</Message></Error>"
            ),
            "an XML document that says \"AccessDenied\""
        );
        assert_eq!(shown(br#"{"error":"Entry not found"}"#), "a JSON document that says \"Entry not found\"");
        assert_eq!(shown(br#"{"architectures":[]}"#), "a JSON document");
        assert_eq!(shown(b"<Error><Code>cut off"), "an XML document");
        assert_eq!(shown(b"\x01\x02\x03\x04\x05"), r#"a file that starts with "\x01\x02\x03\x04""#);
    }
}
