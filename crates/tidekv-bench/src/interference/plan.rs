//! The checked arguments.

use anyhow::ensure;
use serde::Serialize;

use super::{InterferenceArgs, MapRate};
use crate::servers::drive::Lengths;
use crate::servers::kvserve::Backend;

/// Default and with `--quick`.
const PAIRS: (u32, u32) = (24, 6);
const OUTPUT_LEN: (u32, u32) = (256, 128);
const MAX_PAIRS: u32 = 1000;
const MAX_STREAMS: u32 = 1024;
const MAX_TOKENS: u32 = 1 << 16;
const MAX_PAGES: u32 = 1 << 20;

/// What is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    pub(super) model: String,
    pub(super) backend: Backend,
    pub(super) kv_budget_bytes: u64,
    pub(super) streams: u32,
    pub(super) lengths: Lengths,
    pub(super) map_rates: Vec<MapRate>,
    pub(super) map_batch: u32,
    pub(super) page_bytes: u64,
    pub(super) pages: u32,
    pub(super) touch: bool,
    pub(super) pairs: u32,
    #[serde(skip)]
    pub(super) tolerances: Tolerances,
    pub(super) seed: u64,
}

/// How far a median and a tail may move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerances {
    pub(super) median: crate::compare::judge::Tolerance,
    pub(super) tail: crate::compare::judge::Tolerance,
}

impl Plan {
    pub(super) fn of(args: &InterferenceArgs) -> anyhow::Result<Self> {
        let quick = args.output.quick;
        let pick = |(usual, when_quick): (u32, u32)| if quick { when_quick } else { usual };
        let model = match args.backend {
            Backend::Cpu => "synthetic:tiny",
            Backend::Cuda => "synthetic:llama-8b",
        };
        let usual = [MapRate::Pages(100.0), MapRate::Pages(1000.0), MapRate::Max];
        let plan = Self {
            model: args.model.clone().unwrap_or_else(|| model.to_owned()),
            backend: args.backend,
            kv_budget_bytes: args.kv_budget.0,
            streams: args.streams,
            lengths: Lengths {
                input: args.input_len,
                output: args.output_len.unwrap_or(pick(OUTPUT_LEN)),
                spread: 0.0,
            },
            map_rates: match &args.map_rate {
                Some(rates) => rates.to_vec(),
                None if quick => usual[..1].to_vec(),
                None => usual.to_vec(),
            },
            map_batch: args.map_batch,
            page_bytes: args.page_size.0,
            pages: args.pages,
            touch: args.touch,
            pairs: args.pairs.unwrap_or(pick(PAIRS)),
            tolerances: Tolerances { median: args.tolerance, tail: args.tail_tolerance },
            seed: args.seed,
        };
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> anyhow::Result<()> {
        let within = |flag: &str, value: u32, least: u32, most: u32| {
            ensure!((least..=most).contains(&value), "{flag} is {value}: give {least} to {most}");
            Ok(())
        };
        within("--streams", self.streams, 1, MAX_STREAMS)?;
        within("--input-len", self.lengths.input, 1, MAX_TOKENS)?;
        // Two tokens have one gap between them.
        within("--output-len", self.lengths.output, 2, MAX_TOKENS)?;
        within("--pairs", self.pairs, 1, MAX_PAIRS)?;
        within("--pages", self.pages, 1, MAX_PAGES)?;
        within("--map-batch", self.map_batch, 1, self.pages)?;
        ensure!(self.kv_budget_bytes > 0, "--kv-budget is 0");
        ensure!(self.page_bytes > 0, "--page-size is 0");
        Ok(())
    }

    /// What the neighbour holds at most: a batch more than it keeps, and one that is on its way out.
    pub(super) fn neighbour_pages(&self) -> u32 {
        self.pages + 2 * self.map_batch
    }

    /// How many slices there are.
    pub(super) fn slices(&self) -> u64 {
        self.map_rates.len() as u64 * 2 * u64::from(self.pairs)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser as _;

    use super::*;

    pub(in crate::interference) fn plan(line: &str) -> anyhow::Result<Plan> {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: InterferenceArgs,
        }
        let words = std::iter::once("interference").chain(line.split_whitespace());
        Plan::of(&Line::try_parse_from(words)?.args)
    }

    #[test]
    fn what_is_served_depends_on_where() {
        assert_eq!(plan("").unwrap().model, "synthetic:tiny");
        assert_eq!(plan("--backend cuda").unwrap().model, "synthetic:llama-8b");
        assert_eq!(plan("--backend cuda --model synthetic:qwen-0.5b").unwrap().model, "synthetic:qwen-0.5b");
    }

    #[test]
    fn a_quick_run_is_a_part_of_the_usual_one() {
        let (usual, quick) = (plan("").unwrap(), plan("--quick").unwrap());
        assert_eq!(usual.map_rates, [MapRate::Pages(100.0), MapRate::Pages(1000.0), MapRate::Max]);
        assert_eq!(quick.map_rates, [MapRate::Pages(100.0)]);
        assert_eq!((usual.slices(), quick.slices()), (144, 12));
        assert_eq!(plan("--map-rate 10,0.5,max --pairs 2").unwrap().slices(), 12);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (line, part) in [
            ("--streams 0", "--streams is 0"),
            ("--output-len 1", "--output-len is 1: give 2"),
            ("--pairs 0", "--pairs is 0"),
            ("--map-batch 17", "--map-batch is 17: give 1 to 16"),
            ("--map-rate 0", "not a rate"),
            ("--map-rate fast", "not a rate"),
            ("--page-size 0", "--page-size is 0"),
            ("--kv-budget 0", "--kv-budget is 0"),
        ] {
            let error = plan(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
