//! Short helps. The commands in groups: the screen that `blobd` alone and `blobd -h` print, and the list in `blobd --help`.

use std::ffi::OsString;

use blobd_cli_common::output::{terminal_width, wrap};
use clap::Command;

struct Group {
    title: &'static str,
    /// The commands with a line of their own on the first screen: what is typed, and what it does.
    first: &'static [(&'static str, &'static str)],
    others: &'static [&'static str],
}

/// Commands that are in no group are in the last one.
const GROUPS: &[Group] = &[
    Group {
        title: "get",
        first: &[
            ("pull llama3:8b", "download a model; needs no daemon"),
            ("import FILE", "store a file or folder of this machine"),
        ],
        others: &["outdated", "load", "promote", "login", "logout"],
    },
    Group {
        title: "look",
        first: &[("ls", "list the models"), ("show llama3:8b", "describe a model")],
        others: &["diff", "fit", "tensor", "history", "ps", "log"],
    },
    Group {
        title: "use",
        first: &[
            ("export llama3:8b", "write a model's original file"),
            ("exec -- PROGRAM", "run a program that opens models as files"),
        ],
        others: &["mount", "warm", "release", "push", "transfer", "save", "edit", "tag", "rename"],
    },
    Group {
        title: "clean up",
        first: &[("df", "show what the store takes on disk"), ("rm llama3:8b", "remove a model")],
        others: &["gc", "undelete", "undo", "pin", "unpin", "partial", "verify"],
    },
    Group {
        title: "daemon",
        first: &[("serve", "serve models to programs over a socket")],
        others: &["web", "health", "doctor", "limit", "config", "reindex"],
    },
    Group {
        title: "more",
        first: &[("help COMMAND", "explain a command; `blobd --help` lists all")],
        others: &["demo", "completions", "man", "version"],
    },
];

/// The width of the first screen.
const WIDTH: usize = 80;

/// What `blobd` without arguments and `blobd -h` print: at most 24 lines.
pub(super) fn screen(blobd: &Command) -> String {
    const COMMAND_WIDTH: usize = 26;
    let mut text = "blobd stores model weights once, for every program on this machine.\n\n".to_owned();
    for (group, others) in groups(blobd) {
        for (place, (typed, what)) in group.first.iter().enumerate() {
            let title = if place == 0 { group.title } else { "" };
            text += &format!("{title:<10}{:<COMMAND_WIDTH$}{what}\n", format!("blobd {typed}"));
        }
        let indent = " ".repeat(10);
        text += &wrap(&format!("also {}", others.join(", ")), WIDTH, &indent, &indent);
    }
    text
}

/// What `-h` prints, if the arguments have it: of a command its own options and the first examples.
pub(super) fn short_help(mut blobd: Command, arguments: &[OsString]) -> Option<String> {
    let words = || arguments.iter().skip(1).filter_map(|word| word.to_str()).take_while(|word| *word != "--");
    if words().any(|word| word == "--help") || !words().any(|word| word == "-h") {
        return None;
    }
    // Gives the commands their full names.
    blobd.build();
    let found = words().fold(&blobd, |command, word| command.find_subcommand(word).unwrap_or(command));
    Some(if found.get_name() == blobd.get_name() { screen(&blobd) } else { short(found.clone()) })
}

fn short(command: Command) -> String {
    const EXAMPLES: &str = "Examples:\n";
    const MOST: usize = 4;
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    let notes = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples = notes.split_once(EXAMPLES).map_or("", |(_, examples)| examples);
    let examples = examples.lines().take_while(|line| line.starts_with("  ")).take(MOST);
    let examples: String = examples.map(|line| format!("{line}\n")).collect();
    let more =
        format!("{EXAMPLES}{examples}\n`{name} --help` explains more, and the options of all commands.");
    let of_command = command.mut_args(|arg| if arg.is_global_set() { arg.hide(true) } else { arg });
    of_command.after_help(more).render_help().to_string()
}

/// The commands with their descriptions, as `blobd --help` lists them.
pub(super) fn list(blobd: &Command) -> String {
    const INDENT: usize = 15;
    const MAX_WIDTH: usize = 100;
    let mut text = String::new();
    for (group, others) in groups(blobd) {
        text += &format!("{}:\n", title_case(group.title));
        let first = group.first.iter().filter_map(|(typed, _)| typed.split(' ').next());
        for name in first.chain(others.iter().copied()) {
            let about = blobd.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            text += &wrap(
                &about,
                terminal_width().min(MAX_WIDTH),
                &format!("  {name:<12} "),
                &" ".repeat(INDENT),
            );
        }
        text.push('\n');
    }
    text.trim_end().to_owned()
}

/// The groups with their other commands; the last one has those that no group names.
fn groups(blobd: &Command) -> Vec<(&'static Group, Vec<&str>)> {
    let named = |group: &Group, name: &str| {
        let first = group.first.iter().any(|(typed, _)| typed.split(' ').next() == Some(name));
        first || group.others.contains(&name)
    };
    let visible = blobd.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name);
    let unnamed: Vec<&str> = visible.filter(|name| !GROUPS.iter().any(|group| named(group, name))).collect();
    let known = |name: &&&str| blobd.find_subcommand(name).is_some();
    let mut groups: Vec<(&Group, Vec<&str>)> =
        GROUPS.iter().map(|group| (group, group.others.iter().filter(known).copied().collect())).collect();
    if let Some((_, others)) = groups.last_mut() {
        others.extend(unnamed);
    }
    groups
}

fn title_case(title: &str) -> String {
    let mut letters = title.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn first_screen_has_24_lines_and_names_every_command_once() {
        let blobd = crate::command();
        let screen = screen(&blobd);
        assert!(screen.lines().count() <= 24, "{screen}");
        assert!(screen.lines().all(|line| line.chars().count() <= WIDTH), "{screen}");
        let grouped: Vec<&str> = groups(&blobd)
            .into_iter()
            .flat_map(|(group, others)| {
                group.first.iter().map(|(typed, _)| typed.split(' ').next().unwrap()).chain(others)
            })
            .collect();
        let distinct: BTreeSet<&str> = grouped.iter().copied().collect();
        assert_eq!(grouped.len(), distinct.len(), "{grouped:?}");
        let visible = blobd.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name);
        assert_eq!(visible.collect::<BTreeSet<_>>(), distinct);
    }

    #[test]
    fn short_help_of_a_command_has_its_options_and_a_few_examples() {
        let help = |line: &str| {
            short_help(crate::command(), &line.split(' ').map(OsString::from).collect::<Vec<_>>())
        };
        let of_list = help("blobd ls -h").unwrap();
        assert!(of_list.contains("--sort") && !of_list.contains("--socket"), "{of_list}");
        assert!(of_list.contains("  blobd ls llama") && !of_list.contains("jq"), "{of_list}");
        assert!(
            of_list.trim_end().ends_with("`blobd ls --help` explains more, and the options of all commands.")
        );
        assert!(help("blobd partial rm -h").unwrap().contains("Usage: blobd partial rm"));
        assert_eq!(help("blobd -h"), Some(screen(&crate::command())));
        assert_eq!([help("blobd ls --help"), help("blobd exec -- x -h")], [None, None]);
    }

    #[test]
    fn list_describes_every_command() {
        let list = list(&crate::command());
        for part in ["Clean up:\n", "  rm           Remove models", "  version      Print the version"] {
            assert!(list.contains(part), "{part}: {list}");
        }
    }
}
