//! A sum of many numbers.

/// A compensated sum: its error does not grow with the number of terms. Source: A. Neumaier, 1974.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    sum: f64,
    lost: f64,
}

impl Sum {
    /// How many numbers are added without compensation before their sum is added with it. Few enough for an error of
    /// about 1e-14, and enough for speed.
    pub(super) const BLOCK: usize = 128;

    pub(super) fn add(&mut self, term: f64) {
        let sum = self.sum + term;
        self.lost += match self.sum.abs() >= term.abs() {
            true => (self.sum - sum) + term,
            false => (term - sum) + self.sum,
        };
        self.sum = sum;
    }

    pub(super) fn value(&self) -> f64 {
        // After an overflow the compensation is NaN.
        if self.sum.is_finite() { self.sum + self.lost } else { self.sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(terms: &[f64]) -> f64 {
        let mut sum = Sum::default();
        terms.iter().for_each(|term| sum.add(*term));
        sum.value()
    }

    #[test]
    fn small_terms_are_not_lost() {
        assert_eq!(sum(&[1.0, 1e100, 1.0, -1e100]), 2.0);
        assert_eq!(sum(&[0.1; 10]), 1.0);
    }

    #[test]
    fn overflow_is_infinite() {
        assert_eq!(sum(&[f64::MAX, f64::MAX]), f64::INFINITY);
        assert!(sum(&[1.0, f64::NAN]).is_nan());
    }
}
