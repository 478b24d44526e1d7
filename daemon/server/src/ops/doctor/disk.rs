//! Checks of the disk that the store is on.

use blobd_client::protocol::upkeep::Check;
use blobd_store::{Eviction, LowerStatus, RUN_OUTSIDE};
use blobd_store_format::size::{human_bytes, limit_bytes};
use blobd_store_format::text::quoted;

use super::facts::{Facts, SpaceFacts};
use super::{failure, note, ok, warning};

pub(super) fn writes(facts: &Facts) -> Check {
    let Some(reason) = &facts.read_only_reason else {
        return ok("writes", "every sync so far has succeeded");
    };
    let check = failure("writes", format!("the store is read-only: {reason}"))
        .because("models can still be opened and exported, but nothing can be added or removed")
        .with_hint("fix the cause, which the kernel's log may name, and restart blobd");
    let mount = facts.mount.as_ref().filter(|mount| mount.is_read_only());
    match mount {
        _ if facts.ownership.foreign > 0 => check.mended_by(facts.chown()),
        _ if !facts.ownership.owner.is_mapped() => check.with_hint(RUN_OUTSIDE),
        _ if !facts.runs_as_owner() => {
            check.with_hint("run blobd as the store's owner").mended_by(facts.as_owner())
        }
        Some(mount) => check.mended_by(format!("sudo mount -o remount,rw {}", quoted(&mount.point))),
        None => check.mended_by("sudo dmesg --level=err,warn | tail -n 20"),
    }
}

pub(super) fn file_system(facts: &Facts) -> Check {
    let name = facts.file_system.name;
    let detail = format!("{} on {name}", facts.root);
    if let Some(what) = facts.file_system.warning {
        let hint = "keep the store on a local disk, such as with ext4, xfs or btrfs; OPERATIONS.md says how to move it";
        return warning("file system", format!("{detail}: {what}"))
            .because("a power cut or a second machine may damage models that were reported as stored")
            .with_hint(hint);
    }
    if facts.has_direct_io == Some(false) {
        return note("file system", format!("{detail}, without direct I/O"))
            .because("imports and verifications read and write through the page cache, and may drop mapped models from it")
            .with_hint("on ext4, direct I/O is missing with the option data=journal or with encryption");
    }
    ok("file system", detail)
}

pub(super) fn renames(facts: &Facts) -> Check {
    match &facts.rename_failure {
        None => ok("renames", "a file gets its name without replacing another"),
        Some(error) => failure("renames", error)
            .because(
                "two imports of one tensor at a time could replace each other's file, so nothing is imported",
            )
            .with_hint("move the store to another file system; OPERATIONS.md says how")
            .mended_by(format!("findmnt --target {}", quoted(&facts.root))),
    }
}

pub(super) fn lower_stores(facts: &Facts) -> Check {
    let missing: Vec<&str> = facts
        .lower_stores
        .iter()
        .filter_map(|lower| lower.state.as_ref().err())
        .map(String::as_str)
        .collect();
    if !missing.is_empty() {
        return warning("lower stores", missing.join("; "))
            .because("the models there are hidden, and models that use their blobs cannot be opened; nothing is deleted")
            .with_hint("mount the file system, or correct `lower` in the configuration and restart blobd");
    }
    let limit = |lower: &LowerStatus| {
        let limit = lower.state.as_ref().ok()?.limit_as_lower()?;
        Some(format!("{} {limit}", lower.place.display()))
    };
    let limits: Vec<String> = facts.lower_stores.iter().filter_map(limit).collect();
    if !limits.is_empty() {
        return note("lower stores", limits.join("; "))
            .because("programs that have its models mapped depend on the server")
            .with_hint("`blobd promote` copies models that are used often to this machine");
    }
    let places: Vec<String> =
        facts.lower_stores.iter().map(|lower| lower.place.display().to_string()).collect();
    ok("lower stores", if places.is_empty() { "none".to_owned() } else { places.join(", ") })
}

pub(super) fn mount(facts: &Facts) -> Check {
    let Some(mount) = &facts.mount else { return ok("mount", "the kernel does not say which it is") };
    let point = quoted(&mount.point);
    let detail = |what: &str| format!("{} at {}: {what}", mount.source, mount.point);
    if mount.is_read_only() {
        return failure("mount", detail("mounted read-only"))
            .because("nothing can be added or removed; after an I/O error the kernel mounts a disk read-only by itself")
            .with_hint("check the kernel's log and the disk first, then mount it for writing")
            .mended_by(format!("sudo mount -o remount,rw {point} && sudo systemctl restart blobd"));
    }
    if ["nobarrier", "barrier=0", "volatile"].iter().any(|option| mount.has(option)) {
        return warning("mount", detail("mounted so that syncs do not reach the disk"))
            .because("after a power cut, models that were reported as stored may be damaged or gone")
            .with_hint("remove nobarrier, barrier=0 or volatile from the options in /etc/fstab too")
            .mended_by(format!("sudo mount -o remount,barrier=1 {point}"));
    }
    if mount.has("sync") {
        return note("mount", detail("mounted with the option sync"))
            .because("each write waits for the disk, so that pulls and imports are many times slower; blobd syncs itself")
            .with_hint("remove sync from the options in /etc/fstab too")
            .mended_by(format!("sudo mount -o remount,async {point}"));
    }
    ok("mount", detail(&mount.options))
}

pub(super) fn space(facts: &Facts) -> Check {
    let SpaceFacts { free_bytes, used_bytes, is_short, policy } = facts.space;
    let quota = policy.quota_bytes.map_or_else(String::new, |quota| {
        let eviction = match policy.eviction {
            Eviction::Never => "",
            _ => ", eviction on",
        };
        format!(", {} of a quota of {} in use{eviction}", human_bytes(used_bytes), limit_bytes(quota))
    });
    let detail = format!("{} free{quota}", human_bytes(free_bytes));
    if !is_short && policy.high_bytes().is_none_or(|high| used_bytes <= high) {
        return ok("space", detail);
    }
    warning("space", detail)
        .because("pulls and imports that do not fit are refused before they write anything")
        .with_hint(
            "free space with `blobd gc` or `blobd rm`, or configure eviction; `blobd df` shows what takes it",
        )
        .mended_by("blobd gc")
}

pub(super) fn inodes(facts: &Facts) -> Check {
    /// Every tensor is a file. Models have some hundred tensors, and some twenty thousand.
    const FEW: u64 = 20_000;
    let Some(inodes) = facts.inodes else { return ok("inodes", "not limited by this file system") };
    let detail = format!("{} of {} files can still be made", inodes.free, inodes.total);
    if inodes.free >= FEW {
        return ok("inodes", detail);
    }
    warning("inodes", detail)
        .because("every tensor is a file; without inodes a pull fails, even if bytes are free")
        .with_hint("remove small files from this file system, or put the store on one that was made with more inodes")
        .mended_by("blobd gc")
}

pub(super) fn reserve(facts: &Facts) -> Check {
    match facts.reserve_bytes {
        Some(bytes) => ok("reserve", format!("{}, for removals on a full disk", human_bytes(bytes))),
        None if facts.space.used_bytes == 0 && !facts.space.is_short => {
            ok("reserve", "none; the first pull or import creates it")
        }
        None => warning("reserve", "none")
            .because("on a full disk, `rm` and `gc` may fail, because they need some space themselves")
            .with_hint("it is created when there is enough space"),
    }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::CheckStatus;
    use blobd_store::{Inodes, SpacePolicy};

    use super::*;
    use crate::ops::doctor::facts::healthy;

    fn mounted_with(options: &str) -> Facts {
        let mut facts = healthy();
        let mount = facts.mount.as_mut().unwrap();
        (mount.options, mount.point) = (options.to_owned(), "/srv/my models".to_owned());
        facts
    }

    #[test]
    fn options_of_the_mount_that_endanger_or_slow_down_the_store_are_reported() {
        for (options, status, command) in [
            ("ro,relatime", CheckStatus::Failure, "sudo mount -o remount,rw '/srv/my models' && "),
            ("rw,nobarrier", CheckStatus::Warning, "sudo mount -o remount,barrier=1 '/srv/my models'"),
            ("rw,volatile", CheckStatus::Warning, "sudo mount -o remount"),
            ("rw,sync", CheckStatus::Note, "sudo mount -o remount,async '/srv/my models'"),
        ] {
            let check = mount(&mounted_with(options));
            assert_eq!(check.status, status, "{options}");
            assert!(check.command.unwrap().starts_with(command), "{options}");
            assert!(check.why.is_some() && check.hint.is_some());
        }
        assert_eq!(mount(&mounted_with("rw,nodev,noexec,noatime")).status, CheckStatus::Ok);
        assert_eq!(mount(&Facts { mount: None, ..healthy() }).status, CheckStatus::Ok);
    }

    #[test]
    fn read_only_store_is_a_failure_with_the_command_for_its_cause() {
        let reason = Some("it is on a file system that is mounted read-only".to_owned());
        let check = writes(&Facts { read_only_reason: reason, ..mounted_with("ro") });
        assert_eq!(check.command.unwrap(), "sudo mount -o remount,rw '/srv/my models'");
        let reason = Some("cannot sync blobs/: Input/output error".to_owned());
        let check = writes(&Facts { read_only_reason: reason, ..healthy() });
        assert!(check.detail.contains("Input/output error") && check.command.unwrap().contains("dmesg"));
    }

    #[test]
    fn lack_of_inodes_is_reported_and_a_file_system_without_a_limit_is_not() {
        let with = |inodes| super::inodes(&Facts { inodes, ..healthy() });
        let check = with(Some(Inodes { total: 65_536, free: 19_999 }));
        assert_eq!((check.status, check.detail.contains("19999 of 65536")), (CheckStatus::Warning, true));
        assert_eq!(with(None).status, CheckStatus::Ok);
    }

    #[test]
    fn space_is_short_when_nothing_fits_or_the_quota_is_nearly_used() {
        let with = |is_short, used_bytes| {
            let policy = SpacePolicy { quota_bytes: Some(100 << 30), ..SpacePolicy::default() };
            let facts = healthy();
            let space = SpaceFacts { is_short, used_bytes, policy, ..facts.space };
            super::space(&Facts { space, ..facts })
        };
        assert_eq!(with(false, 95 << 30).status, CheckStatus::Ok);
        assert_eq!(with(true, 1).status, CheckStatus::Warning);
        let check = with(false, (95 << 30) + 1);
        assert_eq!((check.status, check.command.as_deref()), (CheckStatus::Warning, Some("blobd gc")));
        assert!(check.detail.contains("of a quota of 100"), "{}", check.detail);
    }

    #[test]
    fn missing_reserve_of_an_empty_store_is_not_a_problem() {
        let facts = Facts { reserve_bytes: None, ..healthy() };
        assert_eq!(reserve(&facts).status, CheckStatus::Warning);
        let space = SpaceFacts { used_bytes: 0, ..facts.space };
        assert_eq!(reserve(&Facts { space, ..facts }).status, CheckStatus::Ok);
    }

    #[test]
    fn file_system_without_direct_io_is_a_note() {
        let check = file_system(&Facts { has_direct_io: Some(false), ..healthy() });
        assert_eq!(check.status, CheckStatus::Note);
    }
}
