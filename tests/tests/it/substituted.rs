//! Files and directories of a store that are not what they seem: each one replaced by a symbolic link,
//! a dangling link, a FIFO, a directory or file, a socket, and by one of another owner.
//!
//! Whatever it is and whatever is asked, no command hangs, nothing outside the store is read or changed,
//! and nothing inside is lost: put back, the original makes the store whole again.

mod actor;
mod case;
mod template;
mod verbs;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use actor::Actor;
use case::{Case, Substitute};
use template::Template;

/// Replaces every entry of the store, as every user that may meet it; says of all cases what is wrong.
fn replace_each(substitute: Substitute) {
    let mut wrong = Vec::new();
    for actor in Actor::all(substitute).iter().copied() {
        let template = Template::make(actor);
        let entries = template.entries();
        assert!(entries.len() > 30, "a store with a bit of everything: {entries:?}");
        for entry in &entries {
            let replace = || replace_one(&template, actor, entry, substitute);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(replace)) {
                let text = panic.downcast_ref::<String>().map_or("a panic", String::as_str);
                wrong.push(format!("{} for {actor:?}: {text}", entry.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong as {substitute:?}:\n{}", wrong.len(), wrong.join("\n"));
}

/// Repeats a case in which a command took long: on a busy machine one may, but one that hangs does so
/// each time.
fn replace_one(template: &Template, actor: Actor, entry: &Path, substitute: Substitute) {
    const TRIES: usize = 3;
    let mut slow = Vec::new();
    for _ in 0..TRIES {
        let case = Case::lay_out(template, actor, entry, substitute);
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
fn entry_that_is_a_dangling_link_is_not_taken_for_absent() {
    replace_each(Substitute::DanglingLink);
}

#[test]
fn entry_that_is_a_fifo_holds_nobody_up() {
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
fn entry_that_belongs_to_another_user_harms_nothing() {
    replace_each(Substitute::AnotherOwner);
}
