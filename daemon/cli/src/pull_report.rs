//! Reports of `blobd pull`: the plan of a dry run, and the files whose digest was wrong at first.

use blobd_cli_common::output::{Table, counted, human_bytes, or_dash, printable, terminal_width};
use blobd_client::protocol::pull::{
    ChosenFiles, CorrectedFile, DifferingRange, PlannedSpace, PullPlan, SpaceLimit, UsedIndex,
};

use crate::Digest;

pub(super) fn plan(plan: &PullPlan) -> String {
    let headings = ["FILE", "DIGEST", "SIZE", "STORED", "RESUMED", "SIMILAR", "TO DOWNLOAD"];
    let rows = plan.files.iter().map(|file| {
        let sizes =
            [file.size, file.stored_bytes, file.resumed_bytes, file.similar_bytes, file.download_bytes];
        let digest = or_dash(file.digest.map(Digest::short));
        [printable(&file.name), digest].into_iter().chain(sizes.map(human_bytes))
    });
    let table = Table::with_rows(&headings, &[2, 3, 4, 5, 6], rows);
    let table = table.leaving_out_first(&["DIGEST", "SIMILAR", "RESUMED", "STORED"]);
    let total = human_bytes(plan.download_bytes);
    let mut text = table.render(terminal_width());
    text.push_str(&format!("{}: would download {total}\n", printable(&plan.name)));
    if plan.files.iter().any(|file| file.similar_bytes > 0) {
        text += "similar: stored tensors that match in all samples, or that the model's tensor index names; the file's \
                 digest is checked\n";
    }
    text + &chosen_line(plan.chosen.as_ref()) + &space(plan)
}

/// The end of a dry run for several models. What two of them have in common is downloaded once, but is in both plans.
pub(super) fn planned_in_all(download_bytes: &[u64]) -> String {
    let total = download_bytes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
    format!("{}: would download at most {}\n", counted(download_bytes.len(), "model"), human_bytes(total))
}

pub(super) fn index(index: &UsedIndex) -> String {
    format!("  its tensor index spared the download of {}\n", human_bytes(index.spared_bytes))
}

pub(super) fn chosen_line(chosen: Option<&ChosenFiles>) -> String {
    let Some(chosen) = chosen else { return String::new() };
    let notes = chosen.notes.iter().map(|note| format!("note: {}\n", printable(note)));
    format!("{}\n", printable(&chosen.to_string())) + &notes.collect::<String>()
}

/// Empty if the pull fits as it is.
fn space(plan: &PullPlan) -> String {
    let PlannedSpace { needed_bytes, available_bytes, limit, missing_bytes, ref group, .. } = plan.space;
    if missing_bytes == 0 {
        return String::new();
    }
    let group = printable(group.as_deref().unwrap_or_default());
    let (limit, is_of_store) = match limit {
        SpaceLimit::Disk => ("on the disk".to_owned(), true),
        SpaceLimit::Quota => ("of the quota".to_owned(), true),
        SpaceLimit::UserQuota => ("of your quota".to_owned(), false),
        SpaceLimit::GroupQuota => (format!("of the quota of group {group}"), false),
    };
    let [needed, available] = [needed_bytes, available_bytes].map(human_bytes);
    let space = format!("{needed} of space needed, {available} available {limit}");
    if !is_of_store && !plan.enough_space {
        return format!(
            "over quota: {space}; `blobd df --users` shows the use, and `blobd rm` of your own models lowers it\n"
        );
    }
    if plan.enough_space {
        let lines =
            plan.space.evicted.iter().map(|model| format!("would evict {}\n", printable(&model.name)));
        return format!("{space}; the rest is freed by the pull\n{}", lines.collect::<String>());
    }
    let reclaimable = match plan.space.reclaimable_bytes {
        None => "`blobd gc --dry-run` shows what could be freed".to_owned(),
        Some(0) => "`blobd gc` would free nothing".to_owned(),
        Some(bytes) => format!("`blobd gc` would free {}", human_bytes(bytes)),
    };
    let evictable = plan
        .space
        .evictable_bytes
        .map_or_else(String::new, |bytes| format!(", evicting models at most {}", human_bytes(bytes)));
    format!("not enough space: {space}; {reclaimable}{evictable}\n")
}

pub(super) fn corrected(files: &[CorrectedFile]) -> String {
    files.iter().map(corrected_file).collect()
}

fn corrected_file(file: &CorrectedFile) -> String {
    const MAX_RANGES: usize = 4;
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
        text.push_str(&differing_range(range));
    }
    let more = file.ranges.len().saturating_sub(MAX_RANGES);
    if more > 0 {
        text.push_str(&format!("  and {} more; --json lists them\n", counted(more, "range")));
    }
    text
}

fn differing_range(range: &DifferingRange) -> String {
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
    const MAX_TENSORS: usize = 3;
    let named = range.tensors.iter().take(MAX_TENSORS).map(String::as_str).collect::<Vec<_>>().join(", ");
    match range.tensors.len().saturating_sub(MAX_TENSORS) {
        _ if named.is_empty() => String::new(),
        0 => format!(", in {named}"),
        _ => format!(", in {named} and others"),
    }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::pull::PlannedFile;

    use super::*;

    #[test]
    fn plan_shows_reused_and_downloaded_bytes() {
        let file = PlannedFile {
            name: "model".to_owned(),
            digest: Some(Digest::of(b"x")),
            size: 10 << 20,
            stored_bytes: 0,
            resumed_bytes: 0,
            similar_bytes: 9 << 20,
            download_bytes: 1 << 20,
        };
        let plan = PullPlan {
            name: "tiny:latest".to_owned(),
            digest: None,
            download_bytes: 1 << 20,
            enough_space: true,
            space: PlannedSpace::default(),
            chosen: None,
            files: vec![file],
        };
        let text = super::plan(&plan);
        assert!(text.contains("9.00 MiB") && text.contains("tiny:latest: would download 1.00 MiB"), "{text}");
        assert!(text.contains("the file's digest is checked") && !text.contains("space"), "{text}");
    }

    #[test]
    fn plan_that_does_not_fit_says_how_much_is_missing_and_what_could_be_freed() {
        let space = PlannedSpace {
            needed_bytes: 9 << 20,
            available_bytes: 4 << 20,
            limit: SpaceLimit::Quota,
            missing_bytes: 5 << 20,
            reclaimable_bytes: Some(1 << 20),
            ..PlannedSpace::default()
        };
        let plan = PullPlan {
            name: "tiny:latest".to_owned(),
            digest: None,
            download_bytes: 8 << 20,
            enough_space: false,
            space,
            chosen: None,
            files: Vec::new(),
        };
        let text = super::plan(&plan);
        assert!(
            text.ends_with(
                "not enough space: 9.00 MiB of space needed, 4.00 MiB available of the quota; `blobd gc` would free \
                 1.00 MiB\n"
            ),
            "{text}"
        );
        let text = super::plan(&PullPlan { enough_space: true, ..plan });
        assert!(text.ends_with("available of the quota; the rest is freed by the pull\n"), "{text}");
    }

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
        assert_eq!(super::corrected(&[corrected(1)]), expected);
        assert!(super::corrected(&[corrected(6)]).ends_with("  and 2 ranges more; --json lists them\n"));
        assert!(super::corrected(&[corrected(0)]).contains("test the memory"));
    }
}
