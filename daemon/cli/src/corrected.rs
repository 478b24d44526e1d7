//! The files of a pull that had a wrong digest at first, for people.

use blobd_client::protocol::corrected::{CorrectedFile, DifferingRange};
use blobd_store_format::size::human_bytes;

/// The most ranges of one file that are listed.
const MAX_RANGES: usize = 4;
/// The most tensors that are named for one range.
const MAX_TENSORS: usize = 3;

pub(super) fn render(files: &[CorrectedFile]) -> String {
    files.iter().map(render_file).collect()
}

fn render_file(file: &CorrectedFile) -> String {
    let name = &file.name;
    let mut text = format!("{name}: the first download had a wrong digest, a second one is right\n");
    match file.ranges.as_slice() {
        [] => text.push_str(
            "  no byte that could be compared differs: test the memory and the disk of this machine\n",
        ),
        ranges => text.push_str(&format!(
            "  {} of {} differed, in {}\n",
            human_bytes(file.differing_bytes),
            human_bytes(file.size),
            counted(ranges.len(), "range")
        )),
    }
    for range in file.ranges.iter().take(MAX_RANGES) {
        text.push_str(&render_range(range));
    }
    let more = file.ranges.len().saturating_sub(MAX_RANGES);
    if more > 0 {
        text.push_str(&format!("  and {} more; --json lists them\n", counted(more, "range")));
    }
    text
}

fn render_range(range: &DifferingRange) -> String {
    let end = range.offset.saturating_add(range.length);
    let place = match range.length {
        1 => format!("byte {}", range.offset),
        _ => format!("bytes {} to {}", range.offset, end.saturating_sub(1)),
    };
    let mut text = format!("  {place}{}\n", tensors(range));
    let earlier = || "an earlier pull".to_owned();
    let [wrong, right] =
        [&range.first_from, &range.second_from].map(|from| from.clone().unwrap_or_else(earlier));
    text.push_str(&format!("    wrong from {wrong}\n    right from {right}\n"));
    text
}

fn tensors(range: &DifferingRange) -> String {
    let named = range.tensors.iter().take(MAX_TENSORS).map(String::as_str).collect::<Vec<_>>().join(", ");
    match range.tensors.len().saturating_sub(MAX_TENSORS) {
        _ if named.is_empty() => String::new(),
        0 => format!(", in {named}"),
        _ => format!(", in {named} and others"),
    }
}

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;

    use super::*;

    fn corrected(count: u64) -> CorrectedFile {
        let range = |number: u64| DifferingRange {
            offset: number << 20,
            length: 3,
            differing_bytes: 2,
            first_from: Some("cdn.example (redirected by registry.example)".to_owned()),
            second_from: None,
            tensors: ["a", "b", "c", "d"].map(str::to_owned).to_vec(),
        };
        CorrectedFile {
            name: "model of m".to_owned(),
            digest: Digest::of(b"right"),
            size: 4 << 20,
            first_digest: Digest::of(b"wrong"),
            differing_bytes: 2 * count,
            ranges: (0..count).map(range).collect(),
        }
    }

    #[test]
    fn corrected_file_is_reported_with_its_ranges_and_senders() {
        let expected = "model of m: the first download had a wrong digest, a second one is right\n\
            \x20 2 B of 4.00 MiB differed, in 1 range\n\
            \x20 bytes 0 to 2, in a, b, c and others\n\
            \x20   wrong from cdn.example (redirected by registry.example)\n\
            \x20   right from an earlier pull\n";
        assert_eq!(render(&[corrected(1)]), expected);
        assert!(render(&[corrected(6)]).ends_with("  and 2 ranges more; --json lists them\n"));
        assert!(render(&[corrected(0)]).contains("test the memory"));
    }
}
