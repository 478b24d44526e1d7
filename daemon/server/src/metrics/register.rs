//! Makes metrics and registers them, each with its description.

use prometheus::core::{AtomicU64, Collector, GenericGauge, GenericGaugeVec};
use prometheus::proto::MetricFamily;
use prometheus::{
    Counter, Error, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry,
};

/// A gauge of whole numbers, such as bytes.
pub(super) type UintGauge = GenericGauge<AtomicU64>;
/// The same with labels.
pub(super) type UintGauges = GenericGaugeVec<AtomicU64>;

/// A gauge of a value that may be unknown. Then it is absent, so that no alert uses an old value.
#[derive(Debug)]
pub(super) struct OptionalGauge(UintGauges);

impl OptionalGauge {
    pub(super) fn set(&self, value: Option<u64>) {
        match value {
            Some(value) => self.0.with_label_values(&[] as &[&str]).set(value),
            None => self.0.reset(),
        }
    }
}

/// The metrics of one kind, and what they are.
#[derive(Default)]
pub(super) struct Register {
    registry: Registry,
    described: Vec<Described>,
}

/// What a metric is. `docs/METRICS.md` is compared with it.
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

    /// A counter of fractions.
    pub(super) fn seconds_counter(&mut self, named: Named) -> Result<Counter, Error> {
        self.add(named, "counter", &[], Counter::with_opts(opts(named))?)
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

    /// A gauge of fractions.
    pub(super) fn time_gauge(&mut self, named: Named) -> Result<Gauge, Error> {
        self.add(named, "gauge", &[], Gauge::with_opts(opts(named))?)
    }

    pub(super) fn gauges(
        &mut self,
        named: Named,
        labels: &'static [&'static str],
    ) -> Result<UintGauges, Error> {
        self.add(named, "gauge", labels, UintGauges::new(opts(named), labels)?)
    }

    /// A gauge that is absent until it is set.
    pub(super) fn optional_gauge(&mut self, named: Named) -> Result<OptionalGauge, Error> {
        self.gauges(named, &[]).map(OptionalGauge)
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
