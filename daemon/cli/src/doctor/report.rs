//! The report of `doctor` as text: findings first, the worst first, then what is right.

use blobd_client::protocol::upkeep::{Check, CheckStatus, DoctorReport};
use blobd_store_format::text::printable;

use crate::output::wrap;

/// Text is easier to read in lines that are not longer than this.
const WIDEST: usize = 100;

/// Commands are on lines of their own, which are never broken.
pub(super) fn render(report: &DoctorReport, width: usize) -> String {
    let mut findings: Vec<_> = report.checks.iter().filter(|check| check.status != CheckStatus::Ok).collect();
    findings.sort_by_key(|check| std::cmp::Reverse(check.status));
    let mut text: String = findings.iter().map(|check| paragraph(check, width.min(WIDEST))).collect();
    let right: Vec<_> = report.checks.iter().filter(|check| check.status == CheckStatus::Ok).collect();
    let longest = right.iter().map(|check| check.name.chars().count()).max().unwrap_or_default();
    let row = |name: &str, status: &str, found: &str| {
        let start = format!("{:<longest$}  {status:<6}  ", printable(name));
        wrap(&printable(found), width, &start, &" ".repeat(longest + 10))
    };
    text.push_str(&row("CHECK", "STATUS", "FOUND"));
    right.iter().for_each(|check| text.push_str(&row(&check.name, "ok", &check.detail)));
    text
}

fn paragraph(check: &Check, width: usize) -> String {
    const INDENT: &str = "            ";
    let status = match check.status {
        CheckStatus::Ok => "ok",
        CheckStatus::Note => "note",
        CheckStatus::Warning => "warning",
        CheckStatus::Failure => "FAILURE",
    };
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
        let text = render(&DoctorReport { checks }, 60);
        let position = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        assert!(position("FAILURE: mount") < position("note: kernel"));
        assert!(position("note: kernel") < position("fine    ok"));
        assert!(text.contains(&format!("\n  command   {command}\n")));
        let other = text.lines().filter(|line| !line.contains("command"));
        assert_eq!(other.filter(|line| line.chars().count() > 60).count(), 0, "{text}");
    }
}
