//! Each entry of a store replaced by a symbolic link, a dangling link, a FIFO, a directory or file, a socket,
//! or given to another owner.
//!
//! In every case, no command hangs, nothing outside the store is read or changed, and nothing inside is lost:
//! after the original is restored, the store is complete.

mod case;
mod template;
mod user;
mod verbs;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use case::{Case, Substitute};
use template::Template;
use user::User;

/// Replaces every entry of the store in turn, for each relevant user. Fails with the list of all problems.
fn replace_each(substitute: Substitute) {
    let mut wrong = Vec::new();
    for user in User::all(substitute).iter().copied() {
        let template = Template::make(user);
        let entries = template.entries();
        assert!(entries.len() > 30, "too few kinds of entries: {entries:?}");
        for entry in &entries {
            let replace = || replace_one(&template, user, entry, substitute);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(replace)) {
                let text = panic.downcast_ref::<String>().map_or("a panic", String::as_str);
                wrong.push(format!("{} for {user:?}: {text}", entry.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong as {substitute:?}:\n{}", wrong.len(), wrong.join("\n"));
}

/// Repeats a case in which a command took long: on a busy machine that may happen, but a hang occurs each
/// time.
fn replace_one(template: &Template, user: User, entry: &Path, substitute: Substitute) {
    const TRIES: usize = 3;
    let mut slow = Vec::new();
    for _ in 0..TRIES {
        let case = Case::lay_out(template, user, entry, substitute);
        slow = case.run_every_verb(template);
        case.check();
        if slow.is_empty() {
            return;
        }
    }
    panic!("too long: {slow:?}");
}

#[test]
fn entry_that_is_a_link_to_something_outside_is_not_followed() {
    replace_each(Substitute::Link);
}

#[test]
fn dangling_link_is_not_treated_as_absent() {
    replace_each(Substitute::DanglingLink);
}

#[test]
fn fifo_blocks_no_command() {
    replace_each(Substitute::Fifo);
}

#[test]
fn entry_that_is_a_directory_instead_of_a_file_or_the_reverse_is_refused() {
    replace_each(Substitute::OtherKind);
}

#[test]
fn entry_that_is_a_socket_is_refused() {
    replace_each(Substitute::Socket);
}

#[test]
fn entry_of_another_owner_causes_no_harm() {
    replace_each(Substitute::AnotherOwner);
}
