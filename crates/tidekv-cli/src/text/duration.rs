//! Durations as people write them: `5s`, `200ms`, `1.5m`, `2h`; a bare number is seconds.

use std::time::Duration;

/// Units and their length in nanoseconds, the longest spelling first where one ends in another.
const UNITS: [(&str, u64); 6] = [
    ("ms", 1_000_000),
    ("us", 1_000),
    ("h", 3600 * 1_000_000_000),
    ("m", 60 * 1_000_000_000),
    ("s", 1_000_000_000),
    ("", 1_000_000_000),
];

/// Above this nobody waits, and clocks do not overflow below it.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Why a text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DurationError {
    /// Not a number and a unit.
    #[error("{text:?} is not a duration: write a number and us, ms, s, m or h, such as 5s or 200ms")]
    Malformed {
        /// What was written.
        text: String,
    },
    /// More than a year.
    #[error("{text:?} is too long: a duration is at most a year")]
    TooLong {
        /// What was written.
        text: String,
    },
}

/// Reads a duration. The arithmetic is exact; fractions of a nanosecond are dropped.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let malformed = || DurationError::Malformed { text: text.to_owned() };
    let too_long = || DurationError::TooLong { text: text.to_owned() };
    let trimmed = text.trim();
    let number_end = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(number_end);
    let unit = unit.trim();
    let (_, nanos) = UNITS.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name)).ok_or_else(malformed)?;

    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let no_digits = whole.is_empty() && fraction.is_empty();
    if no_digits || fraction.contains('.') {
        return Err(malformed());
    }
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_long())? };
    // Hours have less than 10^13 nanoseconds, so digits after the 18th cannot make one more.
    let fraction = &fraction[..fraction.len().min(18)];
    let numerator: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| malformed())? };
    let denominator = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| malformed())?);
    let nanos = u128::from(*nanos);
    let total = whole.checked_mul(nanos).ok_or_else(too_long)? + numerator * nanos / denominator;
    let total = Duration::from_nanos(u64::try_from(total).map_err(|_| too_long())?);
    if total > LONGEST { Err(too_long()) } else { Ok(total) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_spelling_people_use() {
        for (text, millis) in [
            ("5s", 5000),
            ("200ms", 200),
            ("200 MS", 200),
            ("5", 5000),
            ("0", 0),
            ("1.5m", 90_000),
            (".25s", 250),
            ("2h", 7_200_000),
            ("1000us", 1),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in ["", "s", "-5s", "5x", "1.2.3s", "five", "5s5", "."] {
            assert!(matches!(parse_duration(text), Err(DurationError::Malformed { .. })), "{text}");
        }
        for text in ["9000h", "99999999999999999999999999999999999999999s"] {
            assert!(matches!(parse_duration(text), Err(DurationError::TooLong { .. })), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = parse_duration(&text);
        }

        #[test]
        fn milliseconds_read_back(millis in 0..1_000_000u64) {
            prop_assert_eq!(parse_duration(&format!("{millis}ms")), Ok(Duration::from_millis(millis)));
        }
    }
}
