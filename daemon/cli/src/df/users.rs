//! The table of `df --users`.

use blobd_cli_common::output::{Table, human_bytes, or_dash, printable};
use blobd_client::protocol::space::{ChargedUser, QuotaState, UserLimits, UserUsage};
use blobd_store_format::size::limit_bytes;

pub(super) fn render(usage: &UserUsage, width: usize) -> String {
    let columns = ["USER", "UID", "CHARGED", "UNIQUE", "SHARED", "MODELS", "QUOTA", "STATE"];
    let rows = usage.users.iter().map(|user| {
        let [charged, unique, shared] =
            [user.charged_bytes, user.unique_bytes, user.shared_bytes].map(human_bytes);
        let (uid, quota, state) = (or_dash(user.uid), or_dash(user.quota.map(limits)), state(user.state));
        [name(user), uid, charged, unique, shared, user.models.to_string(), quota, state.to_owned()]
    });
    let table = Table::with_rows(&columns, &[1, 2, 3, 4, 5], rows);
    let table = table.leaving_out_first(&["UID", "SHARED", "UNIQUE", "MODELS"]);
    let total = usage.disk_bytes.map(|bytes| format!("total {} on disk\n", human_bytes(bytes)));
    table.render(width) + &total.unwrap_or_default() + &groups(usage, width)
}

fn groups(usage: &UserUsage, width: usize) -> String {
    if usage.groups.is_empty() {
        return String::new();
    }
    let columns = ["GROUP", "CHARGED", "MEMBERS", "QUOTA", "STATE"];
    let rows = usage.groups.iter().map(|group| {
        let (charged, state) = (human_bytes(group.charged_bytes), state(group.state).to_owned());
        [printable(&group.group), charged, group.members.to_string(), limits(group.quota), state]
    });
    format!("\n{}", Table::with_rows(&columns, &[1, 2], rows).render(width))
}

fn name(user: &ChargedUser) -> String {
    match (&user.user, user.uid) {
        (Some(name), _) => printable(name),
        (None, Some(_)) => "-".to_owned(),
        (None, None) => "(no user)".to_owned(),
    }
}

/// `80.0 GiB / 100 GiB`: soft and hard.
fn limits(limits: UserLimits) -> String {
    let size = |limit: Option<u64>| or_dash(limit.map(limit_bytes));
    format!("{} / {}", size(limits.soft_bytes), size(limits.hard_bytes))
}

const fn state(state: QuotaState) -> &'static str {
    match state {
        QuotaState::None => "-",
        QuotaState::Ok => "ok",
        QuotaState::OverSoft => "over soft",
        QuotaState::Full => "full",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_a_row_and_the_rest_belongs_to_no_user() {
        let quota = Some(UserLimits { soft_bytes: None, hard_bytes: Some(100 << 30) });
        let ann = ChargedUser {
            uid: Some(1001),
            user: Some("ann".to_owned()),
            charged_bytes: 5 << 30,
            models: 3,
            quota,
            state: QuotaState::Ok,
            ..ChargedUser::default()
        };
        let nobody = ChargedUser { charged_bytes: 1 << 20, ..ChargedUser::default() };
        let users = vec![ann, ChargedUser { uid: Some(7), ..ChargedUser::default() }, nobody];
        let text = render(&UserUsage { users, disk_bytes: Some(6 << 30), ..UserUsage::default() }, 80);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][..4], ["ann", "1001", "5.00", "GiB"], "{text}");
        assert!(lines[1].ends_with(&["3", "-", "/", "100", "GiB", "ok"]), "{text}");
        assert_eq!(lines[2][..2], ["-", "7"], "{text}");
        assert_eq!(lines[3][..3], ["(no", "user)", "-"], "{text}");
        assert!(text.ends_with("total 6.00 GiB on disk\n"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }
}
