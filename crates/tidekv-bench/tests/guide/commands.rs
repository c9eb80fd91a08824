//! Every command of docs/benchmarking.md: all of them are understood, and those that need no GPU run, in a short form.
//!
//! Short means smaller numbers for the same flags ([`SHORT`]); what a command names (a file, a folder, a server) is put in its
//! place by the test. A command that is added to the page is run without anybody touching this file, unless its subcommand is new.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use clap::Parser;
use tidekv_bench::cli::Cli;
use tidekv_bench::load::mock::{Mock, MockRequest, Script, Timing};

const PAGE: &str = include_str!("../../../../docs/benchmarking.md");

/// What makes a subcommand short. A flag that a command has already gets this value instead of its own.
const SHORT: [(&str, &[&str]); 11] = [
    ("overhead", &["--rates", "32", "--saturated", "2", "--rounds", "1", "--seconds", "0.5", "--warmup-requests", "2"]),
    (
        "latency-benefit",
        &[
            "--requests-per-peak",
            "4",
            "--input-len",
            "16",
            "--output-len",
            "8",
            "--repeats",
            "1",
            "--calibration",
            "0.1",
        ],
    ),
    ("multi-model", &["--max-models", "2", "--pairs", "1", "--seconds", "0.5", "--rate", "16"]),
    ("gsm8k", &["--num-questions", "4"]),
    ("accuracy", &["--num-prompts", "4", "--output-len", "8"]),
    ("serve", &["--num-prompts", "4", "--request-rate", "50", "--warmup-requests", "1"]),
    ("decode", &["--model", "synthetic:tiny", "--context", "16", "--steps", "8"]),
    (
        "interference",
        &[
            "--streams",
            "2",
            "--output-len",
            "8",
            "--pairs",
            "1",
            "--page-size",
            "2M",
            "--pages",
            "2",
            "--kv-budget",
            "64M",
        ],
    ),
    ("links", &[]),
    ("compare", &[]),
    ("report", &[]),
];

/// Lines of `sh` blocks, a backslash at the end joined with what follows.
fn commands() -> Vec<Vec<String>> {
    let blocks = PAGE.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("sh\n"));
    let lines = blocks.flat_map(|block| {
        let joined = block.replace("\\\n", " ");
        joined.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    lines.filter(|line| !line.trim().is_empty()).map(|line| words(&line)).collect()
}

/// Words as a shell splits them; single quotes alone are used on the page.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('\'').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().take_while(|word| !word.starts_with('#')).map(str::to_owned));
        }
    }
    words
}

fn with_short_flags(mut command: Vec<String>, flags: &[&str]) -> Vec<String> {
    // A time for everything, instead of one for each rate as in `SHORT`.
    if let Some(at) = command.iter().position(|word| word == "--minutes") {
        command.drain(at..at + 2);
    }
    for pair in flags.chunks(2) {
        match command.iter().position(|word| word == pair[0]) {
            Some(at) => command[at + 1] = pair[1].to_owned(),
            None => command.extend(pair.iter().map(|word| (*word).to_owned())),
        }
    }
    command
}

/// A server that answers everything at once.
fn mock() -> Mock {
    Mock::start(|request: &MockRequest| match request.prompt.ends_with("Answer:") {
        true => Script::saying(" 7"),
        false => Timing::IMMEDIATE.script(request),
    })
    .unwrap()
}

/// What commands name.
fn furnish(dir: &Path, ports: [u16; 2]) {
    let question = |n: usize| format!("{{\"question\": \"{n}?\", \"answer\": \"#### {n}\"}}\n");
    fs::create_dir_all(dir.join("grade-school-math")).unwrap();
    for file in ["train.jsonl", "test.jsonl"] {
        fs::write(dir.join("grade-school-math").join(file), (0..8).map(question).collect::<String>()).unwrap();
    }
    let [a, b] = ports;
    let config = format!(
        "models:\n  - {{name: a, path: synthetic:tiny:1, port: {a}}}\n  - {{name: b, path: synthetic:tiny:2, port: {b}}}\n\
         benchmark: {{input_len: 32, output_len: 8, num_requests: 16}}\n"
    );
    fs::write(dir.join("bench-config.yaml"), config).unwrap();
    fs::create_dir_all(dir.join("benchmarks/scenarios")).unwrap();
    let scenario = include_str!("../../../../benchmarks/scenarios/disjoint-peaks.yaml");
    fs::write(dir.join("benchmarks/scenarios/disjoint-peaks.yaml"), scenario).unwrap();
    let result = r#"{"schema": "tidekv.bench.v1", "name": "x", "summary": {"a_ms": 1.0}}"#;
    fs::create_dir_all(dir.join("results")).unwrap();
    for file in ["before.json", "after.json", "results/a.json"] {
        fs::write(dir.join(file), result).unwrap();
    }
}

/// An engine or a GPU.
fn needs_more(command: &[String]) -> bool {
    let is_more = |word: &String| word.contains("vllm serve") || word.contains("sglang") || word == "cuda";
    command[1] == "attention" || command.iter().any(is_more)
}

#[test]
fn every_command_is_understood() {
    let commands = commands();
    assert!(commands.len() > 20, "{}", commands.len());
    for command in commands {
        let args = command.iter().map(OsString::from);
        match command[0].as_str() {
            "kvbench" => drop(Cli::parse_args(args).unwrap_or_else(|error| panic!("{command:?}: {error}"))),
            "kvctl" => {
                drop(tidekv_cli::cli::Cli::try_parse_from(args).unwrap_or_else(|error| panic!("{command:?}: {error}")))
            }
            other => panic!("{other} is on the page and no program of ours"),
        }
    }
}

#[test]
fn every_command_runs() {
    let dir = tempfile::tempdir().unwrap();
    let servers = [mock(), mock()];
    furnish(dir.path(), servers.each_ref().map(|server| server.address().port()));
    let short: BTreeMap<&str, &[&str]> = SHORT.into_iter().collect();
    let mut seen = Vec::new();
    for command in commands().into_iter().filter(|command| command[0] == "kvbench" && !needs_more(command)) {
        let flags =
            short.get(command[1].as_str()).unwrap_or_else(|| panic!("{}: say in SHORT how it is short", command[1]));
        let mut command = with_short_flags(command, flags);
        for (port, server) in ["8001", "8002"].iter().zip(&servers) {
            let own = server.address().port().to_string();
            command.iter_mut().for_each(|word| *word = word.replace(port, &own));
        }
        // Nothing new is learned by running what is the same when it is short.
        command.retain(|word| word != "--quick");
        if seen.contains(&command) {
            continue;
        }
        let output = Command::new(env!("CARGO_BIN_EXE_kvbench"))
            .args(&command[1..])
            .current_dir(dir.path())
            .env("KVCACHED_RUNTIME_DIR", dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        // 1 is an answer: underpowered, most of the time.
        assert!(matches!(output.status.code(), Some(0 | 1)), "{command:?}: {said}");
        seen.push(command);
    }
    assert!(seen.len() > 12, "{seen:?}");
}
