//! The table of `df --users`.

use blobd_client::protocol::accounts::{ChargedUser, QuotaState, UserLimits, UserUsage};
use blobd_store_format::size::human_bytes;
use blobd_store_format::text::printable;

use crate::output::Table;

pub(super) fn render(usage: &UserUsage, width: usize) -> String {
    let columns = ["USER", "UID", "CHARGED", "UNIQUE", "SHARED", "MODELS", "QUOTA", "STATE"];
    let mut table = Table::new(&columns, &[1, 2, 3, 4, 5]);
    for user in &usage.users {
        table.row([
            name(user),
            user.uid.map_or_else(|| "-".to_owned(), |uid| uid.to_string()),
            human_bytes(user.charged_bytes),
            human_bytes(user.unique_bytes),
            human_bytes(user.shared_bytes),
            user.models.to_string(),
            user.quota.map_or_else(|| "-".to_owned(), limits),
            state(user.state).to_owned(),
        ]);
    }
    let total = usage.disk_bytes.map(|bytes| format!("total {} on disk\n", human_bytes(bytes)));
    table.render(width) + &total.unwrap_or_default() + &groups(usage, width)
}

/// The quotas that members of groups share; empty if there are none.
fn groups(usage: &UserUsage, width: usize) -> String {
    if usage.groups.is_empty() {
        return String::new();
    }
    let columns = ["GROUP", "CHARGED", "MEMBERS", "QUOTA", "STATE"];
    let mut table = Table::new(&columns, &[1, 2]);
    for group in &usage.groups {
        table.row([
            printable(&group.group),
            human_bytes(group.charged_bytes),
            group.members.to_string(),
            limits(group.quota),
            state(group.state).to_owned(),
        ]);
    }
    format!("\n{}", table.render(width))
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
    let size = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), human_bytes);
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
    fn users_are_rows_and_the_rest_is_one_of_no_user() {
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
