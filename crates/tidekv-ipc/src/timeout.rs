//! How long a scheduler waits for its workers: `KVCACHED_IPC_TIMEOUT`, as kvcached reads it.

use std::time::Duration;

const VARIABLE: &str = "KVCACHED_IPC_TIMEOUT";
const DEFAULT: Duration = Duration::from_secs(60);
/// More than this is the same as no bound, and cannot overflow any clock.
const LONGEST_SECONDS: f64 = 1e9;

/// `KVCACHED_IPC_TIMEOUT` in seconds: 60 where it is unset, no bound (`None`) at 0 or less. What is not a number is
/// warned about and counts as unset.
pub fn ipc_timeout_from_env() -> Option<Duration> {
    match std::env::var(VARIABLE) {
        Ok(text) => parse(&text),
        Err(_) => Some(DEFAULT),
    }
}

fn parse(text: &str) -> Option<Duration> {
    match text.trim().parse::<f64>() {
        Ok(seconds) if seconds <= 0.0 => None,
        Ok(seconds) if seconds < LONGEST_SECONDS => Some(Duration::from_secs_f64(seconds)),
        Ok(seconds) if seconds >= LONGEST_SECONDS => None,
        _ => {
            tracing::warn!("{VARIABLE} is '{text}', not a number of seconds: {} are used", DEFAULT.as_secs());
            Some(DEFAULT)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_as_kvcached_reads_them() {
        let secs = |seconds| Some(Duration::from_secs_f64(seconds));
        assert_eq!(parse("2"), secs(2.0));
        assert_eq!(parse(" 0.25 "), secs(0.25));
        assert_eq!(parse("0"), None);
        assert_eq!(parse("-1"), None);
        assert_eq!(parse("inf"), None);
        assert_eq!(parse("1e300"), None);
        for malformed in ["", "soon", "NaN", "60s"] {
            assert_eq!(parse(malformed), Some(DEFAULT), "{malformed:?}");
        }
    }
}
