//! The limits of the control groups that this process is in: what a container allows.
//!
//! ```text
//!   /proc/self/cgroup      0::/a/b            generation two: one tree for all
//!                          4:memory:/a/b      generation one: a tree for each resource
//!   /sys/fs/cgroup/...     a/b, a, the root   the tightest of them holds
//! ```
//!
//! Inside a container the path may name a place that is not mounted there; the mount's root then is the container's own
//! group, and it is part of the walk.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::Probe;
use super::kernel::text;

/// No tree is deeper than this; a bound for the walk to the root.
const DEPTH_MAX: usize = 64;

/// What the groups allow; `None` for what none of them limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct ControlGroup {
    pub(in super::super) memory: Option<Level>,
    pub(in super::super) cpu: Option<CpuQuota>,
    pub(in super::super) pids: Option<Level>,
}

/// How much there may be, and how much there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Level {
    pub(in super::super) limit: u64,
    pub(in super::super) used: u64,
}

impl Level {
    pub(in super::super) fn left(self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// Processor time in each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct CpuQuota {
    pub(in super::super) quota_us: u64,
    pub(in super::super) period_us: u64,
}

impl CpuQuota {
    /// In hundredths of a processor.
    pub(in super::super) fn hundredths(self) -> u64 {
        self.quota_us.saturating_mul(100) / self.period_us.max(1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Generation {
    One,
    Two,
}

impl ControlGroup {
    /// Reads the groups that are named under this root.
    pub(in super::super) fn read(root: &Path) -> Probe<Self> {
        let groups = text(root, "proc/self/cgroup")?;
        let folders = |resource: &str| folders(root, &groups, resource);
        Ok(Self {
            memory: folders("memory").iter().filter_map(memory).min_by_key(|level| level.left()),
            cpu: folders("cpu").iter().filter_map(cpu).min_by_key(|quota| quota.hundredths()),
            pids: folders("pids").iter().filter_map(pids).min_by_key(|level| level.left()),
        })
    }
}

/// Where the files about a resource are, from this process's group up to the root.
fn folders(root: &Path, groups: &str, resource: &str) -> Vec<(Generation, PathBuf)> {
    let mounts = root.join("sys/fs/cgroup");
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(resources), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let path = Path::new(path.trim_end());
        // Only names below the root: `..` would lead out of the tree.
        if !path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_))) {
            continue;
        }
        let (generation, mounts) = match (id, resources) {
            ("0", "") => (Generation::Two, vec![mounts.clone(), mounts.join("unified")]),
            (_, names) if names.split(',').any(|name| name == resource) => {
                (Generation::One, vec![mounts.join(resource)])
            }
            _ => continue,
        };
        let below = path.strip_prefix("/").unwrap_or(path);
        for mount in mounts {
            found.extend(below.ancestors().take(DEPTH_MAX).map(|below| (generation, mount.join(below))));
        }
    }
    found
}

fn number(folder: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
}

/// Generation two writes "no limit" as a word, which is no number; one writes a number beyond all memory.
fn memory((generation, folder): &(Generation, PathBuf)) -> Option<Level> {
    let (limit, used, reclaimable) = match generation {
        Generation::One => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
        Generation::Two => ("memory.max", "memory.current", "inactive_file "),
    };
    // File pages that nobody used lately go when memory is needed.
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse().ok()).unwrap_or(0);
    let limit = number(folder, limit).filter(|&limit| limit < 1 << 62)?;
    Some(Level { limit, used: number(folder, used)?.saturating_sub(reclaimable) })
}

fn cpu((generation, folder): &(Generation, PathBuf)) -> Option<CpuQuota> {
    let (quota_us, period_us) = match generation {
        // -1 for no limit, which is no number here.
        Generation::One => (number(folder, "cpu.cfs_quota_us")?, number(folder, "cpu.cfs_period_us")?),
        Generation::Two => {
            let text = fs::read_to_string(folder.join("cpu.max")).ok()?;
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.parse().ok()?, period.parse().ok()?)
        }
    };
    Some(CpuQuota { quota_us, period_us })
}

fn pids((_, folder): &(Generation, PathBuf)) -> Option<Level> {
    Some(Level { limit: number(folder, "pids.max")?, used: number(folder, "pids.current")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn generation_two_with_a_tighter_parent() {
        let root = root(&[
            ("proc/self/cgroup", "0::/pod/engine\n"),
            ("sys/fs/cgroup/pod/engine/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/engine/memory.current", "500\n"),
            ("sys/fs/cgroup/pod/memory.max", "1000\n"),
            ("sys/fs/cgroup/pod/memory.current", "700\n"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 100\n"),
            ("sys/fs/cgroup/pod/engine/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/pod/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/pids.max", "50\n"),
            ("sys/fs/cgroup/pids.current", "49\n"),
        ]);
        let group = ControlGroup::read(root.path()).unwrap();
        assert_eq!(group.memory, Some(Level { limit: 1000, used: 600 }));
        assert_eq!(group.cpu.unwrap().hundredths(), 150);
        assert_eq!(group.pids.unwrap().left(), 1);
    }

    #[test]
    fn generation_one_has_a_tree_for_each() {
        let root = root(&[
            ("proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n2:pids:/../escape\nnonsense\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
            ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "4096\n"),
            ("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "4000\n"),
            ("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n"),
        ]);
        let group = ControlGroup::read(root.path()).unwrap();
        assert_eq!(group, ControlGroup { memory: Some(Level { limit: 4096, used: 4000 }), cpu: None, pids: None });
    }
}
