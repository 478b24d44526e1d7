//! Failing commands. The error of each says what happened, why, and what to do next.
//!
//! The tables in the modules below are also `docs/TROUBLESHOOTING.md`: `BLESS=1` writes it.

mod command_line;
mod configuration;
mod daemon;
mod files;
mod fixture;
mod models;
mod registries;
mod store;

use std::path::Path;
use std::{env, fs};

use blobd_tests::command::Run;

use self::fixture::Fixture;
use crate::documents::with_contents;

/// A failing command, and what its error must contain.
struct Situation {
    /// What the user did wrong, or what is broken.
    did: &'static str,
    /// The command as a person types it, for the document.
    command: &'static str,
    /// Sets the situation up and runs the command.
    run: fn(&Fixture) -> Run,
    code: i32,
    /// Parts of what is printed: what happened, why, and what to do.
    happened: &'static str,
    why: &'static str,
    to_do: &'static str,
}

/// Situations of one kind.
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
    fn question_and_answer(&self) -> String {
        let Self { did, command, code, happened, why, to_do, .. } = self;
        let message =
            if happened.contains(why) { (*happened).to_owned() } else { format!("{happened} … {why}") };
        // Some parts end where the command that they quote names what differs between runs.
        let end = if to_do.matches('`').count() % 2 == 1 { "…`" } else { "" };
        let quote = if message.contains('`') { ("`` ", " ``") } else { ("`", "`") };
        format!(
            "\n### Why does `{command}` say {}{message}{}?\n\n\
             Cause: {did}. What blobd advises: {to_do}{end}. Exit code: {code}.\n",
            quote.0, quote.1
        )
        .replace("?. ", "? ")
    }

    /// How the error differs from the expected one; `None` if it does not.
    fn fault(&self) -> Option<String> {
        let run = (self.run)(&Fixture::new());
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
fn errors_of_command_lines_have_cause_and_hint() {
    check(0);
}

#[test]
fn errors_of_configurations_have_cause_and_hint() {
    check(1);
}

#[test]
fn errors_of_model_names_have_cause_and_hint() {
    check(2);
}

#[test]
fn errors_of_files_have_cause_and_hint() {
    check(3);
}

#[test]
fn errors_of_registries_have_cause_and_hint() {
    check(4);
}

#[test]
fn errors_of_stores_have_cause_and_hint() {
    check(5);
}

#[test]
fn errors_of_daemons_have_cause_and_hint() {
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

/// Questions whose answer is not an error.
const QUESTIONS: &str = include_str!("troubleshooting/questions.md");

fn document() -> String {
    let mut text = "# Troubleshooting\n\n\
        Questions and answers. The questions after the first section quote what blobd prints when something is wrong; search this\n\
        page for the message. Each of them is a test (`tests/tests/it/troubleshooting`), which also writes this file.\n\
        `blobd doctor` looks for what is wrong with the set-up of a machine and prints the commands that correct it:\n\
        [OPERATIONS.md](OPERATIONS.md). What servers say when they refuse a request is quoted: [REFUSALS.md](REFUSALS.md).\n\
        Damaged blobs stay in `quarantine/` of the store until `blobd gc --quarantine` deletes them.\n"
        .to_owned();
    text += &format!("\n## Questions\n\n{QUESTIONS}");
    for Group { title, situations } in GROUPS {
        text += &format!("\n## {title}\n");
        text.extend(situations.iter().map(Situation::question_and_answer));
    }
    with_contents(&text)
}
