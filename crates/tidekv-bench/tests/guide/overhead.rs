//! `kvbench overhead` as people run it: how much it measures, and what it says about that.

use std::time::Duration;

use serde_json::Value;
use tidekv_bench::load::mock::{Mock, Script, Timing};

use crate::support::KvBench;

fn measured(args: &[&str]) -> Value {
    let output = KvBench::new("overhead").args(args).args(&["--warmup-requests", "2", "--json"]).output();
    // 1 is an answer: underpowered, so short.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn rounds_and_seconds_say_how_much_is_measured() {
    let result = measured(&["--rates", "16", "--saturated", "2", "--rounds", "3", "--seconds", "3", "--save-detailed"]);
    let (summary, rates) = (&result["summary"], &result["summary"]["rates"]);
    assert_eq!([&rates[0]["rounds"], &rates[1]["rounds"]], [3, 3]);
    assert!(rates[0]["pairs"].as_u64().unwrap() >= 3, "{rates}");
    for figure in ["throughput", "ttft_p50", "itl_p50", "e2e_p50"] {
        let interval = &rates[0]["ci"][figure];
        let (low, ratio, high) = (&interval[0], &rates[0][format!("{figure}_ratio")], &interval[1]);
        assert!(low.as_f64() <= ratio.as_f64() && ratio.as_f64() <= high.as_f64(), "{figure}: {rates}");
    }
    // Memory is looked at in one pair of every round, and half a gigabyte is held from the start.
    assert!(rates[0]["static"]["kv_held_mean_bytes"].as_f64().unwrap() > 5e8, "{rates}");
    assert!(summary["starts"].as_f64().unwrap() >= 2.0 && summary["elapsed_s"].as_f64().unwrap() > 0.0, "{summary}");
    assert_eq!(summary["verdict"], "underpowered: too noisy to tell", "three rounds show nothing");
    assert_eq!(result["sweep"].as_array().unwrap().len(), 2 * 2 * 3, "a row for each point, side and round");
    let pairs = result["pairs"].as_array().unwrap();
    let of_rate = pairs.iter().filter(|pair| pair["request_rate"] == 16.0);
    assert_eq!(of_rate.clone().count() as u64, rates[0]["pairs"].as_u64().unwrap());
    for pair in of_rate {
        let count = |side: &str, times: &str| pair[side][times].as_array().unwrap().len();
        assert!(count("static", "ttft_ms") > 0, "{pair}");
        assert_eq!(count("static", "ttft_ms"), count("elastic", "itl_mean_ms"), "{pair}");
    }
}

#[test]
fn minutes_are_for_everything_and_no_round_is_begun_that_they_have_no_room_for() {
    let result = measured(&["--rates", "32", "--saturated", "0", "--minutes", "0.1"]);
    let rounds = result["summary"]["rates"][0]["rounds"].as_u64().unwrap();
    assert!((1..=24).contains(&rounds), "{rounds}");
    // Six seconds, and what a first start takes on a busy machine.
    assert!(result["summary"]["elapsed_s"].as_f64().unwrap() < 30.0, "{}", result["summary"]);
    assert_eq!((&result["args"]["minutes"], &result["args"]["seconds"]), (&0.1.into(), &Value::Null));
    KvBench::new("overhead").args(&["--minutes", "1", "--seconds", "5"]).refused("--seconds");
    KvBench::new("overhead").args(&["--minutes", "0"]).refused("--minutes");
    KvBench::new("overhead").args(&["--pairs", "0"]).refused("--rounds");
}

/// At low rates a slice is one request, and one that failed in the last minute cost all that was measured before.
#[test]
fn a_request_that_fails_forbids_a_conclusion_and_a_server_that_is_gone_ends_the_run() {
    let timing = Timing { first: Duration::from_millis(1), gap: Duration::from_millis(1), ..Timing::IMMEDIATE };
    let failing = |fails: fn(u64) -> bool| {
        Mock::start(move |request| match fails(u64::try_from(request.ordinal).unwrap()) {
            true => Script::error(503, "not now"),
            false => timing.script(request),
        })
        .unwrap()
    };
    let measured = |b: &Mock| {
        let fine = failing(|_| false);
        let (a, b) = (fine.base_url().to_string(), b.base_url().to_string());
        let sides = ["--a-url", &a, "--b-url", &b, "--rates", "4", "--saturated", "0", "--json"];
        let long =
            ["--rounds", "2", "--seconds", "8", "--warmup-requests", "2", "--input-len", "8", "--output-len", "4"];
        KvBench::new("overhead").args(&sides).args(&long).output()
    };
    let once = measured(&failing(|ordinal| ordinal == 12));
    assert_eq!(once.status.code(), Some(1), "{}", String::from_utf8_lossy(&once.stderr));
    let result: Value = serde_json::from_slice(&once.stdout).unwrap();
    assert_eq!(result["summary"]["verdict"], "1 requests failed: nothing is concluded");
    let gone = measured(&failing(|ordinal| ordinal >= 12));
    let said = String::from_utf8_lossy(&gone.stderr).into_owned();
    assert_eq!(gone.status.code(), Some(2), "{said}");
    assert!(said.contains("side B answers nothing any more") && said.contains("not now"), "{said}");
}
