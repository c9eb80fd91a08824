//! What control groups allow: the walls of a container.

use tidekv_core::units::Bytes;

use super::super::check::{CGROUP_CPU, CGROUP_MEMORY, CGROUP_PIDS, Check};
use super::super::facts::{ControlGroup, Kernel, Level};

pub(super) fn judge(kernel: &Kernel) -> Vec<Check> {
    match &kernel.control_group {
        Ok(group) => vec![memory(group, kernel), cpu(group, kernel), pids(group)],
        Err(why) => [CGROUP_MEMORY, CGROUP_CPU, CGROUP_PIDS].map(|kind| kind.skipped(why)).into(),
    }
}

/// Whether less than a twentieth is left.
fn nearly_full(level: Level) -> bool {
    level.left() < level.limit / 20
}

fn memory(group: &ControlGroup, kernel: &Kernel) -> Check {
    let total = kernel.memory.as_ref().map_or(u64::MAX, |memory| memory.total.0);
    let Some(level) = group.memory.filter(|level| level.limit < total) else {
        return CGROUP_MEMORY.ok("none below the machine's memory");
    };
    let what = format!("{} of {} in use", Bytes(level.used.min(level.limit)), Bytes(level.limit));
    if nearly_full(level) {
        return CGROUP_MEMORY.finding(
            what,
            "pools on the host will be refused, and the kernel kills a process of the group when it is full",
            "start the container with more (docker update --memory 64g --memory-swap 64g NAME)",
        );
    }
    CGROUP_MEMORY.note(what, "pools on the host share this, not the machine's memory")
}

fn cpu(group: &ControlGroup, kernel: &Kernel) -> Check {
    let online = kernel.cpus.as_ref().map_or(u32::MAX, |cpus| cpus.online);
    let Some(quota) = group.cpu.filter(|quota| quota.hundredths() < u64::from(online) * 100) else {
        return CGROUP_CPU.ok("none");
    };
    let hundredths = quota.hundredths();
    let what = format!("{}.{:02} processors", hundredths / 100, hundredths % 100);
    if hundredths < 100 {
        return CGROUP_CPU.finding(
            what,
            "every process here is stopped in each period: steps and the giving back of memory are late by tens of ms",
            "start the container with more (docker update --cpus 4 NAME)",
        );
    }
    CGROUP_CPU.note(what, "engines that start a thread for each processor are stopped when they use more")
}

fn pids(group: &ControlGroup) -> Check {
    match group.pids {
        None => CGROUP_PIDS.ok("none"),
        Some(level) if nearly_full(level) => CGROUP_PIDS.finding(
            format!("{} of {} in use", level.used, level.limit),
            "pools and engines cannot start their threads",
            "start the container with more (docker update --pids-limit 4096 NAME)",
        ),
        Some(level) => CGROUP_PIDS.ok(format!("{} of {} in use", level.used, level.limit)),
    }
}
