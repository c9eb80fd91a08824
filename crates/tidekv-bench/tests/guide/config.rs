//! `--config` with the file of kvcached's guide.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::support::KvBench;

/// As the guide prints it, with nothing but `path` changed.
const GUIDE: &str = "\
# bench-config.yaml
models:
  - name: llama-7b
    path: synthetic:tiny:1
    port: 8001

  - name: qwen-7b
    path: synthetic:tiny:2
    port: 8002

benchmark:
  request_rates: [1, 2, 4, 8, 16, 32]
  num_requests: 1000
  input_len: 512
  output_len: 128

kvcached:
  gpu_utilization: 0.95
  page_size_mb: 2
";

fn file(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bench-config.yaml");
    fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn the_file_of_the_guide_runs_with_only_its_paths_changed() {
    let (_dir, path) = file(GUIDE);
    let path = path.to_str().unwrap();
    // What the flags say goes before what the file says: its thousand requests take a while.
    let short = [
        "--config",
        path,
        "--rates",
        "32",
        "--saturated",
        "0",
        "--pairs",
        "1",
        "--seconds",
        "1",
        "--warmup-requests",
        "2",
    ];
    let output = KvBench::new("overhead").args(&short).args(&["--kv-budget", "128M", "--json"]).output();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["args"]["a"], "kvserve synthetic:tiny:1 --backend cpu --kv static");
    assert_eq!(result["args"]["profiles"][0]["lengths"]["input"], 512);

    let args = ["--config", path, "--seconds", "0", "--max-models", "2", "--kv-budget", "128M", "--model-kv", "100M"];
    let result = KvBench::new("multi-model").args(&args).json();
    assert_eq!(result["args"]["models"], serde_json::json!(["synthetic:tiny:1", "synthetic:tiny:2"]));
    assert_eq!(result["summary"]["models_elastic"], 2.0);

    let short = [
        "--requests-per-peak",
        "4",
        "--input-len",
        "16",
        "--output-len",
        "16",
        "--repeats",
        "1",
        "--calibration",
        "0.2",
    ];
    let args = [&["--config", path, "--kv-budget", "256M"], &short[..]].concat();
    let output = KvBench::new("latency-benefit").args(&args).args(&["--json"]).output();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(result["summary"]["models"]["qwen-7b"].is_object(), "{}", result["summary"]);
}

#[test]
fn a_file_that_is_wrong_is_refused_with_its_line_and_its_key() {
    let (_dir, path) = file(&GUIDE.replace("output_len", "outputlen"));
    let path = path.to_str().unwrap();
    let (_other_dir, misspelt) = file(&GUIDE.replace("gpu_utilization", "gpu_utilisation"));
    let misspelt = misspelt.to_str().unwrap();
    for subcommand in ["overhead", "latency-benefit", "multi-model"] {
        KvBench::new(subcommand).args(&["--config", path]).refused("outputlen");
        KvBench::new(subcommand).args(&["--config", misspelt]).refused("did you mean KVCACHED_GPU_UTILIZATION?");
        KvBench::new(subcommand).args(&["--config", "/nonexistent.yaml"]).refused("/nonexistent.yaml");
    }
}
