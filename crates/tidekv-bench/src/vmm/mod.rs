//! `kvbench vmm`: what does it cost to put memory behind a page and to take it away again, how much of that is ours,
//! and what does the layout of the KV cache make of it?
//!
//! ```text
//!   calls     each raw system or driver call of a page's life, timed alone: create, map, set_access, unmap, release
//!   ratio     our map and unmap of one page beside the same raw calls, page by page and taking turns who is first,
//!             so that whatever slows the machine slows both
//!   threads   several threads mapping pages of one reservation (with --threads)
//!   layouts   one page id of a whole model in each layout, and reserving the device's whole memory for it
//! ```
//!
//! | figure of `summary`                                     | meaning                                               |
//! |---------------------------------------------------------|-------------------------------------------------------|
//! | `map_ratio_to_raw`, `unmap_ratio_to_raw`                | median of ours / median of raw, the worst page size    |
//! | `page_sizes.<size>.{map,unmap}_us_p50`, `.raw_*`        | both sides of that ratio                              |
//! | `page_sizes.<size>.{map,unmap}_ratio_to_raw`            | the ratio of one page size                            |
//! | `layouts.<name>.{map,unmap}_page_us_p50`                | one page id, all layers, K and V                      |
//! | `layouts.<name>.map_us_per_gib`                         | the same per GiB of memory                            |
//! | `layouts.<name>.driver_calls_per_page`                  | calls to map and unmap one page id                    |
//! | `layouts.<name>.page_bytes`, `.handles_per_page`        | what a page id is made of                             |
//! | `layouts.<name>.init_ms`                                | reserving addresses for the device's whole memory     |
//! | `speedup_slab_over_per_layer.{page_id,per_gib}`         | how much faster slab maps                             |
//! | `threads.{one,all}_pages_per_s`                         | pages mapped and unmapped per second                  |

mod calls;
mod layouts;
mod report;
mod threads;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use serde::Serialize;
use tidekv_core::geometry::{ChunkChoice, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, BackendName};

use crate::host::HostInfo;
use crate::lab::LayoutName;
use crate::list::List;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use tidekv_cli::exit::Outcome;

const DEFAULT_ITERS: u32 = 200;
const QUICK_ITERS: u32 = 10;

/// How long one measurement may take when `--iters` was not given: slow memory gets fewer rounds, not a longer run.
const DEFAULT_CAP: Duration = Duration::from_secs(20);
const QUICK_CAP: Duration = Duration::from_secs(2);

const MAX_ITERS: u32 = 1_000_000;
const MAX_PAGES: u32 = 1_000_000;
const MAX_THREADS: u32 = 256;
const MAX_LAYERS: u32 = 10_000;
const MAX_BLOCK_TOKENS: u32 = 1_000_000;

/// Arguments of `kvbench vmm`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct VmmArgs {
    /// Memory to measure: host, cuda, fake, or auto (cuda where there is a GPU)
    #[arg(long, value_name = "NAME", default_value_t = BackendName::Auto)]
    pub backend: BackendName,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Sizes of the pages compared with raw calls
    #[arg(long, value_name = "SIZE,...", default_value = "2M,16M,128M")]
    pub page_size: List<Bytes>,

    /// Pages mapped in each round; of the layouts, as many bytes as that many of the largest page ids
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub pages: u32,

    /// Threads that map at the same time; above 1 adds a measurement
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: u32,

    /// Layers of the model whose layouts are measured (8 KV heads of 128, bf16)
    #[arg(long, visible_alias = "num-layers", value_name = "N", default_value_t = 32)]
    pub layers: u32,

    /// Tokens in one block of that model
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub block_size: u32,

    /// Layouts to measure: slab, per-layer, interleaved
    #[arg(long, value_name = "NAME,...", default_value = "slab,per-layer,interleaved")]
    pub layout: List<LayoutName>,

    /// Rounds of each measurement [default: 200 or 20 s, with --quick 10 or 2 s]
    #[arg(long, value_name = "N")]
    pub iters: Option<u32>,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench vmm                                    # GPU if there is one, else host memory
  kvbench vmm --quick --backend host
  kvbench vmm --backend cuda --device 1 --page-size 2M,32M --threads 4
  kvbench vmm --layers 80 --layout slab,per-layer
  KVCACHED_PAGE_SIZE_MB=2 kvbench vmm            # 2 MiB per layer and per K or V, in every layout

One page id holds a chunk of every layer's K and V. KVCACHED_PAGE_SIZE_MB sets that chunk in MiB; unset, slab chooses
it so that a page id is 16 to 32 MiB, and the other layouts take 2 MiB as kvcached does. The table shows what a page
id costs in memory.";

/// Measures, prints and keeps the result.
pub fn run(args: &VmmArgs) -> anyhow::Result<Outcome> {
    let backend = tidekv_mem::open(args.backend, args.device)?;
    let plan = Plan::of(args, &*backend)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("vmm", &plan, HostInfo::with_backend(backend.capabilities()))?;

    let progress = output.progress(plan.steps());
    let mut sizes = Vec::new();
    for &page_bytes in &plan.page_sizes {
        progress.now(format!("pages of {page_bytes}"));
        sizes.push(
            calls::measure(&backend, &plan, page_bytes).with_context(|| format!("measuring pages of {page_bytes}"))?,
        );
        progress.step();
    }
    let mut threads = None;
    if plan.threads > 1 {
        progress.now(format!("{} threads", plan.threads));
        threads = Some(threads::measure(&backend, &plan).context("measuring threads")?);
        progress.step();
    }
    progress.now("layouts");
    let layouts = layouts::measure(&backend, &plan, &progress).context("measuring layouts")?;
    drop(progress);

    report::fill(&mut result, &sizes, threads.as_ref(), &layouts);
    output.emit(&result, &report::tables(backend.capabilities(), &plan, &sizes, threads.as_ref(), &layouts))?;
    Ok(Outcome::Done)
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    backend: &'static str,
    device: u32,
    #[serde(serialize_with = "as_numbers")]
    page_sizes: Vec<Bytes>,
    pages: u32,
    threads: u32,
    layers: u32,
    block_size: u32,
    layouts: Vec<&'static str>,
    #[serde(skip)]
    layouts_measured: Vec<Layout>,
    /// `KVCACHED_PAGE_SIZE_MB`, if set.
    chunk_bytes: Option<u64>,
    #[serde(skip)]
    chunk: ChunkChoice,
    iters: u32,
    cap_s: Option<u64>,
}

impl Plan {
    fn of(args: &VmmArgs, backend: &dyn Backend) -> anyhow::Result<Self> {
        let within = |flag, value, most| {
            ensure!((1..=most).contains(&value), "{flag} is {value}: give 1 to {most}");
            Ok(value)
        };
        let page_size_mb = std::env::var("KVCACHED_PAGE_SIZE_MB").ok();
        let chunk = ChunkChoice::from_page_size_mb(page_size_mb.as_deref()).context("KVCACHED_PAGE_SIZE_MB")?;
        let quick = args.output.quick;
        let cap = if quick { QUICK_CAP } else { DEFAULT_CAP };
        let layouts_measured: Vec<Layout> = args.layout.iter().map(|name| name.0).collect();
        let plan = Self {
            backend: backend.capabilities().name,
            device: args.device,
            page_sizes: args.page_size.to_vec(),
            pages: within("--pages", args.pages, MAX_PAGES)?,
            threads: within("--threads", args.threads, MAX_THREADS)?,
            layers: within("--layers", args.layers, MAX_LAYERS)?,
            block_size: within("--block-size", args.block_size, MAX_BLOCK_TOKENS)?,
            layouts: layouts_measured.iter().map(|layout| layout.name()).collect(),
            layouts_measured,
            chunk_bytes: match chunk {
                ChunkChoice::Auto => None,
                ChunkChoice::Bytes(bytes) => Some(bytes.0),
            },
            chunk,
            iters: within("--iters", args.iters.unwrap_or(if quick { QUICK_ITERS } else { DEFAULT_ITERS }), MAX_ITERS)?,
            cap_s: args.iters.is_none().then_some(cap.as_secs()),
        };
        plan.check_memory(backend)?;
        // Every layout and page size is refused now rather than after minutes of measuring.
        for &page_bytes in &plan.page_sizes {
            drop(backend.raw_pages(page_bytes, 1)?);
        }
        for &layout in &plan.layouts_measured {
            layouts::geometry(&plan, layout, backend).with_context(|| format!("the {} layout", layout.name()))?;
        }
        Ok(plan)
    }

    /// Ours and the raw side hold their pages at the same time.
    fn check_memory(&self, backend: &dyn Backend) -> anyhow::Result<()> {
        let free = backend.memory()?.free;
        let copies = 2 * u64::from(self.pages) * u64::from(self.threads);
        for &page_bytes in &self.page_sizes {
            let needed = page_bytes.0.checked_mul(copies).map(Bytes);
            ensure!(
                needed.is_some_and(|needed| needed <= free),
                "{} pages of {page_bytes}, twice, do not fit into {free} of free memory: lower --pages, --threads or --page-size",
                self.pages * self.threads
            );
        }
        Ok(())
    }

    fn steps(&self) -> u64 {
        self.page_sizes.len() as u64 + u64::from(self.threads > 1) + u64::from(self.iters)
    }

    /// Rounds until all are done or the time is up, whichever is first; at least one.
    fn rounds(&self) -> impl Iterator<Item = u32> + use<> {
        let deadline = self.cap_s.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        (0..self.iters)
            .take_while(move |&round| round == 0 || deadline.is_none_or(|deadline| Instant::now() < deadline))
    }
}

fn as_numbers<S: serde::Serializer>(sizes: &[Bytes], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(sizes.iter().map(|bytes| bytes.0))
}

/// Shared by the measurements: the back-end behind an `Arc`, as reservations keep it.
type SharedBackend = Arc<dyn Backend>;
