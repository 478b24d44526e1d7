//! The baseline of two measurements: `mmap` of a plain file, as engines do without blobd.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::measure::Outcome;

pub(crate) fn map(path: &Path) -> Outcome<Mmap> {
    map_file(&File::open(path)?)
}

pub(crate) fn map_file(file: &File) -> Outcome<Mmap> {
    // SAFETY: needed because mapping a file that others could truncate is unsafe; sound because
    // the file lies in the benchmark's own temporary directory and nothing writes to it.
    Ok(unsafe { Mmap::map(file)? })
}
