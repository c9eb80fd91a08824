//! Who this process is, in words that survive the reuse of its number.

/// When this process started, in clock ticks since the machine did; 0 where the system does not say. Together with the
/// process number it names a process for good, as far as people who look at a ledger are concerned; whether an owner
/// lives is decided by its lock alone.
pub(crate) fn started() -> u64 {
    std::fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(parse_start).unwrap_or(0)
}

/// Field 22 of `/proc/<pid>/stat`. The second field is the program's name in parentheses and may contain anything.
fn parse_start(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_field_22_whatever_the_program_is_called() {
        let stat = "4711 (a) b (c 1 2) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654 20 21\n";
        assert_eq!(parse_start(stat), Some(987_654));
        assert_eq!(parse_start("4711 (short) S 1"), None);
        assert_eq!(parse_start(""), None);
        assert!(started() > 0);
    }
}
