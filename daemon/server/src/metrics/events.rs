//! Counters and histograms that are fed where events happen.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::error::ErrorCode;
use hyper::StatusCode;
use prometheus::{Error, Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::register::{Register, UintGauge, UintGauges, as_float};

/// Requests are served from memory, or read the whole store.
const REQUEST_SECONDS: [f64; 9] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0];
/// An open takes a millisecond or less, unless its client or the disk is slow.
const OPEN_SECONDS: [f64; 11] = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0];
/// From a slow connection to the fastest disk.
const BYTES_PER_SECOND: [f64; 9] = [1e5, 1e6, 5e6, 1e7, 5e7, 1e8, 5e8, 1e9, 5e9];

const RESULTS: [&str; 3] = ["ok", "failed", "cancelled"];
/// The classes of HTTP statuses, named by their first digit.
const STATUSES: [&str; 4] = ["2xx", "3xx", "4xx", "5xx"];

#[derive(Debug)]
pub(crate) struct Events {
    requests: IntCounterVec,
    request_errors: IntCounterVec,
    request_seconds: HistogramVec,
    open_seconds: Histogram,
    pub(crate) pulls_started: IntCounter,
    pulls_ended: IntCounterVec,
    pull_errors: IntCounterVec,
    pull_throughput: Histogram,
    import_throughput: Histogram,
    reused_bytes: IntCounterVec,
    imported_bytes: IntCounter,
    repaired_blobs: IntCounter,
    pub(crate) descriptors_sent: IntCounter,
    pub(crate) connections_refused: IntCounter,
    pub(crate) served: ServedEvents,
    configuration_seconds: UintGauges,
    is_configuration_current: UintGauge,
}

/// What other machines have got over the network.
#[derive(Debug)]
pub(crate) struct ServedEvents {
    requests: IntCounterVec,
    bytes: IntCounter,
}

impl ServedEvents {
    fn register(register: &mut Register) -> Result<Self, Error> {
        let requests = register.counters(
            (
                "blobd_served_requests_total",
                "Requests of other machines that were answered, by the status (2xx, 3xx, 4xx or 5xx).",
            ),
            &["status"],
        )?;
        STATUSES.iter().for_each(|status| drop(requests.with_label_values(&[status])));
        let bytes = register
            .counter(("blobd_served_bytes_total", "Bytes of models that were sent to other machines."))?;
        Ok(Self { requests, bytes })
    }

    pub(crate) fn answered(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).checked_sub(2).and_then(|class| STATUSES.get(class));
        if let Some(class) = class {
            self.requests.with_label_values(&[class]).inc();
        }
    }

    pub(crate) fn sent(&self, bytes: u64) {
        self.bytes.inc_by(bytes);
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestEnd {
    pub(crate) verb: &'static str,
    pub(crate) is_open: bool,
    /// `ok`, `cancelled`, or the error's code.
    pub(crate) result: &'static str,
    pub(crate) duration: Duration,
    pub(crate) bytes: u64,
    /// The bytes that it did not move because the store had them.
    pub(crate) reused_bytes: u64,
    pub(crate) repaired_blobs: u64,
}

impl Events {
    pub(super) fn new(
        register: &mut Register,
        verbs: impl IntoIterator<Item = &'static str>,
    ) -> Result<Self, Error> {
        let events = Self::register(register)?;
        verbs.into_iter().for_each(|verb| events.start_verb(verb));
        events.start_others();
        Ok(events)
    }

    /// The counters of a verb begin at 0 and not at the first event: `increase()` does not see how a counter appears.
    fn start_verb(&self, verb: &str) {
        let verb = &*label(verb);
        RESULTS.iter().for_each(|result| drop(self.requests.with_label_values(&[verb, result])));
    }

    /// Records that the configuration was read, at the start or later.
    pub(crate) fn configuration_read(&self, is_usable: bool) {
        self.is_configuration_current.set(is_usable.into());
        if is_usable {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.configuration_seconds.with_label_values(&[] as &[&str]).set(now.as_secs());
        }
    }

    fn start_others(&self) {
        for code in ErrorCode::ALL {
            drop(self.request_errors.with_label_values(&[code.name()]));
            drop(self.pull_errors.with_label_values(&[code.name()]));
        }
        RESULTS.iter().for_each(|result| drop(self.pulls_ended.with_label_values(&[result])));
        ["pull", "import"].iter().for_each(|verb| drop(self.reused_bytes.with_label_values(&[verb])));
    }

    fn register(register: &mut Register) -> Result<Self, Error> {
        Ok(Self {
            requests: register.counters(
                ("blobd_requests_total", "Requests that have ended, by verb and result (ok, failed or cancelled)."),
                &["verb", "result"],
            )?,
            request_errors: register.counters(
                ("blobd_request_errors_total", "Requests that were refused or have failed, by the error's code."),
                &["code"],
            )?,
            request_seconds: register.histograms(
                ("blobd_request_duration_seconds", "Time from a request to its result, by verb."),
                &["verb"],
                &REQUEST_SECONDS,
            )?,
            open_seconds: register.histogram(
                (
                    "blobd_open_duration_seconds",
                    "Time from a request to open a model until its client had all descriptors.",
                ),
                &OPEN_SECONDS,
            )?,
            pulls_started: register
                .counter(("blobd_pulls_started_total", "Pulls that were started."))?,
            pulls_ended: register.counters(
                ("blobd_pulls_ended_total", "Pulls that have ended, by result (ok, failed or cancelled)."),
                &["result"],
            )?,
            pull_errors: register.counters(
                ("blobd_pull_errors_total", "Pulls that were refused or have failed, by the error's code."),
                &["code"],
            )?,
            pull_throughput: register.histogram(
                ("blobd_pull_throughput_bytes_per_second", "Bytes downloaded per second of each pull that downloaded any."),
                &BYTES_PER_SECOND,
            )?,
            import_throughput: register.histogram(
                ("blobd_import_throughput_bytes_per_second", "Bytes read per second of each import."),
                &BYTES_PER_SECOND,
            )?,
            reused_bytes: register.counters(
                (
                    "blobd_reused_bytes_total",
                    "Bytes that were not downloaded or written because the store had them, by verb (pull or import).",
                ),
                &["verb"],
            )?,
            imported_bytes: register
                .counter(("blobd_imported_bytes_total", "Bytes that imports have written."))?,
            repaired_blobs: register
                .counter(("blobd_repaired_blobs_total", "Damaged blobs that verify --repair has replaced."))?,
            descriptors_sent: register
                .counter(("blobd_descriptors_sent_total", "Descriptors of blobs that were sent to clients."))?,
            connections_refused: register.counter((
                "blobd_connections_refused_total",
                "Connections that were refused because their user or all users had too many.",
            ))?,
            served: ServedEvents::register(register)?,
            configuration_seconds: register.gauges(
                (
                    "blobd_config_reload_success_timestamp_seconds",
                    "When the configuration was last read and used, at the start or since, since unix epoch in seconds.",
                ),
                &[],
            )?,
            is_configuration_current: register.gauge((
                "blobd_config_reload_successful",
                "1 if the configuration was used when it was last read, 0 if it has an error and the earlier one stays.",
            ))?,
        })
    }

    /// Holds no lock for long and does not block: it runs on the runtime's threads.
    pub(crate) fn request_ended(&self, end: &RequestEnd) {
        let RequestEnd { verb, result: code, duration, .. } = *end;
        let result = match code {
            "ok" | "cancelled" => code,
            code => {
                self.request_errors.with_label_values(&[code]).inc();
                "failed"
            }
        };
        let verb_label = &*label(verb);
        self.requests.with_label_values(&[verb_label, result]).inc();
        self.request_seconds.with_label_values(&[verb_label]).observe(duration.as_secs_f64());
        if end.is_open && result == "ok" {
            self.open_seconds.observe(duration.as_secs_f64());
        }
        match (verb, result) {
            ("pull", result) => self.pull_ended(result, end),
            ("import", "ok") => self.imported(end),
            ("verify", "ok") => self.repaired_blobs.inc_by(end.repaired_blobs),
            _ => {}
        }
    }

    fn pull_ended(&self, result: &str, end: &RequestEnd) {
        self.pulls_ended.with_label_values(&[result]).inc();
        if result == "failed" {
            self.pull_errors.with_label_values(&[end.result]).inc();
        }
        self.reused_bytes.with_label_values(&["pull"]).inc_by(end.reused_bytes);
        observe_rate(&self.pull_throughput, end.bytes, end.duration);
    }

    fn imported(&self, end: &RequestEnd) {
        self.imported_bytes.inc_by(end.bytes);
        self.reused_bytes.with_label_values(&["import"]).inc_by(end.reused_bytes);
        observe_rate(&self.import_throughput, end.bytes.saturating_add(end.reused_bytes), end.duration);
    }
}

/// A verb as the value of a label. Queries and alerts quote such values, so they have no spaces.
fn label(verb: &str) -> Cow<'_, str> {
    if verb.contains(' ') { Cow::Owned(verb.replace(' ', "_")) } else { Cow::Borrowed(verb) }
}

fn observe_rate(histogram: &Histogram, bytes: u64, duration: Duration) {
    let seconds = duration.as_secs_f64();
    if bytes > 0 && seconds > 0.0 {
        histogram.observe(as_float(bytes) / seconds);
    }
}
