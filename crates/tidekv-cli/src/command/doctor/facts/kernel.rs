//! What the kernel says of memory, processors and limits, in files under `/proc` and `/sys`.
//!
//! Each fact stands for itself: a file that is missing (another kernel, a container) costs that fact alone.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tidekv_core::units::Bytes;

use super::{ControlGroup, Probe};

/// Facts about the machine and this process's place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Kernel {
    pub(in super::super) memory: Probe<HostMemory>,
    /// When memory files get huge pages: `never`, `advise`, `within_size`, `always`, `deny` or `force`.
    pub(in super::super) shmem_huge_pages: Probe<String>,
    pub(in super::super) memlock: Probe<Limit>,
    pub(in super::super) address_space: Probe<Limit>,
    /// Network cards that reach memory directly.
    pub(in super::super) rdma_devices: Vec<String>,
    pub(in super::super) max_map_count: Probe<u64>,
    /// 0 by rule of thumb, 1 always, 2 never beyond the commit limit.
    pub(in super::super) overcommit: Probe<u64>,
    pub(in super::super) governors: Probe<Vec<Governor>>,
    pub(in super::super) cpus: Probe<CpuCounts>,
    pub(in super::super) control_group: Probe<ControlGroup>,
}

/// `/proc/meminfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct HostMemory {
    pub(in super::super) total: Bytes,
    pub(in super::super) available: Bytes,
    pub(in super::super) commit_limit: Bytes,
    /// Set aside as huge pages, and what of it nobody uses.
    pub(in super::super) huge: Bytes,
    pub(in super::super) huge_free: Bytes,
}

/// A limit of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Limit {
    Unlimited,
    Bytes(Bytes),
}

/// How the clock of some processors is governed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Governor {
    pub(in super::super) name: String,
    /// What processors that govern themselves are told to prefer.
    pub(in super::super) preference: Option<String>,
    pub(in super::super) cpus: u32,
}

/// Processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct CpuCounts {
    pub(in super::super) online: u32,
    /// Those that this process may run on.
    pub(in super::super) allowed: u32,
}

impl HostMemory {
    pub(in super::super) fn read(root: &Path) -> Probe<Self> {
        let text = text(root, "proc/meminfo")?;
        parse_memory(&text).ok_or_else(|| "/proc/meminfo lacks figures".to_owned())
    }
}

impl Kernel {
    /// Reads the files under this root.
    pub(in super::super) fn read(root: &Path) -> Self {
        let limits = text(root, "proc/self/limits");
        let limit = |name: &'static str| {
            let text = limits.as_ref().map_err(Clone::clone)?;
            parse_limit(text, name).ok_or_else(|| format!("/proc/self/limits has no \"{name}\""))
        };
        Self {
            memory: HostMemory::read(root),
            shmem_huge_pages: text(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled")
                .and_then(|text| chosen_word(&text).ok_or_else(|| "no word is chosen in shmem_enabled".to_owned())),
            memlock: limit("Max locked memory"),
            address_space: limit("Max address space"),
            rdma_devices: names(&root.join("sys/class/infiniband")),
            max_map_count: number(root, "proc/sys/vm/max_map_count"),
            overcommit: number(root, "proc/sys/vm/overcommit_memory"),
            governors: governors(&root.join("sys/devices/system/cpu")),
            cpus: cpus(root),
            control_group: ControlGroup::read(root),
        }
    }

    /// A kernel of which nothing is known.
    pub(in super::super) fn unknown(why: &str) -> Self {
        let why = why.to_owned();
        Self {
            memory: Err(why.clone()),
            shmem_huge_pages: Err(why.clone()),
            memlock: Err(why.clone()),
            address_space: Err(why.clone()),
            rdma_devices: Vec::new(),
            max_map_count: Err(why.clone()),
            overcommit: Err(why.clone()),
            governors: Err(why.clone()),
            cpus: Err(why.clone()),
            control_group: Err(why),
        }
    }
}

/// A file's text.
pub(super) fn text(root: &Path, path: &str) -> Probe<String> {
    fs::read_to_string(root.join(path)).map_err(|error| format!("cannot read /{path}: {error}"))
}

fn number(root: &Path, path: &str) -> Probe<u64> {
    text(root, path)?.trim().parse().map_err(|_| format!("/{path} is not a number"))
}

/// Names in a folder, sorted; none where there is no folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn parse_memory(text: &str) -> Option<HostMemory> {
    let field = |name: &str| {
        let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    };
    let kib = |name: &str| Some(Bytes(field(name)?.checked_mul(1024)?));
    let page = kib("Hugepagesize").unwrap_or(Bytes::ZERO);
    let huge = |name: &str| Bytes(field(name).unwrap_or(0).saturating_mul(page.0));
    let total = kib("MemTotal")?;
    Some(HostMemory {
        total,
        available: kib("MemAvailable")?.min(total),
        commit_limit: kib("CommitLimit").unwrap_or(total),
        huge: huge("HugePages_Total"),
        huge_free: huge("HugePages_Free"),
    })
}

/// `always [advise] never` says `advise`.
fn chosen_word(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// The soft limit of this name, in bytes.
fn parse_limit(text: &str, name: &str) -> Option<Limit> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(Limit::Unlimited),
        soft => soft.parse().ok().map(|bytes| Limit::Bytes(Bytes(bytes))),
    }
}

fn governors(folder: &Path) -> Probe<Vec<Governor>> {
    let mut seen: BTreeMap<(String, Option<String>), u32> = BTreeMap::new();
    let is_cpu = |name: &str| name.strip_prefix("cpu").is_some_and(|number| number.parse::<u32>().is_ok());
    for name in names(folder).iter().filter(|name| is_cpu(name)) {
        let file = |file: &str| fs::read_to_string(folder.join(name).join("cpufreq").join(file)).ok();
        let word = |text: String| text.trim().to_owned();
        if let Some(governor) = file("scaling_governor").map(word) {
            *seen.entry((governor, file("energy_performance_preference").map(word))).or_default() += 1;
        }
    }
    if seen.is_empty() {
        return Err("the kernel does not govern the clock here (a virtual machine, most likely)".to_owned());
    }
    Ok(seen.into_iter().map(|((name, preference), cpus)| Governor { name, preference, cpus }).collect())
}

fn cpus(root: &Path) -> Probe<CpuCounts> {
    let online = text(root, "sys/devices/system/cpu/online")?;
    let status = text(root, "proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let counts = count_list(&online).zip(allowed.and_then(count_list));
    let (online, allowed) = counts.ok_or_else(|| "the kernel's lists of processors make no sense".to_owned())?;
    Ok(CpuCounts { online, allowed })
}

/// How many numbers `0-3,8,10-11` names.
fn count_list(text: &str) -> Option<u32> {
    let mut count = 0u32;
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_file_is_understood() {
        let text =
            "MemTotal: 1000 kB\nMemAvailable: 400 kB\nHugePages_Total: 3\nHugePages_Free: 1\nHugepagesize: 2048 kB\n";
        let memory = parse_memory(text).unwrap();
        assert_eq!((memory.total, memory.available), (Bytes::kib(1000), Bytes::kib(400)));
        assert_eq!((memory.huge, memory.huge_free), (Bytes::mib(6), Bytes::mib(2)));
        assert_eq!(parse_memory("MemTotal: 1000 kB\n"), None);

        let limits = "Limit  Soft  Hard  Units\nMax locked memory  8388608  unlimited  bytes\n\
                      Max address space  unlimited  unlimited  bytes\n";
        assert_eq!(parse_limit(limits, "Max locked memory"), Some(Limit::Bytes(Bytes::mib(8))));
        assert_eq!(parse_limit(limits, "Max address space"), Some(Limit::Unlimited));
        assert_eq!(parse_limit(limits, "Max pending signals"), None);

        assert_eq!(chosen_word("always within_size [advise] never").as_deref(), Some("advise"));
        assert_eq!(chosen_word("never"), None);

        assert_eq!(["0-3", "0-3,8,10-11\n", "5"].map(count_list), [Some(4), Some(7), Some(1)]);
        assert_eq!(["", "3-1", "a", "0-4294967295"].map(count_list), [None; 4]);
    }

    /// Whatever is missing is missing alone, and names the file.
    #[test]
    fn an_empty_root_gives_reasons() {
        let folder = tempfile::tempdir().unwrap();
        let kernel = Kernel::read(folder.path());
        assert!(kernel.memory.unwrap_err().starts_with("cannot read /proc/meminfo: "));
        assert!(kernel.memlock.unwrap_err().starts_with("cannot read /proc/self/limits: "));
        assert!(kernel.cpus.is_err() && kernel.governors.is_err() && kernel.control_group.is_err());
        assert_eq!(kernel.rdma_devices, Vec::<String>::new());
    }

    #[test]
    fn this_machine_has_memory_and_processors() {
        let kernel = Kernel::read(Path::new("/"));
        assert!(kernel.memory.unwrap().total > Bytes::mib(64));
        let cpus = kernel.cpus.unwrap();
        assert!(cpus.allowed >= 1 && cpus.allowed <= cpus.online, "{cpus:?}");
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = (parse_memory(&text), parse_limit(&text, "Max"), chosen_word(&text), count_list(&text));
        }
    }
}
