use proptest::collection::vec;
use proptest::prelude::*;

use super::super::layout;
use super::*;
use crate::file_layout::RangeContent;

/// A header of the given form.
fn header(name: &[u8], size: u64, kind: u8) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name);
    header[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    header[156] = kind;
    header[257..263].copy_from_slice(b"ustar\0");
    sealed(header)
}

fn sealed(mut header: Vec<u8>) -> Vec<u8> {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

fn padded(content: &[u8]) -> Vec<u8> {
    let mut padded = content.to_vec();
    padded.resize(content.len().next_multiple_of(512), 0);
    padded
}

fn entry(name: &[u8], content: &[u8], kind: u8) -> Vec<u8> {
    [header(name, content.len() as u64, kind), padded(content)].concat()
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let record = |(key, value): &(&str, &str)| {
        let body = format!(" {key}={value}\n");
        let length = (1..9)
            .map(|digits| digits + body.len())
            .find(|length| length.to_string().len() + body.len() == *length);
        format!("{}{body}", length.unwrap())
    };
    entry(b"PaxHeaders/x", records.iter().map(record).collect::<String>().as_bytes(), b'x')
}

fn read(archive: &[u8]) -> Result<Vec<ArchiveFile>, TarError> {
    let mut reader = TarReader::new(archive.len() as u64);
    while let Some(wanted) = reader.wanted() {
        let range = usize::try_from(wanted.start).unwrap()..usize::try_from(wanted.end).unwrap();
        reader.push(&archive[range])?;
    }
    Ok(reader.into_files())
}

fn files(archive: &[u8]) -> Vec<(String, u64, u64)> {
    let files = read(archive).unwrap();
    files.into_iter().map(|file| (file.path, file.offset, file.size)).collect()
}

fn file(path: &str, offset: u64, size: u64) -> (String, u64, u64) {
    (path.to_owned(), offset, size)
}

#[test]
fn regular_files_are_found_among_other_entries() {
    let archive = [
        entry(b"./", b"", b'5'),
        entry(b"./a/m.gguf", &[7; 600], b'0'),
        header(b"link", 600, b'1'),
        header(b"symlink", 0, b'2'),
        entry(b"a/empty", b"", b'0'),
        entry(b"old", b"x", 0),
        entry(b"comment", b"y", b'g'),
        entry(b"a/n.gguf", &[8; 512], b'7'),
        vec![0; 1024],
    ]
    .concat();
    let expected = [file("a/m.gguf", 1024, 600), file("old", 4096, 1), file("a/n.gguf", 6144, 512)];
    assert_eq!(files(&archive), expected);
}

#[test]
fn long_names_and_sizes_are_read_in_every_form() {
    let long = format!("{}/m.gguf", "d".repeat(200));
    let gnu = [entry(b"././@LongLink", format!("{long}\0").as_bytes(), b'L'), entry(b"short", b"abc", b'0')];
    assert_eq!(files(&gnu.concat()), [file(&long, 1536, 3)]);
    let in_pax =
        [pax(&[("mtime", "1.5"), ("path", &long), ("size", "3")]), header(b"short", 0, b'0'), padded(b"abc")];
    assert_eq!(files(&in_pax.concat()), [file(&long, 1536, 3)]);
    let mut ustar = header(b"m.gguf", 3, b'0');
    ustar[345..345 + 5].copy_from_slice(b"a/b/c");
    assert_eq!(files(&[sealed(ustar), padded(b"abc")].concat()), [file("a/b/c/m.gguf", 512, 3)]);
    let mut base_256 = header(b"m", 0, b'0');
    base_256[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    assert_eq!(files(&[sealed(base_256), padded(b"abc")].concat()), [file("m", 512, 3)]);
}

#[test]
fn archive_may_end_without_padding_and_have_any_padding() {
    let content = entry(b"m", b"abc", b'0');
    assert_eq!(files(&content[..515]), [file("m", 512, 3)]);
    assert_eq!(files(&[content.clone(), vec![0; 512]].concat()), [file("m", 512, 3)]);
    assert_eq!(files(&[content, vec![0; 100_000]].concat()), [file("m", 512, 3)]);
    assert!(files(&[]).is_empty());
    assert!(files(&[1; 511]).is_empty());
}

#[test]
fn hostile_archives_are_refused() {
    for name in [&b"../m.gguf"[..], b"/etc/passwd", b"a/../../m", b"a//b", b"a\\b", b"a\nb", b".."] {
        let error = read(&entry(name, b"x", b'0')).unwrap_err();
        assert!(matches!(error, TarError::Path { .. }), "{error}");
    }
    let truncated = &entry(b"m", &[1; 2000], b'0')[..1024];
    assert!(matches!(read(truncated), Err(TarError::Outside { .. })));
    let huge = [pax(&[("size", "18446744073709551615")]), header(b"m", 0, b'0')].concat();
    assert!(matches!(read(&huge), Err(TarError::Outside { .. })));
    let mut negative = header(b"m", 0, b'0');
    negative[124..136].fill(0xff);
    assert!(matches!(read(&sealed(negative)), Err(TarError::Number { .. })));
    for sparse in
        [entry(b"m", b"x", b'S'), [pax(&[("GNU.sparse.major", "1")]), entry(b"m", b"x", b'0')].concat()]
    {
        assert!(matches!(read(&sparse), Err(TarError::Scattered { .. })));
    }
    assert!(matches!(
        read(&[entry(b"m", b"x", b'0'), entry(b"m", b"y", b'0')].concat()),
        Err(TarError::Twice { .. })
    ));
    assert!(matches!(read(&[b'x'; 1024]), Err(TarError::Header { offset: 0 })));
    let long = header(b"x", 1 << 20, b'x');
    assert!(matches!(read(&[long, vec![b'1'; 1 << 20]].concat()), Err(TarError::Extension { .. })));
    for records in [&b"9 path=x"[..], b"x path=x\n", b"99 path=x\n", b"7 path\n", b"0 a=b\n"] {
        assert!(matches!(read(&entry(b"x", records, b'x')), Err(TarError::Extension { .. })));
    }
}

#[test]
fn composed_headers_are_read_again() {
    let content = b"content";
    let of_file = |path: &str| [tar_header(path, 7).unwrap().to_vec(), padded(content)].concat();
    let longest = "p".repeat(100);
    let files = read(&[of_file("blobs/sha256/ab"), of_file(&longest)].concat()).unwrap();
    let found: Vec<_> = files.iter().map(|file| (file.path.as_str(), file.offset, file.size)).collect();
    assert_eq!(found, [("blobs/sha256/ab", 512, 7), (longest.as_str(), 1536, 7)]);
    assert_eq!(tar_header(&"p".repeat(101), 7), None);
    for size in [0, (1 << 33) - 1, 1 << 33, u64::MAX] {
        let header = tar_header("large", size).unwrap();
        assert_eq!(Header { offset: 0, bytes: &header }.size(), Ok(size));
    }
}

#[test]
fn headers_of_a_layer_are_read_again_with_any_path() {
    let content = b"content";
    for length in 1..=255_usize {
        let path = "p".repeat(length);
        let archive = [layer_headers("models/", 0), layer_headers(&path, 7), padded(content)].concat();
        let files = read(&archive).unwrap();
        assert_eq!((files.len(), &files[0].path, files[0].size), (1, &path, 7));
        assert_eq!(&archive[usize::try_from(files[0].offset).unwrap()..][..7], content);
    }
    let file = layer_headers("models/m", 7);
    assert_eq!((&file[100..108], file[156]), (&b"0000444\0"[..], b'0'));
    let folder = layer_headers("models/", 0);
    assert_eq!((&folder[100..108], folder[156]), (&b"0000755\0"[..], b'5'));
}

#[test]
fn headers_files_and_extensions_are_limited() {
    const MAX_HEADERS: usize = TarReader::MAX_FILES * TarReader::HEADERS_PER_FILE;
    let headers = |count: usize| read(&header(b"d/", 0, b'5').repeat(count));
    assert!(headers(MAX_HEADERS).is_ok());
    assert!(matches!(headers(MAX_HEADERS + 1), Err(TarError::TooMany { what: "headers", .. })));
    let files = |count: usize| {
        let archive = (0..count).flat_map(|number| entry(format!("f{number}").as_bytes(), b"x", b'0'));
        read(&archive.collect::<Vec<u8>>())
    };
    assert_eq!(files(TarReader::MAX_FILES).unwrap().len(), TarReader::MAX_FILES);
    assert!(matches!(files(TarReader::MAX_FILES + 1), Err(TarError::TooMany { what: "files", .. })));
    let comment = |size: u64| read(&entry(b"g", &vec![b'x'; usize::try_from(size).unwrap()], b'g'));
    assert_eq!(comment(TarReader::MAX_EXTENSION_BYTES), Ok(Vec::new()));
    assert!(matches!(comment(TarReader::MAX_EXTENSION_BYTES + 1), Err(TarError::Extension { .. })));
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_give_files_in_order(
        entries in vec((any::<bool>(), 0_u64..2000, prop::sample::select(b"0x5LgK1S\0".to_vec()), any::<u8>()), 0..12),
        cut in 0_usize..20_000,
    ) {
        let mut archive = Vec::new();
        for (number, (is_whole, size, kind, fill)) in entries.into_iter().enumerate() {
            archive.extend(header(format!("f{number}").as_bytes(), size, kind));
            if is_whole {
                archive.extend(padded(&vec![fill; usize::try_from(size).unwrap()]));
            }
        }
        archive.truncate(cut);
        let Ok(files) = read(&archive) else { return Ok(()) };
        let mut position = 0;
        for file in &files {
            prop_assert!(file.size > 0 && file.offset >= position + 512);
            position = file.offset + file.size;
        }
        prop_assert!(position <= archive.len() as u64);
        let layout = layout(archive.len() as u64, files.into_iter().map(|file| (file, None)).collect());
        let mut end = 0;
        for range in layout.ranges() {
            prop_assert_eq!((range.content, range.offset), (RangeContent::Gap, end));
            end += range.size;
        }
        prop_assert_eq!(end, archive.len() as u64);
    }
}
