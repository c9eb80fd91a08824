//! The lines that tools of other people look for. Their form is fixed.
//!
//! ```text
//!   Total (all 3 syscalls).*?mean=([\d.]+) ns            Linear Scan.*?Avg time per lookup: ([\d.]+) ns
//!   Throughput: ([\d.]+) allocations/sec                 Arithmetic Translation.*?Avg time per lookup: ([\d.]+) ns
//!   1 MB\s+([\d.]+)\s+([\d.]+)
//! ```
//!
//! The last is searched for in the whole text, so no other table of ours has a row that begins with `1 MB`: they say
//! `1 MiB`.

use crate::stats::{Samples, to_f64};

/// `                    shm_open(): mean=2031.20 ns, min=1802.00 ns, max=9120.00 ns, total=2.03 ms`
pub(super) fn stat_line(label: &str, times: &Samples) -> String {
    let Some(p) = times.percentiles() else { return String::new() };
    let total_ms = p.avg * to_f64(p.count as u64) / 1e6;
    let (mean, min, max) = (p.avg, to_f64(p.min), to_f64(p.max));
    format!("{label:>30}: mean={mean:.2} ns, min={min:.2} ns, max={max:.2} ns, total={total_ms:.2} ms\n")
}

/// A row of right-aligned columns.
pub(super) fn row(width: usize, cells: &[&str]) -> String {
    cells.iter().map(|cell| format!("{cell:>width$}")).collect::<String>() + "\n"
}

/// The line under a header.
pub(super) fn rule(width: usize, columns: usize) -> String {
    "-".repeat(width * columns) + "\n"
}

/// `4 KB`, `1 MB`: as the rows of the transfer table are called.
pub(super) fn seed_size(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{} KB", bytes >> 10) } else { format!("{} MB", bytes >> 20) }
}

/// `4 KiB`, `1 MiB`: as rows of our own tables are called.
pub(super) fn our_size(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_what_it_always_was() {
        let times: Samples = [1000, 3000].into_iter().collect();
        assert_eq!(
            stat_line("mmap()", &times),
            "                        mmap(): mean=2000.00 ns, min=1000.00 ns, max=3000.00 ns, total=0.00 ms\n"
        );
        assert_eq!(stat_line("mmap()", &Samples::new()), "");
    }

    #[test]
    fn sizes_and_rows() {
        assert_eq!([seed_size(1024), seed_size(1 << 20), our_size(1 << 20)], ["1 KB", "1 MB", "1 MiB"]);
        assert_eq!(row(5, &["a", "bb"]), "    a   bb\n");
        assert_eq!(rule(2, 3), "------\n");
    }
}
