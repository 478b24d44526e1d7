//! Makes metrics and registers them, each with its description.

use prometheus::core::{AtomicU64, Collector, GenericGauge, GenericGaugeVec};
use prometheus::proto::MetricFamily;
use prometheus::{
    CounterVec, Error, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts,
    Registry,
};

/// A gauge of whole numbers, such as bytes.
pub(super) type UintGauge = GenericGauge<AtomicU64>;
pub(super) type UintGauges = GenericGaugeVec<AtomicU64>;

/// Values, each with its label. What is not known is left out, so that no alert uses an old value.
type Values<R> = fn(&R) -> Vec<(&str, f64)>;

/// A metric whose values are read from an `R`.
pub(super) struct Row<R: 'static> {
    named: Named,
    is_counter: bool,
    /// None, or one.
    labels: &'static [&'static str],
    values: Values<R>,
}

pub(super) const fn gauge<R>(name: &'static str, help: &'static str, values: Values<R>) -> Row<R> {
    gauge_by(&[], name, help, values)
}

pub(super) const fn gauge_by<R>(
    labels: &'static [&'static str],
    name: &'static str,
    help: &'static str,
    values: Values<R>,
) -> Row<R> {
    Row { named: (name, help), is_counter: false, labels, values }
}

/// A total that a part of the daemon counts itself.
pub(super) const fn counter<R>(name: &'static str, help: &'static str, values: Values<R>) -> Row<R> {
    counter_by(&[], name, help, values)
}

pub(super) const fn counter_by<R>(
    labels: &'static [&'static str],
    name: &'static str,
    help: &'static str,
    values: Values<R>,
) -> Row<R> {
    Row { named: (name, help), is_counter: true, labels, values }
}

/// The value of a metric without labels, if it is known.
pub(super) fn known(value: impl Into<Option<u64>>) -> Vec<(&'static str, f64)> {
    value.into().map(|value| ("", as_float(value))).into_iter().collect()
}

/// Exact up to 8 PiB.
#[expect(clippy::cast_precision_loss, reason = "metrics are floating-point numbers")]
pub(super) const fn as_float(number: u64) -> f64 {
    number as f64
}

/// Metrics that are set together.
pub(super) struct Table<R: 'static>(Vec<(Metric, &'static Row<R>)>);

enum Metric {
    Gauge(GaugeVec),
    Counter(CounterVec),
}

impl<R> Table<R> {
    pub(super) fn new(register: &mut Register, rows: &'static [Row<R>]) -> Result<Self, Error> {
        let metric = |row: &'static Row<R>| {
            let (opts, labels) = (opts(row.named), row.labels);
            let metric = match row.is_counter {
                true => {
                    let counter = CounterVec::new(opts, labels)?;
                    Metric::Counter(register.add(row.named, "counter", labels, counter)?)
                }
                false => {
                    Metric::Gauge(register.add(row.named, "gauge", labels, GaugeVec::new(opts, labels)?)?)
                }
            };
            Ok((metric, row))
        };
        rows.iter().map(metric).collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn set(&self, reading: &R) {
        for (metric, row) in &self.0 {
            if let Metric::Gauge(gauges) = metric {
                gauges.reset();
            }
            for (label, value) in (row.values)(reading) {
                // A row has one label or none.
                let label = [label];
                let labels = label.get(..row.labels.len()).unwrap_or(&label);
                match metric {
                    Metric::Gauge(gauges) => gauges.with_label_values(labels).set(value),
                    Metric::Counter(counters) => {
                        let counter = counters.with_label_values(labels);
                        // A reading that was taken earlier may come later.
                        counter.inc_by((value - counter.get()).max(0.0));
                    }
                }
            }
        }
    }
}

/// The metrics of one kind, and what they are.
#[derive(Default)]
pub(super) struct Register {
    registry: Registry,
    described: Vec<Described>,
}

/// A row of the tables in `docs/METRICS.md`, which a test compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

/// A name and a description.
pub(super) type Named = (&'static str, &'static str);

impl Register {
    pub(super) fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    #[cfg(test)]
    pub(super) fn described(&self) -> &[Described] {
        &self.described
    }

    fn add<M: Collector + Clone + 'static>(
        &mut self,
        (name, help): Named,
        kind: &'static str,
        labels: &'static [&'static str],
        metric: M,
    ) -> Result<M, Error> {
        self.registry.register(Box::new(metric.clone()))?;
        self.described.push(Described { name, kind, labels, help });
        Ok(metric)
    }

    pub(super) fn counter(&mut self, named: Named) -> Result<IntCounter, Error> {
        self.add(named, "counter", &[], IntCounter::with_opts(opts(named))?)
    }

    pub(super) fn counters(
        &mut self,
        named: Named,
        labels: &'static [&'static str],
    ) -> Result<IntCounterVec, Error> {
        self.add(named, "counter", labels, IntCounterVec::new(opts(named), labels)?)
    }

    pub(super) fn gauge(&mut self, named: Named) -> Result<UintGauge, Error> {
        self.add(named, "gauge", &[], UintGauge::with_opts(opts(named))?)
    }

    pub(super) fn gauges(
        &mut self,
        named: Named,
        labels: &'static [&'static str],
    ) -> Result<UintGauges, Error> {
        self.add(named, "gauge", labels, UintGauges::new(opts(named), labels)?)
    }

    pub(super) fn histogram(&mut self, named: Named, buckets: &[f64]) -> Result<Histogram, Error> {
        self.add(named, "histogram", &[], Histogram::with_opts(histogram(named, buckets))?)
    }

    pub(super) fn histograms(
        &mut self,
        named: Named,
        labels: &'static [&'static str],
        buckets: &[f64],
    ) -> Result<HistogramVec, Error> {
        self.add(named, "histogram", labels, HistogramVec::new(histogram(named, buckets), labels)?)
    }
}

fn opts((name, help): Named) -> Opts {
    Opts::new(name, help)
}

fn histogram((name, help): Named, buckets: &[f64]) -> HistogramOpts {
    HistogramOpts::new(name, help).buckets(buckets.to_vec())
}
