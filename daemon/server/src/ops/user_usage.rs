//! `df --users`: what is charged to each user.

use std::cmp::Reverse;

use blobd_client::protocol::accounts::{ChargedGroup, ChargedUser, UserUsage};
use blobd_store::{Pool, Store, UserCharge};

use super::OpError;
use crate::names::Names;
use crate::quotas::UserQuota;
use crate::requester::Requester;

/// Finds the quota of a user.
pub(crate) type QuotaOf<'q> = dyn Fn(u32) -> UserQuota + 'q;

/// Reports what is charged to each user. Only administrators see other users than themselves.
///
/// # Errors
/// As for [`super::usage`].
pub(crate) fn user_usage(
    store: &Store,
    quota_of: &QuotaOf<'_>,
    requester: Requester,
) -> Result<UserUsage, OpError> {
    let others = store.content().other_files(store.content().index().recheck_sizes()?)?;
    let charges = match requester.may_administer() {
        true => store.liveness().charges(&others),
        false => store.liveness().charges_for(&others, requester.uid()),
    }?;
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

/// The groups with quotas, with `member` only those that this user is a member of.
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
        let quota = UserQuota { soft: pool.soft_bytes, hard: pool.hard_bytes };
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
