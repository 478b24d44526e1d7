//! `blobd pull --dry-run`

use blobd_client::protocol::response::PullPlan;

use crate::output::{Table, printable, terminal_width};
use crate::size::human_bytes;

/// What would be downloaded and what would be reused, for each file.
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
    text
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
            files: vec![file],
        };
        let text = render(&plan);
        assert!(text.contains("9.00 MiB") && text.contains("tiny:latest: would download 1.00 MiB"), "{text}");
        assert!(text.contains("the file's digest is checked"), "{text}");
    }
}
