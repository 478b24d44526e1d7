//! Durations of the calls of one verb.

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

/// The durations of the calls of one verb.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Timings {
    /// The duration of each call, failed ones included.
    pub(crate) milliseconds: Vec<f64>,
    /// The errors of the failed calls.
    pub(crate) errors: Vec<String>,
}

impl Timings {
    pub(crate) fn min(&self) -> f64 {
        self.quantile(0.0)
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn max(&self) -> f64 {
        self.quantile(1.0)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index below the length")]
    #[expect(clippy::cast_precision_loss, reason = "there are a few thousand values")]
    fn quantile(&self, fraction: f64) -> f64 {
        let mut values = self.milliseconds.clone();
        values.sort_by(f64::total_cmp);
        let index = (values.len() as f64 * fraction) as usize;
        values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    /// The summary for the JSON document.
    pub(crate) fn summary(&self) -> Json {
        json!({
            "calls": self.milliseconds.len(),
            "errors": self.errors.len(),
            "min_ms": self.min(),
            "median_ms": self.median(),
            "max_ms": self.max(),
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
pub(crate) fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_in_the_middle() {
        let timings = Timings { milliseconds: vec![3.0, 1.0, 2.0], errors: Vec::new() };
        assert!((timings.min(), timings.median(), timings.max()) == (1.0, 2.0, 3.0));
        assert!(Timings::default().median().is_nan());
    }
}
