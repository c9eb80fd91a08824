//! Several real processes on one budget: races, shares, floors, kills and stops.
//!
//! One test at a time, because each of them wants the machine's cores to itself: bounds on waiting are asserted with
//! slack for a busy machine of two cores, and what was seen is printed (`cargo test -- --nocapture`). Speeds live in
//! `kvbench share`.
//!
//! | variable       | meaning                                                        | default |
//! |----------------|----------------------------------------------------------------|---------|
//! | `TIDEKV_RACES` | how often two processes race for the last page                 | 10000   |
//! | `TIDEKV_KILLS` | how many processes are killed in the middle of something       | 60      |

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests fail the test and print figures")]

mod kills;
mod race;
mod shares;
mod stopped;

use std::env;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidekv_bench::crew::{Crew, MemberId, Order, Refusal, Word};
use tidekv_bench::lab::{Lab, PoolSpec};
use tidekv_core::units::Bytes;

/// Small enough that mapping one costs little.
const PAGE: Bytes = Bytes::kib(64);

/// How long an answer may take that nothing stands in the way of.
const PATIENCE: Duration = Duration::from_secs(20);

/// Workers, their directory, and the right to be the only test that runs.
struct Stage {
    crew: Crew,
    lab: Lab,
    budget_pages: u32,
    _alone: MutexGuard<'static, ()>,
}

impl Stage {
    fn new(budget_pages: u32) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let crew = Crew::new(env!("CARGO_BIN_EXE_kvbench"));
        Self { crew, lab: Lab::new().unwrap(), budget_pages, _alone: alone }
    }

    /// A pool of this stage.
    fn spec(&self, name: &str) -> PoolSpec {
        PoolSpec::new(format!("kvcached_{name}"), self.lab.path(), PAGE, self.budget_pages)
    }

    fn start(&mut self, spec: PoolSpec) -> MemberId {
        self.crew.start(spec, PATIENCE).unwrap()
    }

    fn want(&mut self, id: MemberId, blocks: u32) {
        self.crew.send(id, &Order::Want { blocks, marks: Vec::new() }).unwrap();
    }

    /// Pages that a worker said it holds.
    fn held_pages(&self, id: MemberId) -> f64 {
        let bytes = self.crew.latest(id).map_or(0, |report| report.held_bytes);
        f64::from(u32::try_from(bytes / PAGE.0).unwrap())
    }
}

/// The outcome of a grab and how long it took.
fn grabbed(word: &Word) -> Option<(Option<Refusal>, Duration)> {
    match word {
        Word::Grabbed { refusal, us } => Some((refusal.clone(), Duration::from_micros(*us))),
        _ => None,
    }
}

fn number_of(variable: &str, default: u32) -> u32 {
    env::var(variable).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}")))
}
