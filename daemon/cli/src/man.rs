//! `blobd man`, `blobd help` and `blobd version`

use std::path::{Path, PathBuf};
use std::{fs, io};

use blobd_cli_common::connect::print_report;
use blobd_cli_common::output::{print, print_json};
use blobd_cli_common::{Global, file_error, internal};
use clap::{Args, Command};
use clap_mangen::Man;

use crate::{ErrorBody, usage_error};

mod configuration;

/// Print a manual page, or write all of them into a directory
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd man pull | man -l -                    read the page of a command
  blobd man partial rm | man -l -
  blobd man blobd.toml | man -l -              all keys of the configuration file
  blobd man --dir ~/.local/share/man/man1      then `man blobd-pull`")]
pub(super) struct Params {
    /// The command, or blobd.toml for the configuration file; without one, the page of blobd itself
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    command: Vec<String>,
    /// Write the pages of all commands into this directory, which is created if it does not exist
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let mut root = crate::command();
    // Gives the commands the global options and their full names.
    root.build();
    if let Some(directory) = &params.dir {
        return write_all(global, &root, directory);
    }
    let page = if params.command == [configuration::NAME] {
        configuration::page(&(global.server.configuration_keys)())
    } else {
        let (parents, command) = find(&root, &params.command)?;
        page(&parents, command).map_err(internal)?
    };
    if global.json { print_json(&serde_json::json!({ "page": page })) } else { print(&page) }
}

/// Explain a command
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd help                                   list the commands
  blobd help pull
  blobd help partial rm")]
pub(super) struct HelpArgs {
    /// The command; if omitted, all commands are listed
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

pub(super) fn help(global: &Global, args: &HelpArgs) -> Result<(), ErrorBody> {
    let root = crate::command();
    let mut command = &root;
    for word in &args.command {
        command = subcommand(command, word)?;
    }
    // The parser's own text, as for `--help`.
    let arguments = ["blobd"].into_iter().chain(args.command.iter().map(String::as_str)).chain(["--help"]);
    let help = root.clone().try_get_matches_from(arguments).err().map(|help| help.to_string());
    let help = help.unwrap_or_default();
    if global.json { print_json(&serde_json::json!({ "help": help })) } else { print(&help) }
}

fn subcommand<'c>(command: &'c Command, word: &str) -> Result<&'c Command, ErrorBody> {
    command.find_subcommand(word).ok_or_else(|| usage_error::unknown(command, word))
}

/// Print the version
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd version
  blobd version --json | jq -r .version

`blobd doctor` names the version of the daemon, if that is another one.")]
pub(super) struct VersionArgs {}

pub(super) fn version(global: &Global) -> Result<(), ErrorBody> {
    let version = env!("CARGO_PKG_VERSION");
    if global.json {
        return print_json(&serde_json::json!({ "version": version }));
    }
    print(&format!("blobd {version}\n"))
}

fn write_all(global: &Global, root: &Command, directory: &Path) -> Result<(), ErrorBody> {
    fs::create_dir_all(directory).map_err(|error| file_error(&directory.display().to_string(), &error))?;
    let commands = all(root);
    let pages = commands
        .iter()
        .map(|(parents, command)| (format!("{}.1", full_name(command)), page(parents, command)))
        .chain([(
            format!("{}.5", configuration::NAME),
            Ok(configuration::page(&(global.server.configuration_keys)())),
        )]);
    let mut written = Vec::new();
    for (name, page) in pages {
        let path = directory.join(name);
        let write = page.and_then(|page| fs::write(&path, page));
        write.map_err(|error| file_error(&path.display().to_string(), &error))?;
        written.push(path.display().to_string());
    }
    let pages = serde_json::json!({ "pages": written });
    print_report(global, &pages, |_| format!("{}: {} pages written\n", directory.display(), written.len()))
}

/// Finds the command with this name, and its parents, starting with `root`.
fn find<'c>(root: &'c Command, words: &[String]) -> Result<(Vec<&'c Command>, &'c Command), ErrorBody> {
    let (mut parents, mut command) = (Vec::new(), root);
    for word in words {
        parents.push(command);
        command = subcommand(command, word)?;
    }
    Ok((parents, command))
}

/// Every command that has a page, with its parents.
fn all(root: &Command) -> Vec<(Vec<&Command>, &Command)> {
    let mut found = vec![(Vec::new(), root)];
    let mut next = 0;
    while let Some((parents, command)) = found.get(next).cloned() {
        let parents: Vec<_> = parents.into_iter().chain([command]).collect();
        let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
        found.extend(visible.map(|command| (parents.clone(), command)));
        next += 1;
    }
    found
}

/// `blobd-pull`
fn full_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(parents: &[&Command], command: &Command) -> io::Result<String> {
    let man = Man::new(command.clone()).title(full_name(command).to_ascii_uppercase());
    let man = man.source(format!("blobd {}", env!("CARGO_PKG_VERSION"))).manual("blobd");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    // Not justified: names of options are too long for that.
    page.extend_from_slice(b".ad l\n.nh\n");
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut page = String::from_utf8_lossy(&page).into_owned();
    let notes = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    page.push_str(&notes_section(&notes));
    page.push_str(&see_also(parents));
    Ok(page)
}

fn see_also(parents: &[&Command]) -> String {
    if parents.is_empty() {
        return String::new();
    }
    let pages = parents.iter().map(|command| format!("\\fB{}\\fR(1)", escaped(full_name(command))));
    format!(".SH SEE ALSO\n{}\n", pages.collect::<Vec<_>>().join(", "))
}

/// The text below a command's help, line by line: examples must not be joined.
fn notes_section(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    let lines: String = text.lines().map(|line| escaped(line) + "\n").collect();
    format!(".SH NOTES AND EXAMPLES\n.nf\n{lines}.fi\n")
}

/// Escapes what would be a request or a special character to `roff`.
fn escaped(line: &str) -> String {
    let text = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq").replace('`', "\\(ga");
    if text.starts_with('.') { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_the_examples_line_by_line() {
        let mut root = crate::command();
        root.build();
        let (parents, pull) = find(&root, &["pull".to_owned()]).unwrap();
        let page = page(&parents, pull).unwrap();
        assert!(page.contains(".TH BLOBD-PULL"), "{page}");
        assert!(page.contains("\n  blobd pull llama3:8b\n") && page.contains(".SH SEE ALSO"), "{page}");
        assert!(page.ends_with(".SH SEE ALSO\n\\fBblobd\\fR(1)\n"), "{page}");
        assert_eq!(escaped(".a 'b' -c \\t"), "\\&.a \\(aqb\\(aq \\-c \\et");
    }

    #[test]
    fn subcommands_have_their_own_pages() {
        let mut root = crate::command();
        root.build();
        let names: Vec<&str> = all(&root).into_iter().map(|(_, command)| full_name(command)).collect();
        for name in ["blobd", "blobd-pull", "blobd-partial", "blobd-partial-ls", "blobd-partial-rm"] {
            assert_eq!(names.iter().filter(|known| **known == name).count(), 1, "{name}: {names:?}");
        }
        let (parents, remove) = find(&root, &["partial".to_owned(), "rm".to_owned()]).unwrap();
        let remove = page(&parents, remove).unwrap();
        assert!(remove.contains("\\-\\-older\\-than"), "{remove}");
        assert!(remove.contains("\\fBblobd\\fR(1), \\fBblobd\\-partial\\fR(1)"), "{remove}");
        let (parents, partial) = find(&root, &["partial".to_owned()]).unwrap();
        let partial = page(&parents, partial).unwrap();
        assert!(partial.contains("blobd\\-partial\\-ls(1)"), "{partial}");
        assert!(find(&root, &["partial".to_owned(), "nothing".to_owned()]).is_err());
    }
}
