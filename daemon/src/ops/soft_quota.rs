//! The note for users who exceed their soft quota.

use blobd_store::Store;

use crate::requester::Requester;
use crate::size::human_bytes;

/// Notes for the response to a request that has added something: that the requester's soft quota is exceeded. Also
/// logs that.
pub(super) fn notes(store: &Store, requester: Requester) -> Vec<String> {
    let Some(soft_bytes) = requester.quota().soft else { return Vec::new() };
    let uid = requester.uid();
    // The request has succeeded already, so its response does not wait for the index, and an error is only logged.
    let charged_bytes = match store.charged_bytes_unless_building(uid) {
        Ok(Some(charged_bytes)) => charged_bytes,
        Ok(None) => return Vec::new(),
        Err(error) => {
            tracing::warn!(uid, "soft quota: the use is unknown: {error}");
            return Vec::new();
        }
    };
    if charged_bytes <= soft_bytes {
        return Vec::new();
    }
    tracing::warn!(uid, charged_bytes, soft_bytes, "over soft quota");
    let (charged, soft) = (human_bytes(charged_bytes), human_bytes(soft_bytes));
    let hard = requester
        .quota()
        .hard
        .map_or_else(String::new, |hard| format!("; above {} nothing more can be added", human_bytes(hard)));
    vec![format!("soft quota: {charged} of {soft} used by uid {uid}{hard}; `blobd df --users` shows the use")]
}
