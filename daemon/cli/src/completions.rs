//! `blobd completions`

use blobd_cli_common::Global;
use blobd_cli_common::output::{print, print_json};
use clap::{Arg, Args, Command, ValueEnum};
use clap_complete::aot;

use crate::suggest::Kind;
use crate::{ErrorBody, ErrorCode, other_tools};

mod shells;

/// Print a script that completes commands, options and names of models in a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  source <(blobd completions bash)             for this shell; add it to ~/.bashrc
  blobd completions zsh > ~/.zfunc/_blobd      into a directory of $fpath
  blobd completions fish > ~/.config/fish/completions/blobd.fish")]
pub(super) struct Params {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let script = script(params.shell)?;
    if global.json { print_json(&serde_json::json!({ "script": script })) } else { print(&script) }
}

fn script(shell: Shell) -> Result<String, ErrorBody> {
    let generator = match shell {
        Shell::Bash => aot::Shell::Bash,
        Shell::Zsh => aot::Shell::Zsh,
        Shell::Fish => aot::Shell::Fish,
    };
    let mut command = visible();
    let mut script = Vec::new();
    aot::generate(generator, &mut command, "blobd", &mut script);
    let script = String::from_utf8(script)
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("script: {error}")))?;
    let completed_arguments = completed_arguments(&command);
    Ok(match shell {
        Shell::Bash => script + &shells::bash(&command, &completed_arguments),
        Shell::Zsh => shells::zsh(&script, &completed_arguments),
        Shell::Fish => script + &shells::fish(&completed_arguments),
    })
}

/// Without the internal commands, which the generators would offer.
fn visible() -> Command {
    let all = crate::command();
    let commands = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("blobd")
        .args(all.get_arguments().cloned())
        .subcommands(commands)
        .disable_help_subcommand(true)
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct CompletedArgument {
    /// The command and its aliases.
    command: Vec<String>,
    /// For a subcommand such as `partial rm`, the outer command.
    parent: Option<String>,
    argument: String,
    kinds: Vec<Kind>,
    takes_files: bool,
}

impl CompletedArgument {
    fn kinds(&self) -> String {
        self.kinds.iter().map(|kind| kind.word()).collect::<Vec<_>>().join(",")
    }
}

/// The arguments whose values can be suggested. Each command has at most one kind of them.
fn completed_arguments(blobd: &Command) -> Vec<CompletedArgument> {
    let of = |parent: Option<&Command>, command: &Command| {
        let words: Vec<String> = other_tools::names(command).map(str::to_owned).collect();
        let parent = parent.map(|parent| parent.get_name().to_owned());
        let known = command.get_positionals().filter_map(|argument| {
            let (kinds, takes_files) = kinds(command, argument)?;
            let argument = argument.get_id().to_string();
            Some(CompletedArgument {
                command: words.clone(),
                parent: parent.clone(),
                argument,
                kinds,
                takes_files,
            })
        });
        known.collect::<Vec<_>>()
    };
    let commands = blobd.get_subcommands();
    let all = commands.flat_map(|command| {
        let below = command.get_subcommands().flat_map(|below| of(Some(command), below));
        of(None, command).into_iter().chain(below).collect::<Vec<_>>()
    });
    all.collect()
}

fn kinds(command: &Command, argument: &Arg) -> Option<(Vec<Kind>, bool)> {
    let name = argument.get_value_names()?.first()?.as_str();
    Some(match (command.get_name(), name) {
        ("undelete", "REF|PATTERN") => (vec![Kind::Trash], false),
        ("undo", "REF") => (vec![Kind::Models, Kind::Trash], false),
        ("help" | "man", "COMMAND") => (vec![Kind::Commands], false),
        (_, "REF" | "REF|PATTERN" | "SRC" | "OLD" | "A" | "B") => (vec![Kind::Models], false),
        (_, "REF|PATH") => (vec![Kind::Models], true),
        (_, "PID|REF|PATTERN") => (vec![Kind::Models, Kind::Processes], false),
        (_, "REF|ID") => (vec![Kind::Downloads], false),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_completed_and_the_internal_ones_are_not() {
        let command = visible();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell).unwrap();
            for name in command.get_subcommands().map(Command::get_name) {
                assert!(script.contains(name), "{shell:?}: {name}");
            }
            assert!(script.contains("blobd __suggest"), "{shell:?}");
            assert!(!script.contains("mount-guard"), "{shell:?}");
            let quiet = script.lines().filter(|line| line.contains("blobd __suggest"));
            assert!(quiet.clone().all(|line| line.contains("2>/dev/null")), "{shell:?}");
        }
    }

    #[test]
    fn names_are_suggested_where_they_are_expected() {
        let completed_arguments = completed_arguments(&visible());
        let of = |parent: Option<&str>, name: &str| {
            let is_it = |argument: &&CompletedArgument| {
                argument.parent.as_deref() == parent && argument.command.iter().any(|known| known == name)
            };
            completed_arguments.iter().find(is_it).map(|argument| (argument.kinds(), argument.takes_files))
        };
        for name in ["rm", "rmi", "tag", "cp", "export", "rename", "mv", "pin", "pull", "warm", "verify"] {
            assert_eq!(of(None, name), Some(("models".to_owned(), false)), "{name}");
        }
        assert_eq!(of(None, "show"), Some(("models".to_owned(), true)));
        assert_eq!(of(None, "release"), Some(("models,processes".to_owned(), false)));
        assert_eq!(of(None, "undelete"), Some(("trash".to_owned(), false)));
        assert_eq!(of(None, "undo"), Some(("models,trash".to_owned(), false)));
        assert_eq!(of(None, "help"), Some(("commands".to_owned(), false)));
        assert_eq!(of(Some("partial"), "rm"), Some(("downloads".to_owned(), false)));
        for name in ["gc", "import", "partial", "login", "ls"] {
            assert_eq!(of(None, name), None, "{name}");
        }
    }
}
