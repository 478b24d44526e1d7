//! Checks of stored data.

use std::time::{Duration, UNIX_EPOCH};

use blobd_client::protocol::upkeep::Check;
use blobd_store::index::IndexStatus;
use blobd_store::scrub::Cursor;
use blobd_store_format::size::human_bytes;
use blobd_store_format::text::quoted;

use super::facts::{AuditStatus, Facts, Metadata};
use super::{failure, note, ok, warning};
use crate::ops::rfc3339;

pub(super) fn index(facts: &Facts) -> Check {
    match &facts.index {
        IndexStatus::Degraded(reason) => warning("index", format!("kept in memory only: {reason}"))
            .because("nothing is lost, but the next start reads the whole store again")
            .with_hint("models can still be opened; `blobd reindex` or a restart rebuilds it")
            .mended_by("blobd reindex"),
        IndexStatus::Building => ok("index", "being built, for example after an unclean shutdown"),
        _ => ok("index", "a cache; nothing depends on it"),
    }
}

pub(super) fn layout(facts: &Facts) -> Check {
    if facts.misplaced.is_empty() {
        return ok("layout", "every file and directory has the right type");
    }
    failure("layout", facts.misplaced.join("; "))
        .because(
            "what a missing directory contained is unknown, so nothing is collected, and space is not freed",
        )
        .with_hint("move misplaced files out of the store and restore missing ones from a copy")
        .mended_by(format!("ls -la {}", quoted(&facts.root)))
}

pub(super) fn content(facts: &Facts) -> Check {
    match facts.damaged_blobs {
        0 if facts.quarantine_bytes > 0 => {
            let bytes = human_bytes(facts.quarantine_bytes);
            note(
                "content",
                format!(
                    "no blob is known to be damaged; {bytes} of blobs that were replaced are in quarantine"
                ),
            )
            .with_hint("they are kept to find the cause; `blobd gc --quarantine` deletes them")
        }
        0 => ok("content", "no blob is known to be damaged"),
        count => failure("content", format!("damaged or missing blobs: {count}"))
            .because("the models that need them cannot be opened; `blobd ls` marks these")
            .with_hint("`blobd verify --repair` fetches them again")
            .mended_by("blobd verify --repair"),
    }
}

pub(super) fn scrub(facts: &Facts) -> Check {
    let Cursor { running, blobs, .. } = facts.scrub;
    let now = facts.now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // Cannot overflow: a cursor has no times after the year 9999.
    let time = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
    let ended = match (facts.scrub.ended, facts.scrub.ended_by(now)) {
        (_, Some(ended)) => format!("last complete pass ended {}", time(ended)),
        (Some(_), None) => "last complete pass ended in the future: the clock was set back".to_owned(),
        (None, None) => "no complete pass yet".to_owned(),
    };
    let running = match running {
        true => format!(", blobs read in the next one: {blobs}"),
        false => String::new(),
    };
    ok("scrub", format!("{ended}{running}"))
}

pub(super) fn metadata(facts: &Facts) -> Check {
    match &facts.metadata {
        Metadata::Busy => {
            warning("metadata", "a collection is running; manifests and recipes were not checked")
                .because("an unreadable record would stop later collections")
                .with_hint("run `blobd doctor` again when it has ended")
                .mended_by("blobd doctor")
        }
        Metadata::Readable { reclaimable_bytes } => {
            ok("metadata", format!("all readable, {} reclaimable", human_bytes(*reclaimable_bytes)))
        }
        Metadata::Unreadable(error) => failure("metadata", error)
            .because("what that record needs is unknown, so nothing is collected until it is repaired")
            .with_hint(
                "`blobd rm`, `pull` or `import` the model; move a file that is not blobd's out of the store",
            )
            .mended_by("blobd gc --dry-run"),
    }
}

pub(super) fn audit(facts: &Facts) -> Check {
    let audit = &facts.context.audit;
    let AuditStatus { directory, failure: error, not_forwarded, .. } = audit;
    let dropped = audit.all_dropped();
    let Some(directory) = directory else {
        return ok("audit log", "off");
    };
    if let Some(error) = error {
        return failure(
            "audit log",
            format!("{directory}: cannot be written: {error}; dropped records: {dropped}"),
        )
        .because("what is done meanwhile is not recorded; requests are served nevertheless")
        .with_hint("free space there, or correct its permissions; the next record is written then")
        .mended_by(format!("ls -ld {}", quoted(directory)));
    }
    if dropped > 0 {
        let detail = format!("{directory}: dropped records since the start: {dropped}");
        return note("audit log", detail)
            .because("the disk was full or too slow; the log says where records are missing")
            .with_hint("`blobd log --verb audit` shows when");
    }
    if *not_forwarded > 0 {
        let detail = format!("{directory}: records not sent to the journal since the start: {not_forwarded}");
        return note("audit log", detail)
            .because("the journal does not run or does not keep up; the log itself has these records")
            .with_hint("`systemctl status systemd-journald`");
    }
    ok("audit log", directory.clone())
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::CheckStatus;
    use blobd_store::testing::new_store;

    use super::*;
    use crate::ops::DoctorContext;
    use crate::ops::doctor::facts::healthy;

    fn scrub_after(json: &str) -> String {
        let (folder, store) = new_store();
        std::fs::write(folder.path().join("store/scrub.json"), json).unwrap();
        scrub(&Facts::gather(&store, DoctorContext::default()).unwrap()).detail
    }

    #[test]
    fn times_in_the_scrub_file_outside_the_range_are_ignored() {
        assert_eq!(
            scrub_after(r#"{"began":1,"ended":1767225600}"#),
            "last complete pass ended 2026-01-01T00:00:00Z"
        );
        assert_eq!(scrub_after(r#"{"began":18446744073709551615}"#), "no complete pass yet");
        for ended in ["18446744073709551615", "253402300800", "-5", "1e99"] {
            assert_eq!(scrub_after(&format!("{{\"ended\":{ended}}}")), "no complete pass yet");
        }
        assert!(scrub_after(r#"{"ended":253402300799}"#).contains("in the future"));
    }

    #[test]
    fn damage_and_unreadable_records_are_failures() {
        let damaged = content(&Facts { damaged_blobs: 3, ..healthy() });
        assert_eq!(damaged.command.as_deref(), Some("blobd verify --repair"));
        let unreadable = Metadata::Unreadable("manifests/m: expected value".to_owned());
        let unreadable = metadata(&Facts { metadata: unreadable, ..healthy() });
        let misplaced = layout(&Facts { misplaced: vec!["blobs: missing".to_owned()], ..healthy() });
        assert!(misplaced.detail.contains("blobs: missing"));
        let index = index(&Facts { index: IndexStatus::Degraded("panicked".to_owned()), ..healthy() });
        assert_eq!(index.status, CheckStatus::Warning);
        for check in [damaged, unreadable, misplaced] {
            assert_eq!(check.status, CheckStatus::Failure);
            assert!(check.why.is_some() && check.hint.is_some() && check.command.is_some(), "{check:?}");
        }
    }
}
