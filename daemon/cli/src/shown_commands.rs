//! Every command that blobd shows or documents exists: its name and its options, compared with the parser.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Arg;

/// Where commands are shown: sources, whose messages users read, the page, the clients and the documents.
const PLACES: [&str; 10] = [
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "daemon",
    "client",
    "store-format/src",
    "packaging",
    "systemd",
    "tests/src/bin",
    "justfile",
];
const ENDINGS: [&str; 9] = ["md", "rs", "html", "js", "py", "go", "h", "service", "justfile"];
/// Mistakes whose answers are documented.
const DELIBERATE: [&str; 2] = ["lst", "ls --jso"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn files() -> Vec<PathBuf> {
    let (mut open, mut found): (Vec<_>, Vec<_>) =
        (PLACES.map(|place| root().join(place)).to_vec(), Vec::new());
    while let Some(path) = open.pop() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if ENDINGS.iter().any(|ending| name.ends_with(ending)) && !is_test(&path) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn is_test(path: &Path) -> bool {
    let path = path.to_string_lossy();
    path.contains("/tests") || path.ends_with("_test.go") || path.ends_with("shown_commands.rs")
}

/// The commands that a text shows: in backquotes or tags, as examples in help texts, and in blocks of documents.
fn shown(path: &Path, text: &str) -> Vec<String> {
    let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
    let (mut found, mut is_block) = (Vec::new(), false);
    for line in joined(text).lines() {
        is_block ^= line.trim_start().starts_with("```");
        for (open, close) in [("`blobd ", "`"), (">blobd ", "<")] {
            let parts = line.split(open).skip(1);
            found.extend(parts.filter_map(|part| Some(part.split_once(close)?.0.to_owned())));
        }
        let is_example = match &*ending {
            "md" => is_block,
            "rs" => line.starts_with("  blobd ") && !line.starts_with("   "),
            "html" => true,
            _ => false,
        };
        let line = line.trim_start().trim_start_matches("$ ").trim_start_matches("sudo ");
        if let Some(command) = line.strip_prefix("blobd ").filter(|_| is_example) {
            // An explanation follows two spaces.
            found.push(command.split("  ").next().unwrap_or_default().to_owned());
        }
    }
    found
}

/// Without the ends of lines in strings and commands that a backslash continues.
fn joined(text: &str) -> String {
    let mut parts = text.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |joined, part| joined + part.trim_start_matches([' ', '/']))
}

fn mistake(line: &str) -> Option<String> {
    let root = crate::command();
    let mut command = &root;
    let mut words =
        line.split_whitespace().map(|word| word.trim_matches(['[', ']', '(', ')', ',', '.', ':', '"', '\'']));
    let mut options: Vec<&Arg> = command.get_arguments().collect();
    while let Some(word) = words.next() {
        if matches!(word, "|" | "||" | "&&" | ";" | ">" | ">>" | "&" | "--" | "<" | "\\")
            || word.starts_with('#')
        {
            return None;
        }
        if let Some(long) = word.strip_prefix("--") {
            let name = long.split(['=', '|', '[', ']', '<', '…']).next().unwrap_or_default();
            let Some(arg) = options.iter().find(|arg| has_long(arg, name)) else {
                let is_help = matches!(name, "help" | "version");
                if !is_help {
                    return Some(format!("--{name} is not an option of {}", command.get_name()));
                };
                continue;
            };
            if takes_next(arg) && !long.contains('=') {
                words.next();
            }
        } else if let Some(short) =
            word.strip_prefix('-').filter(|rest| rest.starts_with(|c: char| c.is_ascii_alphabetic()))
        {
            let name = short.chars().next()?;
            let known = options.iter().find(|arg| arg.get_short() == Some(name));
            match known {
                Some(arg) if takes_next(arg) && short.len() == 1 => drop(words.next()),
                Some(_) => {}
                None if matches!(name, 'h' | 'V') => {}
                None => return Some(format!("-{name} is not an option of {}", command.get_name())),
            }
        } else if command.has_subcommands() {
            let is_placeholder =
                word.starts_with(|c: char| !c.is_ascii_lowercase()) || word.contains(['{', '…', '$']);
            if is_placeholder || word == "help" {
                return None;
            }
            let parent = command;
            // `ls|rm` in a table stands for two commands.
            for name in word.split('|').map(|name| name.trim_end_matches('\\')) {
                match parent.find_subcommand(name) {
                    Some(next) => command = next,
                    None => return Some(format!("{name} is not a command")),
                }
            }
            options.extend(command.get_arguments());
        }
    }
    None
}

fn has_long(arg: &Arg, name: &str) -> bool {
    arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

fn takes_next(arg: &Arg) -> bool {
    arg.get_action().takes_values()
        && !arg.is_require_equals_set()
        && arg.get_num_args().is_none_or(|count| count.min_values() > 0)
}

#[test]
fn every_command_that_is_shown_anywhere_exists() {
    let (mut count, mut wrong) = (0, Vec::new());
    for path in files() {
        let text = fs::read_to_string(&path).unwrap();
        for line in shown(&path, &text) {
            count += 1;
            if let Some(mistake) = mistake(&line).filter(|_| !DELIBERATE.contains(&&*line)) {
                wrong.push(format!("{}: `blobd {line}`: {mistake}", path.display()));
            }
        }
    }
    assert!(count > 500, "only {count} commands found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn commands_that_do_not_exist_are_found() {
    for (line, expected) in [
        ("import --from-nowhere", Some("--from-nowhere is not an option of import")),
        ("improt x.gguf", Some("improt is not a command")),
        ("ls -Z", Some("-Z is not an option of ls")),
        ("export m -o - | sha256sum --tag", None),
        ("--socket /x ls --json", None),
        ("exec -- program --option", None),
        ("COMMAND --help", None),
    ] {
        assert_eq!(mistake(line).as_deref(), expected, "{line}");
    }
}
