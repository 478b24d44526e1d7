//! What is charged to users: `df --users`, and the notes for users who exceed a soft quota.

use std::cmp::Reverse;

use blobd_client::protocol::space::{ChargedGroup, ChargedUser, UserUsage};
use blobd_store::{Payer, Pool, Store, UserCharge, VisitedFiles};
use blobd_store_format::size::{human_bytes, limit_bytes};

use crate::names::Names;
use crate::ops::OpError;
use crate::quotas::UserQuota;
use crate::requester::Requester;

/// Reports what is charged to each user. Only administrators see other users than themselves.
pub(crate) fn user_usage(
    store: &Store,
    quota_of: &dyn Fn(u32) -> UserQuota,
    requester: Requester,
) -> Result<UserUsage, OpError> {
    let linked = store.content().index().recheck_sizes()?;
    let mut manifests = VisitedFiles::default();
    store.names().summaries_with_files(&mut manifests)?;
    let others = store.content().other_files(linked, &manifests)?;
    let only = (!requester.may_administer()).then(|| requester.uid());
    let charges = store.liveness().charges(&others, only)?;
    let names = Names::system();
    let row = |charge: &UserCharge| {
        let quota = charge.uid.map(quota_of).unwrap_or_default();
        ChargedUser {
            uid: charge.uid,
            user: charge.uid.and_then(|uid| names.name_of(uid)),
            charged_bytes: charge.charged_bytes,
            unique_bytes: charge.unique_bytes,
            shared_bytes: charge.shared_bytes,
            models: charge.models,
            quota: quota.limits(),
            state: quota.state(charge.charged_bytes),
        }
    };
    if !requester.may_administer() {
        let uid = Some(requester.uid());
        let own = charges.iter().find(|charge| charge.uid == uid).copied();
        let quota = requester.quota();
        let own = row(&own.unwrap_or(UserCharge { uid, ..UserCharge::default() }));
        // The groups of the connection may be others than those in the system's files.
        let own = ChargedUser { quota: quota.limits(), state: quota.state(own.charged_bytes), ..own };
        let groups = groups(store, &charges, Some(requester.uid()));
        return Ok(UserUsage { users: vec![own], groups, disk_bytes: None });
    }
    let disk_bytes = charges.iter().map(|charge| charge.charged_bytes).fold(0, u64::saturating_add);
    let mut users: Vec<ChargedUser> = charges.iter().map(row).collect();
    users.sort_by_key(|user| (user.uid.is_none(), Reverse(user.charged_bytes), user.uid));
    Ok(UserUsage { users, groups: groups(store, &charges, None), disk_bytes: Some(disk_bytes) })
}

/// Logs that the soft quota of the requester or of one of its groups is exceeded, and returns notes for the response to a
/// request that has added something.
pub(in crate::ops) fn soft_quota_notes(store: &Store, requester: Requester) -> Vec<String> {
    let uid = requester.uid();
    let own = (Payer::User(uid), requester.quota());
    let pools = store.ledger().pools();
    let of_groups = pools.iter().filter(|pool| !requester.may_administer() && pool.members.contains(uid));
    let of_groups = of_groups.map(|pool| (Payer::Pool(pool.clone()), quota_of_pool(pool)));
    [own].into_iter().chain(of_groups).filter_map(|(payer, quota)| note(store, uid, &payer, quota)).collect()
}

/// Lists the groups with quotas; with `member`, only the groups of this user.
fn groups(store: &Store, charges: &[UserCharge], member: Option<u32>) -> Vec<ChargedGroup> {
    let pools = store.ledger().pools();
    let uids: Vec<u32> = charges.iter().filter_map(|charge| charge.uid).chain(member).collect();
    pools.iter().for_each(|pool| pool.members.prepare(&uids));
    let shown = pools.iter().filter(|pool| member.is_none_or(|uid| pool.members.contains(uid)));
    let group = |pool: &Pool| {
        let of_members =
            charges.iter().filter(|charge| charge.uid.is_some_and(|uid| pool.members.contains(uid)));
        let charged_bytes =
            of_members.clone().map(|charge| charge.charged_bytes).fold(0, u64::saturating_add);
        let quota = quota_of_pool(pool);
        ChargedGroup {
            group: pool.name.clone(),
            charged_bytes,
            members: of_members.filter(|charge| charge.charged_bytes > 0).count() as u64,
            quota: quota.limits().unwrap_or_default(),
            state: quota.state(charged_bytes),
        }
    };
    shown.map(group).collect()
}

fn quota_of_pool(pool: &Pool) -> UserQuota {
    UserQuota { soft: pool.soft_bytes, hard: pool.hard_bytes }
}

fn note(store: &Store, uid: u32, payer: &Payer, quota: UserQuota) -> Option<String> {
    let soft_bytes = quota.soft?;
    // The request has succeeded already, so its response does not wait for the index, and an error is only logged.
    let charged_bytes = match store.liveness().charged_bytes_unless_building(payer) {
        Ok(charged_bytes) => charged_bytes?,
        Err(error) => {
            tracing::warn!(uid, "soft quota: the use is unknown: {error}");
            return None;
        }
    };
    if charged_bytes <= soft_bytes {
        return None;
    }
    let user = match payer.group() {
        None => format!("uid {uid}"),
        Some(group) => format!("group {group}"),
    };
    tracing::warn!(uid, group = payer.group(), charged_bytes, soft_bytes, "over soft quota");
    let (charged, soft) = (human_bytes(charged_bytes), limit_bytes(soft_bytes));
    let hard = quota
        .hard
        .map_or_else(String::new, |hard| format!("; above {} nothing more can be added", limit_bytes(hard)));
    Some(format!("soft quota: {charged} of {soft} used by {user}{hard}; `blobd df --users` shows the use"))
}
