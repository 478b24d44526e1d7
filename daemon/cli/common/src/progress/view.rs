//! What is known of a piece of work, as one line of a terminal or of a log.

use std::time::{Duration, Instant};

use super::meter::Meter;
use crate::output::human_bytes;
use crate::table::cut::{NameCutter, end_cut};

/// A piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// Unique for each piece of work of a command.
    pub(super) id: u64,
    label: String,
    step: Step,
    /// 0 if unknown.
    total: u64,
    bytes: Meter,
    /// The speed that the daemon has measured.
    speed: Option<u64>,
}

/// What the work does now.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Bytes are moved.
    Moving,
    /// It waits, or does something that has no amount.
    Status { text: String, since: Instant },
    /// What follows the last byte.
    Phase { name: &'static str, total: u64, done: Meter, since: Instant },
}

/// A wait that is shorter than this has no time.
const SHORT: Duration = Duration::from_secs(2);
/// A log says that nothing happens after this time; before, data may come in large pieces.
const STILL: Duration = Duration::from_secs(3);
/// The widest bar: a longer one says no more.
const MAX_BAR: usize = 40;
const MIN_BAR: usize = 10;
const MAX_LABEL: usize = 48;
/// `1023 KiB / 1.00 GiB`, `1023 KiB/s` and `23h 59m`, with the spaces before them.
const NUMBERS: usize = 22 + 12 + 8;
/// Enough columns for a bar beside the label and the numbers.
const WIDE: usize = 78;

impl View {
    pub(super) fn new(id: u64, label: String, total: u64, now: Instant) -> Self {
        Self { id, label, step: Step::Moving, total, bytes: Meter::starting_at(now, 0), speed: None }
    }

    pub(super) const fn done(&self) -> u64 {
        self.bytes.done()
    }

    #[cfg(test)]
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn set(&mut self, done: u64, total: u64, now: Instant) {
        self.note(done, total, now);
        self.step = Step::Moving;
    }

    /// As [`Self::set`], while something else is shown.
    pub(super) fn note(&mut self, done: u64, total: u64, now: Instant) {
        self.total = total;
        self.bytes.note(now, done);
    }

    /// The bytes that are done do not count towards the speed.
    pub(super) fn begin_at(&mut self, done: u64, total: u64, now: Instant) {
        (self.total, self.step, self.bytes) = (total, Step::Moving, Meter::starting_at(now, done));
    }

    pub(super) const fn set_speed(&mut self, speed: Option<u64>) {
        self.speed = speed;
    }

    pub(super) fn wait(&mut self, text: &str, now: Instant) {
        if !matches!(&self.step, Step::Status { text: before, .. } if before == text) {
            self.step = Step::Status { text: text.to_owned(), since: now };
        }
    }

    /// `total` is 0 if it is unknown how much there is to do.
    pub(super) fn enter(&mut self, phase: &'static str, (done, total): (u64, u64), now: Instant) {
        match &mut self.step {
            Step::Phase { name, total: of, done: meter, .. } if *name == phase && *of == total => {
                meter.note(now, done);
            }
            step => {
                let done = Meter::starting_at(now, done);
                *step = Step::Phase { name: phase, total, done, since: now };
            }
        }
    }

    fn speed(&self, now: Instant) -> u64 {
        self.speed.unwrap_or_else(|| self.bytes.speed(now))
    }

    /// The line of a terminal with this many columns. It leaves the last column empty, where some terminals wrap.
    pub(super) fn line(&self, columns: usize, now: Instant) -> String {
        let columns = if columns == 0 { 80 } else { columns };
        let room = columns.saturating_sub(1);
        let line = if columns >= WIDE { self.wide_line(room, now) } else { self.narrow_line(room, now) };
        line.trim_end().to_owned()
    }

    fn wide_line(&self, room: usize, now: Instant) -> String {
        let left = room.saturating_sub(NUMBERS);
        let bar_width = (left / 3).clamp(MIN_BAR, MAX_BAR);
        let width = left.saturating_sub(bar_width + 1).clamp(1, MAX_LABEL);
        let label = padded(&self.label, width);
        match &self.step {
            Step::Moving if self.total == 0 => {
                format!("{label} {:>20}", none_if_zero(self.done(), human_bytes))
            }
            Step::Moving => {
                let (done, total) = (human_bytes(self.done()), human_bytes(self.total));
                let (speed, left) = (self.shown_speed(now), self.left(now));
                let bar = bar(self.done(), self.total, bar_width);
                format!("{label} {bar} {:>21} {speed:>11} {left:>7}", format!("{done} / {total}"))
            }
            Step::Status { text, since } => {
                let amount = match self.total {
                    0 => String::new(),
                    total => format!("{} / {}", human_bytes(self.done()), human_bytes(total)),
                };
                let rest = room.saturating_sub(width + 1);
                let text = with_time(text, *since, now);
                let text = cut(&text, rest.saturating_sub(amount.len() + 1));
                format!(
                    "{label} {text} {amount:>fill$}",
                    fill = rest.saturating_sub(text.chars().count() + 1)
                )
            }
            Step::Phase { name, total: 0, since, .. } => format!("{label} {}", with_time(name, *since, now)),
            Step::Phase { name, total, done, .. } => {
                let (bar, left) = (bar(done.done(), *total, bar_width), left_of(done, *total, now));
                let percent = format!("{name} {}%", percent(done.done(), *total));
                format!("{label} {bar} {percent:>21} {:>11} {left:>7}", "")
            }
        }
    }

    fn narrow_line(&self, room: usize, now: Instant) -> String {
        let facts = match &self.step {
            Step::Moving if self.total == 0 => none_if_zero(self.done(), human_bytes),
            Step::Moving => {
                let done = percent(self.done(), self.total);
                format!("{done:>3}% {:>11} {:>7}", self.shown_speed(now), self.left(now))
            }
            Step::Status { text, since } => cut(&with_time(text, *since, now), room.saturating_sub(12)),
            Step::Phase { name, total: 0, since, .. } => with_time(name, *since, now),
            Step::Phase { name, total, done, .. } => {
                format!("{name} {:>3}% {:>7}", percent(done.done(), *total), left_of(done, *total, now))
            }
        };
        let width = room.saturating_sub(facts.chars().count() + 1).max(1);
        cut(&format!("{} {facts}", padded(&self.label, width)), room)
    }

    fn shown_speed(&self, now: Instant) -> String {
        none_if_zero(self.speed(now), |speed| format!("{}/s", human_bytes(speed)))
    }

    fn left(&self, now: Instant) -> String {
        if self.total == 0 {
            return String::new();
        }
        left(self.total.saturating_sub(self.done()), self.speed(now))
    }

    /// The line of a log.
    pub(super) fn text(&self, now: Instant) -> String {
        let (label, done, total) = (&self.label, self.done(), self.total);
        let amount = match (done, total) {
            (0, 0) => label.clone(),
            (done, 0) => format!("{label}: {}", human_bytes(done)),
            (done, total) => {
                let (percent, done, total) = (percent(done, total), human_bytes(done), human_bytes(total));
                format!("{label}: {done} of {total} ({percent}%)")
            }
        };
        match &self.step {
            Step::Status { text, since } if amount == *label => {
                format!("{label}: {}", with_time(text, *since, now))
            }
            Step::Status { text, since } => format!("{amount}; {}", with_time(text, *since, now)),
            Step::Phase { name, total: 0, since, .. } => format!("{label}: {}", with_time(name, *since, now)),
            Step::Phase { name, total, done, .. } => {
                let left = left_of(done, *total, now);
                let left = none_if_empty(&left, |left| format!(", {left} left"));
                format!("{label}: {name}, {}%{left}", percent(done.done(), *total))
            }
            Step::Moving => match (self.speed(now), self.bytes.still_for(now)) {
                (speed @ 1.., still) if still < STILL => {
                    let left = none_if_empty(&self.left(now), |left| format!(", {left} left"));
                    format!("{amount}, {}/s{left}", human_bytes(speed))
                }
                (_, still) => format!("{amount}, no progress for {}", time(still.as_secs())),
            },
        }
    }
}

fn bar(done: u64, total: u64, width: usize) -> String {
    let cells = u128::from(done.min(total)) * width as u128 / u128::from(total.max(1));
    let cells = usize::try_from(cells).unwrap_or_default();
    format!("{}{}", "█".repeat(cells), "░".repeat(width.saturating_sub(cells)))
}

fn padded(label: &str, width: usize) -> String {
    format!("{:width$}", NameCutter::new(width).shown(label))
}

fn cut(text: &str, width: usize) -> String {
    end_cut(text, width)
}

fn with_time(text: &str, since: Instant, now: Instant) -> String {
    let waited = now.saturating_duration_since(since);
    if waited < SHORT { text.to_owned() } else { format!("{text} ({})", time(waited.as_secs())) }
}

fn left_of(done: &Meter, total: u64, now: Instant) -> String {
    left(total.saturating_sub(done.done()), done.speed(now))
}

fn left(left: u64, speed: u64) -> String {
    left.checked_div(speed).map_or_else(String::new, time)
}

fn none_if_zero(number: u64, shown: impl Fn(u64) -> String) -> String {
    if number == 0 { String::new() } else { shown(number) }
}

fn none_if_empty(text: &str, shown: impl Fn(&str) -> String) -> String {
    if text.is_empty() { String::new() } else { shown(text) }
}

fn percent(done: u64, total: u64) -> u128 {
    u128::from(done.min(total)) * 100 / u128::from(total.max(1))
}

/// Two units at most: `42s`, `1m 17s`, `3h 20m`, `2d 5h`.
fn time(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")];
    let first = UNITS.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(UNITS.len() - 1);
    let parts = UNITS.iter().enumerate().skip(first).take(2).map(|(index, (unit, name))| {
        let above = index.checked_sub(1).and_then(|larger| UNITS.get(larger)).map(|(larger, _)| *larger);
        let count = above.filter(|_| index > first).map_or(seconds, |larger| seconds % larger) / unit;
        format!("{count}{name}")
    });
    parts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
