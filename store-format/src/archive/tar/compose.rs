//! Composes headers of archives: the same path and size always give the same bytes, with no time and no user in them.

use std::ops::Range;

use super::{BLOCK_BYTES, Header};

/// The header of a file, in the form of ustar. A size above 8 GiB is a number to the base 256, as GNU tar writes it. `None`
/// for a path of more than 100 bytes.
#[must_use]
pub fn tar_header(path: &str, size: u64) -> Option<[u8; BLOCK_BYTES]> {
    (path.len() <= Header::NAME.len()).then(|| ustar(path.as_bytes(), Kind::File, 0o644, size))
}

/// The headers of a file that all may read and nobody may write, as a layer of a container image has it. A path of more than
/// 100 bytes is in a header before it, in the form of pax. A path that ends in `/` is that of a folder, without content.
#[must_use]
pub fn layer_headers(path: &str, size: u64) -> Vec<u8> {
    let (kind, mode) = if path.ends_with('/') { (Kind::Folder, 0o755) } else { (Kind::File, 0o444) };
    let name = path.as_bytes().get(..Header::NAME.len()).unwrap_or(path.as_bytes());
    let header = ustar(name, kind, mode, size);
    if name.len() == path.len() {
        return header.to_vec();
    }
    let mut record = path_record(path).into_bytes();
    let extension = ustar(b"pax-header", Kind::Extension, 0o644, record.len() as u64);
    record.resize(record.len().next_multiple_of(BLOCK_BYTES), 0);
    [&extension[..], &record, &header].concat()
}

/// A record of pax, which begins with its own length in bytes.
fn path_record(path: &str) -> String {
    let rest = format!(" path={path}\n");
    let with_digits = |digits: usize| rest.len().saturating_add(digits);
    let digits = (1..).find(|digits| with_digits(*digits).to_string().len() == *digits).unwrap_or(1);
    format!("{}{rest}", with_digits(digits))
}

#[derive(Clone, Copy)]
enum Kind {
    File,
    Folder,
    Extension,
}

fn ustar(name: &[u8], kind: Kind, mode: u32, size: u64) -> [u8; BLOCK_BYTES] {
    const MODE: Range<usize> = 100..108;
    const USER: Range<usize> = 108..116;
    const GROUP: Range<usize> = 116..124;
    const MODIFIED: Range<usize> = 136..148;
    const MAX_OCTAL: u64 = (1 << 33) - 1;
    let mut header = [0; BLOCK_BYTES];
    let mut set = |range: Range<usize>, bytes: &[u8]| put(&mut header, range, bytes);
    set(Header::NAME, name);
    set(MODE, format!("{mode:07o}\0").as_bytes());
    set(USER, b"0000000\0");
    set(GROUP, b"0000000\0");
    match size {
        0..=MAX_OCTAL => set(Header::SIZE, format!("{size:011o}\0").as_bytes()),
        _ => set(Header::SIZE, &[&[0x80, 0, 0, 0][..], &size.to_be_bytes()].concat()),
    }
    set(MODIFIED, b"00000000000\0");
    set(Header::CHECK_SUM, b"        ");
    let kind = match kind {
        Kind::File => b"0",
        Kind::Folder => b"5",
        Kind::Extension => b"x",
    };
    set(Header::KIND..Header::KIND + 1, kind);
    set(Header::MAGIC, b"ustar\0");
    set(Header::MAGIC.end..Header::MAGIC.end + 2, b"00");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    put(&mut header, Header::CHECK_SUM, format!("{sum:06o}\0 ").as_bytes());
    header
}

fn put(header: &mut [u8], field: Range<usize>, bytes: &[u8]) {
    let field = header.get_mut(field).unwrap_or_default();
    field.iter_mut().zip(bytes).for_each(|(byte, new)| *byte = *new);
}
