//! Lines of the audit log.
//!
//! Invariant: any line is a record or none; a record is written as one line of limited length without control
//! characters, and reads back; what was removed from it when it was written is not removed again.
#![no_main]

use blobd_client::protocol::audit::{AuditRecord, MAX_LINE_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|line: &[u8]| {
    let Some(record) = AuditRecord::parse(line) else { return };
    let written = record.line();
    let (end, content) = written.split_last().expect("a line has a line break");
    assert_eq!(*end, b'\n');
    assert!(content.iter().all(|byte| *byte >= 0x20));
    // A field that no daemon writes, such as a name of a user of 16 KiB, has no limit of its own.
    if written.len() > MAX_LINE_BYTES {
        return;
    }
    let again = AuditRecord::parse(&written).expect("what is written can be read");
    assert_eq!(again.line(), written);
});
