//! Processors: how fast they may run, and how many of them we may use.

use super::super::check::{CPU_AFFINITY, CPU_GOVERNOR, Check};
use super::super::facts::{Governor, Kernel};
use super::some_of;

pub(super) fn judge(kernel: &Kernel) -> Vec<Check> {
    vec![governor(kernel), affinity(kernel)]
}

fn governor(kernel: &Kernel) -> Check {
    let governors = match &kernel.governors {
        Ok(governors) => governors,
        Err(why) => return CPU_GOVERNOR.skipped(why),
    };
    let name = |governor: &Governor| format!("{} on {}", governor.name, governor.cpus);
    let what = some_of(&governors.iter().map(name).collect::<Vec<_>>());
    // Processors that govern themselves are called so too, and run at full speed if that is what they are told to prefer.
    let slow = |it: &&Governor| it.name == "powersave" && it.preference.as_deref() != Some("performance");
    match governors.iter().find(slow) {
        None => CPU_GOVERNOR.ok(what),
        Some(_) => CPU_GOVERNOR.finding(
            what,
            "the clock is slow to rise: scheduling steps and mapping of pages take longer, and their times scatter",
            "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        ),
    }
}

fn affinity(kernel: &Kernel) -> Check {
    let cpus = match &kernel.cpus {
        Ok(cpus) => cpus,
        Err(why) => return CPU_AFFINITY.skipped(why),
    };
    let what = format!("{} of {} processors", cpus.allowed, cpus.online);
    if cpus.allowed >= cpus.online {
        return CPU_AFFINITY.ok(what);
    }
    if cpus.allowed == 1 {
        return CPU_AFFINITY.finding(
            what,
            "an engine started from here has one processor for itself, its workers and the threads of its pools",
            format!("taskset -pc 0-{} $$ (docker: --cpuset-cpus), before the engine starts", cpus.online - 1),
        );
    }
    CPU_AFFINITY.note(what, "what is started from here runs on these alone")
}
