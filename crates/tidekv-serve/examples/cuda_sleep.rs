//! How long a model takes to sleep and to wake up: `cuda_sleep MODEL ROUNDS`.
//!
//! Parks the weights in host memory and brings them back, beside what the bus can do: the driver's copy of as many bytes from and to
//! page-locked memory that was touched before, and its copy to ordinary memory that was not.

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;
use tidekv_serve::compute::cuda::{Device, StepLimits};
use tidekv_serve::compute::{Compute, CudaCompute};
use tidekv_serve::config::{ModelSource, Precision};
use tidekv_serve::model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, rounds] = &arguments[..] else { return Err("usage: cuda_sleep MODEL ROUNDS".into()) };
    let ModelSource::Synthetic { size, seed } = model.parse()? else { return Err("a synthetic model".into()) };
    let device = Device::open(0)?;
    let limits = StepLimits { max_rows: 64, max_step_tokens: 2048 };
    let mut compute = CudaCompute::made(&device, Model::sketch(size, seed), Precision::Bf16, limits)?;
    let bytes = compute.weight_bytes();
    println!("weights: {bytes}");
    let say = |what: &str, time: Duration| {
        println!("{what:<48} {:>7.3} s {:>6.1} GB/s", time.as_secs_f64(), rate(bytes, time));
    };
    for round in 0..rounds.parse::<u32>()? {
        let start = Instant::now();
        compute.park()?;
        say(&format!("round {round}: asleep after"), start.elapsed());
        let start = Instant::now();
        compute.unpark()?;
        say(&format!("round {round}: awake after"), start.elapsed());
    }
    drop(compute);
    let times = device.time_copies(bytes)?;
    say("the driver, to page-locked memory", times.to_locked);
    say("the driver, from page-locked memory", times.from_locked);
    say("the driver, to memory that nobody touched", times.to_untouched);
    say("the driver, from ordinary memory", times.from_ordinary);
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn rate(bytes: Bytes, time: Duration) -> f64 {
    bytes.0 as f64 / 1e9 / time.as_secs_f64()
}
