//! Pages of made-up results: what is on them, and what never is.

use std::fs;

use serde_json::json;

use super::*;

/// A result of `kvbench serve` at a rate, with everything that a page can show.
fn serving(rate: f64, kv_mode: &str) -> Value {
    let times: Vec<u64> = (1..200).map(|i| 10_000_000 + i * 50_000).collect();
    let series = crate::result::Series::of_times(&times.into_iter().collect()).unwrap();
    json!({
        "schema": "tidekv.bench.v1", "name": "serve", "args": {"request_rate": rate}, "samples": {"ttft": series},
        "host": {"cpu": "some cpu", "cores": 2, "date": "2026-08-01T10:00:00Z", "build": "release"},
        "summary": {"ttft_ms": {"p50": 15.0 + rate, "p99": 19.9}, "cells": [{"batch": 1, "step_us": 2.5}]},
        "kv_mode": kv_mode, "duration": 10.0, "completed": 199, "failed": 2, "request_throughput": rate * 0.99,
        "throughput": rate * 0.99, "median_ttft_ms": 15.0 + rate, "ttft_p50": 15.0 + rate, "p99_ttft_ms": 19.9,
        "environment": {"vllm": "0.99", "torch": "9.9"}, "warnings": ["the client was the bottleneck"],
        "timeline": {"t_s": [0.0, 0.5, 1.0], "columns": {"pool.a.in_use_bytes": [0, 2_097_152, null],
                     "nvml.0.utilization_percent": [1, 50, 99], "server.a.running": [0, 3, 1]}},
        "requests": {"model": ["a", "a", "b"], "intended_s": [0.1, 0.6, 0.9], "ttft_ms": [12.0, null, 31.0]},
    })
}

fn page_of(files: &[(&str, String)]) -> (String, Collected) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let collected = Collected::read(folder.path()).unwrap();
    (page::render("runs", &collected), collected)
}

#[test]
fn a_page_of_servers_has_every_part() {
    let files: Vec<(String, String)> = [(8.0, "static"), (16.0, "static"), (8.0, "elastic"), (16.0, "elastic")]
        .map(|(rate, mode)| (format!("{mode}/r{rate}.json"), serving(rate, mode).to_string()))
        .to_vec();
    let files: Vec<(&str, String)> = files.iter().map(|(name, text)| (name.as_str(), text.clone())).collect();
    let (page, _) = page_of(&files);
    for part in [
        "4 runs of 1 benchmark, measured on 2026-08-01.",
        "Latency against rate",
        "Time to first token, median",
        "Memory and latency over time",
        "pool.a.in_use_bytes",
        "TTFT b",
        "Distributions",
        "elastic/r16",
        "Before you read on",
        "the client was the bottleneck",
        "2 requests failed",
        "Environment",
        "0.99",
        "Reproduce",
        "step_us",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert_eq!(page.matches("<svg").count(), page.matches("role=\"img\"").count(), "every plot says what it is");
    assert_eq!(page.matches("<desc").count(), page.matches("<svg").count());
}

#[test]
fn a_page_is_alone_and_runs_nothing() {
    let evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'";
    let mut result = serving(8.0, evil);
    result["name"] = json!(evil);
    result["args"] = json!({evil: evil, "label": evil});
    result["host"]["gpu"] = json!(evil);
    result["environment"] = json!({evil: {evil: evil}});
    result["warnings"] = json!([evil]);
    result["command"] = json!(["kvbench", evil]);
    result["summary"] = json!({evil: {"x_us": 1}, "list": [{evil: evil}]});
    result["samples"] = json!({evil: result["samples"]["ttft"]});
    result["timeline"]["columns"] = json!({evil: [1, 2, 3]});
    result["requests"]["model"] = json!([evil, evil, evil]);
    let (page, _) = page_of(&[("<b>.json", result.to_string())]);
    for forbidden in ["<script", "<img", "<b>", " onerror=alert(1)>", "src=", "http:", "https:", "@import", "url("] {
        let escaped = page.matches(forbidden).count();
        let inside_text = page.matches("&lt;img src=x onerror=alert(1)&gt;").count();
        let allowed = if forbidden == "src=" { inside_text } else { 0 };
        assert_eq!(escaped, allowed, "{forbidden}");
    }
    assert!(page.contains("Content-Security-Policy") && page.contains("&lt;script&gt;"));
}

#[test]
fn what_is_no_result_is_named_and_left_out() {
    let (page, collected) =
        page_of(&[("good.json", serving(4.0, "static").to_string()), ("notes.json", "{\"a\": 1}".into())]);
    assert_eq!((collected.runs.len(), collected.left_out.len()), (1, 1));
    assert!(page.contains("notes.json is left out"));
    let empty = tempfile::tempdir().unwrap();
    assert!(Collected::read(empty.path()).is_err());
    fs::write(empty.path().join("notes.json"), "{}").unwrap();
    let error = Collected::read(empty.path()).err().unwrap().to_string();
    assert!(error.contains("none of its .json files"), "{error}");
}

#[test]
fn a_bundle_has_everything_and_is_the_same_every_time() {
    let folder = tempfile::tempdir().unwrap();
    let raw = serving(8.0, "static").to_string();
    fs::create_dir(folder.path().join("a")).unwrap();
    fs::write(folder.path().join("a/one.json"), &raw).unwrap();
    let collected = Collected::read(folder.path()).unwrap();
    let bytes = bundle::pack("runs", &collected, "<page>").unwrap();
    assert_eq!(bytes, bundle::pack("runs", &collected, "<page>").unwrap());
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
    let mut names = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let text = std::io::read_to_string(&mut entry).unwrap();
        if name.ends_with("one.json") {
            assert_eq!(text, raw, "the result is as it was, to the byte");
        }
        if name.ends_with("environment.json") {
            assert!(text.contains("some cpu") && text.contains("torch"), "{text}");
        }
        names.push(name);
    }
    let expected =
        ["README.md", "report.html", "environment.json", "configuration.json", "reproduce.sh", "results/a/one.json"];
    assert_eq!(names, expected.map(|name| format!("kvbench-bundle/{name}")));
}
