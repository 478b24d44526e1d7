//! The command line: arguments → request → rendering. One file per command.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use blobd_client::protocol::error::{ErrorBody, ErrorCode, ErrorResponse};
use blobd_store_format::text::printable;
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

use crate::client_file;
use crate::output::{output_written, print, print_message, print_message_unbroken};
use crate::systemd::Notifier;

mod advice;
mod audit_log;
mod batch;
mod completions;
mod config;
mod connect;
mod corrected;
mod demo;
mod df;
mod diff;
mod doctor;
mod edit;
mod effective;
mod embedded;
mod endpoint;
mod exec;
mod export;
mod file_name;
mod fit;
mod gc;
mod habits;
mod health;
mod help;
mod history;
mod import;
mod limit;
mod local_model;
mod local_sidecars;
mod log;
mod login;
mod logout;
mod lost_models;
mod ls;
mod man;
mod model_name;
mod model_source;
mod mount;
mod nothing;
mod outdated;
mod output_file;
mod partial;
mod pin;
mod progress;
mod promote;
mod prompt;
mod ps;
mod pull;
mod pull_plan;
mod reindex;
mod release;
mod rename;
mod residency;
mod rm;
mod serve;
mod show;
#[cfg(test)]
mod shown_commands;
mod source_file;
mod store_access;
mod suggest;
mod system_service;
mod tag;
mod target;
mod tensor;
mod undelete;
mod upstream;
mod usage_error;
mod verify;
mod warm;
mod web;

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
6 no space, 7 denied, 8 no daemon answers, 130 stopped by Ctrl-C during a pull.")]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, Default, Args)]
pub struct Global {
    /// The store's directory, which the command opens itself if no daemon has it [env: BLOBD_ROOT]
    #[arg(long, global = true, help_heading = "Global options", value_name = "DIR")]
    root: Option<PathBuf>,
    /// The daemon's socket [env: BLOBD_SOCKET]
    #[arg(long, global = true, help_heading = "Global options", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The configuration file [env: BLOBD_CONFIG]
    #[arg(long, global = true, help_heading = "Global options", value_name = "PATH")]
    config: Option<PathBuf>,
    /// Print one JSON document instead of text; `pull` and `log` print one object per line
    #[arg(long, global = true, help_heading = "Global options")]
    json: bool,
    /// Print only results and errors: no progress, no reports of what was done, no hints
    #[arg(short, long, global = true, help_heading = "Global options")]
    quiet: bool,
    /// Print more detail, and a log of the work of this process on standard error
    #[arg(short, long, global = true, help_heading = "Global options")]
    verbose: bool,
    /// Which of the paths come from the environment.
    #[arg(skip)]
    from_environment: FromEnvironment,
}

#[derive(Clone, Copy, Debug, Default)]
struct FromEnvironment {
    root: bool,
    socket: bool,
}

impl Global {
    /// Whether progress is left out.
    const fn hides_progress(&self) -> bool {
        self.json || self.quiet
    }

    const fn socket_is_from_environment(&self) -> bool {
        self.socket.is_some() && self.from_environment.socket
    }

    /// Whether reports of what was done, such as `removed llama3:8b`, are left out. Requested results are not.
    const fn hides_reports(&self) -> bool {
        self.json || self.quiet
    }

    /// Takes missing options from the environment; an empty variable counts as unset. All paths become absolute:
    /// they are compared, printed, and written into the lock file for other processes.
    fn or_environment(&self) -> Result<Self, ErrorBody> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let (None, Some(root)) = (&self.root, variable("BLOBD_ROOT").filter(|root| root.is_relative())) {
            // A variable lasts longer than a command, and a relative one names another store in each directory.
            let message = format!("BLOBD_ROOT: expected an absolute path, found {root:?}");
            return Err(usage(message).with_hint("--root takes relative paths too"));
        }
        let path = |option: &str, given: &Option<PathBuf>, name| {
            let given = given.clone().map(|path| (option, path));
            let Some((source, path)) = given.or_else(|| Some((name, variable(name)?))) else {
                return Ok(None);
            };
            let absolute = std::path::absolute(&path);
            absolute.map(Some).map_err(|error| usage(format!("{source}: {path:?}: {error}")))
        };
        let from_environment = FromEnvironment { root: self.root.is_none(), socket: self.socket.is_none() };
        Ok(Self {
            from_environment,
            root: path("--root", &self.root, "BLOBD_ROOT")?,
            socket: path("--socket", &self.socket, "BLOBD_SOCKET")?,
            config: path("--config", &self.config, "BLOBD_CONFIG")?,
            ..self.clone()
        })
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    Pull(pull::Params),
    Outdated(outdated::Params),
    Limit(limit::Params),
    Config(config::Params),
    Partial(partial::Params),
    Import(import::Params),
    Export(export::Params),
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
    Release(release::Params),
    Warm(warm::Params),
    Df(df::Params),
    #[command(aliases = ["rmi", "remove", "delete"])]
    Rm(rm::Params),
    Undelete(undelete::Params),
    Pin(pin::PinArgs),
    Unpin(pin::UnpinArgs),
    #[command(alias = "cp")]
    Tag(tag::Params),
    #[command(aliases = ["mv", "move"])]
    Rename(rename::Params),
    Promote(promote::Params),
    Gc(gc::Params),
    Verify(verify::Params),
    Doctor(doctor::Params),
    Health(health::Params),
    Reindex(reindex::Params),
    Login(login::Params),
    Logout(logout::Params),
    Serve(serve::Params),
    Mount(mount::Params),
    Web(web::Params),
    #[command(hide = true)]
    MountGuard(mount::GuardParams),
    /// Read a client's file
    #[command(hide = true, name = client_file::COMMAND)]
    ClientFile,
    Demo(demo::Params),
    Completions(completions::Params),
    Man(man::Params),
    Help(help::Params),
    #[command(hide = true, name = suggest::COMMAND)]
    Suggest(suggest::Params),
    #[command(hide = true)]
    DemoReader(demo::ReaderParams),
}

impl Command {
    /// Whether `--verbose` starts a log. For `df` it means a table of models; `exec` leaves standard error to
    /// its program, and the hidden commands run within others.
    const fn has_log(&self) -> bool {
        let is_hidden =
            matches!(self, Self::MountGuard(_) | Self::ClientFile | Self::Suggest(_) | Self::DemoReader(_));
        !is_hidden && !matches!(self, Self::Df(_) | Self::Exec(_))
    }

    /// When the command logs. `verbose` is the option.
    const fn log_use(&self, verbose: bool) -> log::Use {
        match self {
            Self::Serve(_) | Self::Mount(_) => log::Use::Always,
            // Its standard error is a file that belongs to a client, or the terminal on which somebody types.
            Self::ClientFile | Self::Suggest(_) => log::Use::Never,
            _ if verbose && self.has_log() => log::Use::Always,
            _ => log::Use::OnRequest,
        }
    }
}

/// Parses the arguments, runs the command, and turns a failure into a message and an exit code.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().collect();
    if arguments.len() <= 1 {
        print_message(help::FIRST_STEPS);
        return ExitCode::from(ErrorCode::InvalidRequest.exit_code());
    }
    let Cli { global, command } = match Cli::try_parse_from(&arguments) {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error, &arguments),
    };
    let log = log::start(command.log_use(global.verbose), global.verbose);
    let is_daemon = matches!(command, Command::Serve(_));
    match log.and_then(|()| run(&global.or_environment()?, command)) {
        Ok(code) => code,
        Err(error) => {
            report(&global, &error);
            ExitCode::from(if is_daemon {
                serve::exit_code(&error, Notifier::is_requested())
            } else {
                error.code.exit_code()
            })
        }
    }
}

/// Prints help or the version if the arguments ask for it, else what is wrong with them.
fn refuse(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let Err(failure) = output_written(error.print()) else { return ExitCode::SUCCESS };
        report(&usage_error::output_options(arguments), &failure);
        return ExitCode::from(failure.code.exit_code());
    }
    let body = usage_error::body(error, arguments);
    report(&usage_error::output_options(arguments), &body);
    ExitCode::from(body.code.exit_code())
}

/// Returns [`ExitCode::SUCCESS`], except for `exec`, which returns its program's exit code, and for `fit`, whose
/// exit code says whether the model fits.
fn run(global: &Global, command: Command) -> Result<ExitCode, ErrorBody> {
    let done = match command {
        Command::Exec(params) => return exec::run(global, &params),
        Command::Fit(params) => return fit::run(global, &params),
        Command::Outdated(params) => return outdated::run(global, &params),
        Command::Pull(params) => pull::run(global, &params),
        Command::Limit(params) => limit::run(global, &params),
        Command::Config(params) => config::run(global, &params),
        Command::Partial(params) => partial::run(global, &params),
        Command::Import(params) => import::run(global, &params),
        Command::Export(params) => export::run(global, &params),
        Command::Edit(params) => edit::run(global, &params),
        Command::Ls(params) => ls::run(global, &params),
        Command::Show(params) => show::run(global, &params),
        Command::Diff(params) => diff::run(global, &params),
        Command::History(params) => history::run(global, &params),
        Command::Log(params) => audit_log::run(global, &params),
        Command::Tensor(params) => tensor::run(global, &params),
        Command::Ps(params) => ps::run(global, &params),
        Command::Release(params) => release::run(global, &params),
        Command::Warm(params) => warm::run(global, &params),
        Command::Df(params) => df::run(global, &params),
        Command::Rm(params) => rm::run(global, &params),
        Command::Undelete(params) => undelete::run(global, &params),
        Command::Pin(params) => pin::run(global, &params.models, true),
        Command::Unpin(params) => pin::run(global, &params.models, false),
        Command::Tag(params) => tag::run(global, &params),
        Command::Rename(params) => rename::run(global, &params),
        Command::Promote(params) => promote::run(global, &params),
        Command::Gc(params) => gc::run(global, &params),
        Command::Verify(params) => verify::run(global, &params),
        Command::Doctor(params) => doctor::run(global, &params),
        Command::Health(params) => health::run(global, &params),
        Command::Reindex(params) => reindex::run(global, &params),
        Command::Login(params) => login::run(global, &params),
        Command::Logout(params) => logout::run(global, &params),
        Command::Serve(params) => serve::run(global, &params),
        Command::Mount(params) => mount::run(global, &params),
        Command::Web(params) => web::run(global, &params),
        Command::ClientFile => {
            client_file::run();
            Ok(())
        }
        Command::MountGuard(params) => mount::run_guard(&params),
        Command::Demo(params) => demo::run(global, &params),
        Command::Completions(params) => completions::run(global, &params),
        Command::Man(params) => man::run(global, &params),
        Command::Help(params) => help::run(global, &params),
        Command::Suggest(params) => print(&suggest::names(global, &params)),
        Command::DemoReader(params) => demo::run_reader(global, &params),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn report(global: &Global, error: &ErrorBody) {
    if global.json {
        let response = ErrorResponse { error: error.clone() };
        let json = serde_json::to_string(&response).unwrap_or_default();
        print_message_unbroken(&log::at_error_priority(&format!("{json}\n")));
        return;
    }
    let hint = error.hint.as_ref().filter(|_hint| !global.quiet);
    let hint = hint.map_or_else(String::new, |hint| format!("hint: {}\n", printable(hint)));
    let text = format!("blobd: {}\n{hint}{}", printable(&error.message), request_note(error));
    print_message(&log::at_error_priority(&text));
}

/// How to find a failure of the daemon itself in its log.
fn request_note(error: &ErrorBody) -> String {
    let request = error.request.as_ref().filter(|_| error.code == ErrorCode::Internal);
    request.map_or_else(String::new, |id| format!("request: {}, as in the daemon's log\n", printable(id)))
}

/// An error in the command line or the configuration.
fn usage(message: impl std::fmt::Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidRequest, message)
}

fn file_error(name: &str, error: &io::Error) -> ErrorBody {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        io::ErrorKind::PermissionDenied => ErrorCode::Denied,
        io::ErrorKind::NotFound => ErrorCode::NotFound,
        _ => ErrorCode::Internal,
    };
    let body = ErrorBody::new(code, format!("{name}: {error}"));
    match error.kind() {
        io::ErrorKind::NotFound => body.with_hint("check the path; the directories in it must exist"),
        io::ErrorKind::PermissionDenied => {
            body.with_hint("use a file that this user may use, or run the command as its owner")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            body.with_hint("free space there, or choose another place")
        }
        _ => body,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    /// Every command but the hidden ones, with the commands of commands.
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
