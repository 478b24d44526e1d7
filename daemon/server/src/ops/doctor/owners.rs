//! Checks of who may read and change the store's files.

use blobd_client::protocol::upkeep::Check;
use blobd_store::{ForeignGroup, Ownership, RUN_OUTSIDE, WrongGroups};
use blobd_store_format::text::quoted;

use super::facts::Facts;
use super::{failure, ok, warning};

pub(super) fn directory(facts: &Facts) -> Check {
    let detail = format!("mode {:04o}, owned by uid {}", facts.mode, facts.owner);
    let mend = |check: Check| {
        let command = format!("{}chmod 0700 {}", facts.sudo(), quoted(&facts.root));
        check.with_hint("chmod 0700 it").mended_by(command)
    };
    match facts.mode {
        mode if mode & 0o022 != 0 => mend(
            failure("directory", format!("{detail}: others may write to it"))
                .because("any of them can replace or delete the models of all users"),
        ),
        mode if mode & 0o055 != 0 => mend(
            warning("directory", format!("{detail}: others may read it without the daemon"))
                .because("a model's licence may have been accepted by some users only, and quotas do not see these reads"),
        ),
        _ => ok("directory", detail),
    }
}

/// Files of another user come from a copy that root has made, or from an earlier version of blobd run as root.
pub(super) fn ownership(facts: &Facts) -> Check {
    let Ownership { owner, files, foreign, examples, wrong_groups } = &facts.ownership;
    if *foreign > 0 {
        let found = examples.iter().map(|found| format!("{} to uid {}", found.path.display(), found.uid));
        let found = found.collect::<Vec<_>>().join(", ");
        let detail = format!(
            "the store belongs to uid {}, but {foreign} of its {files} files and directories to others: {found}{}",
            owner.uid,
            if *foreign > examples.len() as u64 { ", …" } else { "" }
        );
        return failure("ownership", detail)
            .because("pulls, removals and collections fail where the store's owner may not write")
            .with_hint("stop the daemon, then give all files to the store's owner")
            .mended_by(facts.chown());
    }
    // Its owner may use it also in a namespace that maps nobody.
    if !owner.is_mapped() && facts.read_only_reason.is_some() {
        return failure("ownership", format!("the store belongs to {}", owner.description()))
            .because("its owner cannot be checked, and nothing can be changed")
            .with_hint(RUN_OUTSIDE);
    }
    if !facts.runs_as_owner() {
        let detail =
            format!("the store belongs to uid {}, and this process runs as uid {}", owner.uid, facts.uid);
        return failure("ownership", detail)
            .because("files of another user in it would stop its owner's daemon, so nothing is changed")
            .with_hint("run blobd as the store's owner; or give the store to this user with `chown -R`")
            .mended_by(facts.as_owner());
    }
    if let WrongGroups { files: wrong, writable, example: Some(example) } = wrong_groups {
        let ForeignGroup { path, gid, mode } = example;
        let detail = format!(
            "{wrong} of the store's {files} files and directories have another group than {}, such as {}: gid {gid}, mode \
             {mode:04o}",
            owner.gid,
            path.display()
        );
        return match writable {
            0 => warning("ownership", detail).because(
                "group quotas of the file system count them for that group, and modes give it rights to the store's files",
            ),
            _ => failure("ownership", format!("{detail}; the group may write to {writable} of them"))
                .because("its members can change or delete the models of all users"),
        }
        .with_hint("give all files to the store's owner and group")
        .mended_by(facts.chown());
    }
    ok("ownership", format!("all {files} files and directories belong to uid {}", owner.uid))
}

/// The owner of a blob can make it writable and change it while others have it mapped.
pub(super) fn owner(facts: &Facts) -> Check {
    let uid = facts.uid;
    if facts.context.is_single_user {
        return ok("owner", format!("uid {uid}, the only user of this store"));
    }
    if facts.context.has_met_owner {
        return warning(
            "owner",
            format!("programs that open models run as uid {uid}, which owns the blobs and can change them"),
        )
        .because("a program of that user can change a model that other users have mapped")
        .with_hint("run the daemon as a user of its own, or set single_user = true if nobody else uses it")
        .mended_by("sudo useradd --system --home-dir /var/lib/blobd --shell /usr/sbin/nologin blobd");
    }
    match uid {
        0 => ok("owner", "root; other users cannot change what they open"),
        _ => ok("owner", format!("uid {uid}, as which no program has opened a model so far")),
    }
}

pub(super) fn hard_links(facts: &Facts) -> Check {
    if facts.kernel.protected_hardlinks != Some(0) {
        return ok("hard links", "protected by the kernel");
    }
    warning("hard links", "any user who can read a blob can link it")
        .because("a link keeps the space in use after `rm`, and nothing but its owner can free it")
        .with_hint("set fs.protected_hardlinks to 1, now and at each start of the machine")
        .mended_by("echo 'fs.protected_hardlinks = 1' | sudo tee /etc/sysctl.d/60-blobd-links.conf && sudo sysctl --system")
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::upkeep::CheckStatus;
    use blobd_store::ForeignOwner;

    use super::*;
    use crate::ops::DoctorContext;
    use crate::ops::doctor::facts::healthy;

    #[test]
    fn directory_that_others_may_use_is_reported_with_its_path() {
        for (mode, status) in
            [(0o777, CheckStatus::Failure), (0o755, CheckStatus::Warning), (0o711, CheckStatus::Warning)]
        {
            let check = directory(&Facts { mode, root: "/srv/my store".to_owned(), ..healthy() });
            assert_eq!(check.status, status, "{mode:o}");
            assert_eq!(check.command.unwrap(), "sudo chmod 0700 '/srv/my store'");
        }
        let context = DoctorContext { is_single_user: true, has_met_owner: true, ..DoctorContext::default() };
        let check = directory(&Facts { mode: 0o755, context, ..healthy() });
        assert_eq!(check.command.unwrap(), "chmod 0700 /var/lib/blobd");
    }

    #[test]
    fn files_of_other_users_are_counted_and_the_first_are_named() {
        let mut facts = healthy();
        let example = |path: &str, uid| ForeignOwner { path: path.into(), uid };
        facts.ownership.files = 40;
        facts.ownership.foreign = 2;
        facts.ownership.examples = vec![example("blobs/sha256-1", 0), example("store.json", 7)];
        let check = ownership(&facts);
        assert_eq!(check.status, CheckStatus::Failure);
        assert_eq!(
            check.detail,
            "the store belongs to uid 990, but 2 of its 40 files and directories to others: blobs/sha256-1 to uid 0, \
             store.json to uid 7"
        );
        let command = "sudo chown -R --no-dereference 990:991 /var/lib/blobd";
        assert_eq!(check.command.unwrap(), command);
        facts.ownership.foreign = 3;
        assert!(ownership(&facts).detail.ends_with("store.json to uid 7, …"));
        facts.read_only_reason = Some("its lock file belongs to uid 0".to_owned());
        assert_eq!(crate::ops::doctor::disk::writes(&facts).command.unwrap(), command);
    }

    #[test]
    fn wrong_groups_are_reported_with_the_command_that_corrects_them() {
        let mut facts = healthy();
        let example = ForeignGroup { path: "blobs/sha256-1".into(), gid: 0, mode: 0o444 };
        facts.ownership.files = 40;
        facts.ownership.wrong_groups = WrongGroups { files: 30, writable: 0, example: Some(example) };
        let check = ownership(&facts);
        assert_eq!(check.status, CheckStatus::Warning);
        assert_eq!(
            check.detail,
            "30 of the store's 40 files and directories have another group than 991, such as blobs/sha256-1: gid 0, \
             mode 0444"
        );
        assert_eq!(check.command.unwrap(), "sudo chown -R --no-dereference 990:991 /var/lib/blobd");
        facts.ownership.wrong_groups.writable = 2;
        let check = ownership(&facts);
        assert_eq!(check.status, CheckStatus::Failure);
        assert!(check.detail.ends_with("; the group may write to 2 of them"), "{}", check.detail);
    }

    #[test]
    fn process_of_another_user_is_told_to_run_as_the_owner() {
        let facts = Facts { uid: 1000, root: "/srv/my store".to_owned(), ..healthy() };
        let check = ownership(&facts);
        assert_eq!(check.status, CheckStatus::Failure);
        assert_eq!(check.command.unwrap(), "sudo -u '#990' blobd --root '/srv/my store' doctor");
        assert_eq!(ownership(&Facts { uid: 0, ..facts }).status, CheckStatus::Ok, "root acts as the owner");
    }

    #[test]
    fn clients_of_the_daemons_user_and_unprotected_links_are_warnings() {
        let context =
            DoctorContext { is_single_user: false, has_met_owner: true, ..DoctorContext::default() };
        let check = owner(&Facts { context, ..healthy() });
        assert!(check.hint.unwrap().contains("single_user = true"));
        let mut facts = healthy();
        facts.kernel.protected_hardlinks = Some(0);
        assert!(hard_links(&facts).command.unwrap().contains("fs.protected_hardlinks = 1"));
    }
}
