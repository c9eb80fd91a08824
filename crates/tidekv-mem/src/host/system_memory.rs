//! What memory the machine has for us: `/proc/meminfo`, bounded by every control group we are in.
//!
//! ```text
//!   total = min(MemTotal,     limit of each group from ours up to the root)
//!   free  = min(MemAvailable, limit - (usage - inactive file pages) of each group)
//! ```
//!
//! A container's own limit is what counts there, not the machine's size. Both generations of control groups are read;
//! a group without a limit does not bound anything. The parsers take text and are fuzzed.

use std::fs;
use std::path::{Path, PathBuf};

use tidekv_core::units::Bytes;

use crate::{MemError, MemoryInfo};

/// No control-group hierarchy is deeper than this; a bound for the walk to the root.
const GROUP_DEPTH_MAX: usize = 64;

/// Reads the machine's and the control groups' figures.
///
/// # Errors
/// When `/proc/meminfo` cannot be read or lacks its two figures.
pub fn read() -> Result<MemoryInfo, MemError> {
    let unreadable = |source| MemError::System { call: "read", doing: "reading /proc/meminfo", source };
    let text = fs::read_to_string("/proc/meminfo").map_err(unreadable)?;
    let machine = parse_meminfo(&text).ok_or_else(|| {
        unreadable(std::io::Error::new(std::io::ErrorKind::InvalidData, "MemTotal or MemAvailable is missing"))
    })?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let memory =
        parse_groups(&groups).into_iter().flat_map(|group| group.folders()).filter_map(|folder| folder.read()).fold(
            machine,
            |memory, group| MemoryInfo { total: memory.total.min(group.total), free: memory.free.min(group.free) },
        );
    Ok(memory)
}

/// Huge pages that an administrator set aside.
pub fn reserved_huge_pages() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo_field(&text, "HugePages_Total:").unwrap_or(0)
}

/// `MemTotal` and `MemAvailable` of `/proc/meminfo`.
pub fn parse_meminfo(text: &str) -> Option<MemoryInfo> {
    let kib = |name| meminfo_field(text, name)?.checked_mul(1024).map(Bytes);
    let total = kib("MemTotal:")?;
    Some(MemoryInfo { total, free: kib("MemAvailable:")?.min(total) })
}

fn meminfo_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A control group that accounts memory, and which generation of files describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    generation: Generation,
    path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Generation {
    One,
    Two,
}

/// The memory groups named in `/proc/self/cgroup`. Lines that do not speak of memory are passed over.
pub fn parse_groups(text: &str) -> Vec<Group> {
    let group = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let generation = match (id, controllers) {
            ("0", "") => Generation::Two,
            (_, names) if names.split(',').any(|name| name == "memory") => Generation::One,
            _ => return None,
        };
        let path = Path::new(path.trim_end());
        // Only names below the root: `..` would lead out of the hierarchy.
        let inside = path
            .components()
            .all(|part| matches!(part, std::path::Component::RootDir | std::path::Component::Normal(_)));
        inside.then(|| Group { generation, path: path.strip_prefix("/").unwrap_or(path).to_owned() })
    };
    text.lines().filter_map(group).collect()
}

/// One group's folder of files.
#[derive(Debug)]
struct Folder {
    generation: Generation,
    path: PathBuf,
}

impl Group {
    /// Where it is in its hierarchy: names alone, from the root down, never `..`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its folder and those of all its parents. Inside a container the path may name a place that is not mounted
    /// there; the mount's root then is the container's own group, and it is part of the walk.
    fn folders(self) -> Vec<Folder> {
        let generation = self.generation;
        let roots: &[&str] = match generation {
            Generation::One => &["/sys/fs/cgroup/memory"],
            Generation::Two => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
        };
        let folder = |root: &&str, below: &Path| Folder { generation, path: Path::new(root).join(below) };
        self.path
            .ancestors()
            .take(GROUP_DEPTH_MAX)
            .flat_map(|below| roots.iter().map(move |root| folder(root, below)))
            .collect()
    }
}

impl Folder {
    /// What the group allows; `None` for a group that sets no limit or cannot be read.
    fn read(&self) -> Option<MemoryInfo> {
        let text = |name: &str| fs::read_to_string(self.path.join(name)).ok();
        let (limit, usage) = match self.generation {
            Generation::One => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            Generation::Two => ("memory.max", "memory.current"),
        };
        parse_group_memory(&text(limit)?, &text(usage)?, &text("memory.stat").unwrap_or_default())
    }
}

/// What a group with these files allows. Generation one writes "no limit" as a number near 2^63, generation two as `max`;
/// both bound nothing.
pub fn parse_group_memory(limit: &str, usage: &str, stat: &str) -> Option<MemoryInfo> {
    let limit: u64 = limit.trim().parse().ok()?;
    let usage: u64 = usage.trim().parse().ok()?;
    let field = |name: &str| {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    };
    // File pages that nobody used lately go when memory is needed; generation one totals them over its children.
    let reclaimable = field("total_inactive_file").or_else(|| field("inactive_file")).unwrap_or(0);
    let free = limit.saturating_sub(usage.saturating_sub(reclaimable));
    Some(MemoryInfo { total: Bytes(limit), free: Bytes(free) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_gives_total_and_available() {
        let text = "MemTotal:       24576000 kB\nMemFree:        1000 kB\nMemAvailable:   20000000 kB\nBuffers: 5 kB\n";
        let memory = parse_meminfo(text).unwrap();
        assert_eq!((memory.total, memory.free), (Bytes(24_576_000 << 10), Bytes(20_000_000 << 10)));
        assert_eq!(parse_meminfo("MemTotal: 5 kB\n"), None);
        assert_eq!(parse_meminfo("MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB"), None);
    }

    #[test]
    fn both_generations_of_groups_are_found() {
        let text = "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/user.slice/me\n3:memory:/../escape\nnonsense\n";
        let groups = parse_groups(text);
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0], Group { generation: Generation::One, path: "docker/abc".into() });
        assert_eq!(groups[1], Group { generation: Generation::Two, path: "user.slice/me".into() });
        let walked: Vec<_> = groups[0].clone().folders().into_iter().map(|folder| folder.path).collect();
        assert_eq!(
            walked,
            ["/sys/fs/cgroup/memory/docker/abc", "/sys/fs/cgroup/memory/docker", "/sys/fs/cgroup/memory/"]
                .map(PathBuf::from)
        );
    }

    #[test]
    fn a_group_counts_what_it_can_drop_as_free() {
        let stat = "inactive_file 7\ntotal_inactive_file 100\n";
        assert_eq!(
            parse_group_memory("1000\n", "600\n", stat),
            Some(MemoryInfo { total: Bytes(1000), free: Bytes(500) })
        );
        assert_eq!(parse_group_memory("1000", "1600", ""), Some(MemoryInfo { total: Bytes(1000), free: Bytes(0) }));
        assert_eq!(parse_group_memory("max\n", "600\n", stat), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = read().unwrap();
        assert!(memory.free <= memory.total && memory.total > Bytes::mib(64), "{memory:?}");
    }
}
