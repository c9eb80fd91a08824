//! A part of a whole in percent: `50`, `12.5`, `80%`. Exact, no floating point.

use std::str::FromStr;

use tidekv_core::units::Bytes;

/// Digits after the point that count: a millionth of a percent of 1 TiB is 10 KiB.
const DECIMALS: usize = 6;

/// One percent in the unit that [`Percent`] counts.
const ONE: u64 = 10u64.pow(6);

/// Zero to a hundred percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent {
    millionths: u64,
}

/// Why a text is not a percentage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PercentError {
    /// Not a number.
    #[error("{text:?} is not a percentage: write a number from 0 to 100, such as 50 or 12.5%")]
    Malformed {
        /// What was written.
        text: String,
    },
    /// Below 0 or above 100.
    #[error("{text:?} is out of range: a percentage of a device is 0 to 100")]
    OutOfRange {
        /// What was written.
        text: String,
    },
}

impl FromStr for Percent {
    type Err = PercentError;

    fn from_str(text: &str) -> Result<Self, PercentError> {
        let malformed = || PercentError::Malformed { text: text.to_owned() };
        let out_of_range = || PercentError::OutOfRange { text: text.to_owned() };
        let number = text.trim().trim_end_matches('%').trim_end();
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if let Some(positive) = number.strip_prefix('-') {
            return Err(if positive.parse::<f64>().is_ok() { out_of_range() } else { malformed() });
        }
        if !digits(whole) || !digits(fraction) || (whole.is_empty() && fraction.is_empty()) {
            return Err(malformed());
        }
        let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| out_of_range())? };
        let fraction: String = fraction.chars().chain("000000".chars()).take(DECIMALS).collect();
        let fraction: u64 = fraction.parse().map_err(|_| malformed())?;
        let millionths = whole.checked_mul(ONE).and_then(|whole| whole.checked_add(fraction));
        match millionths {
            Some(millionths) if millionths <= 100 * ONE => Ok(Self { millionths }),
            _ => Err(out_of_range()),
        }
    }
}

impl Percent {
    /// This part of `whole`, rounded down.
    pub fn of(self, whole: Bytes) -> Bytes {
        let part = u128::from(whole.0) * u128::from(self.millionths) / u128::from(100 * ONE);
        Bytes(u64::try_from(part).expect("at most 100 % of a number that fits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_device() {
        let of = |text: &str| text.parse::<Percent>().unwrap().of(Bytes(1000)).0;
        assert_eq!(
            [of("50"), of("12.5%"), of("0"), of("100 %"), of(".1"), of("33.3333339")],
            [500, 125, 0, 1000, 1, 333]
        );
        assert_eq!("100".parse::<Percent>().unwrap().of(Bytes(u64::MAX)), Bytes(u64::MAX));
    }

    #[test]
    fn what_is_no_percentage_is_refused() {
        for text in ["", "%", "half", "1e2", "5.5.5", "-", "nan"] {
            assert!(matches!(text.parse::<Percent>(), Err(PercentError::Malformed { .. })), "{text}");
        }
        for text in ["-1", "100.000001", "101", "99999999999999999999999"] {
            assert!(matches!(text.parse::<Percent>(), Err(PercentError::OutOfRange { .. })), "{text}");
        }
    }
}
