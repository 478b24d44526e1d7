//! Finds the files of a tar archive from its headers alone, without its data.
//!
//! Sources: POSIX.1-2008 `pax`, and GNU tar's manual, "Basic Tar Format". Old (v7), ustar, pax and GNU headers are
//! read; long names in both forms, and sizes in octal and base 256. Sparse files and archives of several volumes
//! are refused, because the bytes of their files are not in one place. Links, directories and devices have no
//! data and are skipped.

mod compose;

use std::collections::BTreeSet;
use std::ops::Range;

pub use self::compose::{layer_headers, tar_header};
use crate::file_layout::ArchiveFile;
use crate::manifest::is_file_name;

/// Reads headers one after the other.
///
/// ```
/// use blobd_store_format::archive::{TarReader, tar_header};
///
/// let header = tar_header("m.gguf", 4).ok_or("the path is too long")?;
/// let archive = [&header[..], b"GGUF", &[0; 508], &[0; 1024]].concat();
/// let mut reader = TarReader::new(archive.len() as u64);
/// while let Some(wanted) = reader.wanted() {
///     let range = usize::try_from(wanted.start)?..usize::try_from(wanted.end)?;
///     reader.push(&archive[range])?;
/// }
/// let files = reader.into_files();
/// assert_eq!((files[0].path.as_str(), files[0].offset, files[0].size), ("m.gguf", 512, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TarReader {
    archive_size: u64,
    next: Option<Next>,
    /// From extension headers, for the next file.
    path: Option<String>,
    size: Option<u64>,
    headers: usize,
    files: Vec<ArchiveFile>,
    paths: BTreeSet<String>,
    max_files: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    Header { offset: u64 },
    Extension { kind: u8, content: Range<u64>, following: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TarError {
    #[error("archive: no tar header at byte {offset}")]
    Header { offset: u64 },
    #[error("archive: header at byte {offset}: {field} is not a valid number")]
    Number { offset: u64, field: &'static str },
    #[error(
        "archive: file {path:?} of {size} bytes at byte {offset} ends after the archive of {archive_size}"
    )]
    Outside { path: String, offset: u64, size: u64, archive_size: u64 },
    #[error(
        "archive: file {path:?}: expected a plain file, found one that is sparse or continues in another archive"
    )]
    Scattered { path: String },
    #[error(
        "archive: wrong file name: expected a relative path without \"..\" of at most 255 bytes, found {path:?}"
    )]
    Path { path: String },
    #[error("archive: two files with the name {path:?}")]
    Twice { path: String },
    #[error(
        "archive: extension header at byte {offset}: not in the expected form, or longer than {limit} bytes"
    )]
    Extension { offset: u64, limit: u64 },
    #[error("archive: more than {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
    #[error("archive: wrong number of bytes given: expected {expected}, found {found}")]
    Given { found: u64, expected: u64 },
}

const BLOCK_BYTES: usize = 512;

impl TarReader {
    /// The length of a header, and the unit of all lengths in an archive, in bytes.
    pub const BLOCK_BYTES: u64 = BLOCK_BYTES as u64;
    /// The most files. Each costs a request; the largest published models have some hundred.
    pub const MAX_FILES: usize = 1024;
    /// The most headers for each file, those of directories, links and long names included.
    const HEADERS_PER_FILE: usize = 8;
    /// The longest extension header. A path has 4 KiB at most; attributes take the rest.
    const MAX_EXTENSION_BYTES: u64 = 64 << 10;

    pub fn new(archive_size: u64) -> Self {
        let next = Some(Next::Header { offset: 0 });
        Self {
            archive_size,
            next: next.filter(|_| archive_size >= Self::BLOCK_BYTES),
            path: None,
            size: None,
            headers: 0,
            files: Vec::new(),
            paths: BTreeSet::new(),
            max_files: Self::MAX_FILES,
        }
    }

    /// Accepts this many files instead of [`Self::MAX_FILES`], for an archive that is on this machine.
    #[must_use]
    pub fn with_max_files(self, max_files: usize) -> Self {
        Self { max_files, ..self }
    }

    /// The bytes of the archive that are needed next; `None` when all files are known.
    pub fn wanted(&self) -> Option<Range<u64>> {
        match self.next.as_ref()? {
            Next::Header { offset } => Some(*offset..offset.saturating_add(Self::BLOCK_BYTES)),
            Next::Extension { content, .. } => Some(content.clone()),
        }
    }

    /// Takes the [wanted](Self::wanted) bytes.
    ///
    /// # Errors
    /// [`TarError`] when the archive cannot be read; then nothing more is wanted.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), TarError> {
        let expected = self.wanted().map_or(0, |wanted| wanted.end.saturating_sub(wanted.start));
        let found = bytes.len() as u64;
        if found != expected {
            return Err(TarError::Given { found, expected });
        }
        match self.next.take() {
            Some(Next::Header { offset }) => self.next = self.header(offset, bytes)?,
            Some(Next::Extension { kind, content, following }) => {
                self.extension(kind, content.start, bytes)?;
                self.next = self.header_at(following);
            }
            None => {}
        }
        Ok(())
    }

    /// The files found so far, in the order of their data.
    pub fn files(&self) -> &[ArchiveFile] {
        &self.files
    }

    pub fn into_files(self) -> Vec<ArchiveFile> {
        self.files
    }

    /// The files of an archive that ends here, although more is wanted: its size was not known.
    ///
    /// # Errors
    /// [`TarError::Outside`] when it ends inside an extension header.
    pub fn end_at(self, archive_size: u64) -> Result<Vec<ArchiveFile>, TarError> {
        let Some(Next::Extension { content, .. }) = self.next else { return Ok(self.files) };
        let (path, size) = ("extension header".to_owned(), content.end.saturating_sub(content.start));
        Err(TarError::Outside { path, offset: content.start, size, archive_size })
    }

    /// The header at an offset, if the archive has one there. Many programs omit the blocks of zeros at the end.
    fn header_at(&self, offset: u64) -> Option<Next> {
        let end = offset.checked_add(Self::BLOCK_BYTES)?;
        (end <= self.archive_size).then_some(Next::Header { offset })
    }

    fn header(&mut self, offset: u64, bytes: &[u8]) -> Result<Option<Next>, TarError> {
        if bytes.iter().all(|byte| *byte == 0) {
            // The end of the archive; what follows is padding.
            return Ok(None);
        }
        let header = Header { offset, bytes };
        header.check()?;
        self.headers = self.headers.saturating_add(1);
        let limit = self.max_files.saturating_mul(Self::HEADERS_PER_FILE);
        if self.headers > limit {
            return Err(TarError::TooMany { what: "headers", limit });
        }
        let start = offset.saturating_add(Self::BLOCK_BYTES);
        match header.kind() {
            kind @ (b'x' | b'g' | b'L' | b'K') => self.begin_extension(kind, start, header.size()?),
            b'1'..=b'6' | b'V' => {
                // Their size, if any, does not count data in the archive.
                (self.path, self.size) = (None, None);
                Ok(self.header_at(start))
            }
            kind => self.file(&header, kind, start),
        }
    }

    fn file(&mut self, header: &Header<'_>, kind: u8, start: u64) -> Result<Option<Next>, TarError> {
        let path = self.path.take().unwrap_or_else(|| header.path());
        let size = self.size.take().map_or_else(|| header.size(), Ok)?;
        let following = self.end_of_data(&path, start, size)?;
        if matches!(kind, b'S' | b'M') {
            return Err(TarError::Scattered { path });
        }
        // An old header marks a directory by its name. Other types are not files.
        let is_file = matches!(kind, b'0' | 0 | b'7') && !path.ends_with('/');
        if is_file && size > 0 {
            self.add(&path, start, size)?;
        }
        Ok(self.header_at(following))
    }

    fn add(&mut self, path: &str, offset: u64, size: u64) -> Result<(), TarError> {
        let path = path.trim_start_matches("./").to_owned();
        if !is_file_name(&path) {
            return Err(TarError::Path { path: path.chars().take(200).collect() });
        }
        if !self.paths.insert(path.clone()) {
            return Err(TarError::Twice { path });
        }
        if self.files.len() >= self.max_files {
            return Err(TarError::TooMany { what: "files", limit: self.max_files });
        }
        self.files.push(ArchiveFile { path, offset, size });
        Ok(())
    }

    /// Where the header after this data is.
    fn end_of_data(&self, path: &str, offset: u64, size: u64) -> Result<u64, TarError> {
        let end = offset.checked_add(size).filter(|end| *end <= self.archive_size);
        let padded = end.and_then(|end| end.checked_next_multiple_of(Self::BLOCK_BYTES));
        padded.ok_or_else(|| TarError::Outside {
            path: path.chars().take(200).collect(),
            offset,
            size,
            archive_size: self.archive_size,
        })
    }

    fn begin_extension(&self, kind: u8, offset: u64, size: u64) -> Result<Option<Next>, TarError> {
        if size > Self::MAX_EXTENSION_BYTES {
            return Err(TarError::Extension { offset, limit: Self::MAX_EXTENSION_BYTES });
        }
        let following = self.end_of_data("extension header", offset, size)?;
        if size == 0 {
            return Ok(self.header_at(following));
        }
        Ok(Some(Next::Extension { kind, content: offset..offset.saturating_add(size), following }))
    }

    fn extension(&mut self, kind: u8, offset: u64, content: &[u8]) -> Result<(), TarError> {
        match kind {
            b'L' => {
                let path = content.split(|byte| *byte == 0).next().unwrap_or_default();
                self.path = Some(String::from_utf8_lossy(path).into_owned());
            }
            b'x' => self.records(offset, content)?,
            // The target of a link, or attributes of all files.
            _ => {}
        }
        Ok(())
    }

    /// Records of pax: `LENGTH KEYWORD=VALUE\n`.
    fn records(&mut self, offset: u64, content: &[u8]) -> Result<(), TarError> {
        let malformed = || TarError::Extension { offset, limit: Self::MAX_EXTENSION_BYTES };
        let mut rest = content;
        while !rest.is_empty() && rest.first() != Some(&0) {
            let (record, after) = split_record(rest).ok_or_else(malformed)?;
            rest = after;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
            let (keyword, value) = record.split_at(equals);
            let value = value.get(1..).unwrap_or_default();
            match keyword {
                b"path" => self.path = Some(String::from_utf8_lossy(value).into_owned()),
                b"size" => {
                    let text = std::str::from_utf8(value).ok();
                    self.size = Some(text.and_then(|text| text.parse().ok()).ok_or_else(malformed)?);
                }
                _ if keyword.starts_with(b"GNU.sparse.") => {
                    let path = self.path.clone().unwrap_or_default();
                    return Err(TarError::Scattered { path });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Splits off a record without its length and line break.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    const MAX_DIGITS: usize = 6;
    let space = bytes.iter().take(MAX_DIGITS + 1).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(bytes.get(..space)?).ok()?.parse().ok()?;
    let (record, rest) = bytes.split_at_checked(length)?;
    Some((record.get(space + 1..)?.strip_suffix(b"\n")?, rest))
}

struct Header<'b> {
    offset: u64,
    bytes: &'b [u8],
}

impl<'b> Header<'b> {
    const NAME: Range<usize> = 0..100;
    const SIZE: Range<usize> = 124..136;
    const CHECK_SUM: Range<usize> = 148..156;
    const KIND: usize = 156;
    const MAGIC: Range<usize> = 257..263;
    const PREFIX: Range<usize> = 345..500;

    fn field(&self, range: Range<usize>) -> &'b [u8] {
        self.bytes.get(range).unwrap_or_default()
    }

    fn kind(&self) -> u8 {
        self.bytes.get(Self::KIND).copied().unwrap_or_default()
    }

    /// The sum of all bytes, with spaces in place of the sum itself. Some old programs added signed bytes.
    fn check(&self) -> Result<(), TarError> {
        let byte = |(at, byte): (usize, &u8)| if Self::CHECK_SUM.contains(&at) { b' ' } else { *byte };
        let bytes = || self.bytes.iter().enumerate().map(byte);
        let unsigned: i64 = bytes().map(i64::from).sum();
        let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
        let found = octal(self.field(Self::CHECK_SUM)).and_then(|sum| i64::try_from(sum).ok());
        match found {
            Some(sum) if sum == unsigned || sum == signed => Ok(()),
            _ => Err(TarError::Header { offset: self.offset }),
        }
    }

    fn size(&self) -> Result<u64, TarError> {
        let field = self.field(Self::SIZE);
        // The highest bit says that the number is not octal; negative ones have more bits set.
        let number = match field.split_first() {
            Some((0x80, digits)) => base_256(digits),
            Some((first, _)) if *first < 0x80 => octal(field),
            _ => None,
        };
        number.ok_or(TarError::Number { offset: self.offset, field: "size" })
    }

    /// The name, with the prefix of ustar. The place of the prefix has other data in GNU's headers.
    fn path(&self) -> String {
        let text = |range| {
            let bytes = self.field(range).split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let (name, is_ustar) = (text(Self::NAME), self.field(Self::MAGIC) == b"ustar\0");
        match text(Self::PREFIX) {
            prefix if is_ustar && !prefix.is_empty() => format!("{prefix}/{name}"),
            _ => name,
        }
    }
}

/// Octal digits, with spaces in front, and spaces or zero bytes behind. Without digits the number is 0.
fn octal(field: &[u8]) -> Option<u64> {
    let start = field.iter().position(|byte| *byte != b' ').unwrap_or(field.len());
    let digits = field.get(start..)?;
    let end = digits.iter().position(|byte| matches!(byte, 0 | b' ')).unwrap_or(digits.len());
    digits.get(..end)?.iter().try_fold(0_u64, |number, digit| match digit {
        b'0'..=b'7' => number.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

fn base_256(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0_u64, |number, digit| number.checked_mul(256)?.checked_add((*digit).into()))
}

#[cfg(test)]
mod tests;
