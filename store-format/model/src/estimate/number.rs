//! The arithmetic of the formulas: numbers that record an overflow.

use std::ops::{Add, Div, Mul};

use super::EstimateError;

/// A number of 128 bits, or a mark that a calculation overflowed. Files and command lines can contain any 64-bit
/// number, and the formulas multiply up to four of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number(Option<u128>);

impl Number {
    pub(super) fn max(self, other: Self) -> Self {
        self.both(other, |a, b| Some(a.max(b)))
    }

    pub(super) fn min(self, other: Self) -> Self {
        self.both(other, |a, b| Some(a.min(b)))
    }

    pub(super) fn next_multiple_of(self, unit: u128) -> Self {
        Self(self.0.and_then(|number| number.checked_next_multiple_of(unit)))
    }

    /// The number as bytes.
    pub(super) fn bytes(self, what: &'static str) -> Result<u64, EstimateError> {
        self.0.and_then(|number| u64::try_from(number).ok()).ok_or(EstimateError::Overflow { what })
    }

    /// Converts a saturated number: the largest value means overflow.
    pub(super) fn from_saturated(number: u128) -> Self {
        Self((number < u128::MAX).then_some(number))
    }

    /// The number, or the largest one after an overflow.
    pub(super) fn saturated(self) -> u128 {
        self.0.unwrap_or(u128::MAX)
    }

    fn both(self, other: Self, calculate: impl FnOnce(u128, u128) -> Option<u128>) -> Self {
        Self(self.0.zip(other.0).and_then(|(a, b)| calculate(a, b)))
    }
}

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Self(Some(number.into()))
    }
}

impl std::iter::Sum for Number {
    fn sum<I: Iterator<Item = Self>>(numbers: I) -> Self {
        numbers.fold(Self::from(0), Self::add)
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident $checked:ident;)*) => {$(
        impl $operator for Number {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                self.both(other, u128::$checked)
            }
        }

        impl $operator<u64> for Number {
            type Output = Self;

            fn $method(self, other: u64) -> Self {
                self.$method(Self::from(other))
            }
        }

        impl $operator<Number> for u64 {
            type Output = Number;

            fn $method(self, other: Number) -> Number {
                Number::from(self).$method(other)
            }
        }
    )*};
}

operators! {
    Add add checked_add;
    Mul mul checked_mul;
    Div div checked_div;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(number: Number) -> Option<u64> {
        number.bytes("test").ok()
    }

    #[test]
    fn calculates_with_numbers_and_literals() {
        let (a, b) = (Number::from(7), Number::from(2));
        assert_eq!(bytes(4 * a * (1 + 3 * b) / b), Some(98));
        assert_eq!(bytes(a / 2 + b), Some(5));
        assert_eq!((bytes(a.max(b)), bytes(a.min(b))), (Some(7), Some(2)));
        assert_eq!(bytes(a.next_multiple_of(256)), Some(256));
        assert_eq!(bytes([a, b, b].into_iter().sum()), Some(11));
    }

    #[test]
    fn overflow_and_division_by_zero_are_propagated() {
        let large = Number::from(u64::MAX);
        assert_eq!(bytes(large), Some(u64::MAX));
        assert_eq!(bytes(large + 1), None);
        assert_eq!(bytes((large + 1) / 2), Some(1 << 63));
        let lost = large * large * large;
        for number in [lost, lost / large, lost.min(1.into()), lost.max(1.into()), 1 / Number::from(0)] {
            assert_eq!(number.bytes("graph"), Err(EstimateError::Overflow { what: "graph" }));
        }
    }
}
