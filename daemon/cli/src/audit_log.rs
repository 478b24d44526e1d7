//! `blobd log`: the audit log.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_cli_common::Global;
use blobd_cli_common::connect::{client_error, connect};
use blobd_cli_common::output::{human_bytes, print, print_json, print_message, printable, terminal_width};
use blobd_cli_common::system_service::within;
use blobd_cli_common::table::cut::{NameCutter, end_cut};
use blobd_cli_common::times::{local, parse_period};
use blobd_client::name_service::user_by_name;
use blobd_client::protocol::audit::{AuditRecord, LogEnd, LogParams};
use clap::Args;

use crate::{ErrorBody, Reference};

/// Show what was done to the store, by whom, and what was refused
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd log                                    the latest 50 records
  blobd log --follow                           and those that are written from now on
  blobd log --model llama3:8b --since 7d       what happened to a model within a week
  blobd log --user ann --failed -v             what failed or was refused, with the reasons
  blobd log --verb rm --verb evict --until 1d  what was removed before yesterday
  blobd log --result denied                    what a right has refused
  blobd log --limit 0 --json | jq -r .verb     for programs: all records, one JSON object per line

Users who do not administer the store see only their own records. The records are in the directory
audit/ of the store, unless audit.directory in the configuration names another one.")]
pub(super) struct Params {
    /// Continue with the records that are written from now on; needs a daemon
    #[arg(short, long)]
    follow: bool,
    /// Only records of this user, by name or number
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Only records about this model, by name, pattern or ID
    #[arg(long, value_name = "REF")]
    model: Option<String>,
    /// Only records since then: a period such as 2h or 7d, or a time such as 2026-11-24T10:00:00Z
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<SystemTime>,
    /// Only records before then, given as for --since
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<SystemTime>,
    /// Only records of this verb, such as pull, rm, open or evict; several are alternatives
    #[arg(long = "verb", value_name = "VERB")]
    verbs: Vec<String>,
    /// Only records with this result, such as ok, denied or cancelled; several are alternatives
    #[arg(long = "result", value_name = "RESULT")]
    results: Vec<String>,
    /// Only what failed or was refused
    #[arg(long)]
    failed: bool,
    /// Print at most this number of records, the latest ones; 0 for all
    #[arg(short = 'n', long, alias = "lines", value_name = "N", default_value_t = 50)]
    limit: u64,
}

/// A period before now, a time, or a day, in UTC.
fn time(text: &str) -> Result<SystemTime, String> {
    let ago = |period| SystemTime::now().checked_sub(period).unwrap_or(UNIX_EPOCH);
    let parse = |text: &str| humantime::parse_rfc3339_weak(text).ok();
    let found = parse_period(text).ok().map(ago);
    let found = found.or_else(|| parse(text)).or_else(|| parse(&format!("{text}T00:00:00")));
    found.ok_or_else(|| {
        format!("{text:?}: not a time; write for example 2h, 7d, 2026-11-24 or 2026-11-24T10:00:00Z")
    })
}

impl Params {
    /// The requested user, if nobody has that name. Records may still contain it.
    fn unknown_user(&self) -> Option<&str> {
        /// A reachable directory server answers within a second; its client library tries the next one after some
        /// seconds.
        const LIMIT: Duration = Duration::from_secs(10);
        let user = self.user.as_deref().filter(|user| user.parse::<u32>().is_err())?;
        let name = user.to_owned();
        let found = within(LIMIT, move || user_by_name(&name))?;
        matches!(found, Ok(None)).then_some(user)
    }

    fn request(&self) -> LogParams {
        let time = |time| humantime::format_rfc3339_millis(time).to_string();
        LogParams {
            user: self.user.clone(),
            model: self.model.clone(),
            verbs: self.verbs.clone(),
            results: self.results.clone(),
            since: self.since.map(time),
            until: self.until.map(time),
            failed: self.failed,
            limit: Some(if self.limit == 0 { u64::MAX } else { self.limit }),
            follow: self.follow,
        }
    }
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    let connected = connect(global)?;
    if params.follow {
        connected.require_daemon("log --follow")?;
    }
    let (mut columns, mut records, mut printed) = (Columns::of_output(), 0_u64, Ok(()));
    let shown = connected.client.log(&params.request(), |record| {
        if printed.is_ok() {
            printed =
                if global.json { print_json(&record) } else { columns.print(global, &record, records == 0) };
        }
        records += 1;
    });
    printed?;
    let end = shown.map_err(client_error)?;
    if !global.hides_reports() {
        print_message(&remarks(records, &end, params.unknown_user()));
    }
    Ok(())
}

fn remarks(records: u64, end: &LogEnd, unknown_user: Option<&str>) -> String {
    let mut text = match end.earlier_records {
        0 => String::new(),
        1 => "blobd: 1 earlier record not shown (`--limit 0`)\n".to_owned(),
        LogEnd::MAX_EARLIER.. => {
            format!("blobd: {} or more earlier records not shown (`--limit 0`)\n", LogEnd::MAX_EARLIER)
        }
        earlier => format!("blobd: {earlier} earlier records not shown (`--limit 0`)\n"),
    };
    if records == 0 {
        if let Some(user) = unknown_user {
            text.push_str(&format!("blobd: no user named {}\n", printable(user)));
        }
        let whose = if end.own_only { " of your own; only administrators see others" } else { "" };
        text.push_str(&format!("blobd: no such records{whose}\n"));
    }
    match end.unreadable_lines {
        0 => {}
        1 => text.push_str("blobd: 1 line of the log is not a record, as after a crash\n"),
        lines => {
            text.push_str(&format!("blobd: {lines} lines of the log are not records, as after a crash\n"));
        }
    }
    text
}

/// The columns, whose widths must not depend on the records: these may arrive at any time. A narrow terminal has no room
/// for all of them.
#[derive(Debug)]
struct Columns {
    model: NameCutter,
    model_width: usize,
    has_year: bool,
    has_user: bool,
    has_bytes: bool,
    /// Whether longer texts are cut.
    is_terminal: bool,
    width: usize,
}

impl Columns {
    const TIME: usize = "2026-11-24 10:00".len();
    const YEAR: usize = "2026-".len();
    const USER: usize = 12;
    const VERB: usize = 10;
    const BYTES: usize = "1023.9 MiB".len();
    /// Wide enough for most results.
    const RESULT: usize = 10;
    const GAP: usize = 2;
    /// Where most names of models differ already.
    const COMFORTABLE: usize = 30;

    fn of_output() -> Self {
        Self::of_width(terminal_width())
    }

    fn of_width(width: usize) -> Self {
        const ALWAYS: usize = Columns::TIME + Columns::VERB + Columns::RESULT + 3 * Columns::GAP;
        let room = |columns: usize| width.saturating_sub(ALWAYS + columns);
        let (user, bytes) = (Self::USER + Self::GAP, Self::BYTES + Self::GAP);
        let has_bytes = room(user + bytes) >= Self::COMFORTABLE;
        let has_user = has_bytes || room(user) >= Self::COMFORTABLE;
        let has_year = has_user || room(0) >= Self::COMFORTABLE;
        let others = if has_user { user } else { 0 } + if has_bytes { bytes } else { 0 };
        let model_width = (room(others) + if has_year { 0 } else { Self::YEAR }).clamp(8, 40);
        let is_terminal = width != usize::MAX;
        let model = NameCutter::new(if is_terminal { model_width } else { usize::MAX });
        Self { model, model_width, has_year, has_user, has_bytes, is_terminal, width }
    }

    fn print(&mut self, global: &Global, record: &AuditRecord, is_first: bool) -> Result<(), ErrorBody> {
        let heading = if is_first {
            self.line(["TIME", "USER", "VERB", "MODEL", "BYTES", "RESULT"])
        } else {
            String::new()
        };
        print(&(heading + &self.text(record, global.verbose)))
    }

    fn text(&mut self, record: &AuditRecord, is_verbose: bool) -> String {
        let user = record.user.clone().unwrap_or_else(|| format!("uid {}", record.uid));
        let bytes = record.bytes.map_or_else(|| "-".to_owned(), human_bytes);
        let result = if record.dry_run { "ok, dry run" } else { &record.result };
        let short =
            |model: &String| model.parse().map_or_else(|_| model.clone(), |name: Reference| name.short());
        let model = record.model.as_ref().map_or_else(|| "-".to_owned(), short);
        let model = self.model.shown(&printable(&model));
        let line = self.line([&local(&record.time), &user, &record.verb, &model, &bytes, result]);
        if is_verbose { line + &details(record) } else { line }
    }

    fn line(&self, [time, user, verb, model, bytes, result]: [&str; 6]) -> String {
        let bytes = format!("{bytes:>width$}", width = Self::BYTES);
        let is_heading = !time.starts_with(|first: char| first.is_ascii_digit());
        let time = if self.has_year || is_heading { time } else { time.get(Self::YEAR..).unwrap_or(time) };
        let time_width = Self::TIME - if self.has_year { 0 } else { Self::YEAR };
        let cells = [
            Some((time, time_width)),
            self.has_user.then_some((user, Self::USER)),
            Some((verb, Self::VERB)),
            Some((model, self.model_width)),
            self.has_bytes.then_some((bytes.as_str(), Self::BYTES)),
        ];
        let cells = cells.into_iter().flatten().map(|(text, width)| self.cell(text, width) + "  ");
        let line = cells.collect::<String>() + &printable(result);
        format!("{}\n", end_cut(&line, self.width))
    }

    fn cell(&self, text: &str, width: usize) -> String {
        let text = printable(text);
        let text = if self.is_terminal { end_cut(&text, width) } else { text };
        format!("{text:<width$}")
    }
}

/// Facts that have no column, on lines of their own.
fn details(record: &AuditRecord) -> String {
    let mut facts = Vec::new();
    facts.extend(record.message.clone());
    let process = record.pid.map(|pid| match &record.command {
        Some(command) => format!("process {pid} ({command})"),
        None => format!("process {pid}"),
    });
    facts.extend(process);
    facts.extend(record.duration_ms.map(|ms| format!("{ms} ms")));
    facts.extend(record.request.as_ref().map(|id| format!("request {id}")));
    facts.extend(record.digest.map(|digest| digest.to_string()));
    facts.extend(record.details.iter().map(|(name, value)| format!("{name}: {value}")));
    facts.iter().map(|fact| format!("    {}\n", printable(fact))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> AuditRecord {
        AuditRecord {
            time: "2026-11-24T10:00:00.500Z".to_owned(),
            user: Some("a-user-with-a-long-name".to_owned()),
            verb: "partial rm".to_owned(),
            model: Some("hf.co/a-user/a-repository-with-a-long-name:Q4_K_M".to_owned()),
            bytes: Some(1023 << 20),
            result: "invalid_request".to_owned(),
            message: Some("no\u{1b}[31m".to_owned()),
            ..AuditRecord::default()
        }
    }

    #[test]
    fn line_fits_a_terminal_and_is_complete_in_a_file() {
        for width in [60, 80, 100, 120] {
            let line = Columns::of_width(width).text(&record(), false);
            assert!(line.trim_end().chars().count() <= width, "{width}: {line}");
        }
        let line = Columns::of_width(usize::MAX).text(&record(), false);
        assert!(line.contains(
            "a-user-with-a-long-name  partial rm  hf.co/a-user/a-repository-with-a-long-name:Q4_K_M"
        ));
    }

    #[test]
    fn records_that_the_limit_leaves_out_are_counted() {
        let text = |earlier_records| remarks(50, &LogEnd { earlier_records, ..LogEnd::default() }, None);
        assert_eq!(text(0), "");
        assert_eq!(text(1), "blobd: 1 earlier record not shown (`--limit 0`)\n");
        assert_eq!(text(554), "blobd: 554 earlier records not shown (`--limit 0`)\n");
        assert!(text(LogEnd::MAX_EARLIER).contains(" or more earlier"));
    }

    #[test]
    fn details_have_no_control_characters() {
        assert!(Columns::of_width(80).text(&record(), true).chars().all(|c| c == '\n' || !c.is_control()));
    }

    #[test]
    fn since_is_a_period_a_day_or_a_time() {
        for text in ["2h", "7d", "2026-11-24", "2026-11-24T10:00:00Z", "2026-11-24 10:00:00"] {
            assert!(time(text).is_ok(), "{text}");
        }
        assert!(time("yesterday").unwrap_err().contains("2h"));
    }
}
