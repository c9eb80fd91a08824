//! Memory of the machine, for pools on the host back-end and for everything that engines keep outside the GPU.

use tidekv_core::units::Bytes;
use tidekv_shm::DeviceName;

use super::super::check::{ADDRESS_SPACE, Check, HOST_FREE, HUGE_PAGES, MAX_MAP_COUNT, MEMLOCK, OVERCOMMIT};
use super::super::facts::{Facts, HostMemory, Limit, Probe};
use super::super::memory::DeviceMemory;
use super::some_of;

/// The kernel's own default.
const MAP_COUNT_DEFAULT: u64 = 65_530;
/// A pool whose pages lie apart has two mappings for each: the page and the gap after it.
const MAPPINGS_PER_PAGE: u64 = 2;
/// The smallest page that pools are made of in practice.
const SMALL_PAGE: Bytes = Bytes::mib(2);
/// What network cards must be able to hold in place for transfers of KV blocks.
const MEMLOCK_MIN: Bytes = Bytes::gib(1);

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let kernel = &facts.kernel;
    let memory = kernel.memory.as_ref();
    vec![
        free(memory, facts),
        huge_pages(memory, kernel.shmem_huge_pages.as_ref()),
        memlock(kernel.memlock.as_ref(), &kernel.rdma_devices),
        address_space(kernel.address_space.as_ref()),
        max_map_count(kernel.max_map_count.as_ref(), memory),
        overcommit(kernel.overcommit.as_ref(), memory),
    ]
}

/// A borrowed fact, or why it is not known.
type Known<'a, T> = Result<&'a T, &'a String>;

fn free(memory: Known<'_, HostMemory>, facts: &Facts) -> Check {
    let memory = match memory {
        Ok(memory) => memory,
        Err(why) => return HOST_FREE.skipped(why),
    };
    let HostMemory { total, available, .. } = *memory;
    let pools = facts.pools.as_ref().map_or(&[][..], |pools| &pools.live);
    let on_host = pools.iter().filter(|pool| pool.device == DeviceName::host().as_str());
    let held = Bytes(on_host.map(|pool| pool.reserved.0).fold(0, u64::saturating_add));
    let DeviceMemory { free, others } = DeviceMemory::of_host(memory, facts.kernel.control_group.as_ref().ok(), held);
    let what =
        format!("{available} available of {total}: pools hold {held}, others {others}, and {free} are free for pools");
    if available.0 >= total.0 / 20 {
        return HOST_FREE.ok(what);
    }
    HOST_FREE.finding(
        what,
        "pools on the host will be refused, and the kernel is about to kill processes",
        "ps -eo pid,rss,comm --sort=-rss | head shows who holds it; stop one of them",
    )
}

/// Pools use ordinary pages unless told otherwise, so nothing here is more than a note.
fn huge_pages(memory: Known<'_, HostMemory>, shmem: Known<'_, String>) -> Check {
    let (memory, shmem) = match (memory, shmem) {
        (Ok(memory), Ok(shmem)) => (memory, shmem),
        (Err(why), _) | (_, Err(why)) => return HUGE_PAGES.skipped(why),
    };
    let what = format!("transparent for shared memory: {shmem}; set aside: {}", memory.huge);
    if memory.huge_free.0 > memory.total.0 / 10 {
        let means = format!("{} are set aside that only pools with reserved huge pages can use", memory.huge_free);
        return HUGE_PAGES.note(what, means).advice("sudo sysctl -w vm.nr_hugepages=0 gives them back");
    }
    match shmem.as_str() {
        "never" | "deny" => HUGE_PAGES
            .note(what, "pools on the host that ask for transparent huge pages do not get them")
            .advice("echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        _ => HUGE_PAGES.ok(what),
    }
}

/// Pools lock no memory. Network cards that read and write it directly need it locked.
fn memlock(limit: Known<'_, Limit>, rdma: &[String]) -> Check {
    let what = match limit {
        Err(why) => return MEMLOCK.skipped(why),
        Ok(Limit::Unlimited) => return MEMLOCK.ok("unlimited"),
        Ok(Limit::Bytes(bytes)) if rdma.is_empty() => {
            return MEMLOCK.ok(format!("{bytes}; pools need none, and there are no RDMA cards"));
        }
        Ok(Limit::Bytes(bytes)) if *bytes >= MEMLOCK_MIN => return MEMLOCK.ok(bytes.to_string()),
        Ok(Limit::Bytes(bytes)) => bytes,
    };
    MEMLOCK.finding(
        format!("{what}, with RDMA cards {}", some_of(rdma)),
        "transfers of KV blocks over these cards (NIXL, NCCL) cannot register memory and fail",
        "ulimit -l unlimited, before the engine starts (docker: --ulimit memlock=-1)",
    )
}

fn address_space(limit: Known<'_, Limit>) -> Check {
    match limit {
        Err(why) => ADDRESS_SPACE.skipped(why),
        Ok(Limit::Unlimited) => ADDRESS_SPACE.ok("unlimited"),
        Ok(Limit::Bytes(bytes)) => ADDRESS_SPACE.finding(
            format!("{bytes} for each process"),
            "pools reserve addresses for all they may ever hold, and CUDA many times that: both are refused",
            "ulimit -v unlimited, before the engine starts",
        ),
    }
}

fn max_map_count(count: Known<'_, u64>, memory: Known<'_, HostMemory>) -> Check {
    let count = match count {
        Ok(&count) => count,
        Err(why) => return MAX_MAP_COUNT.skipped(why),
    };
    let reach = Bytes((count / MAPPINGS_PER_PAGE).saturating_mul(SMALL_PAGE.0));
    let what = format!("{count} for each process");
    let fix = "sudo sysctl -w vm.max_map_count=1048576";
    if count < MAP_COUNT_DEFAULT {
        let means = format!("less than the kernel's default: a pool on the host in {SMALL_PAGE} pages ends at {reach}");
        return MAX_MAP_COUNT.finding(what, means, fix);
    }
    match memory {
        Ok(memory) if reach < memory.total => {
            let means = format!("a pool on the host in {SMALL_PAGE} pages that lie apart ends at {reach}");
            MAX_MAP_COUNT.note(what, means).advice(fix)
        }
        _ => MAX_MAP_COUNT.ok(what),
    }
}

fn overcommit(mode: Known<'_, u64>, memory: Known<'_, HostMemory>) -> Check {
    let (mode, memory): (u64, Probe<&HostMemory>) = match mode {
        Ok(&mode) => (mode, memory.map_err(Clone::clone)),
        Err(why) => return OVERCOMMIT.skipped(why),
    };
    match (mode, memory) {
        (2, Ok(memory)) if memory.commit_limit < memory.total => OVERCOMMIT.finding(
            format!("never beyond {} (vm.overcommit_memory is 2)", memory.commit_limit),
            "pools on the host and engines are refused memory that is free",
            "sudo sysctl -w vm.overcommit_memory=0",
        ),
        (2, _) => OVERCOMMIT.ok("never beyond the commit limit"),
        (1, _) => OVERCOMMIT.ok("always"),
        _ => OVERCOMMIT.ok("by rule of thumb"),
    }
}
