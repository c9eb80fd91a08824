//! `kvbench frag`: how much memory do a few retained blocks pin?
//!
//! Memory comes back in whole pages, and a page goes only when its last block does. So a cache of so many blocks may
//! cost many times their own bytes, and how many depends on where they lie:
//!
//! ```text
//!   page 0 [x...x...]  page 1 [...x....]  page 2 [.x....x.]     5 blocks kept, 3 pages pinned: waste 24 / 5
//!   page 0 [xxxxx...]  page 1 --          page 2 --             the same blocks packed: waste 8 / 5
//! ```
//!
//! | column      | the retained blocks                                                                       |
//! |-------------|-------------------------------------------------------------------------------------------|
//! | `scattered` | are a random share of a full pool; the rest was freed. No allocator can do better.         |
//! | `churned`   | were then replaced, one at a time: new ones go to the fullest pages, and emptier pages go.  |
//! | `evict age` | of the scattered ones, half was evicted, the oldest first                                  |
//! | `evict pages` | the same, but the blocks of the emptiest pages first                                     |
//!
//! | figure of `summary`           | meaning                                                       |
//! |-------------------------------|---------------------------------------------------------------|
//! | `waste.keep<p>`               | bytes pinned by pages / bytes of live blocks, scattered, p % kept |
//! | `churn_waste.keep<p>`         | the same after the churn                                      |
//! | `evict_waste.age.keep<p>`     | the same after evicting half by age                           |
//! | `evict_waste.pages.keep<p>`   | the same after evicting half by pages                         |

mod scenes;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_core::geometry::Capacity;
use tidekv_mem::BackendName;
use tidekv_pool::ReservePolicy;

use crate::host::HostInfo;
use crate::lab::{Lab, model};
use crate::list::List;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::table::{Table, format_figure};
use scenes::{Scene, Wastes};
use tidekv_cli::exit::Outcome;

const DEFAULT_PAGES: u32 = 512;
const QUICK_PAGES: u32 = 128;
const MAX_PAGES: u32 = 1_000_000;
const MAX_LAYERS: u32 = 10_000;

/// Arguments of `kvbench frag`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct FragArgs {
    /// Shares of the pool's blocks that are retained, in percent
    #[arg(long, value_name = "PERCENT,...", default_value = "1,5,10,25,50")]
    pub keep: List<u32>,

    /// Layers of the model (8 KV heads of 128, bf16, blocks of 16 tokens)
    #[arg(long, visible_alias = "num-layers", value_name = "N", default_value_t = 32)]
    pub layers: u32,

    /// Pages of the pool [default: 512, with --quick 128]
    #[arg(long, value_name = "N")]
    pub pages: Option<u32>,

    /// Memory behind the pool: fake (waste does not depend on it), host, cuda or auto
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
  kvbench frag
  kvbench frag --keep 2,20 --layers 80
  kvbench frag --backend host --pages 64      # real memory: 64 pages of 20 MiB";

/// Measures, prints and keeps the result.
pub fn run(args: &FragArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("frag", &plan, HostInfo::current())?;
    let backend = tidekv_mem::open(args.backend, args.device)?;
    let progress = output.progress(plan.keep.len() as u64);

    let lab = Lab::new()?;
    let geometry = model(&*backend, plan.layers, Capacity::Pages(plan.pages));
    let mut config = lab.config(backend.clone(), geometry, backend.memory()?.total);
    // Only what blocks pin is counted: nothing is kept ahead of demand.
    config.reserve = ReservePolicy::Fixed { min: 0, max: 0 };
    let scene = Scene::new(config)?;
    let mut rows = Vec::new();
    for &keep in &plan.keep {
        progress.now(format!("{keep} % kept"));
        rows.push(scene.measure(keep)?);
        progress.step();
    }
    drop(progress);

    rows.iter().for_each(|row| fill(&mut result, row));
    output.emit(&result, &table(&scene, &rows))?;
    Ok(Outcome::Done)
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    keep: Vec<u32>,
    layers: u32,
    pages: u32,
    backend: &'static str,
    device: u32,
}

impl Plan {
    fn of(args: &FragArgs) -> anyhow::Result<Self> {
        let default_pages = if args.output.quick { QUICK_PAGES } else { DEFAULT_PAGES };
        let plan = Self {
            keep: args.keep.to_vec(),
            layers: args.layers,
            pages: args.pages.unwrap_or(default_pages),
            backend: args.backend.name(),
            device: args.device,
        };
        for &keep in &plan.keep {
            ensure!((1..=100).contains(&keep), "--keep has {keep}: give 1 to 100 percent");
        }
        ensure!((1..=MAX_LAYERS).contains(&plan.layers), "--layers is {}: give 1 to {MAX_LAYERS}", plan.layers);
        ensure!((2..=MAX_PAGES).contains(&plan.pages), "--pages is {}: give 2 to {MAX_PAGES}", plan.pages);
        Ok(plan)
    }
}

fn fill(result: &mut BenchResult, row: &Wastes) {
    let keep = row.keep;
    result.set_figure(&format!("waste.keep{keep}"), row.scattered);
    result.set_figure(&format!("churn_waste.keep{keep}"), row.churned);
    result.set_figure(&format!("evict_waste.age.keep{keep}"), row.evicted_by_age);
    result.set_figure(&format!("evict_waste.pages.keep{keep}"), row.evicted_by_pages);
}

fn table(scene: &Scene, rows: &[Wastes]) -> String {
    let mut table = Table::new(&["kept", "blocks", "scattered", "churned", "evict age", "evict pages"]);
    for row in rows {
        let wastes = [row.scattered, row.churned, row.evicted_by_age, row.evicted_by_pages].map(format_figure);
        let [scattered, churned, age, pages] = wastes;
        table.row(&[format!("{} %", row.keep), row.blocks.to_string(), scattered, churned, age, pages]);
    }
    let geometry = scene.geometry();
    format!(
        "{}\nBytes pinned by pages over bytes of live blocks; {} pages of {}, {} blocks each.\n",
        table.render(),
        geometry.page_count(),
        geometry.page_bytes(),
        geometry.blocks_per_page()
    )
}
