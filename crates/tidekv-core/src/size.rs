//! Sizes as people write them: `2M`, `1.5GiB`, `45,312 MiB`, `512`.
//!
//! Units are 1024-based whether written `M`, `MB` or `MiB`, in any case; `,` and `_` may group digits.
//! The arithmetic is exact (no floating point), so `0.1G` is the floor of the true value on every machine.

use std::str::FromStr;

use crate::units::Bytes;

const UNITS: [(&str, u32); 6] = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("PiB", 50)];

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// There is no number in it.
    #[error("{text:?} has no number: write a size such as 512, 20M or 1.5GiB")]
    NoNumber {
        /// What was written.
        text: String,
    },
    /// The part after the number is not a unit.
    #[error("{unit:?} is not a unit of size: use B, K, M, G, T or P (KB and KiB both mean 1024 bytes)")]
    UnknownUnit {
        /// The unit as written.
        unit: String,
    },
    /// A size cannot be below zero.
    #[error("{text:?} is negative: a size is zero or more")]
    Negative {
        /// What was written.
        text: String,
    },
    /// More than 64 bits of bytes.
    #[error("{text:?} is too large: a size is below 16 EiB")]
    TooLarge {
        /// What was written.
        text: String,
    },
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        parse(text)
    }
}

fn parse(text: &str) -> Result<Bytes, SizeError> {
    let own = || text.to_owned();
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(SizeError::Negative { text: own() });
    }
    let number_end =
        trimmed.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | ',' | '_'))).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(number_end);

    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |part: &str| part.chars().filter(char::is_ascii_digit).collect::<String>();
    let (whole, fraction) = (digits(whole), digits(fraction));
    if (whole.is_empty() && fraction.is_empty()) || number.matches('.').count() > 1 {
        return Err(SizeError::NoNumber { text: own() });
    }
    let shift = unit_shift(unit.trim())?;
    let too_large = || SizeError::TooLarge { text: own() };
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large())? };
    // 18 decimal places separate any two byte counts below 16 EiB; the rest cannot change the floor.
    let fraction = &fraction[..fraction.len().min(18)];
    let numerator: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| too_large())? };
    let denominator = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| too_large())?);

    let bytes = (u128::from(whole) << shift) + (numerator << shift) / denominator;
    u64::try_from(bytes).map(Bytes).map_err(|_| too_large())
}

fn unit_shift(unit: &str) -> Result<u32, SizeError> {
    UNITS
        .iter()
        .find(|(name, shift)| {
            let letter = &name[..1];
            let written = |spelling: &str| unit.eq_ignore_ascii_case(spelling);
            written(name)
                || written(letter)
                || (*shift > 0 && written(&format!("{letter}B")))
                || (*shift == 0 && unit.is_empty())
        })
        .map(|&(_, shift)| shift)
        .ok_or_else(|| SizeError::UnknownUnit { unit: unit.to_owned() })
}

/// The shortest exact form where there is one (`2 MiB`), else two decimals (`1.41 GiB`).
pub fn format(bytes: Bytes) -> String {
    let (name, shift) = UNITS.iter().rev().find(|&&(_, shift)| bytes.0 >> shift != 0).copied().unwrap_or(UNITS[0]);
    let whole = bytes.0 >> shift;
    let rest = bytes.0 - (whole << shift);
    if rest == 0 {
        return format!("{whole} {name}");
    }
    // Rounded down, so that a size just below a limit never reads as the limit.
    let hundredths = (u128::from(rest) * 100) >> shift;
    format!("{whole}.{hundredths:02} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_spelling_people_use() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("2k", 2048),
            ("2kb", 2048),
            ("2KiB", 2048),
            ("2M", 2 << 20),
            ("1.5GiB", 3 << 29),
            ("1.5 gb", 3 << 29),
            ("45,312 MiB", 45_312 << 20),
            ("1_000", 1000),
            (".5k", 512),
            ("1T", 1 << 40),
            ("0.1G", 107_374_182),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        assert!(matches!("G".parse::<Bytes>(), Err(SizeError::NoNumber { .. })));
        assert!(matches!("".parse::<Bytes>(), Err(SizeError::NoNumber { .. })));
        assert!(matches!("x".parse::<Bytes>(), Err(SizeError::NoNumber { .. })));
        assert!(matches!("1.2.3M".parse::<Bytes>(), Err(SizeError::NoNumber { .. })));
        assert!(matches!("-1G".parse::<Bytes>(), Err(SizeError::Negative { .. })));
        assert!(matches!("1X".parse::<Bytes>(), Err(SizeError::UnknownUnit { .. })));
        assert!(matches!("16384P".parse::<Bytes>(), Err(SizeError::TooLarge { .. })));
        assert!(matches!("99999999999999999999".parse::<Bytes>(), Err(SizeError::TooLarge { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 10 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn plain_byte_counts_round_trip(n: u64) {
            prop_assert_eq!(n.to_string().parse(), Ok(Bytes(n)));
        }

        #[test]
        fn what_we_print_reads_back_within_its_precision(n in 0..1u64 << 60) {
            let printed = format(Bytes(n));
            let back: Bytes = printed.parse().unwrap();
            prop_assert!(back.0 <= n && n - back.0 <= n / 100 + 1, "{} -> {} -> {}", n, printed, back.0);
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = text.parse::<Bytes>();
        }
    }
}
