//! `blobd ps`

use blobd_client::client::Client;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::response::{RunningPull, RunningPulls, SessionList, SessionSummary};
use blobd_client::residency::Residency;
use blobd_store_format::size::human_bytes;
use clap::Args;
use serde::Serialize;

use super::connect::show;
use super::{Global, residency};
use crate::output::{Table, terminal_width};
use crate::times::relative;

/// List the processes that have models open, how much of each model is in memory, and the pulls in progress
#[derive(Debug, Args)]
#[command(
    after_help = "BYTES is the size of the blobs that the process has received. IN MEMORY is how much of the whole
model is in the page cache, which all processes share. Of `blobd exec`, the program that it runs is
shown, and of a program in a container the start of the container's ID.

Examples:
  blobd ps
  blobd ps --json | jq -r '.sessions[] | [.pid, .model, .resident_bytes] | @tsv'
  blobd ps --json | jq -r '.pulls[] | [.model, .completed_bytes, .bytes_per_second] | @tsv'"
)]
pub(super) struct Params {}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Document {
    #[serde(flatten)]
    sessions: SessionList,
    #[serde(flatten)]
    pulls: RunningPulls,
}

pub(super) fn run(global: &Global, _params: &Params) -> Result<(), ErrorBody> {
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
        let mut text = match sessions.is_empty() {
            true => "no model is open\n".to_owned(),
            false => session_table(sessions).render(terminal_width()),
        };
        if !pulls.is_empty() {
            text.push('\n');
            text += &pull_table(pulls).render(terminal_width());
        }
        text
    })
}

fn session_table(sessions: &[SessionSummary]) -> Table {
    let mut table =
        Table::new(&["MODEL", "PID", "USER", "COMMAND", "SINCE", "BYTES", "IN MEMORY"], &[1, 5, 6]);
    for session in sessions {
        let residency = session.model_bytes.zip(session.resident_bytes);
        let in_memory = residency.map_or_else(
            || "-".to_owned(),
            |(bytes, resident_bytes)| residency::share(Residency { bytes, resident_bytes }),
        );
        table.row(row(session).into_iter().chain([in_memory]));
    }
    table
}

fn pull_table(pulls: &[RunningPull]) -> Table {
    let mut table = Table::new(&["PULL OF", "USER", "SINCE", "DONE", "OF", "SPEED", ""], &[3, 4, 5]);
    for pull in pulls {
        table.row([
            pull.model.clone(),
            pull.user.clone().unwrap_or_else(|| pull.uid.to_string()),
            relative(&pull.since),
            human_bytes(pull.completed_bytes),
            pull.total_bytes.map_or_else(|| "-".to_owned(), human_bytes),
            format!("{}/s", human_bytes(pull.bytes_per_second)),
            pull.status.clone(),
        ]);
    }
    table
}

/// Model, process, user, command, start and bytes of a session.
pub(super) fn row(session: &SessionSummary) -> [String; 6] {
    [
        session.model.clone(),
        pid(session),
        session.user.clone().unwrap_or_else(|| session.uid.to_string()),
        program(session),
        relative(&session.since),
        human_bytes(session.bytes_mapped),
    ]
}

/// The process that uses the model. One of another PID namespace has no number here.
fn pid(session: &SessionSummary) -> String {
    let pid = session.engine.as_ref().map_or(session.pid, |engine| engine.pid);
    if pid > 0 { pid.to_string() } else { "-".to_owned() }
}

/// Its program and container.
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
}
