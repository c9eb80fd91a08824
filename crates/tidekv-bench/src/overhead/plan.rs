//! The checked arguments: what is measured, and how long a slice of it is.

use anyhow::ensure;
use serde::Serialize;

use super::{OverheadArgs, Profile};
use crate::bench_config::BenchConfig;
use crate::servers::drive::Lengths;
use crate::servers::sides::{Arm, Sides};

const RATES: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
const QUICK_RATES: [f64; 2] = [8.0, 64.0];
/// Default and with `--quick`.
const MINUTES: (f64, f64) = (9.0, 0.75);
/// Many and short: a machine that hiccups for a second spoils one of them, and ranks leave that one out.
const ROUNDS_WITHIN: (u32, u32) = (24, 6);
/// Servers that make room for each other start twice in each.
const ROUNDS_FIXED: (u32, u32) = (10, 6);
const SECONDS: (f64, f64) = (45.0, 8.0);
const WARMUP: (u32, u32) = (100, 20);
const MAX_ROUNDS: u32 = 1000;
const MAX_SECONDS: f64 = 86_400.0;
const MAX_TOKENS: u32 = 1 << 20;

/// A slice: so short that what the machine does besides meets both sides of a pair (a neighbour on the same core comes and goes
/// within a second), so long that requests meet each other as they do at this rate.
const SLICE_S: f64 = 0.125;
const SLICE_ANSWERS: f64 = 5.0;
const MAX_SLICE_S: f64 = 20.0;
/// Without pause a slice begins and ends with fewer requests under way: that is to be its smaller part.
const SATURATED_S: f64 = 0.5;
const SATURATED_TURNS: f64 = 8.0;

/// What is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    pub(super) a: String,
    pub(super) b: String,
    pub(super) names: [&'static str; 2],
    pub(super) rates: Vec<f64>,
    pub(super) saturated: u32,
    pub(super) profiles: Vec<ProfilePlan>,
    #[serde(flatten)]
    pub(super) design: Design,
    /// Requests of a rate and side, when the file says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) num_requests: Option<u32>,
    pub(super) tolerance: f64,
    pub(super) warmup_requests: u32,
    pub(super) seed: u64,
    pub(super) both_up: bool,
    pub(super) kv_budget_bytes: u64,
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Design {
    /// So many rounds, and so long for each rate in all of them together.
    Fixed { rounds: u32, seconds: f64 },
    /// All rates and rounds together, as it is needed.
    Within {
        minutes: f64,
        #[serde(skip)]
        rounds: u32,
    },
}

impl Design {
    pub(super) fn rounds(self) -> u32 {
        match self {
            Self::Fixed { rounds, .. } | Self::Within { rounds, .. } => rounds,
        }
    }
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

/// One measurement: a round of it is one of its samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) profile: usize,
    pub(super) point: Point,
}

/// What warming up has shown of a profile, by the slower side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Speed {
    /// Answers a second without pause.
    pub(super) per_s: f64,
    /// Seconds of one answer that has the server to itself.
    pub(super) alone_s: f64,
}

/// How a slice looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Slice {
    pub(super) requests: usize,
    /// About as long as it takes.
    pub(super) seconds: f64,
}

impl Plan {
    pub(super) fn of(args: &OverheadArgs) -> anyhow::Result<(Self, Sides)> {
        let config = args.sides.config.as_deref().map(BenchConfig::read).transpose()?;
        let quick = args.output.quick;
        let pick = |(usual, when_quick): (u32, u32)| if quick { when_quick } else { usual };
        let pick_f64 = |(usual, when_quick): (f64, f64)| if quick { when_quick } else { usual };
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
        // A first look, or a time that was asked for, goes before the file's number.
        let has_time = quick || args.seconds.is_some() || args.minutes.is_some();
        let num_requests = of_file.filter(|_| !has_time).map(|file| file.num_requests);
        // Servers that make room for each other take a start for every round, and nobody knows how long that is.
        let is_fixed = args.rounds.is_some() || args.seconds.is_some() || num_requests.is_some() || !sides.both_up;
        let rounds = |usual| args.rounds.unwrap_or(pick(usual));
        let design = match args.minutes {
            None if is_fixed => {
                let seconds = args.seconds.unwrap_or(pick_f64(SECONDS));
                Design::Fixed { rounds: rounds(ROUNDS_FIXED), seconds }
            }
            minutes => {
                let minutes = minutes.unwrap_or(pick_f64(MINUTES));
                Design::Within { minutes, rounds: rounds(ROUNDS_WITHIN) }
            }
        };
        let plan = Self {
            a: sides.description(Arm::A),
            b: sides.description(Arm::B),
            names: sides.names,
            rates,
            saturated: args.saturated,
            profiles: profiles.into_iter().map(lengths).collect(),
            design,
            num_requests,
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
        let rounds = self.design.rounds();
        ensure!((1..=MAX_ROUNDS).contains(&rounds), "--rounds is {rounds}: give 1 to {MAX_ROUNDS}");
        let (flag, seconds) = match self.design {
            Design::Fixed { seconds, .. } => ("--seconds", seconds),
            Design::Within { minutes, .. } => ("--minutes", minutes * 60.0),
        };
        ensure!(seconds > 0.0 && seconds <= MAX_SECONDS, "{flag} comes to {seconds} s: give up to a day");
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

    /// A slice at a point, no longer than `most_s`.
    pub(super) fn slice(&self, point: Point, speed: Speed, most_s: f64) -> Slice {
        let seconds = (SLICE_ANSWERS * speed.alone_s).clamp(SLICE_S, MAX_SLICE_S);
        match point {
            Point::Rate(rate) => {
                let requests = whole(rate * seconds.min(most_s));
                Slice { requests, seconds: to_f64(requests) / rate.min(speed.per_s) }
            }
            Point::Saturated(under_way) => {
                let turns_s = SATURATED_TURNS * f64::from(under_way) / speed.per_s;
                let requests = whole(speed.per_s * seconds.max(SATURATED_S).max(turns_s).min(most_s));
                Slice { requests, seconds: to_f64(requests) / speed.per_s }
            }
        }
    }

    /// Where little is sent there is little to take a median of: until it is known better, the lowest rates get more time.
    pub(super) fn weight(point: Point) -> f64 {
        match point {
            Point::Rate(rate) if rate <= 1.0 => 2.0,
            Point::Rate(rate) if rate <= 2.0 => 1.5,
            Point::Rate(_) | Point::Saturated(_) => 1.0,
        }
    }
}

/// At least one.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded and clamped")]
pub(super) fn whole(number: f64) -> usize {
    number.round().clamp(1.0, 1e6) as usize
}

fn to_f64(number: usize) -> f64 {
    crate::stats::to_f64(number as u64)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::overhead) fn plan(design: Design) -> Plan {
        Plan {
            a: String::new(),
            b: String::new(),
            names: ["static", "elastic"],
            rates: vec![1.0, 8.0],
            saturated: 4,
            profiles: vec![ProfilePlan { name: "fixed", lengths: Profile::Fixed.lengths() }],
            design,
            num_requests: None,
            tolerance: 0.03,
            warmup_requests: 0,
            seed: 0,
            both_up: true,
            kv_budget_bytes: 0,
        }
    }

    #[test]
    fn slices_are_short_and_longer_than_their_answers() {
        let plan = plan(Design::Fixed { rounds: 2, seconds: 40.0 });
        let fast = Speed { per_s: 150.0, alone_s: 0.01 };
        let requests = |point, speed, most_s| plan.slice(point, speed, most_s).requests;
        assert_eq!([1.0, 8.0, 16.0, 64.0].map(|rate| requests(Point::Rate(rate), fast, 60.0)), [1, 1, 2, 8]);
        assert_eq!(requests(Point::Saturated(16), fast, 60.0), 128);
        // An answer of a second: at 8 a second some forty of them are under way, and a slice must be longer than that takes.
        let slow = Speed { per_s: 150.0, alone_s: 1.0 };
        assert_eq!(requests(Point::Rate(8.0), slow, 60.0), 40);
        assert_eq!(requests(Point::Saturated(256), fast, 60.0), 2048);
        assert_eq!(requests(Point::Rate(8.0), slow, 0.25), 2, "whoever asks for little time gets little");
    }

    #[test]
    fn a_slice_says_how_long_it_takes_even_where_a_server_cannot_keep_up() {
        let plan = plan(Design::Fixed { rounds: 2, seconds: 40.0 });
        let slow = Speed { per_s: 32.0, alone_s: 0.01 };
        assert_eq!(plan.slice(Point::Rate(128.0), slow, 60.0), Slice { requests: 16, seconds: 0.5 });
        assert_eq!(plan.slice(Point::Rate(4.0), slow, 60.0), Slice { requests: 1, seconds: 0.25 });
    }
}
