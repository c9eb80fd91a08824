//! The names of scripts that people know.

use std::process::Command;

use crate::support::KvBench;

#[test]
fn a_link_behaves_as_its_subcommand() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("names");
    let said = KvBench::new("links").args(&[folder.to_str().unwrap()]).stdout();
    assert!(said.contains("start_client.sh -> kvbench serve"), "{said}");
    let usage_of = |name: &str| {
        let output = Command::new(folder.join(name)).arg("--help").output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().find(|line| line.starts_with("Usage: ")).unwrap().to_owned()
    };
    for (name, usage) in [
        ("kvcached_map_parallel_benchmark.py", "Usage: kvbench map-parallel"),
        ("kvcached_tp_ipc_benchmark.py", "Usage: kvbench tp-ipc"),
        ("start_server.sh", "Usage: kvserve"),
        ("start_client.sh", "Usage: kvbench serve"),
        ("run_benchmark.sh", "Usage: kvbench latency-benefit"),
        ("bench_vllm.py", "Usage: kvbench gsm8k"),
        ("prepare_batch.py", "Usage: kvbench prepare-batch"),
        ("test_prepare_batch.py", "Usage: kvbench prepare-batch"),
        ("shm_allocation_bench", "Usage: kvbench shm-alloc"),
        ("shm_address_lookup_bench", "Usage: kvbench shm-lookup"),
        ("shm_transfer_bench", "Usage: kvbench shm-transfer"),
    ] {
        assert!(usage_of(name).starts_with(usage), "{name}: {}", usage_of(name));
    }
    // As often as one likes.
    KvBench::new("links").args(&[folder.to_str().unwrap()]).stdout();
    std::fs::remove_file(folder.join("prepare_batch.py")).unwrap();
    std::fs::write(folder.join("prepare_batch.py"), "mine").unwrap();
    KvBench::new("links").args(&[folder.to_str().unwrap()]).refused("left as it is");
}

#[test]
fn flags_of_gflags_work_under_the_old_name() {
    let dir = tempfile::tempdir().unwrap();
    KvBench::new("links").args(&[dir.path().to_str().unwrap()]).stdout();
    let bench = dir.path().join("shm_allocation_bench");
    let output = Command::new(bench)
        .args(["--num_iterations=3", "-min_size_kb=4", "--max_size_kb=4", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
