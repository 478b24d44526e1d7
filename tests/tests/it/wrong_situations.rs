//! Wrong invocations, configurations and situations. Each is answered with what happened, why, and what to do.
//!
//! The tables in the modules below are also `docs/TROUBLESHOOTING.md`: `BLESS=1` writes it.

mod command_line;
mod configuration;
mod daemon;
mod files;
mod models;
mod place;
mod registries;
mod store;

use std::path::Path;
use std::{env, fs};

use blobd_tests::command::Run;

use self::place::Place;
use crate::documents::with_contents;

/// A situation, and what must be said in it.
struct Situation {
    /// What somebody did, or what is broken.
    did: &'static str,
    /// The command as a person types it, for the document.
    command: &'static str,
    /// Sets the situation up and runs the command.
    run: fn(&Place) -> Run,
    code: i32,
    /// Parts of what is printed: what happened, why, and what to do.
    happened: &'static str,
    why: &'static str,
    to_do: &'static str,
}

/// Situations that have something in common.
struct Group {
    title: &'static str,
    situations: &'static [Situation],
}

const GROUPS: [Group; 7] = [
    Group { title: "The command line", situations: command_line::SITUATIONS },
    Group { title: "The configuration", situations: configuration::SITUATIONS },
    Group { title: "Models", situations: models::SITUATIONS },
    Group { title: "Files", situations: files::SITUATIONS },
    Group { title: "Registries", situations: registries::SITUATIONS },
    Group { title: "The store", situations: store::SITUATIONS },
    Group { title: "The daemon and programs", situations: daemon::SITUATIONS },
];

impl Situation {
    /// What is wrong with the response; `None` if it is as expected.
    fn fault(&self) -> Option<String> {
        let run = (self.run)(&Place::new());
        // A terminal may break lines; a pipe does not.
        let missing: Vec<_> = [self.happened, self.why, self.to_do]
            .into_iter()
            .filter(|part| part.is_empty() || !run.stderr.contains(part))
            .collect();
        let is_right = run.code == self.code && missing.is_empty();
        (!is_right).then(|| {
            format!(
                "{}: exit code {}, {} expected; not said: {missing:?}; said:\n{}",
                self.did, run.code, self.code, run.stderr
            )
        })
    }
}

fn check(group: usize) {
    let faults: Vec<_> = GROUPS[group].situations.iter().filter_map(Situation::fault).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn wrong_command_lines_are_answered() {
    check(0);
}

#[test]
fn wrong_configurations_are_answered() {
    check(1);
}

#[test]
fn wrong_names_of_models_are_answered() {
    check(2);
}

#[test]
fn wrong_files_are_answered() {
    check(3);
}

#[test]
fn failures_of_registries_are_answered() {
    check(4);
}

#[test]
fn wrong_stores_are_answered() {
    check(5);
}

#[test]
fn failures_of_daemons_are_answered() {
    check(6);
}

#[test]
fn there_are_at_least_thirty_situations_and_all_are_documented() {
    assert!(GROUPS.iter().map(|group| group.situations.len()).sum::<usize>() >= 30);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/TROUBLESHOOTING.md");
    let text = document();
    if env::var_os("BLESS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == text, "docs/TROUBLESHOOTING.md differs from the table; BLESS=1 writes it");
}

fn document() -> String {
    let mut text = "# Troubleshooting\n\n\
        What blobd prints when something is wrong, by situation: what happened and why, then what to do. Every row is a test\n\
        (`tests/tests/it/wrong_situations`), which also writes this file. `blobd doctor` looks for what is wrong with the\n\
        set-up of a machine and prints the commands that correct it: [OPERATIONS.md](OPERATIONS.md). What servers say when they\n\
        refuse a request is quoted: [REFUSALS.md](REFUSALS.md).\n"
        .to_owned();
    for Group { title, situations } in GROUPS {
        text += &format!(
            "\n## {title}\n\n| situation | command | exit code | what happened, and why | what to do |\n"
        );
        text += "|---|---|---|---|---|\n";
        for Situation { did, command, code, happened, why, to_do, .. } in situations {
            let said =
                if happened.contains(why) { (*happened).to_owned() } else { format!("{happened} … {why}") };
            let cells = [did, &*format!("`{command}`"), &code.to_string(), &said, to_do];
            let cells = cells.map(|cell| cell.replace('|', "\\|").replace('<', "&lt;"));
            text += &format!("| {} |\n", cells.join(" | "));
        }
    }
    with_contents(&text)
}
