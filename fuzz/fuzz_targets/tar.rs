//! Tar archives.
//!
//! Invariant: any bytes are refused or give files that are not empty, in order, apart from each other and in the
//! archive, with safe and different names; and the layout with them covers the archive exactly once.
#![no_main]

use blobd_store_format::archive::{TarReader, layout};
use blobd_store_format::manifest::is_file_name;
use blobd_store_format::split::SplitPlan;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // With correct check sums, which a fuzzer would not find.
    let mut archive = bytes.to_vec();
    for header in archive.chunks_exact_mut(512) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    for archive in [bytes, &archive[..]] {
        let mut reader = TarReader::new(archive.len() as u64);
        while let Some(wanted) = reader.wanted() {
            let range = usize::try_from(wanted.start).unwrap()..usize::try_from(wanted.end).unwrap();
            if reader.push(&archive[range]).is_err() {
                return;
            }
        }
        let files = reader.into_files();
        let mut position = 0;
        for (number, file) in files.iter().enumerate() {
            assert!(file.size > 0 && file.offset >= position + TarReader::BLOCK_BYTES);
            assert!(is_file_name(&file.path) && files[..number].iter().all(|other| other.path != file.path));
            position = file.offset + file.size;
        }
        assert!(position <= archive.len() as u64);
        let plan = SplitPlan::new(layout(
            archive.len() as u64,
            files.into_iter().map(|file| (file, None)).collect(),
        ));
        assert_eq!(plan.file_size(), archive.len() as u64);
        let mut end = 0;
        for segment in plan.segments() {
            assert!(segment.length > 0 && segment.offset_in_file == end);
            end += segment.length;
        }
        assert_eq!(end, archive.len() as u64);
    }
});
