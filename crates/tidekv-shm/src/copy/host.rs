//! What a profile depends on: the processor, and how much of it is ours.

use std::num::NonZero;

use super::profile::MachineKey;

pub(super) fn key() -> MachineKey {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    MachineKey { processor: processor(&cpuinfo), cpus: allowed_cpus().get() }
}

/// Processors that this process may run on (`taskset` counts).
pub fn allowed_cpus() -> NonZero<usize> {
    let counted = rustix::thread::sched_getaffinity(None).ok().map(|set| set.count() as usize);
    counted.and_then(NonZero::new).unwrap_or(NonZero::<usize>::MIN)
}

/// The model name. Kernels on Arm give the numbers of the part instead; the architecture is better than nothing.
fn processor(cpuinfo: &str) -> String {
    let value = |key: &str| {
        let mut pairs = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(found, value)| found.trim() == key && !value.trim().is_empty()).map(|(_, value)| value.trim())
    };
    // A virtual machine may hide the model's number in its name; family, model and stepping tell them apart.
    let parts = ["model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part"];
    let words: Vec<&str> = parts.iter().filter_map(|part| value(part)).flat_map(str::split_whitespace).collect();
    if words.is_empty() { std::env::consts::ARCH.to_owned() } else { words.join(" ") }
}

/// Bytes of the largest cache of the first processor, if the kernel tells.
pub(super) fn last_cache_bytes() -> Option<usize> {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(entry.ok()?.path().join("size")).ok().as_deref().and_then(cache_size)
    };
    caches.filter_map(size).max()
}

/// `32768K` or `32M`.
fn cache_size(text: &str) -> Option<usize> {
    let text = text.trim();
    let (digits, shift) = match text.strip_suffix('K') {
        Some(digits) => (digits, 10),
        None => (text.strip_suffix('M')?, 20),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_as_kernels_name_them() {
        let x86 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD  EPYC\nstepping\t: 1\n";
        assert_eq!(processor(x86), "AMD EPYC 25 17 1");
        assert_eq!(processor("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n"), "0x41 0xd40");
        assert_eq!(processor(""), std::env::consts::ARCH);
        assert!(allowed_cpus().get() >= 1);
    }

    #[test]
    fn cache_sizes_have_a_unit() {
        assert_eq!(cache_size("32768K\n"), Some(32 << 20));
        assert_eq!(cache_size("32M"), Some(32 << 20));
        assert_eq!(cache_size("32"), None);
        assert_eq!(cache_size("99999999999999999999K"), None);
    }
}
