//! Sizes and percentages as kvcached's tools print them, for the lines that scripts read: `1.00 GB`, `12.5`.
//!
//! Units are 1024-based although they are called KB, MB, GB. Everything else of ours prints `GiB`.

const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];

/// A number of bytes with two decimals. Segments hold signed words, so it may be negative.
pub fn kvcached_size(bytes: i64) -> String {
    let magnitude = u128::from(bytes.unsigned_abs());
    // The largest unit of which there is a whole one. Negative numbers stay bytes, as kvcached has it.
    let unit = (1..UNITS.len()).rev().find(|&unit| bytes > 0 && magnitude >> (10 * unit) != 0).unwrap_or(0);
    let shift = 10 * unit;
    // To the nearest hundredth, of two equally near ones to the even one.
    let hundredths = round_half_even(magnitude * 100, 1 << shift);
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}.{:02} {}", hundredths / 100, hundredths % 100, UNITS[unit])
}

/// `used` of `limit` in percent, with one decimal; 0 where there is no limit.
pub fn kvcached_percent(used: i64, limit: i64) -> String {
    let tenths = percent_tenths(used, limit);
    let sign = if tenths < 0 { "-" } else { "" };
    format!("{sign}{}.{}", tenths.unsigned_abs() / 10, tenths.unsigned_abs() % 10)
}

/// A number of bytes in at most six columns, for screens: `0B`, `999K`, `1.5G`, `20.1G`, `140G`.
pub fn compact_size(bytes: u64) -> String {
    const LETTERS: [&str; 7] = ["B", "K", "M", "G", "T", "P", "E"];
    let unit = (1..LETTERS.len()).rev().find(|&unit| bytes >> (10 * unit) != 0).unwrap_or(0);
    let tenths = round_half_even(u128::from(bytes) * 10, 1 << (10 * unit));
    // Below a hundred the first decimal still tells something.
    if unit > 0 && tenths < 1000 {
        format!("{}.{}{}", tenths / 10, tenths % 10, LETTERS[unit])
    } else {
        format!("{}{}", round_half_even(u128::from(bytes), 1 << (10 * unit)), LETTERS[unit])
    }
}

/// `used` of `limit` in tenths of a percent; 0 where there is no limit.
pub fn percent_tenths(used: i64, limit: i64) -> i128 {
    if limit == 0 {
        return 0;
    }
    let magnitude = round_half_even(u128::from(used.unsigned_abs()) * 1000, u128::from(limit.unsigned_abs()));
    let magnitude = i128::try_from(magnitude).unwrap_or(i128::MAX);
    if (used < 0) == (limit < 0) { magnitude } else { -magnitude }
}

fn round_half_even(numerator: u128, denominator: u128) -> u128 {
    let (floor, rest) = (numerator / denominator, numerator % denominator);
    let up = rest * 2 > denominator || (rest * 2 == denominator && floor % 2 == 1);
    floor + u128::from(up)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_kvcached_prints_them() {
        for (bytes, text) in [
            (0, "0.00 B"),
            (1023, "1023.00 B"),
            (1024, "1.00 KB"),
            (1 << 30, "1.00 GB"),
            (536_870_912, "512.00 MB"),
            ((1 << 30) - 1, "1024.00 MB"),
            (3 << 29, "1.50 GB"),
            (5 << 50, "5120.00 TB"),
            (-1, "-1.00 B"),
            (-(1 << 30), "-1073741824.00 B"),
        ] {
            assert_eq!(kvcached_size(bytes), text);
        }
        assert!(kvcached_size(i64::MIN).starts_with('-'));
    }

    #[test]
    fn sizes_for_screens_are_short() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1.0K"),
            (3 << 29, "1.5G"),
            (20 << 30, "20.0G"),
            (140 << 30, "140G"),
            ((1 << 30) - 1, "1024M"),
            (u64::MAX, "16.0E"),
        ] {
            assert_eq!(compact_size(bytes), text);
            assert!(text.len() <= 6);
        }
    }

    #[test]
    fn percentages_as_kvcached_prints_them() {
        for (used, limit, text) in
            [(0, 100, "0.0"), (1, 8, "12.5"), (2, 3, "66.7"), (3, 2, "150.0"), (5, 0, "0.0"), (-1, 4, "-25.0")]
        {
            assert_eq!(kvcached_percent(used, limit), text);
        }
    }
}
