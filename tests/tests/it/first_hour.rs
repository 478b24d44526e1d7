//! The first hour of a new user: without root, with an empty home, without any variable of a desktop session, on a
//! simple terminal of 80 columns and 24 rows. Every command of the README, and the mistakes that people make.

mod commands;
mod mistakes;
mod user;

use std::collections::BTreeSet;

use self::user::{Step, User};

#[test]
fn every_command_of_the_readme_works_in_the_first_hour() {
    let Some(user) = User::new() else { return };
    user.check_all(commands::STEPS);
    user.stop();
}

#[test]
fn every_mistake_of_the_first_hour_gets_a_helpful_error() {
    let Some(user) = User::new() else { return };
    user.check_all(mistakes::PREPARATION.iter().chain(mistakes::STEPS));
    assert!(mistakes::STEPS.len() >= 30);
    user.stop();
}

#[test]
fn first_hour_uses_every_command_that_the_readme_lists() {
    let readme = include_str!("../../../README.md");
    let rows = readme.lines().filter(|line| line.starts_with("| `blobd "));
    let listed: BTreeSet<&str> = rows.flat_map(commands_of_row).collect();
    assert!(listed.len() > 20, "{listed:?}");
    let used: BTreeSet<&str> = commands::STEPS.iter().flat_map(Step::commands).collect();
    let missing: Vec<_> = listed.difference(&used).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The commands in the first cell of a row such as "| `blobd pin REF…`, `unpin REF…` | protects …".
fn commands_of_row(row: &str) -> impl Iterator<Item = &str> {
    let cell = row.split(" | ").next().unwrap_or_default();
    let quoted = cell.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| text.trim_start_matches("blobd ").split_whitespace().next())
}
