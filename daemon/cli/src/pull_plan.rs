//! `blobd pull --dry-run`

use blobd_client::protocol::response::{ChosenFiles, PlannedSpace, PullPlan, SpaceLimit};
use blobd_store_format::size::human_bytes;
use blobd_store_format::text::printable;

use crate::output::{Table, terminal_width};

/// For each file, the bytes to download and those to reuse.
pub(super) fn render(plan: &PullPlan) -> String {
    let headings = ["FILE", "DIGEST", "SIZE", "STORED", "RESUMED", "SIMILAR", "TO DOWNLOAD"];
    let mut table = Table::new(&headings, &[2, 3, 4, 5, 6]);
    for file in &plan.files {
        let sizes =
            [file.size, file.stored_bytes, file.resumed_bytes, file.similar_bytes, file.download_bytes];
        let digest = file.digest.map_or_else(|| "-".to_owned(), blobd_store_format::digest::Digest::short);
        table.row([printable(&file.name), digest].into_iter().chain(sizes.map(human_bytes)));
    }
    let total = human_bytes(plan.download_bytes);
    let mut text = table.render(terminal_width());
    text.push_str(&format!("{}: would download {total}\n", printable(&plan.name)));
    if plan.files.iter().any(|file| file.similar_bytes > 0) {
        text.push_str(
            "similar: tensors of stored models that match in all samples; the file's digest is checked\n",
        );
    }
    text + &chosen_line(plan.chosen.as_ref()) + &space(plan)
}

/// The files that were chosen of a repository.
pub(super) fn chosen_line(chosen: Option<&ChosenFiles>) -> String {
    chosen.map_or_else(String::new, |chosen| format!("{}\n", printable(&chosen.to_string())))
}

/// Nothing if the pull fits as it is.
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

#[cfg(test)]
mod tests {
    use blobd_client::protocol::response::PlannedFile;
    use blobd_store_format::digest::Digest;

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
        let text = render(&plan);
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
        let text = render(&plan);
        assert!(
            text.ends_with(
                "not enough space: 9.00 MiB of space needed, 4.00 MiB available of the quota; `blobd gc` would free \
                 1.00 MiB\n"
            ),
            "{text}"
        );
        let text = render(&PullPlan { enough_space: true, ..plan });
        assert!(text.ends_with("available of the quota; the rest is freed by the pull\n"), "{text}");
    }
}
