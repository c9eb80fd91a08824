//! `kvbench idle`: what does a model still hold once its requests are over?
//!
//! ```text
//!   requests with staggered decode lengths ──> all finished, prefix cache full ──> idle, decayed     waste
//!                                              prefix cache emptied            ──> idle, decayed     idle_bytes
//! ```
//!
//! Staggered lengths are the point: prefill asks for many blocks at once and packs well, decode asks for one block at a
//! time, from many requests that end at different moments, and what is left over lies everywhere. The prefix cache
//! is bounded as in kvcached (`KVCACHED_MAX_CACHED_TOKENS`: below 0 no bound, 0 nothing is kept, else this many
//! tokens of blocks that no request uses). The *packed floor* is what its blocks would take without any hole.
//!
//! The workload is the one of kvcached's own measurement of the same question, for which it reports 1.4 times the
//! packed floor: 36 layers, 96 requests at a time, some of them with common prefixes.
//!
//! | figure of `summary`         | meaning                                                                         |
//! |-----------------------------|---------------------------------------------------------------------------------|
//! | `idle_bytes`                | held without any request or cached block, after decay                           |
//! | `waste`                     | held with the cache full, after decay, over the packed floor                    |
//! | `age_waste`                 | the same where the cache evicts by age alone                                    |
//! | `held_bytes`, `floor_bytes` | both sides of `waste`                                                           |
//! | `peak_bytes`                | the most that was held while requests ran                                       |
//! | `decay_s`                   | from the last request until nothing more was given back                         |
//! | `hit_percent`, `age_hit_percent` | prompt tokens found in the cache, by either order of eviction              |

mod decay;
mod workload;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use jiff::SignedDuration;
use serde::Serialize;
use tidekv_core::geometry::{Capacity, Geometry};
use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, BackendName};
use tidekv_pool::KvPool;

use crate::host::HostInfo;
use crate::lab::{BLOCK_TOKENS, Lab, model};
use crate::output::OutputArgs;
use crate::prefix_cache::EvictionOrder;
use crate::progress::Progress;
use crate::result::BenchResult;
use crate::stats::to_f64;
use crate::table::{Table, format_figure};
use tidekv_cli::exit::Outcome;
use workload::{Engine, Traffic};

const DEFAULT_REQUESTS: u32 = 2500;
const QUICK_REQUESTS: u32 = 500;
const MAX_REQUESTS: u32 = 10_000_000;
const MAX_CONCURRENCY: u32 = 100_000;
const MAX_LAYERS: u32 = 10_000;

/// Arguments of `kvbench idle`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct IdleArgs {
    /// Requests in all [default: 2500, with --quick 500]
    #[arg(long, value_name = "N")]
    pub requests: Option<u32>,

    /// Requests at a time
    #[arg(long, value_name = "N", default_value_t = 96)]
    pub concurrency: u32,

    /// Bound of the prefix cache: below 0 none, 0 nothing is kept [default: KVCACHED_MAX_CACHED_TOKENS or 16000]
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    pub max_cached_tokens: Option<i64>,

    /// Layers of the model (8 KV heads of 128, bf16, blocks of 16 tokens)
    #[arg(long, visible_alias = "num-layers", value_name = "N", default_value_t = 36)]
    pub layers: u32,

    /// How long pages stay idle before they are given back [default: the pool's own]
    #[arg(long, value_name = "DURATION")]
    pub decay: Option<SignedDuration>,

    /// Memory behind the pool: fake (the figures do not depend on it), host, cuda or auto
    #[arg(long, value_name = "NAME", default_value_t = BackendName::Fake)]
    pub backend: BackendName,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench idle
  kvbench idle --quick --decay 200ms
  kvbench idle --max-cached-tokens 0             # without a prefix cache
  kvbench idle --backend host --concurrency 8    # real memory, up to 2 GiB
  KVCACHED_MAX_CACHED_TOKENS=64000 kvbench idle --layers 80";

/// Measures, prints and keeps the result.
pub fn run(args: &IdleArgs) -> anyhow::Result<Outcome> {
    let mut plan = Plan::of(args)?;
    let output = args.output.open()?;
    let backend = tidekv_mem::open(args.backend, args.device)?;
    let progress = output.progress(u64::from(plan.requests) * EvictionOrder::ALL.len() as u64);
    let mut outcomes = Vec::new();
    for order in EvictionOrder::ALL {
        outcomes.push(measure(&mut plan, &backend, order, &progress)?);
    }
    drop(progress);
    let mut result = BenchResult::new("idle", &plan, HostInfo::current())?;
    for outcome in &outcomes {
        fill(&mut result, outcome);
    }
    output.emit(&result, &table(&plan, &outcomes))?;
    Ok(Outcome::Done)
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    requests: u32,
    concurrency: u32,
    max_cached_tokens: i64,
    layers: u32,
    /// Filled in from the pool where it was not asked for.
    decay_ms: Option<u128>,
    backend: &'static str,
    device: u32,
}

impl Plan {
    fn of(args: &IdleArgs) -> anyhow::Result<Self> {
        let default_requests = if args.output.quick { QUICK_REQUESTS } else { DEFAULT_REQUESTS };
        let decay = args.decay.map(Duration::try_from).transpose().context("--decay is below zero")?;
        let plan = Self {
            requests: args.requests.unwrap_or(default_requests),
            concurrency: args.concurrency,
            max_cached_tokens: match args.max_cached_tokens {
                Some(tokens) => tokens,
                None => max_cached_tokens(std::env::var("KVCACHED_MAX_CACHED_TOKENS").ok().as_deref())?,
            },
            layers: args.layers,
            decay_ms: decay.map(|decay| decay.as_millis()),
            backend: args.backend.name(),
            device: args.device,
        };
        let within = |flag, value, most| {
            ensure!((1..=most).contains(&value), "{flag} is {value}: give 1 to {most}");
            Ok(())
        };
        within("--requests", plan.requests, MAX_REQUESTS)?;
        within("--concurrency", plan.concurrency, MAX_CONCURRENCY)?;
        within("--layers", plan.layers, MAX_LAYERS)?;
        Ok(plan)
    }

    /// Blocks that may stay cached; `None` for any number.
    fn max_cached_blocks(&self) -> Option<usize> {
        let blocks = |tokens: u64| usize::try_from(tokens / u64::from(BLOCK_TOKENS)).unwrap_or(usize::MAX);
        match u64::try_from(self.max_cached_tokens) {
            Err(_) => None,
            Ok(0) => Some(0),
            Ok(tokens) => Some(blocks(tokens).max(1)),
        }
    }
}

fn max_cached_tokens(variable: Option<&str>) -> anyhow::Result<i64> {
    // No bound is a number below 0, as the flag has it.
    Ok(tidekv_pool::max_cached_tokens(variable)?.map_or(-1, |tokens| i64::try_from(tokens).unwrap_or(i64::MAX)))
}

/// What was seen with one order of eviction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    order: EvictionOrder,
    peak: Bytes,
    cached_blocks: usize,
    /// After decay, with the cache as the requests left it.
    held: Bytes,
    /// What the cached blocks would take without holes.
    floor: Bytes,
    decay: Duration,
    /// After decay, with the cache emptied.
    idle: Bytes,
    hit_percent: f64,
}

impl Measured {
    /// `None` where nothing is cached: the floor is zero.
    fn waste(&self) -> Option<f64> {
        (self.floor > Bytes::ZERO).then(|| to_f64(self.held.0) / to_f64(self.floor.0))
    }
}

fn measure(
    plan: &mut Plan,
    backend: &Arc<dyn Backend>,
    order: EvictionOrder,
    progress: &Progress,
) -> anyhow::Result<Measured> {
    let lab = Lab::new()?;
    let memory = backend.memory()?.total;
    let mut config = lab.config(Arc::clone(backend), model(&**backend, plan.layers, Capacity::Budget(memory)), memory);
    config.null_block = true;
    if let Some(decay) = plan.decay_ms {
        config.decay = Duration::from_millis(u64::try_from(decay).context("--decay is too long")?);
    }
    let decay = config.decay;
    plan.decay_ms = Some(decay.as_millis());
    let pool = KvPool::open(config)?;

    progress.now(format!("requests, evicting by {}", order.name()));
    let traffic = Traffic { requests: plan.requests, concurrency: plan.concurrency };
    let mut engine = Engine::new(&pool, traffic, plan.max_cached_blocks(), order);
    engine.run(progress).context("serving the requests: lower --concurrency or --layers")?;

    progress.now("decay");
    let settled = decay::wait(&pool, &lab, decay)?;
    let (cached_blocks, peak, hit_percent) = (engine.cached_blocks(), engine.peak(), engine.hit_percent());
    engine.forget_all()?;
    let idle = decay::wait(&pool, &lab, decay)?.held;
    let floor = packed(pool.geometry(), cached_blocks)?;
    Ok(Measured { order, peak, cached_blocks, held: settled.held, floor, decay: settled.after, idle, hit_percent })
}

/// What so many blocks take without holes.
fn packed(geometry: &Geometry, blocks: usize) -> anyhow::Result<Bytes> {
    let pages = u64::try_from(blocks)?.div_ceil(u64::from(geometry.blocks_per_page()));
    Ok(Bytes(pages * geometry.page_bytes().0))
}

fn fill(result: &mut BenchResult, outcome: &Measured) {
    let waste = outcome.waste();
    match outcome.order {
        EvictionOrder::Age => {
            waste.into_iter().for_each(|waste| result.set_figure("age_waste", waste));
            result.set_figure("age_hit_percent", outcome.hit_percent);
        }
        EvictionOrder::Pages => {
            result.set_figure("idle_bytes", to_f64(outcome.idle.0));
            waste.into_iter().for_each(|waste| result.set_figure("waste", waste));
            result.set_figure("held_bytes", to_f64(outcome.held.0));
            result.set_figure("floor_bytes", to_f64(outcome.floor.0));
            result.set_figure("peak_bytes", to_f64(outcome.peak.0));
            result.set_figure("decay_s", outcome.decay.as_secs_f64());
            result.set_figure("hit_percent", outcome.hit_percent);
        }
    }
}

fn table(plan: &Plan, outcomes: &[Measured]) -> String {
    let mut table = Table::new(&["evicted by", "peak", "cached", "held", "packed", "waste", "hits", "idle"]);
    for outcome in outcomes {
        table.row(&[
            outcome.order.name().to_owned(),
            outcome.peak.to_string(),
            format!("{} blocks", outcome.cached_blocks),
            outcome.held.to_string(),
            outcome.floor.to_string(),
            outcome.waste().map_or("-".to_owned(), format_figure),
            format!("{:.1} %", outcome.hit_percent),
            outcome.idle.to_string(),
        ]);
    }
    format!(
        "{}\n{} layers, {} requests, {} at a time. `held` is with the prefix cache, `idle` without it.\n",
        table.render(),
        plan.layers,
        plan.requests,
        plan.concurrency
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_the_cache_means_what_it_means_in_kvcached() {
        let blocks_of = |tokens| {
            let plan = Plan {
                requests: 1,
                concurrency: 1,
                max_cached_tokens: tokens,
                layers: 1,
                decay_ms: None,
                backend: "fake",
                device: 0,
            };
            plan.max_cached_blocks()
        };
        assert_eq!([-1, 0, 1, 16_000, 64_000].map(blocks_of), [None, Some(0), Some(1), Some(1000), Some(4000)]);
        assert_eq!(max_cached_tokens(None).unwrap(), 16_000);
        assert_eq!(max_cached_tokens(Some(" -1 ")).unwrap(), -1);
        assert!(max_cached_tokens(Some("many")).is_err());
    }
}
