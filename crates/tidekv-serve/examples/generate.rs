//! An engine without a server around it: `generate MODEL REQUESTS TOKENS`, for example `generate synthetic:tiny 64 200`.
//!
//! Submits so many requests at once, each for so many tokens behind a prompt of 32, and says how long that took, what the
//! first of them answered (as bytes), and what the pool held.

use std::time::Instant;

use tidekv_core::geometry::ChunkChoice;
use tidekv_core::units::Bytes;
use tidekv_pool::ReservePolicy;
use tidekv_serve::config::{ComputeChoice, EngineConfig, KvBudget, KvChoice};
use tidekv_serve::engine;
use tidekv_serve::handle::{Event, GenerateRequest, Prompt, Sampling};
use tidekv_shm::{PoolName, RuntimeDir};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, requests, tokens] = &arguments[..] else {
        return Err("usage: generate MODEL REQUESTS TOKENS".into());
    };
    let (requests, max_tokens): (u32, u32) = (requests.parse()?, tokens.parse()?);
    let dir = tempfile::tempdir()?;
    let engine = engine::start(EngineConfig {
        model: model.parse()?,
        kv: KvChoice::Elastic,
        kv_budget: KvBudget::Given(Bytes::gib(1)),
        pool_name: PoolName::new("generate")?,
        runtime_dir: RuntimeDir::at(dir.path()),
        compute: ComputeChoice::Auto,
        max_batch_rows: 64,
        max_step_tokens: 512,
        max_waiting: requests,
        max_cached_tokens: Some(tidekv_pool::DEFAULT_MAX_CACHED_TOKENS),
        context_tokens: None,
        block_tokens: 16,
        chunk: ChunkChoice::Auto,
        reserve: ReservePolicy::Auto,
        threads: None,
    })?;
    let vocab = engine.model().vocab;
    let start = Instant::now();
    let mut running = Vec::new();
    for number in 0..requests {
        let prompt = (0..32).map(|at| (number * 7919 + at * 31) % vocab.min(256)).collect();
        running.push(engine.submit(GenerateRequest {
            prompt: Prompt { tokens: prompt },
            sampling: Sampling::GREEDY,
            max_tokens,
            stop_tokens: Vec::new(),
            ignore_eos: true,
            logprobs: None,
            cache_salt: None,
        })?);
    }
    let mut first = Vec::new();
    let mut usage_tokens = 0;
    for (number, mut generation) in running.into_iter().enumerate() {
        while let Some(event) = generation.blocking_next() {
            match event {
                Event::Token { id, .. } if number == 0 => first.push(u8::try_from(id).unwrap_or(b'?')),
                Event::Token { .. } => {}
                Event::Done { usage, .. } => usage_tokens += usage.completion_tokens,
                Event::Failed(error) => return Err(error.into()),
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let stats = engine.stats();
    let mut out = std::io::stdout().lock();
    use std::io::Write;
    writeln!(out, "first answer: {}", String::from_utf8_lossy(&first))?;
    writeln!(out, "{usage_tokens} tokens in {seconds:.2} s: {:.0} tokens/s", f64::from(usage_tokens) / seconds)?;
    writeln!(out, "{} steps, {} preemptions, {} used", stats.steps, stats.preemptions, stats.memory.used())?;
    Ok(())
}
