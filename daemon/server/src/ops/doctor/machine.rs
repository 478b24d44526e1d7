//! Checks of the kernel, its settings, the limits of this process, and the clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::upkeep::Check;

use super::facts::Facts;
use super::{failure, note, ok, warning};
use crate::ops::rfc3339;

/// Improvements of newer kernels: the version, the file system that it concerns (all if empty), and the effect.
const IMPROVEMENTS: [(u32, u32, &str, &str); 6] = [
    (5, 14, "", "`warm` reads a model without touching each page (MADV_POPULATE_READ)"),
    (5, 18, "xfs", "maps of models cost a tenth of the page faults (large folios)"),
    (
        6,
        5,
        "",
        "no program that `exec` runs opens a model without its library (memfd_secret; before, with secretmem.enable=1)",
    ),
    (6, 9, "", "`mount` shares memory for files stored whole (FUSE passthrough)"),
    (6, 16, "", "the daemon refuses unexpected descriptors before they arrive (SO_PASSRIGHTS)"),
    (6, 16, "ext4", "maps of models cost a tenth of the page faults (large folios)"),
];

/// The hard limit, which includes descriptors that were sent and not received yet: `serve` raises the soft one to it.
pub(super) fn descriptors(facts: &Facts) -> Check {
    const ENOUGH: u64 = 4096;
    let limit = facts.most_descriptors;
    let detail = format!("at most {limit} can be open");
    if limit >= ENOUGH {
        return ok("descriptors", detail);
    }
    let check = warning("descriptors", detail)
        .because(
            "a model needs a descriptor for each tensor, so few clients can open models at the same time",
        )
        .with_hint("raise LimitNOFILE or `ulimit -Hn`");
    check.mended_by(if facts.is_service {
        service_limit("LimitNOFILE=524288")
    } else {
        format!("sudo prlimit --pid {} --nofile=524288:524288", facts.pid)
    })
}

fn service_limit(setting: &str) -> String {
    format!(
        "sudo mkdir -p /etc/systemd/system/blobd.service.d && printf '[Service]\\n{setting}\\n' | sudo tee \
         /etc/systemd/system/blobd.service.d/limits.conf && sudo systemctl daemon-reload && sudo systemctl restart blobd"
    )
}

/// A client maps each blob of a file.
pub(super) fn maps(facts: &Facts) -> Check {
    /// Maps that a program has before it opens a model: its libraries, stacks and heap.
    const OTHERS: u64 = 2000;
    let Some(limit) = facts.kernel.max_map_count else {
        return ok("maps", "the kernel does not say the limit");
    };
    let largest = facts.most_blobs_of_a_file;
    let needed = largest.saturating_add(OTHERS);
    let detail = format!("a process may have {limit} maps; the file with the most tensors needs {largest}");
    if needed <= limit {
        return ok("maps", detail);
    }
    warning("maps", detail)
        .because("programs cannot map this model: mmap fails with ENOMEM")
        .with_hint("raise vm.max_map_count, now and at each start of the machine")
        .mended_by(format!(
            "echo 'vm.max_map_count = {}' | sudo tee /etc/sysctl.d/60-blobd-maps.conf && sudo sysctl --system",
            needed.checked_next_power_of_two().unwrap_or(needed).max(1 << 20)
        ))
}

pub(super) fn huge_pages(facts: &Facts) -> Check {
    let setting = facts.kernel.huge_pages.as_deref().unwrap_or_default();
    if !setting.contains("[never]") {
        return ok(
            "huge pages",
            if setting.is_empty() { "not in this kernel" } else { "on for maps of models" },
        );
    }
    note("huge pages", "off for all programs")
        .because("the first read of a model through a map is about a third slower")
        .with_hint("allow them to programs that request them; in a container, this is a setting of the host")
        .mended_by("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")
}

pub(super) fn kernel(facts: &Facts) -> Check {
    let release = &facts.kernel.release;
    let Some(version) = version(release) else { return ok("kernel", format!("Linux {release}")) };
    let file_system = facts.file_system.name;
    let missing = IMPROVEMENTS.iter().filter(|(major, minor, concerns, _)| {
        (*major, *minor) > version && (concerns.is_empty() || *concerns == file_system)
    });
    let missing: Vec<_> =
        missing.map(|(major, minor, _, effect)| format!("from {major}.{minor} {effect}")).collect();
    if missing.is_empty() {
        return ok("kernel", format!("Linux {release}"));
    }
    note("kernel", format!("Linux {release}; {}", missing.join("; ")))
        .because("everything works without these, with more memory or processor time")
        .with_hint("update the kernel when you next restart the machine")
}

/// The first two numbers of a release such as `6.1.0-13-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn clock(facts: &Facts) -> Check {
    /// 2026-01-01: this program did not exist before.
    const PAST: Duration = Duration::from_secs(1_767_225_600);
    /// Clocks differ, and so do those of a file server and its clients.
    const TOLERANCE: Duration = Duration::from_secs(24 * 3600);
    let now = rfc3339(facts.now);
    let mend = |check: Check| {
        check
            .with_hint("set the clock, and keep it right with a time server")
            .mended_by("sudo timedatectl set-ntp true && timedatectl")
    };
    if facts.now < UNIX_EPOCH + PAST {
        return mend(
            failure("clock", format!("says {now}, which is in the past"))
                .because("certificates of registries are then not valid yet, so no pull succeeds"),
        );
    }
    let is_later = |changed: &SystemTime| changed.duration_since(facts.now).is_ok_and(|by| by > TOLERANCE);
    match facts.newest_change.filter(is_later) {
        None => ok("clock", now),
        Some(changed) => mend(
            warning("clock", format!("says {now}, but the store was changed at {}", rfc3339(changed)))
                .because(
                    "expiry of the trash and of unfinished downloads is counted from times in the future",
                ),
        ),
    }
}

/// Without its answers, users are shown as numbers, and a configuration that names users cannot be loaded.
pub(super) fn names(facts: &Facts) -> Check {
    if let Some(failure) = &facts.names.failure {
        return warning("names", failure)
            .because(
                "users are shown as numbers, and a change of the configuration that names users is refused",
            )
            .with_hint("look at the service that /etc/nsswitch.conf names for passwd and group, such as sssd")
            .mended_by("systemctl status sssd nslcd systemd-userdbd");
    }
    if facts.names.are_of_files_only {
        return ok(
            "names",
            "of users and groups in /etc/passwd and /etc/group only: this is a build without the system's name service",
        );
    }
    ok("names", "of users and groups come from the system's name service (/etc/nsswitch.conf)")
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::CheckStatus;

    use super::*;
    use crate::ops::doctor::facts::healthy;

    #[test]
    fn low_limit_of_descriptors_is_raised_where_the_daemon_was_started() {
        let low = Facts { most_descriptors: 1024, ..healthy() };
        let command = descriptors(&low).command.unwrap();
        assert!(command.contains("'[Service]\\nLimitNOFILE=524288\\n'"), "{command}");
        let command = descriptors(&Facts { is_service: false, pid: 4711, ..low }).command.unwrap();
        assert_eq!(command, "sudo prlimit --pid 4711 --nofile=524288:524288");
    }

    #[test]
    fn maps_are_compared_with_the_file_that_has_the_most_tensors() {
        let with = |limit, most_blobs_of_a_file| {
            let mut facts = Facts { most_blobs_of_a_file, ..healthy() };
            facts.kernel.max_map_count = limit;
            maps(&facts)
        };
        assert_eq!(with(Some(65_530), 18_867).status, CheckStatus::Ok);
        assert_eq!(with(None, 18_867).status, CheckStatus::Ok);
        let check = with(Some(65_530), 70_000);
        assert_eq!(check.status, CheckStatus::Warning);
        assert!(check.command.unwrap().contains("vm.max_map_count = 1048576"));
        assert!(with(Some(1), u64::MAX).command.unwrap().contains(&u64::MAX.to_string()));
    }

    #[test]
    fn older_kernel_is_a_note_that_lists_what_a_newer_one_improves() {
        let with = |release: &str, file_system| {
            let mut facts = healthy();
            facts.kernel.release = release.to_owned();
            facts.file_system.name = file_system;
            kernel(&facts)
        };
        let check = with("6.1.0-13-amd64", "ext4");
        assert_eq!(check.status, CheckStatus::Note);
        assert!(check.detail.contains("from 6.9") && check.detail.contains("from 6.16"), "{}", check.detail);
        assert!(!with("6.1.0", "xfs").detail.contains("folios"));
        assert!(with("5.15.0", "xfs").detail.contains("folios"));
        for release in ["6.16.0-rc1", "7.0", "unknown", ""] {
            assert_eq!(with(release, "ext4").status, CheckStatus::Ok, "{release}");
        }
    }

    #[test]
    fn clock_in_the_past_is_a_failure_and_one_behind_the_store_a_warning() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let check = clock(&Facts { now: at(86_400), ..healthy() });
        assert_eq!(check.status, CheckStatus::Failure);
        assert!(check.detail.contains("1970-01-02") && check.command.unwrap().contains("timedatectl"));
        let with = |changed| {
            clock(&Facts { now: at(1_800_000_000), newest_change: Some(at(changed)), ..healthy() }).status
        };
        assert_eq!(with(1_800_000_000 + 86_400), CheckStatus::Ok);
        assert_eq!(with(1_800_000_000 + 86_401), CheckStatus::Warning);
    }

    #[test]
    fn huge_pages_that_are_off_are_a_note() {
        let with = |setting: Option<&str>| {
            let mut facts = healthy();
            facts.kernel.huge_pages = setting.map(str::to_owned);
            huge_pages(&facts).status
        };
        assert_eq!(with(Some("always madvise [never]\n")), CheckStatus::Note);
        assert_eq!([with(Some("[always] madvise never")), with(None)], [CheckStatus::Ok; 2]);
    }

    #[test]
    fn name_service_that_does_not_respond_is_a_warning_and_use_of_files_alone_is_mentioned() {
        let with = |failure: Option<&str>, are_of_files_only| {
            let mut facts = healthy();
            facts.names.failure = failure.map(str::to_owned);
            facts.names.are_of_files_only = are_of_files_only;
            names(&facts)
        };
        assert_eq!(with(Some("does not answer"), false).status, CheckStatus::Warning);
        let check = with(None, true);
        assert!(check.status == CheckStatus::Ok && check.detail.contains("/etc/group only"), "{check:?}");
    }
}
