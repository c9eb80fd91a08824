//! Flags as people type them.

use super::*;
use clap::Parser;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    serve: ServeArgs,
}

fn args(line: &str) -> ServeArgs {
    Line::try_parse_from(std::iter::once("serve").chain(line.split_whitespace())).unwrap().serve
}

#[test]
fn a_command_line_of_vllm_works_as_it_is() {
    let args = args(
        "--backend vllm --model m --endpoint /v1/completions --dataset-name random --random-input-len 512 \
         --random-output-len 64 --num-prompts 200 --request-rate 4 --burstiness 0.5 --max-concurrency 8 --seed 3 \
         --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99.9 --goodput ttft:200 tpot:50 \
         --save-result --result-dir out --save-detailed --metadata a=b c=d --ignore-eos --disable-tqdm",
    );
    let spec = args.stream().unwrap();
    assert_eq!((spec.requests, spec.max_concurrency, spec.dataset.input_len), (Some(200), Some(8), Some(512)));
    assert_eq!((spec.arrivals.rate, spec.arrivals.burstiness), (Some(4.0), Some(0.5)));
    assert_eq!(args.metadata().unwrap(), [("a".into(), "b".into()), ("c".into(), "d".into())]);
    let bounds = Bounds { ttft_ms: Some(200.0), tpot_ms: Some(50.0), e2el_ms: None };
    assert_eq!(args.bounds().unwrap(), Some(bounds));
    assert_eq!(&*args.measure.metric_percentiles, [50.0, 90.0, 99.9]);
}

#[test]
fn guides_defaults_and_shorter_ones_with_quick() {
    let (full, quick) = (args(""), args("--quick"));
    assert_eq!((full.warmup(), full.cooldown(), full.default_prompts()), (100, Duration::from_secs(10), 1000));
    assert!(quick.warmup() < 100 && quick.cooldown() < Duration::from_secs(1));
    assert_eq!(args("--num-warmups 7 --cooldown 1").warmup(), 7);
    assert_eq!(full.stream().unwrap().temperature, Some(0.0));
}

#[test]
fn waves_and_ramps() {
    let spec = args("--square-wave 2,20,30s,0.25").stream().unwrap();
    let wave = spec.arrivals.square.unwrap();
    assert_eq!((wave.low, wave.high, wave.period.0, wave.duty), (2.0, 20.0, Duration::from_secs(30), 0.25));
    assert!(args("--square-wave 2,20").stream().is_err());
    assert!(args("--square-wave 2,20,30s --request-rate 3").stream().is_err());
    let ramp = args("--ramp-up-strategy exponential --ramp-up-start-rps 1 --ramp-up-end-rps 9").stream().unwrap();
    assert_eq!(ramp.arrivals.ramp.unwrap(), RampSpec { strategy: RampKind::Exponential, start: 1.0, end: 9.0 });
}

#[test]
fn what_cannot_be_is_said_with_its_flag() {
    for (line, part) in
        [("--goodput ttft", "NAME:MS"), ("--goodput latency:5", "known are"), ("--goodput ttft:-1", "below 0")]
    {
        assert!(args(line).bounds().unwrap_err().to_string().contains(part), "{line}");
    }
    for (line, part) in [
        ("--request-rate 0", "--request-rate"),
        ("--header x", "--header"),
        ("--extra-body [1]", "--extra-body"),
        ("--vocabulary 7", "--vocabulary"),
    ] {
        assert!(format!("{:#}", args(line).stream().unwrap_err()).contains(part), "{line}");
    }
}
