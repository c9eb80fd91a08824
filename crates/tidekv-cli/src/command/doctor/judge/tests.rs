//! Every judgement on machines that are made up: a healthy one, and one change at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use tidekv_core::units::Bytes;

use super::all;
use crate::command::doctor::check::{ALL, Check, Status};
use crate::command::doctor::facts::{
    ControlGroup, CpuCounts, CpuQuota, Elsewhere, Facts, Files, Filesystem, Folder, FolderState, Governor, HostMemory,
    Kernel, Level, Limit, LivePool, Pools, Python, Space,
};
use crate::command::gc::Found;
use crate::gpu::{BrokenGpu, ComputeMode, Gpu, GpuError, GpuMemory, GpuReport, GpuUser, Mig, MigPart};

const UUID: &str = "GPU-8f000000-0000-0000-0000-000000000001";
const POOL_PID: u32 = 4711;

/// A GPU server as it should be, with one pool on its GPU.
fn healthy() -> Facts {
    let pool = LivePool {
        name: "kvcached_vLLM_4711".to_owned(),
        device: UUID.to_owned(),
        pid: POOL_PID,
        reserved: Bytes::gib(20),
    };
    let python = Python { python: "3.12.1".to_owned(), executable: "/venv/bin/python".to_owned(), ..Python::default() };
    Facts {
        gpus: Ok(Ok(GpuReport {
            driver: Some("580.95.05".to_owned()),
            cuda: Some("13.0".to_owned()),
            gpus: vec![gpu(0)],
            broken: Vec::new(),
        })),
        pools: Ok(Pools { live: vec![pool], unreadable: Vec::new(), budgets: Vec::new() }),
        elsewhere: Ok(Vec::new()),
        left_behind: Ok(Vec::new()),
        folder: Ok(Folder { path: "/dev/shm".into(), uid: 1000, state: Ok(there()) }),
        kernel: Kernel {
            memory: Ok(memory()),
            shmem_huge_pages: Ok("advise".to_owned()),
            memlock: Ok(Limit::Bytes(Bytes::mib(8))),
            address_space: Ok(Limit::Unlimited),
            rdma_devices: Vec::new(),
            max_map_count: Ok(1 << 20),
            overcommit: Ok(0),
            governors: Ok(vec![governor("performance", None)]),
            cpus: Ok(CpuCounts { online: 64, allowed: 64 }),
            control_group: Ok(ControlGroup::default()),
        },
        environment: vec![("KVCACHED_GPU_UTILIZATION".to_owned(), "0.9".to_owned())],
        python: Ok(Python { packages: BTreeMap::from([("torch".to_owned(), "2.8.0".to_owned())]), ..python }),
        gc_command: "kvctl gc".to_owned(),
    }
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        index,
        name: "H200".to_owned(),
        uuid: UUID.to_owned(),
        memory: Some(GpuMemory { total: Bytes::gib(140), free: Bytes::gib(119) }),
        compute_mode: Some(ComputeMode::Default),
        persistence: Some(true),
        mig: Some(Mig { enabled: false, pending: false, parts: Vec::new() }),
        users: Some(vec![user(POOL_PID, "python", 21)]),
    }
}

fn user(pid: u32, name: &str, gib: u64) -> GpuUser {
    GpuUser { pid, name: Some(name.to_owned()), memory: Some(Bytes::gib(gib)) }
}

fn part(free: Bytes) -> MigPart {
    MigPart { uuid: "MIG-1".to_owned(), memory: Some(GpuMemory { total: Bytes::gib(18), free }) }
}

fn memory() -> HostMemory {
    let (total, none) = (Bytes::gib(512), Bytes::ZERO);
    HostMemory { total, available: Bytes::gib(400), commit_limit: Bytes::gib(256), huge: none, huge_free: none }
}

fn governor(name: &str, preference: Option<&str>) -> Governor {
    Governor { name: name.to_owned(), preference: preference.map(str::to_owned), cpus: 64 }
}

fn there() -> FolderState {
    FolderState::There {
        mode: 0o1777,
        owner: 0,
        refusal: None,
        filesystem: Filesystem::Memory("tmpfs"),
        of_container: false,
        space: Space { total: Bytes::gib(256), free: Bytes::gib(255), free_files: Some(1_000_000) },
        files: Files::default(),
    }
}

/// One thing wrong with an otherwise healthy machine.
struct Case {
    id: &'static str,
    status: Status,
    /// Words that the check must contain, in any of its texts.
    words: &'static [&'static str],
    change: fn(&mut Facts),
}

fn case(id: &'static str, status: Status, words: &'static [&'static str], change: fn(&mut Facts)) -> Case {
    Case { id, status, words, change }
}

fn report(facts: &mut Facts) -> &mut GpuReport {
    facts.gpus.as_mut().unwrap().as_mut().unwrap()
}

fn first_gpu(facts: &mut Facts) -> &mut Gpu {
    &mut report(facts).gpus[0]
}

fn set_folder(facts: &mut Facts, state: FolderState) {
    facts.folder.as_mut().unwrap().state = Ok(state);
}

fn set_env(facts: &mut Facts, name: &str, value: &str) {
    facts.environment = vec![(name.to_owned(), value.to_owned())];
}

fn set_group(facts: &mut Facts, group: ControlGroup) {
    facts.kernel.control_group = Ok(group);
}

fn host(facts: &mut Facts) -> &mut HostMemory {
    facts.kernel.memory.as_mut().unwrap()
}

/// The folder of a healthy machine with one thing changed.
macro_rules! folder {
    ($($field:ident: $value:expr),*) => {
        |facts: &mut Facts| {
            let mut state = there();
            let FolderState::There { $($field),*, .. } = &mut state else { unreachable!() };
            $(*$field = $value;)*
            set_folder(facts, state);
        }
    };
}

use Status::{Finding, Note, Ok as Fine, Skipped};

fn gpu_cases() -> Vec<Case> {
    vec![
        case("driver", Finding, &["535.1", "550"], |f| report(f).driver = Some("535.129.03".to_owned())),
        case("driver", Skipped, &["version"], |f| report(f).driver = Some("new".to_owned())),
        case("driver", Skipped, &["pools will use host memory"], |f| {
            f.gpus = Ok(Err(GpuError::NoDriver { why: "it is not loaded".to_owned() }));
        }),
        case("driver", Finding, &["sudo reboot"], |f| f.gpus = Ok(Err(GpuError::Mismatch))),
        case("driver", Finding, &["/dev/nvidia*"], |f| {
            f.gpus = Ok(Err(GpuError::NotPermitted { why: "cgroups".to_owned() }));
        }),
        case("driver", Finding, &["dmesg"], |f| f.gpus = Ok(Err(GpuError::Broken { why: "?".to_owned() }))),
        case("driver", Finding, &["20 s", "dmesg"], |f| f.gpus = Err("did not answer within 20 s".to_owned())),
        case("gpus", Finding, &["fell off", "--gpu-reset -i 1"], |f| {
            report(f).gpus.clear();
            report(f).broken = vec![BrokenGpu { index: 1, why: "it fell off the bus".to_owned() }];
        }),
        case("gpus", Note, &["host memory"], |f| report(f).gpus.clear()),
        case("gpus", Skipped, &["no NVIDIA driver"], |f| {
            f.gpus = Ok(Err(GpuError::NoDriver { why: "it is not loaded".to_owned() }));
        }),
        case("gpu-compute-mode", Finding, &["nvidia-smi -i 0 -c DEFAULT"], |f| {
            first_gpu(f).compute_mode = Some(ComputeMode::ExclusiveProcess);
        }),
        case("gpu-compute-mode", Fine, &["MPS"], |f| {
            first_gpu(f).compute_mode = Some(ComputeMode::ExclusiveProcess);
            first_gpu(f).users = Some(vec![user(9, "nvidia-cuda-mps", 0)]);
        }),
        case("gpu-compute-mode", Finding, &["no process"], |f| {
            first_gpu(f).compute_mode = Some(ComputeMode::Prohibited);
        }),
        case("gpu-compute-mode", Skipped, &[], |f| first_gpu(f).compute_mode = None),
        case("gpu-mig", Finding, &["no parts", "-mig 0"], |f| {
            first_gpu(f).mig = Some(Mig { enabled: true, pending: true, parts: Vec::new() });
        }),
        case("gpu-mig", Note, &["off, and on after"], |f| {
            first_gpu(f).mig = Some(Mig { enabled: false, pending: true, parts: Vec::new() });
        }),
        case("gpu-mig", Fine, &["1 part"], |f| {
            first_gpu(f).mig = Some(Mig { enabled: true, pending: true, parts: vec![part(Bytes::gib(18))] });
        }),
        case("gpu-mig", Fine, &["not on this GPU"], |f| first_gpu(f).mig = None),
        case("gpu-persistence", Note, &["-pm 1"], |f| first_gpu(f).persistence = Some(false)),
        case("gpu-persistence", Skipped, &[], |f| first_gpu(f).persistence = None),
        case("gpu-memory", Finding, &["may hold 2.99 GiB", "kill 99", "train (pid 99, 110 GiB)"], |f| {
            first_gpu(f).memory = Some(GpuMemory { total: Bytes::gib(140), free: Bytes::gib(10) });
            first_gpu(f).users = Some(vec![user(POOL_PID, "python", 0), user(99, "train", 110)]);
            f.pools.as_mut().unwrap().live[0].reserved = Bytes::ZERO;
        }),
        case("gpu-memory", Fine, &["pools hold 129 GiB"], |f| {
            first_gpu(f).memory = Some(GpuMemory { total: Bytes::gib(140), free: Bytes::gib(10) });
            f.pools.as_mut().unwrap().live[0].reserved = Bytes::gib(129);
        }),
        case("gpu-memory", Finding, &["GPU 0 part 0", "nvidia-smi"], |f| {
            first_gpu(f).mig = Some(Mig { enabled: true, pending: true, parts: vec![part(Bytes::mib(100))] });
        }),
        case("gpu-memory", Fine, &["pools hold 15 GiB"], |f| {
            first_gpu(f).mig = Some(Mig { enabled: true, pending: true, parts: vec![part(Bytes::gib(2))] });
            f.pools.as_mut().unwrap().live[0].reserved = Bytes::gib(15);
            f.pools.as_mut().unwrap().live[0].device = "GPU-1".to_owned();
        }),
        case("gpu-memory", Skipped, &[], |f| first_gpu(f).memory = None),
        case("gpu-users", Note, &["train (pid 99, 1 GiB)"], |f| {
            first_gpu(f).users = Some(vec![user(POOL_PID, "python", 20), user(99, "train", 1)]);
        }),
        case("gpu-users", Note, &["21 GiB", "cannot be seen"], |f| first_gpu(f).users = Some(Vec::new())),
        case("gpu-users", Skipped, &[], |f| first_gpu(f).users = None),
    ]
}

fn shared_file_cases() -> Vec<Case> {
    vec![
        case("runtime-dir", Finding, &["not a folder", "KVCACHED_RUNTIME_DIR=\"$XDG_RUNTIME_DIR/kvcached\""], |f| {
            set_folder(f, FolderState::NotAFolder);
        }),
        case("runtime-dir", Finding, &["not a folder", "KVCACHED_RUNTIME_DIR=/dev/shm"], |f| {
            f.folder = Ok(Folder { path: "/x".into(), uid: 0, state: Ok(FolderState::NotAFolder) });
        }),
        case("runtime-dir", Finding, &["install -d"], |f| set_folder(f, FolderState::Missing { can_be_made: false })),
        case("runtime-dir", Fine, &["makes it"], |f| set_folder(f, FolderState::Missing { can_be_made: true })),
        case(
            "runtime-dir",
            Finding,
            &["Read-only", "KVCACHED_RUNTIME_DIR"],
            folder!(refusal: Some("Read-only".into())),
        ),
        case("runtime-dir", Finding, &["5 s"], |f| f.folder = Err("did not answer within 5 s".to_owned())),
        case("runtime-dir", Finding, &["stale handle"], |f| {
            f.folder.as_mut().unwrap().state = Err("stale handle".to_owned());
        }),
        case("runtime-dir-filesystem", Finding, &["NFS"], folder!(filesystem: Filesystem::Network("NFS"))),
        case("runtime-dir-filesystem", Note, &["ext4"], folder!(filesystem: Filesystem::Disk("ext4"))),
        case("runtime-dir-filesystem", Note, &["0x7"], folder!(filesystem: Filesystem::Other(7))),
        case("runtime-dir-filesystem", Skipped, &[], |f| set_folder(f, FolderState::NotAFolder)),
        case("runtime-dir-mode", Finding, &["0777", "chmod +t '/dev/shm'"], folder!(mode: 0o777)),
        case("runtime-dir-mode", Note, &["0770"], folder!(mode: 0o770)),
        case("runtime-dir-mode", Fine, &["0700"], folder!(mode: 0o700, owner: 1000)),
        case("runtime-dir-mode", Finding, &["user 7"], folder!(owner: 7)),
        case("runtime-dir-mode", Note, &["outside"], folder!(owner: 65_534)),
        case("runtime-dir-space", Finding, &["100 MiB free of 256 GiB", "kvctl gc"], |f| {
            folder!(space: Space { total: Bytes::gib(256), free: Bytes::mib(100), free_files: None })(f);
        }),
        case("runtime-dir-space", Finding, &["3 more files"], |f| {
            folder!(space: Space { total: Bytes::gib(256), free: Bytes::gib(99), free_files: Some(3) })(f);
        }),
        case("runtime-dir-filesystem", Note, &["this container", "--ipc=host"], folder!(of_container: true)),
        case("runtime-dir-space", Note, &["Docker", "--shm-size"], |f| {
            let small = Space { total: Bytes::mib(64), free: Bytes::mib(60), free_files: None };
            folder!(of_container: true, space: small)(f);
        }),
        case("runtime-dir-files", Note, &["2 of user 7"], |f| {
            folder!(files: Files { of_others: BTreeMap::from([(7, 2)]), usurped: Vec::new() })(f);
        }),
        case("runtime-dir-files", Finding, &["sudo rm -r '/dev/shm/kvcached-ledger"], |f| {
            let usurped = vec![PathBuf::from("/dev/shm/kvcached-ledger-1000-host")];
            folder!(files: Files { of_others: BTreeMap::new(), usurped: usurped.clone() })(f);
        }),
        case("ledgers", Note, &["format 9"], |f| {
            f.pools.as_mut().unwrap().unreadable.push("host: format 9".to_owned());
        }),
        case("ledgers", Skipped, &["5 s"], |f| f.pools = Err("did not answer within 5 s".to_owned())),
        case("ledgers-elsewhere", Note, &["pid 7 (kvserve): /x/kvcached-ledger-0-host", "share no memory"], |f| {
            let ledger = PathBuf::from("/x/kvcached-ledger-0-host");
            f.elsewhere = Ok(vec![Elsewhere { pid: 7, program: "kvserve".to_owned(), ledger }]);
        }),
        case("ledgers-elsewhere", Skipped, &["5 s"], |f| f.elsewhere = Err("did not answer within 5 s".to_owned())),
        case("leftovers", Finding, &["entry of x", "kvctl gc"], |f| {
            f.left_behind = Ok(vec![Found::Stale { what: "entry of x".to_owned() }]);
        }),
        case("leftovers", Fine, &["nothing"], |f| {
            f.left_behind = Ok(vec![Found::Failed { what: "ledger".to_owned(), error: "format".to_owned() }]);
        }),
        case("leftovers", Skipped, &["5 s"], |f| f.left_behind = Err("did not answer within 5 s".to_owned())),
        case("kvcached-segments", Note, &["theirs", "kvctl delete theirs"], |f| {
            f.left_behind = Ok(vec![Found::Left { name: "theirs".to_owned(), why: "kvcached's own" }]);
        }),
        case("kvcached-segments", Skipped, &[], |f| f.left_behind = Err("no answer".to_owned())),
    ]
}

fn kernel_cases() -> Vec<Case> {
    vec![
        case("host-memory", Finding, &["5 GiB available", "ps -eo"], |f| host(f).available = Bytes::gib(5)),
        case("host-memory", Skipped, &["meminfo"], |f| f.kernel.memory = Err("no meminfo".to_owned())),
        case("huge-pages", Note, &["never", "shmem_enabled"], |f| f.kernel.shmem_huge_pages = Ok("never".to_owned())),
        case("huge-pages", Note, &["100 GiB", "vm.nr_hugepages=0"], |f| {
            (host(f).huge, host(f).huge_free) = (Bytes::gib(100), Bytes::gib(100));
        }),
        case("huge-pages", Fine, &["100 GiB"], |f| host(f).huge = Bytes::gib(100)),
        case("huge-pages", Skipped, &[], |f| f.kernel.shmem_huge_pages = Err("an old kernel".to_owned())),
        case("memlock", Finding, &["mlx5_0", "ulimit -l unlimited"], |f| {
            f.kernel.rdma_devices = vec!["mlx5_0".to_owned()];
        }),
        case("memlock", Fine, &["unlimited"], |f| {
            f.kernel.rdma_devices = vec!["mlx5_0".to_owned()];
            f.kernel.memlock = Ok(Limit::Unlimited);
        }),
        case("memlock", Fine, &["2 GiB"], |f| {
            f.kernel.rdma_devices = vec!["mlx5_0".to_owned()];
            f.kernel.memlock = Ok(Limit::Bytes(Bytes::gib(2)));
        }),
        case("memlock", Skipped, &[], |f| f.kernel.memlock = Err("no limits".to_owned())),
        case("address-space", Finding, &["8 GiB", "ulimit -v unlimited"], |f| {
            f.kernel.address_space = Ok(Limit::Bytes(Bytes::gib(8)));
        }),
        case("address-space", Skipped, &[], |f| f.kernel.address_space = Err("no limits".to_owned())),
        case("max-map-count", Finding, &["1000", "ends at 1000 MiB", "vm.max_map_count="], |f| {
            f.kernel.max_map_count = Ok(1000);
        }),
        case("max-map-count", Note, &["63.99 GiB"], |f| f.kernel.max_map_count = Ok(65_530)),
        case("max-map-count", Fine, &[], |f| {
            f.kernel.max_map_count = Ok(65_530);
            host(f).total = Bytes::gib(32);
        }),
        case("max-map-count", Skipped, &[], |f| f.kernel.max_map_count = Err("not a number".to_owned())),
        case("overcommit", Finding, &["256 GiB", "vm.overcommit_memory=0"], |f| f.kernel.overcommit = Ok(2)),
        case("overcommit", Fine, &[], |f| {
            f.kernel.overcommit = Ok(2);
            host(f).commit_limit = Bytes::gib(512);
        }),
        case("overcommit", Fine, &["always"], |f| f.kernel.overcommit = Ok(1)),
        case("overcommit", Skipped, &[], |f| f.kernel.overcommit = Err("not a number".to_owned())),
        case("cpu-governor", Finding, &["powersave on 64", "scaling_governor"], |f| {
            f.kernel.governors = Ok(vec![governor("powersave", Some("balance_power"))]);
        }),
        case("cpu-governor", Fine, &["powersave"], |f| {
            f.kernel.governors = Ok(vec![governor("powersave", Some("performance"))]);
        }),
        case("cpu-governor", Finding, &["performance on 64; powersave on 64"], |f| {
            f.kernel.governors = Ok(vec![governor("performance", None), governor("powersave", None)]);
        }),
        case("cpu-governor", Skipped, &[], |f| f.kernel.governors = Err("a virtual machine".to_owned())),
        case("cpu-affinity", Note, &["8 of 64"], |f| f.kernel.cpus = Ok(CpuCounts { online: 64, allowed: 8 })),
        case("cpu-affinity", Finding, &["1 of 64", "taskset -pc 0-63"], |f| {
            f.kernel.cpus = Ok(CpuCounts { online: 64, allowed: 1 });
        }),
        case("cpu-affinity", Fine, &["1 of 1"], |f| f.kernel.cpus = Ok(CpuCounts { online: 1, allowed: 1 })),
        case("cpu-affinity", Skipped, &[], |f| f.kernel.cpus = Err("no list".to_owned())),
    ]
}

fn container_cases() -> Vec<Case> {
    fn memory(facts: &mut Facts, limit: u64, used: u64) {
        let memory = Some(Level { limit: limit << 30, used: used << 30 });
        set_group(facts, ControlGroup { memory, ..ControlGroup::default() });
    }
    fn cpu(facts: &mut Facts, quota_us: u64) {
        let cpu = Some(CpuQuota { quota_us, period_us: 100_000 });
        set_group(facts, ControlGroup { cpu, ..ControlGroup::default() });
    }
    fn pids(facts: &mut Facts, limit: u64, used: u64) {
        set_group(facts, ControlGroup { pids: Some(Level { limit, used }), ..ControlGroup::default() });
    }
    vec![
        case("cgroup-memory", Note, &["30 GiB of 100 GiB"], |f| memory(f, 100, 30)),
        case("cgroup-memory", Finding, &["99 GiB of 100 GiB", "--memory"], |f| memory(f, 100, 99)),
        case("cgroup-memory", Finding, &["100 GiB of 100 GiB"], |f| memory(f, 100, 120)),
        case("cgroup-memory", Fine, &[], |f| memory(f, 512, 511)),
        case("cgroup-memory", Skipped, &["cgroup"], |f| f.kernel.control_group = Err("no cgroup".to_owned())),
        case("cgroup-cpu", Note, &["2.50 processors"], |f| cpu(f, 250_000)),
        case("cgroup-cpu", Finding, &["0.50 processors", "--cpus"], |f| cpu(f, 50_000)),
        case("cgroup-cpu", Fine, &[], |f| cpu(f, 64 * 100_000)),
        case("cgroup-cpu", Skipped, &[], |f| f.kernel.control_group = Err("no cgroup".to_owned())),
        case("cgroup-pids", Fine, &["50 of 100"], |f| pids(f, 100, 50)),
        case("cgroup-pids", Finding, &["98 of 100", "--pids-limit"], |f| pids(f, 100, 98)),
        case("cgroup-pids", Skipped, &[], |f| f.kernel.control_group = Err("no cgroup".to_owned())),
    ]
}

fn environment_cases() -> Vec<Case> {
    vec![
        case("environment", Finding, &["export KVCACHED_GPU_UTILIZATION=\"$KVCACHED_GPU_UTILISATION\""], |f| {
            set_env(f, "KVCACHED_GPU_UTILISATION", "0.9");
        }),
        case("environment", Finding, &["unset KVCACHED_TURBO"], |f| set_env(f, "KVCACHED_TURBO", "1")),
        case("environment", Finding, &["ENABLE_KVCACHED is the nearest"], |f| set_env(f, "ENABLE_KVCACHE", "1")),
        case("environment", Finding, &["KVCACHED_IPC_NAME"], |f| set_env(f, "kvcached_ipc_name", "x")),
        case("environment", Finding, &["\"yes\" is not true, false"], |f| set_env(f, "ENABLE_KVCACHED", "yes")),
        case("environment", Fine, &[], |f| set_env(f, "ENABLE_KVCACHED", "True")),
        case("environment", Fine, &[], |f| set_env(f, "ENABLE_KVCACHED", "")),
        case("environment", Finding, &["at most 1"], |f| set_env(f, "KVCACHED_GPU_UTILIZATION", "95")),
        case("environment", Finding, &["\"nan\""], |f| set_env(f, "KVCACHED_GPU_UTILIZATION", "nan")),
        case("environment", Finding, &["number of pages"], |f| set_env(f, "KVCACHED_MAX_RESERVED_PAGES", "-1")),
        case("environment", Finding, &["at least 20", "KVCACHED_MAX_RESERVED_PAGES=20"], |f| {
            set_env(f, "KVCACHED_MIN_RESERVED_PAGES", "20");
        }),
        case("environment", Fine, &[], |f| set_env(f, "KVCACHED_MIN_RESERVED_PAGES", "10")),
        case("environment", Finding, &["whole number"], |f| set_env(f, "KVCACHED_MAX_CACHED_TOKENS", "16k")),
        case("environment", Fine, &[], |f| set_env(f, "KVCACHED_MAX_CACHED_TOKENS", "-1")),
        case("environment", Finding, &["seconds"], |f| set_env(f, "KVCACHED_IPC_TIMEOUT", "1m")),
        case("environment", Finding, &["MiB above 0"], |f| set_env(f, "KVCACHED_PAGE_SIZE_MB", "2M")),
        case("environment", Finding, &["20G"], |f| set_env(f, "KVCACHED_HOST_BUDGET", "lots")),
        case("environment", Fine, &[], |f| set_env(f, "KVCACHED_HOST_BUDGET", "1.5GiB")),
        case("environment", Finding, &["a level"], |f| set_env(f, "KVCACHED_LOG_LEVEL", "9")),
        case("environment", Finding, &["from the root"], |f| set_env(f, "KVCACHED_RUNTIME_DIR", "run/kv")),
        case("environment", Note, &["called my-pool"], |f| set_env(f, "KVCACHED_IPC_NAME", "my pool")),
        case("environment", Note, &["nothing reads it"], |f| set_env(f, "KVCACHED_MAX_CACHED_BLOCKS", "1000")),
        // A service of that name under Kubernetes, and another project's variable.
        case("environment", Fine, &["none set"], |f| set_env(f, "KVCACHED_SERVICE_HOST", "10.0.0.1")),
        case("environment", Fine, &["none set"], |f| set_env(f, "KVCACHED_PORT", "tcp://10.0.0.1:80")),
        case("environment", Fine, &["none set"], |f| set_env(f, "VLLM_CPU_KVCACHE_SPACE", "4")),
        case("versions", Skipped, &["cannot run"], |f| f.python = Err("cannot run python3".to_owned())),
        case("versions", Fine, &["none of torch, vllm"], |f| f.python.as_mut().unwrap().packages.clear()),
    ]
}

fn cases() -> Vec<Case> {
    [gpu_cases(), shared_file_cases(), kernel_cases(), container_cases(), environment_cases()]
        .into_iter()
        .flatten()
        .collect()
}

fn texts(check: &Check) -> String {
    let parts = [check.subject.as_ref(), Some(&check.what), check.means.as_ref(), check.fix.as_ref()];
    parts.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_healthy_machine_passes_every_check() {
    let checks = all(&healthy());
    for check in &checks {
        assert_eq!(check.status, Fine, "{check:?}");
    }
    let ids: Vec<&str> = checks.iter().map(|check| check.id).collect();
    assert_eq!(ids, ALL.iter().map(|kind| kind.id).collect::<Vec<_>>(), "each once, in the order of the report");
}

#[test]
fn each_thing_that_can_be_wrong_is_judged_alone() {
    for Case { id, status, words, change } in cases() {
        let mut facts = healthy();
        change(&mut facts);
        let checks = all(&facts);
        let of_id: Vec<&Check> = checks.iter().filter(|check| check.id == id).collect();
        assert!(!of_id.is_empty(), "{id} is missing");
        for check in of_id {
            assert_eq!(check.status, status, "{words:?}: {check:?}");
            for word in words {
                assert!(texts(check).contains(word), "{word:?} is not in {check:?}");
            }
        }
    }
}

/// What is wrong with one thing must not be blamed on another. (A check that is skipped may be so because of another.)
#[test]
fn nothing_else_becomes_a_finding() {
    for Case { id, words, change, .. } in cases().into_iter().filter(|case| case.status != Skipped) {
        let mut facts = healthy();
        change(&mut facts);
        for check in all(&facts).iter().filter(|check| check.id != id) {
            assert_ne!(check.status, Finding, "{id} {words:?}: {check:?}");
        }
    }
}

#[test]
fn every_check_is_shown_failing_and_every_finding_has_a_fix() {
    let mut failing = BTreeSet::new();
    for Case { id, status, change, .. } in cases() {
        let mut facts = healthy();
        change(&mut facts);
        let checks = all(&facts);
        for finding in checks.iter().filter(|check| check.status == Finding) {
            assert!(finding.means.is_some() && finding.fix.is_some(), "{finding:?}");
        }
        let named: BTreeSet<_> = checks.iter().map(|check| (check.id, check.subject.as_deref())).collect();
        assert_eq!(named.len(), checks.len(), "{id}: two checks of one name");
        for kind in ALL {
            assert!(named.iter().any(|(id, _)| *id == kind.id), "{id}: no check {}", kind.id);
        }
        if status != Fine {
            failing.insert(id);
        }
    }
    for kind in ALL {
        assert!(failing.contains(kind.id), "{} is never shown failing", kind.id);
    }
}

/// Whatever is not known: every check is there, and none is a panic.
#[test]
fn a_machine_of_which_nothing_is_known() {
    let why = || "no answer".to_owned();
    let facts = Facts {
        gpus: Ok(Err(GpuError::NoDriver { why: why() })),
        pools: Err(why()),
        elsewhere: Err(why()),
        left_behind: Err(why()),
        folder: Ok(Folder { path: "/x".into(), uid: 0, state: Ok(FolderState::Missing { can_be_made: true }) }),
        kernel: Kernel::unknown("no answer"),
        environment: Vec::new(),
        python: Err(why()),
        gc_command: String::new(),
    };
    let checks = all(&facts);
    assert_eq!(checks.len(), ALL.len());
    for check in checks {
        let known = ["runtime-dir", "environment"].contains(&check.id);
        assert_eq!(check.status, if known { Fine } else { Skipped }, "{check:?}");
    }
}

#[test]
fn a_broken_gpu_is_named_beside_those_that_work() {
    let mut facts = healthy();
    report(&mut facts).broken = vec![BrokenGpu { index: 1, why: "lost".to_owned() }];
    let checks = all(&facts);
    let gpus: Vec<_> = checks.iter().filter(|check| check.id == "gpus").map(|check| check.status).collect();
    assert_eq!(gpus, [Fine, Finding]);
}

#[test]
fn secrets_and_long_values_are_not_printed() {
    let mut facts = healthy();
    facts.environment = vec![
        ("KVCACHED_WEB_API_KEYS".to_owned(), "hunter2".to_owned()),
        ("KVCACHED_HOST_BUDGET".to_owned(), "x".repeat(5000)),
    ];
    let checks = all(&facts);
    let shown: String = checks.iter().map(texts).collect();
    assert!(!shown.contains("hunter2") && !shown.contains(&"x".repeat(100)), "{shown}");
    assert_eq!(checks.iter().filter(|check| check.status == Finding).count(), 2);
}
