//! The driver, the GPUs and who uses them.

use tidekv_core::units::Bytes;

use super::super::check::{
    Check, DRIVER, GPU_COMPUTE_MODE, GPU_MEMORY, GPU_MIG, GPU_PERSISTENCE, GPU_USERS, GPUS, Kind, Status,
};
use super::super::facts::{Facts, LivePool};
use super::{count, some_of};
use crate::gpu::{BrokenGpu, ComputeMode, Gpu, GpuError, GpuMemory, GpuReport, GpuUser};

/// The oldest driver whose calls we use.
const DRIVER_MIN: u32 = 550;
/// What pools leave free of a device unless told otherwise, in percent.
const LEFT_FREE_PERCENT: u64 = 5;
/// Below this there is no room for a pool worth the name.
const POOL_MIN: Bytes = Bytes::gib(1);
/// How the daemon that lets processes share an exclusive GPU is called, as far as the kernel keeps names.
const SHARING_DAEMON: &str = "nvidia-cuda-mps";

/// Checks that need GPUs to look at.
const OF_EACH_GPU: [Kind; 5] = [GPU_COMPUTE_MODE, GPU_MIG, GPU_PERSISTENCE, GPU_MEMORY, GPU_USERS];

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let report = match &facts.gpus {
        Ok(Ok(report)) => report,
        Ok(Err(error)) => return without_gpus(no_driver(error)),
        Err(why) => return without_gpus(does_not_answer(why)),
    };
    let mut checks = vec![driver(report)];
    checks.extend(gpus(report));
    if report.gpus.is_empty() {
        checks.extend(OF_EACH_GPU.map(|kind| kind.skipped("no GPU to look at")));
        return checks;
    }
    let live = facts.pools.as_ref().map_or(&[][..], |pools| &pools.live);
    checks.extend(report.gpus.iter().map(compute_mode));
    checks.extend(report.gpus.iter().map(mig));
    checks.extend(report.gpus.iter().map(persistence));
    checks.extend(report.gpus.iter().flat_map(|gpu| memory_of_places(gpu, live)));
    checks.extend(report.gpus.iter().map(|gpu| users(gpu, live)));
    checks
}

/// The first of the checks, and the others as skipped for the same reason.
fn without_gpus(driver: Check) -> Vec<Check> {
    let why = if driver.status == Status::Skipped { driver.what.clone() } else { "no GPU to look at".to_owned() };
    let mut checks = vec![driver];
    checks.extend([GPUS].into_iter().chain(OF_EACH_GPU).map(|kind| kind.skipped(why.clone())));
    checks
}

fn no_driver(error: &GpuError) -> Check {
    match error {
        GpuError::NoDriver { .. } => DRIVER.skipped(format!("{error}: pools will use host memory")),
        GpuError::Mismatch => DRIVER.finding(
            error.to_string(),
            "the driver was updated and the old one is still loaded: no new process can use a GPU",
            "sudo reboot",
        ),
        GpuError::NotPermitted { .. } => DRIVER.finding(
            error.to_string(),
            "pools will use host memory",
            "ls -l /dev/nvidia* and give this user access to them (docker: --gpus all)",
        ),
        GpuError::Broken { .. } => DRIVER.finding(
            error.to_string(),
            "pools will use host memory, or fail to start",
            "sudo dmesg | grep -i -e nvrm -e xid says what is wrong with it",
        ),
    }
}

fn does_not_answer(why: &str) -> Check {
    let means = "a GPU may have fallen off the bus: programs that use it will hang as well";
    DRIVER.finding(why, means, "sudo dmesg | grep -i -e nvrm -e xid, then reset that GPU or reboot")
}

fn driver(report: &GpuReport) -> Check {
    let Some(version) = &report.driver else { return DRIVER.skipped("the driver does not say its version") };
    let what = report.cuda.as_ref().map_or_else(|| version.clone(), |cuda| format!("{version} (CUDA {cuda})"));
    let series = version.split('.').next().and_then(|series| series.parse::<u32>().ok());
    match series {
        Some(series) if series < DRIVER_MIN => DRIVER.finding(
            format!("{what} is older than series {DRIVER_MIN}"),
            "it lacks calls that pools need: they will use host memory",
            format!(
                "install driver series {DRIVER_MIN} or later (Ubuntu: sudo apt install nvidia-driver-580), then reboot"
            ),
        ),
        Some(_) => DRIVER.ok(what),
        None => DRIVER.skipped(format!("{version:?} is not a version that we know to read")),
    }
}

fn gpus(report: &GpuReport) -> Vec<Check> {
    let name = |gpu: &Gpu| match gpu.memory {
        Some(memory) => format!("{} {} ({})", gpu.index, gpu.name, memory.total),
        None => format!("{} {}", gpu.index, gpu.name),
    };
    let names: Vec<String> = report.gpus.iter().map(name).collect();
    let mut checks: Vec<Check> = report.broken.iter().map(broken).collect();
    if !names.is_empty() {
        checks.insert(0, GPUS.ok(some_of(&names)));
    } else if checks.is_empty() {
        checks.push(GPUS.note("the driver has no GPU", "pools will use host memory"));
    }
    checks
}

fn broken(gpu: &BrokenGpu) -> Check {
    let check = GPUS.finding(
        format!("does not work: {}", gpu.why),
        "nothing can run on it, and programs that look at all GPUs may fail",
        format!("sudo nvidia-smi --gpu-reset -i {}, and reboot if that does not help", gpu.index),
    );
    check.about(format!("GPU {}", gpu.index))
}

fn subject(gpu: &Gpu) -> String {
    format!("GPU {}", gpu.index)
}

fn compute_mode(gpu: &Gpu) -> Check {
    let shared_by_daemon = gpu.users.iter().flatten().any(|user| user.name.as_deref() == Some(SHARING_DAEMON));
    let fix = format!("sudo nvidia-smi -i {} -c DEFAULT", gpu.index);
    let check = match gpu.compute_mode {
        None => GPU_COMPUTE_MODE.skipped("the driver does not say"),
        Some(ComputeMode::Default) => GPU_COMPUTE_MODE.ok("default: processes may share it"),
        Some(ComputeMode::ExclusiveProcess) if shared_by_daemon => {
            GPU_COMPUTE_MODE.ok("exclusive, and shared through MPS")
        }
        Some(ComputeMode::ExclusiveProcess) => GPU_COMPUTE_MODE.finding(
            "exclusive process",
            "one process at a time can use it: the second engine fails to start",
            fix,
        ),
        Some(ComputeMode::Prohibited) => GPU_COMPUTE_MODE.finding("prohibited", "no process can use it", fix),
    };
    check.about(subject(gpu))
}

fn mig(gpu: &Gpu) -> Check {
    let check = match &gpu.mig {
        None => GPU_MIG.ok("not on this GPU"),
        Some(mig) if mig.enabled && mig.parts.is_empty() => GPU_MIG.finding(
            "on, and the GPU has no parts",
            "there is nothing on it that a process could use",
            format!("sudo nvidia-smi -i {} -mig 0 (or make parts: nvidia-smi mig -cgi)", gpu.index),
        ),
        Some(mig) if mig.enabled != mig.pending => GPU_MIG.note(
            format!("{}, and {} after the next reset", on_off(mig.enabled), on_off(mig.pending)),
            "the GPU's parts, and with them the ledgers, change when it is reset",
        ),
        Some(mig) if mig.enabled => GPU_MIG.ok(format!("on, {}", count(mig.parts.len(), "part", "parts"))),
        Some(_) => GPU_MIG.ok("off"),
    };
    check.about(subject(gpu))
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn persistence(gpu: &Gpu) -> Check {
    let check = match gpu.persistence {
        None => GPU_PERSISTENCE.skipped("the driver does not say"),
        Some(true) => GPU_PERSISTENCE.ok("on"),
        Some(false) => GPU_PERSISTENCE
            .note("off", "the first process after a pause waits a second or more for the GPU to start")
            .advice(format!("sudo nvidia-smi -i {} -pm 1", gpu.index)),
    };
    check.about(subject(gpu))
}

/// What pools take memory from: a GPU, or each of its parts.
struct Place<'a> {
    subject: String,
    uuid: &'a str,
    memory: Option<GpuMemory>,
    /// Everybody on the GPU; of its parts the driver does not say.
    users: &'a [GpuUser],
}

fn places(gpu: &Gpu) -> Vec<Place<'_>> {
    match &gpu.mig {
        Some(mig) if mig.enabled => {
            let parts = mig.parts.iter().enumerate().map(|(number, part)| Place {
                subject: format!("GPU {} part {number}", gpu.index),
                uuid: &part.uuid,
                memory: part.memory,
                users: &[],
            });
            parts.collect()
        }
        _ => {
            let users = gpu.users.as_deref().unwrap_or_default();
            vec![Place { subject: subject(gpu), uuid: &gpu.uuid, memory: gpu.memory, users }]
        }
    }
}

fn memory_of_places(gpu: &Gpu, live: &[LivePool]) -> Vec<Check> {
    let checks: Vec<Check> = places(gpu).iter().map(|place| memory(place, live)).collect();
    if checks.is_empty() { vec![GPU_MEMORY.skipped("the GPU has no parts").about(subject(gpu))] } else { checks }
}

/// Ledgers are named as CUDA names devices, which says `GPU-` of parts too.
fn same_device(ledger: &str, uuid: &str) -> bool {
    let number = |name: &str| name.trim_start_matches("GPU-").trim_start_matches("MIG-").to_ascii_lowercase();
    number(ledger) == number(uuid)
}

fn memory(place: &Place<'_>, live: &[LivePool]) -> Check {
    let Some(memory) = place.memory else {
        return GPU_MEMORY.skipped("the driver does not say").about(place.subject.clone());
    };
    let on_it = live.iter().filter(|pool| same_device(&pool.device, place.uuid));
    let held = Bytes(on_it.map(|pool| pool.reserved.0).fold(0, u64::saturating_add));
    let by_others = memory.used().saturating_sub(held);
    let usable = Bytes(memory.total.0 / 100 * (100 - LEFT_FREE_PERCENT));
    let for_pools = usable.saturating_sub(by_others);
    let what = format!("{} free of {}; pools hold {held} and may hold {for_pools}", memory.free, memory.total);
    let least = POOL_MIN.max(Bytes(memory.total.0 / 100 * LEFT_FREE_PERCENT));
    let check = if for_pools >= least {
        GPU_MEMORY.ok(what)
    } else {
        let means = format!("other memory than that of pools takes {by_others}: pools on it will wait or be refused");
        GPU_MEMORY.finding(what, means, make_room(place.users))
    };
    check.about(place.subject.clone())
}

fn make_room(users: &[GpuUser]) -> String {
    match users.iter().filter(|user| user.memory.is_some()).max_by_key(|user| user.memory) {
        Some(largest) => {
            format!("kill {}, to stop the largest of its users, {}; or give it less", largest.pid, user(largest))
        }
        None => "nvidia-smi shows who uses it; stop one of them, or give it less".to_owned(),
    }
}

fn user(user: &GpuUser) -> String {
    let name = user.name.as_deref().unwrap_or("unknown here");
    match user.memory {
        Some(memory) => format!("{name} (pid {}, {memory})", user.pid),
        None => format!("{name} (pid {})", user.pid),
    }
}

fn users(gpu: &Gpu, live: &[LivePool]) -> Check {
    let Some(all) = &gpu.users else { return GPU_USERS.skipped("the driver does not say").about(subject(gpu)) };
    let (ours, others): (Vec<&GpuUser>, Vec<&GpuUser>) = all.iter().partition(|user| pool_of(user, live).is_some());
    let others: Vec<String> = others.into_iter().map(user).collect();
    let unseen = unseen(gpu.memory, all);
    let with_pools = match ours.len() {
        0 => "nobody".to_owned(),
        some => format!("{}, nobody else", count(some, "process with a pool", "processes with pools")),
    };
    let check = match (others.is_empty(), unseen) {
        (true, None) => GPU_USERS.ok(with_pools),
        (false, None) => GPU_USERS.note(some_of(&others), "their memory is not shared with pools"),
        (_, Some(unseen)) => {
            let seen = if others.is_empty() { with_pools } else { some_of(&others) };
            GPU_USERS.note(
                format!("{seen}; {unseen} belong to processes that cannot be seen from here"),
                "other users or containers use this GPU too; their memory is not shared with pools",
            )
        }
    };
    check.about(subject(gpu))
}

/// The pool whose process this is.
pub(in super::super) fn pool_of<'a>(user: &GpuUser, live: &'a [LivePool]) -> Option<&'a LivePool> {
    live.iter().find(|pool| pool.pid == user.pid)
}

/// Memory in use that no process in the list has, where it is too much for the driver's own.
fn unseen(memory: Option<GpuMemory>, users: &[GpuUser]) -> Option<Bytes> {
    let memory = memory?;
    let seen = users.iter().map(|user| user.memory.map(|bytes| bytes.0)).sum::<Option<u64>>()?;
    let unseen = memory.used().saturating_sub(Bytes(seen));
    (unseen > Bytes::gib(1).max(Bytes(memory.total.0 / 100 * LEFT_FREE_PERCENT))).then_some(unseen)
}
