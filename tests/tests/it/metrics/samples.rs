//! Reads Prometheus's text format, as far as the tests need it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use blobd_tests::http;

/// Values by name with labels, such as `blobd_requests_total{result="ok",verb="ls"}`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Samples(BTreeMap<String, f64>);

impl Samples {
    pub(super) fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
            (name.to_owned(), value.parse().unwrap_or_else(|error| panic!("{line:?}: {error}")))
        };
        Self(lines.map(sample).collect())
    }

    pub(super) fn read(socket: &Path) -> Self {
        let answer = http::get(socket, "/v1/metrics");
        assert_eq!(answer.status, 200, "{answer:?}");
        Self::parse(&answer.body)
    }

    /// The value of one sample; 0 if it is absent, as for a counter whose event has not happened yet.
    pub(super) fn value(&self, sample: &str) -> f64 {
        self.0.get(sample).copied().unwrap_or_default()
    }

    /// Whether a sample is present, with any value.
    pub(super) fn has(&self, sample: &str) -> bool {
        self.0.contains_key(sample)
    }

    /// The sum of all samples of a metric.
    pub(super) fn sum(&self, metric: &str) -> f64 {
        self.0.iter().filter(|(sample, _)| family(sample) == metric).map(|(_, value)| value).sum()
    }

    /// The names of the metrics, without the suffixes of histograms.
    pub(super) fn families(&self) -> BTreeSet<String> {
        let names = self.0.keys().map(|sample| sample.split('{').next().unwrap());
        names.map(|name| family(name).to_owned()).collect()
    }
}

/// The metric that a sample belongs to.
pub(super) fn family(sample: &str) -> &str {
    let name = sample.split('{').next().unwrap();
    let suffixes = ["_bucket", "_count", "_sum"];
    let stripped = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
    stripped.filter(|name| name.ends_with("_seconds") || name.ends_with("_per_second")).unwrap_or(name)
}

/// The metrics of `docs/METRICS.md`, which a unit test of the daemon compares with its registry.
pub(super) fn documented() -> BTreeSet<String> {
    let document = include_str!("../../../../docs/METRICS.md");
    let rows = document.lines().filter_map(|line| line.strip_prefix("| `"));
    let names = rows.filter_map(|row| Some(row.split_once('`')?.0));
    names
        .filter(|name| name.starts_with("blobd_") || name.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}
