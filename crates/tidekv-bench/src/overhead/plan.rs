//! The checked arguments, and in which order slices are measured.

use anyhow::ensure;
use serde::Serialize;

use super::{OverheadArgs, Profile};
use crate::bench_config::BenchConfig;
use crate::servers::drive::Lengths;
use crate::servers::sides::{Arm, Sides};

const RATES: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
const QUICK_RATES: [f64; 2] = [8.0, 64.0];
/// Default and with `--quick`.
const PAIRS: (u32, u32) = (12, 6);
const SECONDS: (f64, f64) = (45.0, 8.0);
const WARMUP: (u32, u32) = (100, 20);
const MAX_PAIRS: u32 = 1000;
const MAX_SECONDS: f64 = 86_400.0;
const MAX_TOKENS: u32 = 1 << 20;

/// What is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    pub(super) a: String,
    pub(super) b: String,
    pub(super) names: [&'static str; 2],
    pub(super) rates: Vec<f64>,
    pub(super) saturated: u32,
    pub(super) profiles: Vec<ProfilePlan>,
    pub(super) pairs: u32,
    pub(super) seconds: f64,
    /// Requests of a rate and side, when the file says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) num_requests: Option<u32>,
    pub(super) tolerance: f64,
    pub(super) warmup_requests: u32,
    pub(super) seed: u64,
    pub(super) both_up: bool,
    pub(super) kv_budget_bytes: u64,
}

/// One kind of requests.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ProfilePlan {
    pub(super) name: &'static str,
    pub(super) lengths: Lengths,
}

/// A rate, or as fast as it goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Point {
    Rate(f64),
    /// So many requests under way, each followed by the next.
    Saturated(u32),
}

/// One measurement: a pair of slices is one of its samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) profile: usize,
    pub(super) point: Point,
}

/// A few seconds of one server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Turn {
    pub(super) pair: usize,
    pub(super) arm: Arm,
    /// Index among [`Plan::cells`].
    pub(super) cell: usize,
}

impl Plan {
    pub(super) fn of(args: &OverheadArgs) -> anyhow::Result<(Self, Sides)> {
        let config = args.sides.config.as_deref().map(BenchConfig::read).transpose()?;
        let quick = args.output.quick;
        let pick = |(usual, when_quick): (u32, u32)| if quick { when_quick } else { usual };
        let of_file = config.as_ref().map(|config| &config.benchmark);
        let rates = match (&args.rates, of_file) {
            (Some(rates), _) => rates.iter().map(|rate| rate.0).collect(),
            (None, Some(benchmark)) => benchmark.request_rates.clone(),
            (None, None) if quick => QUICK_RATES.to_vec(),
            (None, None) => RATES.to_vec(),
        };
        let lengths = |profile: Profile| {
            let usual = profile.lengths();
            let of_file = of_file.filter(|_| profile == Profile::Fixed);
            let input = args.input_len.or(of_file.map(|file| file.input_len)).unwrap_or(usual.input);
            let output = args.output_len.or(of_file.map(|file| file.output_len)).unwrap_or(usual.output);
            ProfilePlan { name: profile.name(), lengths: Lengths { input, output, spread: usual.spread } }
        };
        let mut profiles = args.profile.clone();
        profiles.dedup();
        let sides = Sides::of(&args.sides, config.as_ref())?;
        let plan = Self {
            a: sides.description(Arm::A),
            b: sides.description(Arm::B),
            names: sides.names,
            rates,
            saturated: args.saturated,
            profiles: profiles.into_iter().map(lengths).collect(),
            pairs: args.pairs.unwrap_or(pick(PAIRS)),
            seconds: args.seconds.unwrap_or(if quick { SECONDS.1 } else { SECONDS.0 }),
            // A first look, or a time that was asked for, goes before the file's number.
            num_requests: of_file.filter(|_| !quick && args.seconds.is_none()).map(|file| file.num_requests),
            tolerance: args.tolerance.share(),
            warmup_requests: args.warmup_requests.unwrap_or(pick(WARMUP)),
            seed: args.seed,
            both_up: sides.both_up,
            kv_budget_bytes: args.sides.kv_budget.0,
        };
        plan.check()?;
        Ok((plan, sides))
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!((1..=MAX_PAIRS).contains(&self.pairs), "--pairs is {}: give 1 to {MAX_PAIRS}", self.pairs);
        ensure!(self.seconds > 0.0 && self.seconds <= MAX_SECONDS, "--seconds is {}: give up to a day", self.seconds);
        for profile in &self.profiles {
            let Lengths { input, output, .. } = profile.lengths;
            let fits = (1..=MAX_TOKENS).contains(&input) && (1..=MAX_TOKENS).contains(&output);
            ensure!(fits, "a prompt of {input} and an answer of {output} tokens: give 1 to {MAX_TOKENS}");
        }
        Ok(())
    }

    pub(super) fn cells(&self) -> Vec<Cell> {
        let points = |profile: usize| {
            let rates = self.rates.iter().map(|&rate| Point::Rate(rate));
            let saturated = (self.saturated > 0).then_some(Point::Saturated(self.saturated));
            rates.chain(saturated).map(move |point| Cell { profile, point })
        };
        (0..self.profiles.len()).flat_map(points).collect()
    }

    /// All slices in their order. With both servers up, the slices of a pair are neighbours; with one at a time, a server
    /// that is up measures everything once before it makes room.
    pub(super) fn turns(&self) -> Vec<Turn> {
        let (cells, pairs) = (self.cells().len(), self.pairs as usize);
        let turn = |pair, arm, cell| Turn { pair, arm, cell };
        let mut turns = Vec::with_capacity(2 * cells * pairs);
        if self.both_up {
            for cell in 0..cells {
                turns.extend((0..pairs).flat_map(|pair| Arm::order(pair).map(|arm| turn(pair, arm, cell))));
            }
        } else {
            for pair in 0..pairs {
                turns.extend(
                    Arm::order(pair).into_iter().flat_map(|arm| (0..cells).map(move |cell| turn(pair, arm, cell))),
                );
            }
        }
        turns
    }

    /// How many slices there are.
    pub(super) fn slices(&self) -> u64 {
        u64::try_from(self.turns().len()).unwrap_or(u64::MAX)
    }

    /// Requests of one slice, when so many are served in a second.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded and clamped")]
    pub(super) fn requests(&self, point: Point, per_s: f64) -> usize {
        if let Some(requests) = self.num_requests {
            return requests.div_ceil(self.pairs) as usize;
        }
        (per_s * self.slice_seconds(point)).round().clamp(1.0, 1e6) as usize
    }

    /// Where little is sent there is little to take a median of: the lowest rates get more time.
    fn slice_seconds(&self, point: Point) -> f64 {
        let more = match point {
            Point::Rate(rate) if rate <= 1.0 => 2.0,
            Point::Rate(rate) if rate <= 2.0 => 1.5,
            Point::Rate(_) | Point::Saturated(_) => 1.0,
        };
        self.seconds * more / (2.0 * f64::from(self.pairs))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::overhead) fn plan(both_up: bool) -> Plan {
        Plan {
            a: String::new(),
            b: String::new(),
            names: ["static", "elastic"],
            rates: vec![1.0, 8.0],
            saturated: 4,
            profiles: vec![ProfilePlan { name: "fixed", lengths: Profile::Fixed.lengths() }],
            pairs: 2,
            seconds: 40.0,
            num_requests: None,
            tolerance: 0.03,
            warmup_requests: 0,
            seed: 0,
            both_up,
            kv_budget_bytes: 0,
        }
    }

    fn letters(plan: &Plan) -> String {
        plan.turns().iter().map(|turn| format!("{:?}{} ", turn.arm, turn.cell)).collect()
    }

    #[test]
    fn a_b_b_a_for_each_rate_where_both_are_up() {
        assert_eq!(letters(&plan(true)), "A0 B0 B0 A0 A1 B1 B1 A1 A2 B2 B2 A2 ");
    }

    #[test]
    fn a_server_measures_every_rate_before_it_makes_room() {
        assert_eq!(letters(&plan(false)), "A0 A1 A2 B0 B1 B2 B0 B1 B2 A0 A1 A2 ");
    }

    #[test]
    fn low_rates_get_more_time_and_a_file_says_how_many() {
        let mut plan = plan(true);
        let requests = |plan: &Plan, rate: f64| plan.requests(Point::Rate(rate), rate);
        assert_eq!([1.0, 2.0, 8.0].map(|rate| requests(&plan, rate)), [20, 30, 80]);
        plan.num_requests = Some(1001);
        assert_eq!(requests(&plan, 8.0), 501);
        assert_eq!(plan.slices(), 12);
    }
}
