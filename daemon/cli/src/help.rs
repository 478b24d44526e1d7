//! `blobd help`

use blobd_client::protocol::error::ErrorBody;
use clap::{Args, Command};

use super::{Global, usage_error};
use crate::output::{print, print_json};

/// Explain a command
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd help                                   list the commands
  blobd help pull
  blobd help partial rm")]
pub(super) struct Params {
    /// The command; if omitted, all commands are listed
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let root = crate::command();
    let mut command = &root;
    for word in &params.command {
        command = subcommand(command, word)?;
    }
    // The parser's own answer, so that it is the same text.
    let arguments = ["blobd"].into_iter().chain(params.command.iter().map(String::as_str)).chain(["--help"]);
    let help = root.clone().try_get_matches_from(arguments).err().map(|help| help.to_string());
    let help = help.unwrap_or_default();
    if global.json { print_json(&serde_json::json!({ "help": help })) } else { print(&help) }
}

/// The command of `command` that the word names.
pub(super) fn subcommand<'c>(command: &'c Command, word: &str) -> Result<&'c Command, ErrorBody> {
    command.find_subcommand(word).ok_or_else(|| usage_error::unknown(command, word))
}

/// The output of `blobd` without arguments: the first steps.
pub(super) const FIRST_STEPS: &str = "\
blobd stores model weights once, for every program on this machine.

First steps:
  blobd pull llama3:8b                 download a model; needs no daemon
  blobd import model-Q4_K_M.gguf       store a file of this machine
  blobd ls                             list the models
  blobd export llama3:8b               write a model's original file
  blobd serve                          serve models to programs over a socket

`blobd help` lists all commands, `blobd help COMMAND` explains one.
";
