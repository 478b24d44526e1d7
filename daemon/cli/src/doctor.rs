//! `blobd doctor`
//!
//! The checks of the command itself work without a daemon, without a store and with a wrong configuration file. Those
//! of the process that has the store open follow.

use std::io;

use blobd_cli_common::Global;
use blobd_cli_common::colour::{Paint, Tone};
use blobd_cli_common::connect::{client_error, load_settings};
use blobd_cli_common::output::{print, print_json, printable, terminal_width, wrap};
use blobd_client::protocol::upkeep::{Check, CheckStatus, DoctorReport};
use clap::Args;

use self::connection::Reached;
use crate::{ErrorBody, ErrorCode};

mod connection;
mod files;
mod registries;
mod user;

/// Check the set-up, and say how to fix what is wrong
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd doctor                                 exit code 1 if a check fails
  blobd doctor --registries                    also contact the registries of the stored models
  blobd doctor --json | jq '.checks[] | select(.status != \"ok\")'

It prints what is wrong, why that matters, and the command that fixes it. It changes nothing and
creates no store. Without --registries it contacts no other machine.")]
pub(super) struct Params {
    /// Also ask the registries of the stored models, and those in the configuration, for a manifest
    #[arg(long)]
    registries: bool,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let report = check_all(global, params);
    // Not `print_text`: lines with commands must stay whole, so that they can be copied.
    if global.json {
        print_json(&report)?;
    } else {
        print(&render(&report, terminal_width(), Paint::of(&io::stdout())))?;
    }
    let failed = report.checks.iter().filter(|check| check.status == CheckStatus::Failure);
    let failures: Vec<&str> = failed.map(|check| check.name.as_str()).collect();
    if failures.is_empty() {
        return Ok(());
    }
    Err(ErrorBody::new(ErrorCode::Internal, format!("doctor: checks failed: {}", failures.join(", "))))
}

fn check_all(global: &Global, params: &Params) -> DoctorReport {
    let loaded = load_settings(global);
    let mut checks = vec![files::configuration(global, loaded.as_ref().err())];
    // With a wrong file, the defaults say at least something about the rest.
    let settings = loaded.unwrap_or_else(|_reported| (global.server.default_settings)());
    checks.extend([files::credentials(&*settings), user::environment(global), user::locked_memory()]);
    checks.extend([user::service(), user::other_programs()]);
    let Reached { connected, check } = connection::reach(global, &*settings);
    checks.push(check);
    if let Some(connected) = connected {
        match connected.client.doctor().map_err(client_error) {
            Ok(report) => checks.extend(report.checks),
            Err(error) => checks.push(connection::failed("store", &error)),
        }
        if params.registries {
            checks.extend(registries::check(&connected.client, &*settings));
        }
    }
    DoctorReport { checks }
}

/// Findings first, the worst first, then what is right. Commands are on lines of their own, which are never broken.
fn render(report: &DoctorReport, width: usize, paint: Paint) -> String {
    const WIDEST: usize = 100;
    let mut findings: Vec<_> = report.checks.iter().filter(|check| check.status != CheckStatus::Ok).collect();
    findings.sort_by_key(|check| std::cmp::Reverse(check.status));
    let mut text: String = findings.iter().map(|check| paragraph(check, width.min(WIDEST), paint)).collect();
    let right: Vec<_> = report.checks.iter().filter(|check| check.status == CheckStatus::Ok).collect();
    let longest = right.iter().map(|check| check.name.chars().count()).max().unwrap_or_default();
    let row = |name: &str, status: &str, found: &str| {
        let start = format!("{:<longest$}  {status:<6}  ", printable(name));
        let text = wrap(&printable(found), width, &start, &" ".repeat(longest + 10));
        // Coloured after it is broken: the colours have no width.
        match status {
            "ok" => text.replacen("  ok  ", &format!("  {}  ", paint.text(Tone::Good, "ok")), 1),
            _ => text,
        }
    };
    text.push_str(&row("CHECK", "STATUS", "FOUND"));
    right.iter().for_each(|check| text.push_str(&row(&check.name, "ok", &check.detail)));
    text
}

fn paragraph(check: &Check, width: usize, paint: Paint) -> String {
    const INDENT: &str = "            ";
    let (status, tone) = match check.status {
        CheckStatus::Ok => ("ok", Tone::Good),
        CheckStatus::Note => ("note", Tone::Hint),
        CheckStatus::Warning => ("warning", Tone::Warning),
        CheckStatus::Failure => ("FAILURE", Tone::Bad),
    };
    let status = paint.text(tone, status);
    let line = |label: &str, text: &Option<String>| {
        let first = format!("  {label:<8}  ");
        text.as_ref().map_or_else(String::new, |text| wrap(&printable(text), width, &first, INDENT))
    };
    let command = check.command.as_ref();
    let command = command.map_or_else(String::new, |text| format!("  command   {}\n", printable(text)));
    format!(
        "{status}: {}\n{}{}{}{command}\n",
        printable(&check.name),
        line("found", &Some(check.detail.clone())),
        line("why", &check.why),
        line("to do", &check.hint),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_finding_comes_first_and_its_command_is_one_line() {
        let long = "a word ".repeat(30);
        let command = format!("echo {}", "x ".repeat(80).trim_end());
        let checks = vec![
            Check::new("fine", CheckStatus::Ok, "right"),
            Check::new("longer", CheckStatus::Ok, &long),
            Check::new("kernel", CheckStatus::Note, "old").because("slower").with_hint("update"),
            Check::new("mount", CheckStatus::Failure, &long)
                .because(&long)
                .with_hint("remount")
                .mended_by(&command),
        ];
        let text = render(&DoctorReport { checks }, 60, Paint::default());
        let position = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        assert!(position("FAILURE: mount") < position("note: kernel"));
        assert!(position("note: kernel") < position("fine    ok"));
        assert!(text.contains(&format!("\n  command   {command}\n")));
        let other = text.lines().filter(|line| !line.contains("command"));
        assert_eq!(other.filter(|line| line.chars().count() > 60).count(), 0, "{text}");
    }
}
