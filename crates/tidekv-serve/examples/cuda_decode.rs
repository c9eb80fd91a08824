//! How fast a GPU makes tokens: `cuda_decode MODEL BATCH CONTEXT STEPS`.
//!
//! Fills `BATCH` rows with `CONTEXT` tokens each, then makes `STEPS` more and prints the time of a decode step beside the time that
//! reading the weights once takes on the same card.

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

#[path = "../tests/support/lab.rs"]
mod lab;

use std::time::Instant;

use lab::{Home, Lab, MAX_ROWS};
use tidekv_serve::compute::CudaCompute;
use tidekv_serve::compute::cuda::{Device, StepLimits};
use tidekv_serve::config::{ModelSource, Precision};
use tidekv_serve::model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, batch, context, steps] = &arguments[..] else {
        return Err("usage: cuda_decode MODEL BATCH CONTEXT STEPS".into());
    };
    let (batch, context, steps): (u32, u32, u32) = (batch.parse()?, context.parse()?, steps.parse()?);
    let ModelSource::Synthetic { size, seed } = model.parse()? else { return Err("a synthetic model".into()) };
    let device = Device::open(0)?;
    let model = Model::sketch(size, seed);
    let shape = model.shape.clone();
    let room = batch * (context + steps + 64);
    let start = Instant::now();
    let limits = StepLimits { max_rows: MAX_ROWS, max_step_tokens: 2048.max(MAX_ROWS) };
    let compute = CudaCompute::made(&device, model, Precision::Bf16, limits)?;
    println!("weights: {} in {:.2} s", compute.weight_bytes(), start.elapsed().as_secs_f64());
    let floor = compute.time_weight_read(20)?;
    println!("reading them once: {:.3} ms", floor.as_secs_f64() * 1e3);
    let mut lab = Lab::sized(Box::new(compute), &shape, Home::Gpu(Precision::Bf16), 16, room, 2048)?;
    let prefill = lab.fill(batch, context)?;
    println!(
        "prefill: {:.1} ms, {:.0} tokens/s",
        prefill.as_secs_f64() * 1e3,
        f64::from(batch * context) / prefill.as_secs_f64()
    );
    let mut times = lab.decode(batch, steps)?;
    times.sort_unstable();
    let median = times[times.len() / 2].as_secs_f64();
    println!(
        "decode: {:.3} ms a step (best {:.3}), {:.0} tokens/s, {:.3} times the floor",
        median * 1e3,
        times[0].as_secs_f64() * 1e3,
        f64::from(batch) / median,
        median / floor.as_secs_f64()
    );
    Ok(())
}
