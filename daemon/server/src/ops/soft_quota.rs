//! The notes for users who exceed their soft quota, or that of a group.

use blobd_store::{Payer, Store};
use blobd_store_format::size::human_bytes;

use crate::quotas::UserQuota;
use crate::requester::Requester;

/// Notes for the response to a request that has added something: that the soft quota of the requester, or of one of its
/// groups, is exceeded. Also logs that.
pub(super) fn notes(store: &Store, requester: Requester) -> Vec<String> {
    let uid = requester.uid();
    let own = (Payer::User(uid), requester.quota());
    let pools = store.ledger().pools();
    let of_groups = pools.iter().filter(|pool| !requester.may_administer() && pool.members.contains(uid));
    let of_groups = of_groups.map(|pool| {
        let quota = UserQuota { soft: pool.soft_bytes, hard: pool.hard_bytes };
        (Payer::Pool(pool.clone()), quota)
    });
    [own].into_iter().chain(of_groups).filter_map(|(payer, quota)| note(store, uid, &payer, quota)).collect()
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
    let (charged, soft) = (human_bytes(charged_bytes), human_bytes(soft_bytes));
    let hard = quota
        .hard
        .map_or_else(String::new, |hard| format!("; above {} nothing more can be added", human_bytes(hard)));
    Some(format!("soft quota: {charged} of {soft} used by {user}{hard}; `blobd df --users` shows the use"))
}
