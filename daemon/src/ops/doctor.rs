//! `doctor`: checks the setup and says how to correct it.

use std::time::{Duration, UNIX_EPOCH};

use blobd_client::protocol::upkeep::{Check, CheckStatus, DoctorReport};
use blobd_store::gc;
use blobd_store::index::IndexStatus;
use blobd_store::scrub::{Cursor, unix_seconds};
use blobd_store::{Eviction, Store, StoreError};

use super::{OpError, rfc3339};
use crate::size::human_bytes;

/// What `doctor` needs to know about the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoctorContext {
    /// Whether the configuration allows clients of the daemon's own user.
    pub is_single_user: bool,
    /// Whether a client of the daemon's own user, other than root, has connected.
    pub has_met_owner: bool,
}

/// Runs all checks. None changes anything.
pub fn doctor(store: &Store, context: DoctorContext) -> Result<DoctorReport, OpError> {
    Ok(DoctorReport {
        checks: vec![
            writable(store),
            file_system(store),
            privacy(store)?,
            owner(context),
            hard_links(),
            space(store)?,
            reserve(store),
            index(store),
            layout(store),
            damage(store),
            scrub(store),
            metadata(store),
            descriptors(),
        ],
    })
}

fn check(name: &str, status: CheckStatus, detail: impl Into<String>, hint: Option<&str>) -> Check {
    Check { name: name.to_owned(), status, detail: detail.into(), hint: hint.map(str::to_owned) }
}

fn ok(name: &str, detail: impl Into<String>) -> Check {
    check(name, CheckStatus::Ok, detail, None)
}

fn warning(name: &str, detail: impl Into<String>, hint: &str) -> Check {
    check(name, CheckStatus::Warning, detail, Some(hint))
}

fn failure(name: &str, detail: impl Into<String>, hint: &str) -> Check {
    check(name, CheckStatus::Failure, detail, Some(hint))
}

fn writable(store: &Store) -> Check {
    const HINT: &str = "models can still be opened; fix the cause and restart blobd to change any";
    match store.read_only_reason() {
        Some(reason) => failure("writes", format!("the store is read-only: {reason}"), HINT),
        None => ok("writes", "every sync so far has succeeded"),
    }
}

fn file_system(store: &Store) -> Check {
    let found = store.file_system();
    let detail = format!("{} on {}", store.place().display(), found.name);
    match found.warning {
        Some(what) => warning("file system", format!("{detail}: {what}"), "keep the store on a local disk"),
        None => ok("file system", detail),
    }
}

fn privacy(store: &Store) -> Result<Check, StoreError> {
    let status = store.root_status()?;
    let mode = status.permissions() & 0o777;
    let detail = format!("mode {mode:04o}, owned by uid {}", status.owner());
    const HINT: &str = "chmod 0700 it";
    Ok(match mode {
        _ if mode & 0o022 != 0 => failure("directory", format!("{detail}: others may write to it"), HINT),
        _ if mode & 0o055 != 0 => {
            warning("directory", format!("{detail}: others may read it without the daemon"), HINT)
        }
        _ => ok("directory", detail),
    })
}

/// The owner of a blob can make it writable and change it while others have it mapped.
fn owner(context: DoctorContext) -> Check {
    const HINT: &str =
        "run the daemon as a user of its own, or set single_user = true if nobody else uses it";
    let uid = rustix::process::geteuid().as_raw();
    match context {
        DoctorContext { is_single_user: true, .. } => {
            ok("owner", format!("uid {uid}, the only user of this store"))
        }
        DoctorContext { has_met_owner: true, .. } => warning(
            "owner",
            format!("clients run as uid {uid}, which owns the blobs and can change them"),
            HINT,
        ),
        _ if uid == 0 => ok("owner", "root; other users cannot change what they open"),
        _ => ok("owner", format!("uid {uid}, which no client has used so far")),
    }
}

#[expect(clippy::disallowed_methods, reason = "a setting of the kernel")]
fn hard_links() -> Check {
    const PATH: &str = "/proc/sys/fs/protected_hardlinks";
    match std::fs::read_to_string(PATH).as_deref().map(str::trim) {
        Ok("0") => warning(
            "hard links",
            "any user who can read a blob can link it and so keep its space in use",
            "sysctl fs.protected_hardlinks=1",
        ),
        _ => ok("hard links", "protected by the kernel"),
    }
}

fn space(store: &Store) -> Result<Check, StoreError> {
    const HINT: &str = "free space with `blobd gc` or `blobd rm`, or configure eviction";
    let free = store.free_bytes()?;
    let policy = store.space_policy();
    let quota = policy.quota_bytes.map_or_else(String::new, |quota| {
        let eviction = match policy.eviction {
            Eviction::Never => "",
            _ => ", eviction on",
        };
        let (used, quota) = (human_bytes(store.used_bytes()), human_bytes(quota));
        format!(", {used} of a quota of {quota} in use{eviction}")
    });
    let detail = format!("{} free{quota}", human_bytes(free));
    let is_short = store.shortage(1) > 0 || policy.high_bytes().is_some_and(|high| store.used_bytes() > high);
    Ok(if is_short { warning("space", detail, HINT) } else { ok("space", detail) })
}

fn reserve(store: &Store) -> Check {
    match store.reserve_bytes() {
        Some(bytes) => ok("reserve", format!("{}, for removals on a full disk", human_bytes(bytes))),
        None if store.used_bytes() == 0 && store.shortage(1) == 0 => {
            ok("reserve", "none; the first pull or import creates it")
        }
        None => warning("reserve", "none", "it is created when there is enough space"),
    }
}

fn index(store: &Store) -> Check {
    const HINT: &str = "models can still be opened; `blobd reindex` or a restart rebuilds it";
    match store.index_status() {
        IndexStatus::Degraded(reason) => warning("index", format!("kept in memory only: {reason}"), HINT),
        IndexStatus::Building => ok("index", "being built"),
        _ => ok("index", "a cache; nothing depends on it"),
    }
}

fn layout(store: &Store) -> Check {
    const HINT: &str = "move misplaced files out of the store and restore missing ones from a copy; nothing is \
                        collected until then";
    let misplaced: Vec<_> = store.misplaced().iter().map(ToString::to_string).collect();
    if misplaced.is_empty() {
        ok("layout", "every file and directory has the right type")
    } else {
        failure("layout", misplaced.join("; "), HINT)
    }
}

fn damage(store: &Store) -> Check {
    match store.damaged().len() {
        0 => ok("content", "no blob is known to be damaged"),
        count => {
            let detail = format!("damaged or missing blobs: {count}");
            failure("content", detail, "`blobd verify --repair` fetches them again")
        }
    }
}

fn scrub(store: &Store) -> Check {
    let cursor = Cursor::load(store);
    // Cannot overflow: a cursor has no times after the year 9999.
    let time = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
    let ended = match (cursor.ended, cursor.ended_by(unix_seconds())) {
        (_, Some(ended)) => format!("ended {}", time(ended)),
        (Some(_), None) => "ended at a time in the future: the clock was set back".to_owned(),
        (None, None) => "none yet".to_owned(),
    };
    let running = match cursor.running {
        true => format!(", blobs read in the next one: {}", cursor.blobs),
        false => String::new(),
    };
    ok("scrub", format!("last complete pass {ended}{running}"))
}

fn metadata(store: &Store) -> Check {
    const HINT: &str =
        "nothing is collected until this is repaired: `blobd rm`, `pull` or `import` the model";
    const BUSY: &str = "a collection is running; manifests and recipes were not checked";
    match gc::plan_unless_collecting(store) {
        Ok(None) => warning("metadata", BUSY, "run `blobd doctor` again when it has ended"),
        Ok(Some(plan)) => {
            ok("metadata", format!("all readable, {} reclaimable", human_bytes(plan.freed_bytes())))
        }
        Err(error) => failure("metadata", error.to_string(), HINT),
    }
}

/// The hard limit, which includes descriptors that were sent and not received yet: `serve` raises the soft one to it.
fn descriptors() -> Check {
    const ENOUGH: u64 = 4096;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let detail = format!("at most {limit} can be open");
    if limit >= ENOUGH {
        ok("descriptors", detail)
    } else {
        warning("descriptors", detail, "raise LimitNOFILE or `ulimit -Hn`")
    }
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::new_store;

    use super::*;

    #[test]
    fn doctor_does_not_wait_for_a_collection() {
        let (_folder, store) = new_store();
        let metadata = || {
            let report = doctor(&store, DoctorContext::default()).unwrap();
            report.checks.into_iter().find(|check| check.name == "metadata").unwrap()
        };
        let collection = store.lock_collections();
        let check = metadata();
        assert!(check.detail.contains("a collection is running"), "{check:?}");
        assert_eq!(check.status, CheckStatus::Warning);
        drop(collection);
        assert_eq!(metadata().status, CheckStatus::Ok);
    }

    fn scrub_after(json: &str) -> String {
        let (folder, store) = new_store();
        std::fs::write(folder.path().join("store/scrub.json"), json).unwrap();
        scrub(&store).detail
    }

    #[test]
    fn times_in_the_scrub_file_outside_the_range_are_ignored() {
        assert_eq!(
            scrub_after(r#"{"began":1,"ended":1767225600}"#),
            "last complete pass ended 2026-01-01T00:00:00Z"
        );
        assert_eq!(scrub_after(r#"{"began":18446744073709551615}"#), "last complete pass none yet");
        for ended in ["18446744073709551615", "253402300800", "-5", "1e99"] {
            assert_eq!(scrub_after(&format!("{{\"ended\":{ended}}}")), "last complete pass none yet");
        }
        assert!(scrub_after(r#"{"ended":253402300799}"#).contains("in the future"));
    }
}
