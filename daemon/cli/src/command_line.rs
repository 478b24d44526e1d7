//! Parses the arguments, runs the command, and reports its failure.

use std::env;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::process::ExitCode;

use blobd_cli_common::global::{Global, GlobalOptions};
use blobd_cli_common::local_server::LocalServer;
use blobd_cli_common::output::{output_written, print, print_error, print_message, print_stopped};
use blobd_cli_common::{internal, log};
use blobd_cli_import::{export, import, inventory, load, save};
use blobd_cli_mount::{exec, mount};
use blobd_cli_show::{diff, fit, show, tensor};
use blobd_client::process::on_interrupt;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::{
    ErrorBody, ErrorCode, audit_log, completions, config, df, doctor, edit, gc, history, login, ls, man,
    outdated, overview, partial, promote, ps, pull, push, rm, serve, sign, suggest, tag, transfer, undo,
    usage_error, verify, warm, web,
};

/// One copy of every tensor on disk, one copy in RAM, for every engine on the machine.
#[derive(Debug, Parser)]
#[command(name = "blobd", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(after_help = "Examples:
  blobd pull llama3:8b                 download a model; needs no daemon
  blobd import model-Q4_K_M.gguf       store a file of this machine
  blobd serve                          serve models to programs over a socket
  blobd help pull                      explain a command

REF is the name of a model, such as llama3:8b or hf.co/user/repo:Q4_K_M, or the ID of a stored one,
as `blobd ls` prints it, or at least the first four digits of that ID. The name of a stored model may be
a pattern: * is any text, ? one character, [a-c] one of these. Case does not matter.

Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 busy or locked, 5 corrupt data found,
6 no space, 7 denied, 8 no daemon answers, 130 stopped by Ctrl-C.")]
struct Cli {
    #[command(flatten)]
    global: GlobalOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Pull(pull::Params),
    Push(push::Params),
    Transfer(transfer::Params),
    Outdated(outdated::Params),
    Limit(serve::LimitArgs),
    Config(config::Params),
    Partial(partial::Params),
    Import(import::Params),
    Export(export::Params),
    Save(save::Params),
    Load(load::Params),
    Inventory(inventory::Params),
    Edit(edit::Params),
    Exec(exec::Params),
    #[command(aliases = ["list", "images"])]
    Ls(ls::Params),
    #[command(alias = "inspect")]
    Show(show::Params),
    Diff(diff::Params),
    History(history::Params),
    Log(audit_log::Params),
    Tensor(tensor::Params),
    Fit(fit::Params),
    Ps(ps::Params),
    Release(ps::ReleaseArgs),
    Warm(warm::Params),
    Df(df::Params),
    #[command(aliases = ["rmi", "remove", "delete"])]
    Rm(rm::Params),
    Undelete(rm::UndeleteArgs),
    Undo(undo::Params),
    Pin(tag::PinArgs),
    Unpin(tag::UnpinArgs),
    #[command(alias = "cp")]
    Tag(tag::TagArgs),
    #[command(aliases = ["mv", "move"])]
    Rename(tag::RenameArgs),
    Promote(promote::Params),
    Gc(gc::Params),
    Sign(sign::Params),
    Verify(verify::Params),
    Doctor(doctor::Params),
    Health(serve::HealthArgs),
    Reindex(verify::ReindexArgs),
    Login(login::Params),
    Logout(login::LogoutArgs),
    Serve(serve::Params),
    Mount(mount::Params),
    Web(web::Params),
    #[command(hide = true)]
    MountGuard(mount::GuardArgs),
    Demo(serve::DemoArgs),
    Completions(completions::Params),
    Man(man::Params),
    Help(man::HelpArgs),
    Version(man::VersionArgs),
    #[command(hide = true, name = suggest::COMMAND)]
    Suggest(suggest::Params),
}

impl Command {
    const fn log_use(&self, verbosity: u8) -> log::Use {
        match self {
            Self::Serve(_) | Self::Mount(_) => log::Use::Always,
            // Its standard error is the terminal on which somebody types.
            Self::Suggest(_) => log::Use::Never,
            // `exec` leaves standard error to its program, and the guard belongs to `mount`.
            Self::Exec(_) | Self::MountGuard(_) => log::Use::OnRequest,
            _ if verbosity > 1 => log::Use::Always,
            _ => log::Use::OnRequest,
        }
    }

    /// The verb of a command that works on the store, and what Ctrl-C leaves of its work. A pull knows that better itself, and
    /// so do the commands that write files.
    const fn left_when_stopped(&self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Import(_) => {
                ("import", "finished models are stored, and the same command imports the others")
            }
            Self::Load(_) => ("load", "finished models are stored, and the same command loads the others"),
            Self::Edit(_) => ("edit", "nothing was stored"),
            Self::Push(_) => (
                "push",
                "the registry keeps files that it has received wholly, and the same command sends the others",
            ),
            Self::Transfer(_) => (
                "transfer",
                "the registry keeps files that it has received wholly, and the same command moves the others",
            ),
            Self::Promote(_) => ("promote", "nothing of an unfinished model was stored"),
            Self::Verify(_) => {
                ("verify", "what was found until now is set aside or repaired; run it again for the rest")
            }
            Self::Gc(_) => {
                ("gc", "what was deleted is gone; a daemon finishes the rest, without one run it again")
            }
            Self::Reindex(_) => ("reindex", "a daemon finishes it, without one run it again"),
            _ => return None,
        })
    }
}

/// The definition of all commands.
pub(crate) fn command() -> clap::Command {
    let root = Cli::command();
    // The list of commands is in groups.
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}\n\nGlobal options:\n{{options}}{{after-help}}",
        overview::list(&root)
    );
    root.help_template(template)
}

/// Runs the command that the arguments of this process name. Prints a failure, and returns its exit code.
#[must_use]
pub fn main(server: LocalServer) -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if arguments.len() <= 1 {
        print_message(&overview::screen(&command()));
        return ExitCode::from(ErrorCode::InvalidRequest.exit_code());
    }
    let parsed = command().try_get_matches_from(&arguments).and_then(|found| Cli::from_arg_matches(&found));
    let Cli { global, command } = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error, &arguments),
    };
    let log = log::start(command.log_use(global.verbose), global.verbose > 0);
    let is_daemon = matches!(command, Command::Serve(_));
    match log.and_then(|()| run(&global.or_environment(server)?, command)) {
        Ok(code) => code,
        Err(error) => {
            print_error(global.json, global.quiet, &error);
            ExitCode::from(if is_daemon {
                (server.exit_code_of_serve)(&error)
            } else {
                error.code.exit_code()
            })
        }
    }
}

/// Prints help or the version if the arguments ask for it, else what is wrong with them.
fn refuse(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    let print_failure = |failure: &ErrorBody| {
        let options = usage_error::output_options(arguments);
        print_error(options.json, options.quiet, failure);
    };
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let short =
            overview::short_help(command(), arguments).filter(|_| error.kind() == ErrorKind::DisplayHelp);
        let printed = short.map_or_else(|| output_written(error.print()), |help| print(&help));
        let Err(failure) = printed else { return ExitCode::SUCCESS };
        print_failure(&failure);
        return ExitCode::from(failure.code.exit_code());
    }
    let body = usage_error::body(error, arguments);
    print_failure(&body);
    ExitCode::from(body.code.exit_code())
}

/// Returns [`ExitCode::SUCCESS`], except for `exec`, which returns its program's exit code, and for `fit`, whose
/// exit code says whether the model fits.
fn run(global: &Global, command: Command) -> Result<ExitCode, ErrorBody> {
    if let Some((verb, left)) = command.left_when_stopped() {
        let is_json = global.json;
        let stop = move || {
            // A bar may be on the last line.
            print_message(if std::io::stderr().is_terminal() { "\n" } else { "" });
            print_stopped(is_json, verb, left);
        };
        on_interrupt(stop).map_err(internal)?;
    }
    let done = match command {
        Command::Exec(params) => return exec::run(global, &params),
        Command::Fit(params) => return fit::run(global, &params),
        Command::Outdated(params) => return outdated::run(global, &params),
        Command::Pull(params) => pull::run(global, &params),
        Command::Push(params) => push::run(global, &params),
        Command::Transfer(params) => transfer::run(global, &params),
        Command::Limit(params) => serve::limit(global, &params),
        Command::Config(params) => config::run(global, &params),
        Command::Partial(params) => partial::run(global, &params),
        Command::Import(params) => import::run(global, &params),
        Command::Export(params) => export::run(global, &params),
        Command::Save(params) => save::run(global, &params),
        Command::Load(params) => load::run(global, &params),
        Command::Inventory(params) => inventory::run(global, &params),
        Command::Edit(params) => edit::run(global, &params),
        Command::Ls(params) => ls::run(global, &params),
        Command::Show(params) => show::run(global, &params),
        Command::Diff(params) => diff::run(global, &params),
        Command::History(params) => history::run(global, &params),
        Command::Log(params) => audit_log::run(global, &params),
        Command::Tensor(params) => tensor::run(global, &params),
        Command::Ps(_) => ps::run(global),
        Command::Release(params) => ps::release(global, &params),
        Command::Warm(params) => warm::run(global, &params),
        Command::Df(params) => df::run(global, &params),
        Command::Rm(params) => rm::run(global, &params),
        Command::Undelete(params) => rm::undelete(global, &params),
        Command::Undo(params) => undo::run(global, &params),
        Command::Pin(params) => tag::pin(global, &params.models, true),
        Command::Unpin(params) => tag::pin(global, &params.models, false),
        Command::Tag(params) => tag::tag(global, &params),
        Command::Rename(params) => tag::rename(global, &params),
        Command::Promote(params) => promote::run(global, &params),
        Command::Gc(params) => gc::run(global, &params),
        Command::Sign(params) => sign::run(global, &params),
        Command::Verify(params) => verify::run(global, &params),
        Command::Doctor(params) => doctor::run(global, &params),
        Command::Health(params) => serve::health(global, &params),
        Command::Reindex(_) => verify::reindex(global),
        Command::Login(params) => login::run(global, &params),
        Command::Logout(params) => login::logout(global, &params),
        Command::Serve(_) => serve::serve(global),
        Command::Mount(params) => mount::run(global, &params),
        Command::Web(params) => web::run(global, &params),
        Command::MountGuard(params) => mount::run_guard(&params),
        Command::Demo(_) => serve::demo(global),
        Command::Completions(params) => completions::run(global, &params),
        Command::Man(params) => man::run(global, &params),
        Command::Help(params) => man::help(global, &params),
        Command::Version(_) => man::version(global),
        Command::Suggest(params) => print(&suggest::names(global, &params)),
    };
    done.map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    /// All visible commands, with their subcommands.
    fn commands() -> Vec<clap::Command> {
        let mut root = Cli::command();
        root.build();
        let visible = |command: &clap::Command| {
            let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
            commands.cloned().collect::<Vec<_>>()
        };
        let mut found = visible(&root);
        let mut next = 0;
        while let Some(command) = found.get(next) {
            found.extend(visible(&command.clone()));
            next += 1;
        }
        found
    }

    #[test]
    fn examples_and_explanations_fit_the_width_of_help() {
        const WIDTH: usize = 100;
        for command in commands() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let too_long = text.lines().find(|line| line.chars().count() > WIDTH);
            assert_eq!(too_long, None, "{}", command.get_name());
        }
    }

    #[test]
    fn help_of_every_command_ends_with_examples() {
        let commands = commands();
        assert!(commands.iter().any(|command| command.get_display_name() == Some("blobd-partial-rm")));
        for mut command in commands {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:"), "{}", command.get_name());
        }
    }
}
