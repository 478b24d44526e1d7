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

#[test]
fn every_command_of_getting_started_works_for_a_new_user() {
    let Some(user) = User::new() else { return };
    let document = include_str!("../../../docs/GETTING-STARTED.md");
    let lines: Vec<Step> = blocks_to_run(document).flat_map(str::lines).map(succeeding).collect();
    assert!(lines.len() > 12, "{lines:?}");
    user.check_all(&lines);
    user.stop();
}

/// The blocks of commands below a line `<!-- run -->`.
fn blocks_to_run(document: &'static str) -> impl Iterator<Item = &'static str> {
    let blocks = document.split("<!-- run -->\n```sh\n").skip(1);
    blocks.map(|rest| rest.split("```").next().expect("an end"))
}

const fn succeeding(line: &'static str) -> Step {
    Step { line, code: 0, shows: &[] }
}

/// The commands in the first cell of a row such as "| `blobd pin REF…`, `unpin REF…` | protects …".
fn commands_of_row(row: &str) -> impl Iterator<Item = &str> {
    let cell = row.split(" | ").next().unwrap_or_default();
    let quoted = cell.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| text.trim_start_matches("blobd ").split_whitespace().next())
}
