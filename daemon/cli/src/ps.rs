//! `blobd ps` and `blobd release`: the sessions of processes that have models open

use std::iter;
use std::str::FromStr;

use blobd_cli_common::connect::{client_error, connect, print_report, show};
use blobd_cli_common::model_name::{ModelName, expand_among, names};
use blobd_cli_common::output::{Table, human_bytes, or_dash, terminal_width};
use blobd_cli_common::times::relative;
use blobd_cli_common::{Global, residency, usage};
use blobd_client::protocol::pull::{RunningKind, RunningPull, RunningPulls};
use blobd_client::protocol::request::ReleaseParams;
use blobd_client::protocol::response::{Released, SessionList, SessionSummary};
use blobd_client::residency::Residency;
use clap::Args;
use serde::Serialize;

use crate::{Client, ErrorBody, ErrorCode};

/// List the processes that have models open, how much is in memory, and the pulls and pushes in progress
#[derive(Debug, Args)]
#[command(
    after_help = "BYTES is the size of the blobs that the process has received. IN MEMORY is how much of the whole
model is in the page cache, which all processes share. For `blobd exec`, the program that it runs is
shown, and for a program in a container the start of the container's ID.

Examples:
  blobd ps
  blobd ps --json | jq -r '.sessions[] | [.pid, .model, .resident_bytes] | @tsv'
  blobd ps --json | jq -r '.pulls[] | [.model, .completed_bytes, .bytes_per_second] | @tsv'"
)]
pub(super) struct Params {}

#[derive(Debug, Serialize)]
struct Document {
    #[serde(flatten)]
    sessions: SessionList,
    #[serde(flatten)]
    pulls: RunningPulls,
}

pub(super) fn run(global: &Global) -> Result<(), ErrorBody> {
    let request = |client: &Client| {
        let sessions = client.sessions_with_residency()?;
        let pulls = match client.running_pulls() {
            // A daemon that was started before an upgrade does not list them.
            Err(error) if error.code() == ErrorCode::InvalidRequest => RunningPulls::default(),
            pulls => pulls?,
        };
        Ok(Document { sessions, pulls })
    };
    show(global, request, |document| {
        let (sessions, pulls) = (&document.sessions.sessions, &document.pulls.pulls);
        let tables = [session_table(sessions), pull_table(pulls), push_table(pulls)];
        let [sessions, running @ ..] = tables;
        let none = "no model is open\n".to_owned();
        let text = if sessions.has_rows() { sessions.render(terminal_width()) } else { none };
        let running = running.iter().filter(|table| table.has_rows());
        running.fold(text, |text, table| text + "\n" + &table.render(terminal_width()))
    })
}

/// End the leases of a process, or all leases of a model
#[derive(Debug, Args)]
#[command(
    after_help = "A program keeps its maps when its lease ends, and they stay valid; but the model may then be
removed. Ending leases of other users' processes requires administrator rights. A number means a
process: write NAME:latest for a model whose name is a number.

Examples:
  blobd ps                             list processes and the models that they have open
  blobd release 4711                   end the leases of process 4711
  blobd release llama3:8b              end all leases of a model
  blobd release 4711 --json | jq '.released[].model'"
)]
pub(super) struct ReleaseArgs {
    /// A process, as `blobd ps` lists it, or a model, by name or by pattern
    #[arg(value_name = "PID|REF|PATTERN")]
    target: Target,
}

#[derive(Clone, Debug)]
enum Target {
    Process(i32),
    Model(ModelName),
}

impl FromStr for Target {
    type Err = ErrorBody;

    fn from_str(text: &str) -> Result<Self, ErrorBody> {
        let text = text.trim();
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let pid = text.parse().ok().filter(|pid| *pid > 0);
            let refused = || usage("not a process id: expected a number from 1 to 2147483647");
            return pid.map(Self::Process).ok_or_else(refused);
        }
        text.parse().map(Self::Model)
    }
}

pub(super) fn release(global: &Global, args: &ReleaseArgs) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    let client = &connected.client;
    let requests = match &args.target {
        Target::Process(pid) => vec![ReleaseParams { pid: Some(*pid), reference: None }],
        Target::Model(model) => requests(client, model)?,
    };
    let mut released = Released { released: Vec::new() };
    for request in requests {
        released.released.extend(client.release(&request).map_err(client_error)?.released);
    }
    print_report(global, &released, |released| {
        let headings = ["ENDED LEASE OF", "PID", "USER", "COMMAND", "SINCE", "BYTES"];
        Table::with_rows(&headings, &[1, 5], released.released.iter().map(row))
            .leaving_out_first(&["SINCE", "USER"])
            .render(terminal_width())
    })
}

/// A request for each model. A pattern is compared with the models that are open, which may have been removed.
fn requests(client: &Client, model: &ModelName) -> Result<Vec<ReleaseParams>, ErrorBody> {
    let open = || {
        let sessions = client.sessions().map_err(client_error)?.sessions;
        Ok(names(sessions.iter().map(|session| session.model.as_str())))
    };
    let named = expand_among(std::slice::from_ref(model), open)?;
    let request = |reference| ReleaseParams { pid: None, reference: Some(reference) };
    named.into_iter().map(|named| named.reference.map(request)).collect()
}

fn session_table(sessions: &[SessionSummary]) -> Table {
    let rows = sessions.iter().map(|session| {
        let share = |(bytes, resident_bytes)| residency::share(Residency { bytes, resident_bytes });
        let in_memory = or_dash(session.model_bytes.zip(session.resident_bytes).map(share));
        row(session).into_iter().chain([in_memory])
    });
    Table::with_rows(&["MODEL", "PID", "USER", "COMMAND", "SINCE", "BYTES", "IN MEMORY"], &[1, 5, 6], rows)
        .leaving_out_first(&["SINCE", "BYTES", "USER"])
}

fn pull_table(pulls: &[RunningPull]) -> Table {
    let pulls = pulls.iter().filter(|pull| pull.kind == RunningKind::Pull);
    let rows = pulls.map(|pull| iter::once(pull.model.clone()).chain(progress(pull)));
    Table::with_rows(&["PULL OF", "USER", "SINCE", "DONE", "OF", "SPEED", ""], &[3, 4, 5], rows)
        .leaving_out_first(&["SINCE", "USER", "DONE"])
}

/// The pushes, and the transfers from registry to registry.
fn push_table(pulls: &[RunningPull]) -> Table {
    let pushes = pulls.iter().filter(|pull| pull.kind != RunningKind::Pull);
    let rows = pushes.map(|push| {
        let destination = push.destination.clone().unwrap_or_default();
        [push.source.clone(), destination].into_iter().chain(progress(push))
    });
    Table::with_rows(&["PUSH OF", "TO", "USER", "SINCE", "DONE", "OF", "SPEED", ""], &[4, 5, 6], rows)
        .leaving_out_first(&["SINCE", "USER", "DONE"])
}

fn progress(pull: &RunningPull) -> [String; 6] {
    let user = pull.user.clone().unwrap_or_else(|| pull.uid.to_string());
    let (done, total) = (human_bytes(pull.completed_bytes), or_dash(pull.total_bytes.map(human_bytes)));
    let speed = format!("{}/s", human_bytes(pull.bytes_per_second));
    [user, relative(&pull.since), done, total, speed, pull.status.clone()]
}

fn row(session: &SessionSummary) -> [String; 6] {
    [
        session.model.clone(),
        pid(session),
        session.user.clone().unwrap_or_else(|| session.uid.to_string()),
        program(session),
        relative(&session.since),
        human_bytes(session.bytes_mapped),
    ]
}

/// The process that uses the model. A process in another PID namespace has no number here.
fn pid(session: &SessionSummary) -> String {
    let pid = session.engine.as_ref().map_or(session.pid, |engine| engine.pid);
    if pid > 0 { pid.to_string() } else { "-".to_owned() }
}

fn program(session: &SessionSummary) -> String {
    let command = session.engine.as_ref().map(|engine| &engine.command).or(session.command.as_ref());
    match (command, &session.container) {
        (Some(command), Some(container)) => format!("{command} in {container}"),
        (Some(command), None) => command.clone(),
        (None, Some(container)) => format!("in {container}"),
        (None, None) => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::response::Engine;

    use super::*;

    fn session() -> SessionSummary {
        SessionSummary {
            pid: 7,
            uid: 1000,
            user: Some("ann".to_owned()),
            command: Some("blobd".to_owned()),
            engine: None,
            container: None,
            model: "qwen3:30b-a3b".to_owned(),
            since: "2026-11-24T10:00:00Z".to_owned(),
            bytes_mapped: 18 << 30,
            model_bytes: Some(18 << 30),
            resident_bytes: Some(9 << 30),
        }
    }

    #[test]
    fn process_that_uses_the_model_is_shown_and_its_container() {
        let engine = Some(Engine { pid: 9, command: "llama-server".to_owned() });
        let container = Some("3f2a91bc04d1".to_owned());
        let shown = |session: SessionSummary| {
            let [_, pid, _, program, ..] = row(&session);
            (pid, program)
        };
        assert_eq!(shown(session()), ("7".into(), "blobd".into()));
        assert_eq!(shown(SessionSummary { engine, ..session() }), ("9".into(), "llama-server".into()));
        let of_container = SessionSummary { container, command: Some("python3".into()), ..session() };
        assert_eq!(shown(of_container), ("7".into(), "python3 in 3f2a91bc04d1".into()));
        let elsewhere = Some("another PID namespace".to_owned());
        let unseen = SessionSummary { pid: 0, command: None, container: elsewhere, ..session() };
        assert_eq!(shown(unseen), ("-".into(), "in another PID namespace".into()));
    }

    #[test]
    fn number_is_a_process_and_anything_else_a_model() {
        assert!(matches!("4711".parse(), Ok(Target::Process(4711))));
        assert!(matches!("4711:latest".parse(), Ok(Target::Model(_))));
        assert!(matches!("llama3".parse(), Ok(Target::Model(_))));
        for text in ["0", "99999999999", "../x", ""] {
            assert!(text.parse::<Target>().is_err(), "{text:?}");
        }
    }
}
