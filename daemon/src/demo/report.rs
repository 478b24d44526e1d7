//! Formats the demo's results.

use std::time::Duration;

use blobd_cli_common::output::Table;
use blobd_client::protocol::space::DiskUsage;
use blobd_store_format::size::{human_bytes, human_difference};
use serde::Serialize;

use super::reader::{MemoryUse, Opened};

#[derive(Clone, Debug)]
pub(super) struct Findings {
    pub(super) pulled: Pulled,
    /// With all models in the store.
    pub(super) disk: DiskUsage,
    pub(super) readings: Vec<Reading>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Pulled {
    /// As counted by the registry.
    pub(super) bytes: u64,
    pub(super) time: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) opened: Opened,
    /// While both readers have the model mapped.
    pub(super) memory: MemoryUse,
}

#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pulled_bytes: u64,
    logical_bytes: u64,
    physical_bytes: u64,
    stored_bytes: u64,
    saved_bytes: u64,
    models: usize,
    blobs: u64,
    readers: Vec<ReaderFigures>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct ReaderFigures {
    tensors: u64,
    tensor_bytes: u64,
    open_seconds: f64,
    rss_bytes: u64,
    pss_bytes: u64,
    weights_rss_bytes: u64,
    weights_pss_bytes: u64,
}

pub(super) fn figures(findings: &Findings, elapsed: Duration) -> Figures {
    let Findings { pulled, disk, readings } = findings;
    Figures {
        pulled_bytes: pulled.bytes,
        logical_bytes: disk.logical_bytes,
        physical_bytes: disk.physical_bytes,
        stored_bytes: disk.stored_bytes,
        saved_bytes: disk.saved_bytes,
        models: disk.models.len(),
        blobs: disk.blob_count,
        readers: readings.iter().map(ReaderFigures::from).collect(),
        seconds: elapsed.as_secs_f64(),
    }
}

impl From<&Reading> for ReaderFigures {
    fn from(reading: &Reading) -> Self {
        let Reading { opened, memory } = reading;
        let open_micros = median(opened.open_micros.iter().copied());
        Self {
            tensors: opened.tensor_count,
            tensor_bytes: opened.tensor_bytes,
            open_seconds: Duration::from_micros(open_micros).as_secs_f64(),
            rss_bytes: memory.rss_bytes,
            pss_bytes: memory.pss_bytes,
            weights_rss_bytes: memory.weights_rss_bytes,
            weights_pss_bytes: memory.weights_pss_bytes,
        }
    }
}

pub(super) fn opened(number: usize, pid: u32, opened: &Opened) -> String {
    let (count, time) = (opened.tensor_count, millis(median(opened.open_micros.iter().copied())));
    format!("reader {number} (pid {pid}): {count} tensors mapped in {time}, all digests match")
}

pub(super) fn memory_table(readings: &[Reading]) -> String {
    let mut table =
        Table::new(&["", "RSS", "PSS", "WEIGHTS RSS", "WEIGHTS PSS", "PRIVATE"], &[1, 2, 3, 4, 5]);
    let row = |name: String, memory: &MemoryUse| {
        let MemoryUse { rss_bytes, pss_bytes, weights_rss_bytes, weights_pss_bytes, anonymous_bytes } =
            *memory;
        let figures = [rss_bytes, pss_bytes, weights_rss_bytes, weights_pss_bytes, anonymous_bytes];
        [name].into_iter().chain(figures.map(human_bytes))
    };
    for (index, reading) in readings.iter().enumerate() {
        table.row(row(format!("reader {}", index + 1), &reading.memory));
    }
    table.row(row("sum".to_owned(), &memory_of_all(readings)));
    table.render(usize::MAX)
}

pub(super) fn summary(findings: &Findings, elapsed: Duration) -> Vec<(&'static str, String)> {
    let Findings { pulled, disk, readings } = findings;
    let DiskUsage { logical_bytes, stored_bytes, saved_bytes, blob_count, model_count, .. } = disk;
    let [files, stored, saved] = human_difference(*logical_bytes, *stored_bytes);
    let memory = memory_of_all(readings);
    let [weights, copies] = [memory.weights_pss_bytes, memory.weights_rss_bytes].map(human_bytes);
    vec![
        ("pulled over HTTP", format!("{} in {}", human_bytes(pulled.bytes), seconds(pulled.time))),
        ("as files", format!("{files} in {model_count} models")),
        ("stored", format!("{stored} in {blob_count} blobs")),
        ("saved by sharing", format!("{saved} ({} %)", percent(*saved_bytes, *logical_bytes))),
        ("time to open", time_to_open(readings)),
        ("RSS of the readers", each(readings, |memory| memory.rss_bytes)),
        ("PSS of the readers", each(readings, |memory| memory.pss_bytes)),
        ("weights in memory", format!("{weights} for both; a copy each would take {copies}")),
        ("daemon killed", "maps unchanged; all models available after the restart".to_owned()),
        ("exported files", "same SHA-256 as the originals".to_owned()),
        ("total time", seconds(elapsed)),
    ]
}

fn time_to_open(readings: &[Reading]) -> String {
    let tensor_count = readings.first().map_or(0, |reading| reading.opened.tensor_count);
    let micros: Vec<u64> = readings.iter().flat_map(|reading| reading.opened.open_micros.clone()).collect();
    let try_count = micros.len();
    format!("{} for {tensor_count} tensors, median of {try_count}{BUILD}", millis(median(micros)))
}

/// `45.0 MiB + 45.0 MiB = 90.0 MiB`
fn each(readings: &[Reading], figure: impl Fn(&MemoryUse) -> u64) -> String {
    let figures: Vec<String> = readings.iter().map(|reading| human_bytes(figure(&reading.memory))).collect();
    format!("{} = {}", figures.join(" + "), human_bytes(figure(&memory_of_all(readings))))
}

pub(super) fn memory_of_all(readings: &[Reading]) -> MemoryUse {
    readings.iter().map(|reading| reading.memory).fold(MemoryUse::default(), |sum, one| MemoryUse {
        rss_bytes: sum.rss_bytes + one.rss_bytes,
        pss_bytes: sum.pss_bytes + one.pss_bytes,
        weights_rss_bytes: sum.weights_rss_bytes + one.weights_rss_bytes,
        weights_pss_bytes: sum.weights_pss_bytes + one.weights_pss_bytes,
        anonymous_bytes: sum.anonymous_bytes + one.anonymous_bytes,
    })
}

fn median(figures: impl IntoIterator<Item = u64>) -> u64 {
    let mut figures: Vec<u64> = figures.into_iter().collect();
    figures.sort_unstable();
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

fn percent(part: u64, whole: u64) -> u64 {
    part.saturating_mul(100).checked_div(whole).unwrap_or_default()
}

fn millis(micros: u64) -> String {
    format!("{}.{:02} ms", micros / 1000, micros % 1000 / 10)
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// Marks times that are not representative.
const BUILD: &str = if cfg!(debug_assertions) { " (unoptimised build)" } else { "" };

#[cfg(test)]
mod tests {
    use super::*;

    fn reading() -> Reading {
        let memory = MemoryUse {
            rss_bytes: 1000 << 20,
            pss_bytes: 512 << 20,
            weights_rss_bytes: 998 << 20,
            weights_pss_bytes: 997 << 20,
            anonymous_bytes: 100 << 20,
        };
        let opened =
            Opened { open_micros: vec![900, 1234, 100_000], tensor_count: 291, tensor_bytes: 998 << 20 };
        Reading { opened, memory }
    }

    fn findings() -> Findings {
        let disk = DiskUsage {
            logical_bytes: 200 << 20,
            physical_bytes: 100 << 20,
            stored_bytes: 100 << 20,
            saved_bytes: 100 << 20,
            blob_count: 1234,
            ..DiskUsage::default()
        };
        let pulled = Pulled { bytes: 1000 << 20, time: Duration::from_millis(12_345) };
        Findings { pulled, disk, readings: vec![reading(), reading()] }
    }

    #[test]
    fn lines_fit_a_terminal() {
        let summary = summary(&findings(), Duration::from_secs(12));
        assert!(
            summary.iter().all(|(name, fact)| 2 + 18 + 2 + fact.len() <= 80 && name.len() <= 18),
            "{summary:?}"
        );
        let table = memory_table(&findings().readings);
        assert!(table.lines().all(|line| line.len() <= 78), "{table}");
        let line = opened(2, 4_194_304, &reading().opened);
        assert!(line.len() <= 78, "{line}");
    }

    #[test]
    fn summary_contains_the_measured_figures() {
        let summary = summary(&findings(), Duration::from_secs(12));
        let fact = |name| summary.iter().find(|(known, _)| *known == name).unwrap().1.as_str();
        assert_eq!(fact("time to open"), format!("1.23 ms for 291 tensors, median of 6{BUILD}"));
        assert_eq!(fact("saved by sharing"), "100.0 MiB (50 %)");
        assert_eq!(fact("PSS of the readers"), "512 MiB + 512 MiB = 1.00 GiB");
    }

    #[test]
    fn median_ignores_outliers() {
        assert_eq!(median([]), 0);
        assert_eq!(median([5, 1_000_000, 3]), 5);
    }
}
