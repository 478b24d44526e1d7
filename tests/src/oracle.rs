//! Digests and tensors of GGUF files, computed without code of blobd.
//!
//! The reader supports only files that the tests make: little-endian, known types, well-formed.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;

use sha2::{Digest as _, Sha256};

/// The SHA-256 of bytes, in hexadecimal.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The SHA-256 of all that can be read.
///
/// # Panics
/// When reading fails.
pub fn sha256_of(source: &mut impl Read) -> String {
    let mut hash = Sha256::new();
    // Small enough that the allocator keeps it: fresh pages for each of many blobs cost more than hashing.
    let mut buffer = vec![0; 1 << 16];
    loop {
        match source.read(&mut buffer).expect("it can be read") {
            0 => return hex(&hash.finalize()),
            count => hash.update(&buffer[..count]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where each tensor's bytes are in a GGUF file, by name.
///
/// # Panics
/// When this reader does not support the file.
#[must_use]
pub fn tensor_ranges(file: &[u8]) -> BTreeMap<String, Range<usize>> {
    let mut cursor = Cursor { file, at: 8 };
    assert_eq!(&file[..4], b"GGUF");
    let (tensor_count, key_count) = (cursor.u64(), cursor.u64());
    let mut alignment = 32;
    for _ in 0..key_count {
        let key = cursor.string();
        let value_type = cursor.u32();
        let start = cursor.at;
        cursor.skip_value(value_type);
        if key == b"general.alignment" {
            alignment = Cursor { file, at: start }.u32() as usize;
        }
    }
    let tensors: Vec<_> = (0..tensor_count).map(|_| cursor.tensor()).collect();
    let data = cursor.at.next_multiple_of(alignment);
    let absolute = |(name, size, offset)| (name, data + offset..data + offset + size);
    tensors.into_iter().map(absolute).collect()
}

struct Cursor<'f> {
    file: &'f [u8],
    at: usize,
}

impl<'f> Cursor<'f> {
    fn take(&mut self, count: usize) -> &'f [u8] {
        self.at += count;
        &self.file[self.at - count..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn size(&mut self) -> usize {
        usize::try_from(self.u64()).unwrap()
    }

    fn string(&mut self) -> &'f [u8] {
        let length = self.size();
        self.take(length)
    }

    fn skip_value(&mut self, value_type: u32) {
        match value_type {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            10..=12 => drop(self.take(8)),
            8 => drop(self.string()),
            9 => {
                let element = self.u32();
                for _ in 0..self.u64() {
                    self.skip_value(element);
                }
            }
            other => panic!("value type {other}"),
        }
    }

    fn tensor(&mut self) -> (String, usize, usize) {
        let name = String::from_utf8(self.string().to_vec()).unwrap();
        let elements: u64 = (0..self.u32()).map(|_| self.u64()).product();
        // Elements and bytes of a block, from the table in llama.cpp's ggml.c.
        let (block, bytes) = match self.u32() {
            0 => (1, 4),
            1 | 30 => (1, 2),
            2 => (32, 18),
            8 => (32, 34),
            12 => (256, 144),
            14 => (256, 210),
            24 => (1, 1),
            other => panic!("tensor type {other}"),
        };
        let size = usize::try_from(elements / block * bytes).unwrap();
        (name, size, self.size())
    }
}
