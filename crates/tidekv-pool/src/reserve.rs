//! How many idle pages to keep: the decision alone, without clocks, locks or memory.
//!
//! ```text
//!   pages
//!     |                ___ peak             rise   = highest climb of pages in use within the last second
//!     |        ___----'      in use         target = rise, at least 1, at most the bound       (refill up to it)
//!     |  _----'
//!     |_/                                   trough = fewest idle pages of the last `decay` period
//!     +--------------------------> time     decay  = trough - target: pages that nobody needed all that time
//! ```
//!
//! A page that was idle for a whole period is one that even the busiest moment left over, so the *trough* of the idle
//! count says how many such pages there are without a time stamp on any of them; the page table gives the longest idle
//! ones first. The *rise* is directed: a pool that only shrinks has none, and a page that changes hands a million times
//! a second counts as one.
//!
//! | policy                | refilled when idle falls below | refilled up to | given back                              |
//! |-----------------------|--------------------------------|----------------|-----------------------------------------|
//! | [`ReservePolicy::Auto`]  | half of the target          | the target     | what was idle for a whole decay period  |
//! | [`ReservePolicy::Fixed`] | `min`                       | `min`          | what exceeds `max`, at once             |

use std::time::Duration;

use tidekv_core::units::Bytes;

/// The automatic reserve never exceeds this much memory, nor an eighth of the pool.
pub const AUTO_RESERVE_MAX: Bytes = Bytes::gib(1);

const DEMAND_WINDOW: Duration = Duration::from_secs(1);
const SLOTS: usize = 8;

/// How many idle pages a pool keeps mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReservePolicy {
    /// Grows with recent demand (enough for the pages taken in the last second, at most [`AUTO_RESERVE_MAX`] and an
    /// eighth of the pool) and decays to one page.
    #[default]
    Auto,
    /// kvcached's `KVCACHED_MIN_RESERVED_PAGES` and `KVCACHED_MAX_RESERVED_PAGES`.
    Fixed {
        /// Refilled when fewer are idle.
        min: u32,
        /// Given back when more are idle.
        max: u32,
    },
}

/// What the table saw since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Most pages in use since the last look.
    pub(crate) in_use_peak: u32,
    /// Pages in use now.
    pub(crate) in_use: u32,
    /// Fewest idle pages since the last look.
    pub(crate) idle_trough: u32,
    /// Idle pages now.
    pub(crate) idle: u32,
}

/// What to do now, and when to be asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Map so many pages ahead of demand.
    pub(crate) refill: u32,
    /// Give back so many of the longest idle pages.
    pub(crate) decay: u32,
    /// Ask again at once when fewer pages than this are idle.
    pub(crate) low: u32,
    /// Ask again at once when more pages than this are idle.
    pub(crate) high: u32,
    /// Ask again after this time even if nothing happens; `None` when nothing would change by waiting.
    pub(crate) again_after: Option<Duration>,
}

/// Remembers recent demand and decides on the reserve. Time is whatever the caller counts from.
#[derive(Debug)]
pub(crate) struct Reserve {
    policy: ReservePolicy,
    auto_max: u32,
    demand: Window,
    idleness: Window,
    /// The reserve was taken away (trim, a starved neighbour): no refill until pages are taken again.
    suppressed: bool,
}

impl Reserve {
    pub(crate) fn new(policy: ReservePolicy, page_count: u32, page_bytes: Bytes, decay: Duration) -> Self {
        let in_bytes = u32::try_from(AUTO_RESERVE_MAX.0 / page_bytes.0.max(1)).unwrap_or(u32::MAX);
        Self {
            policy,
            auto_max: in_bytes.min(page_count / 8).max(1),
            demand: Window::new(DEMAND_WINDOW),
            idleness: Window::new(decay),
            suppressed: false,
        }
    }

    /// No refill until the pool takes pages again.
    pub(crate) fn suppress(&mut self) {
        self.suppressed = true;
        // Demand from before does not count: what it had taken was just taken away.
        self.demand = Window::new(DEMAND_WINDOW);
    }

    /// Takes a sample of the moment `now` and decides.
    pub(crate) fn decide(&mut self, now: Duration, sample: Sample) -> Decision {
        self.demand.add(now, sample);
        self.idleness.add(now, sample);
        let rise = self.demand.rise();
        self.suppressed &= rise == 0;
        match self.policy {
            ReservePolicy::Auto => self.decide_auto(rise, sample),
            ReservePolicy::Fixed { min, max } => self.decide_fixed(min, max.max(min), sample),
        }
    }

    fn decide_auto(&self, rise: u32, sample: Sample) -> Decision {
        let target = rise.clamp(1, self.auto_max);
        let decay = self.idleness.trough().map_or(0, |trough| trough.min(sample.idle).saturating_sub(target));
        let settled = rise == 0 && sample.idle - decay <= target;
        let low = if self.suppressed { 0 } else { target.div_ceil(2) };
        Decision {
            refill: if sample.idle < low { target - sample.idle } else { 0 },
            decay,
            low,
            high: if settled { target } else { u32::MAX },
            again_after: (!settled).then(|| self.demand.slot.min(self.idleness.slot)),
        }
    }

    fn decide_fixed(&self, min: u32, max: u32, sample: Sample) -> Decision {
        let low = if self.suppressed { 0 } else { min };
        let decay = sample.idle.saturating_sub(max);
        Decision { refill: low.saturating_sub(sample.idle), decay, low, high: max, again_after: None }
    }
}

/// The last [`SLOTS`] pieces of a period, each with its own extremes.
#[derive(Debug)]
struct Window {
    slot: Duration,
    slots: [Slot; SLOTS],
    /// Number of the newest slot, counted from the start of time; `None` before the first sample.
    newest: Option<u128>,
    first: u128,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Fewest pages in use at a look in this slot.
    in_use_low: u32,
    in_use_peak: u32,
    idle_trough: u32,
}

impl Window {
    fn new(period: Duration) -> Self {
        let slot = (period / u32::try_from(SLOTS).unwrap_or(1)).max(Duration::from_millis(1));
        Self { slot, slots: [Slot::default(); SLOTS], newest: None, first: 0 }
    }

    fn add(&mut self, now: Duration, sample: Sample) {
        let number = now.as_nanos() / self.slot.as_nanos();
        let Some(newest) = self.newest else {
            self.first = number;
            self.newest = Some(number);
            *self.at(number) = Slot::now(sample);
            return;
        };
        // Time without a sample: nothing was seen to change, so what this sample saw held all along.
        let begin = number.saturating_sub(SLOTS as u128 - 1).max(newest + 1);
        for skipped in begin..=number {
            *self.at(skipped) = Slot::of(sample);
        }
        let slot = self.at(number.max(newest));
        slot.in_use_low = slot.in_use_low.min(sample.in_use);
        slot.in_use_peak = slot.in_use_peak.max(sample.in_use_peak);
        slot.idle_trough = slot.idle_trough.min(sample.idle_trough);
        self.newest = Some(number.max(newest));
    }

    fn at(&mut self, number: u128) -> &mut Slot {
        let index = usize::try_from(number % SLOTS as u128).unwrap_or(0);
        &mut self.slots[index]
    }

    /// The slots that were filled, oldest first.
    fn filled(&self) -> impl Iterator<Item = &Slot> {
        let numbers = self.newest.map(|newest| newest.saturating_sub(SLOTS as u128 - 1).max(self.first)..=newest);
        numbers.into_iter().flatten().map(|number| &self.slots[usize::try_from(number % SLOTS as u128).unwrap_or(0)])
    }

    /// The highest climb of pages in use: from a low to a later peak.
    fn rise(&self) -> u32 {
        let mut low = u32::MAX;
        let mut rise = 0;
        for slot in self.filled() {
            // Within a slot the low may come after the peak, so a slot climbs from the lows before it, or its own
            // start where it is the first.
            let from = if low == u32::MAX { slot.in_use_low } else { low };
            rise = rise.max(slot.in_use_peak.saturating_sub(from));
            low = from.min(slot.in_use_low);
        }
        rise
    }

    /// The fewest idle pages of a whole period, once a whole period has been seen.
    fn trough(&self) -> Option<u32> {
        let newest = self.newest?;
        (newest - self.first >= SLOTS as u128).then(|| self.filled().map(|slot| slot.idle_trough).min()).flatten()
    }
}

impl Slot {
    /// The first slot of all: what came before is not known.
    fn now(sample: Sample) -> Self {
        Self { in_use_low: sample.in_use, in_use_peak: sample.in_use, idle_trough: sample.idle }
    }

    fn of(sample: Sample) -> Self {
        Self { in_use_low: sample.in_use, in_use_peak: sample.in_use_peak, idle_trough: sample.idle_trough }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: Bytes = Bytes::mib(18);
    const DECAY: Duration = Duration::from_secs(2);

    fn auto() -> Reserve {
        Reserve::new(ReservePolicy::Auto, 1000, PAGE, DECAY)
    }

    fn steady(in_use: u32, idle: u32) -> Sample {
        Sample { in_use_peak: in_use, in_use, idle_trough: idle, idle }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_new_pool_gets_one_page_and_then_rests() {
        let mut reserve = auto();
        assert_eq!(reserve.decide(ms(0), steady(1, 0)).refill, 1);
        let settled = reserve.decide(ms(1), steady(1, 1));
        assert_eq!(settled, Decision { refill: 0, decay: 0, low: 1, high: 1, again_after: None });
    }

    #[test]
    fn the_reserve_follows_a_burst_and_comes_back_to_one_page() {
        let mut reserve = auto();
        reserve.decide(ms(0), steady(1, 1));
        let burst = reserve.decide(ms(300), Sample { in_use_peak: 21, in_use: 21, idle_trough: 0, idle: 0 });
        assert_eq!((burst.refill, burst.low), (20, 10));
        // The burst is over: 20 reserved pages and 20 freed ones idle for a whole period.
        let mut decayed = 0;
        let mut idle = 40;
        for tick in 0..40 {
            let decision = reserve.decide(ms(400 + tick * 125), steady(1, idle));
            assert_eq!(decision.refill, 0);
            decayed += decision.decay;
            idle -= decision.decay;
        }
        assert_eq!((decayed, idle), (39, 1));
    }

    #[test]
    fn nothing_decays_before_its_time() {
        let mut reserve = auto();
        for tick in 0..DECAY.as_millis() / 125 {
            let now = ms(u64::try_from(tick).unwrap() * 125);
            assert_eq!(reserve.decide(now, steady(0, 30)).decay, 0, "{now:?}");
        }
        assert_eq!(reserve.decide(DECAY, steady(0, 30)).decay, 29);
    }

    #[test]
    fn a_dip_of_the_idle_count_between_looks_is_seen() {
        let mut reserve = auto();
        for tick in 0..32 {
            let dipped = Sample { in_use_peak: 9, in_use: 5, idle_trough: 1, idle: 5 };
            assert_eq!(reserve.decide(ms(tick * 125), dipped).decay, 0, "all five pages are needed now and then");
        }
    }

    #[test]
    fn a_suppressed_reserve_waits_for_the_next_page_taken() {
        let mut reserve = auto();
        reserve.decide(ms(0), steady(1, 1));
        reserve.decide(ms(5), steady(3, 1));
        reserve.suppress();
        assert_eq!(
            reserve.decide(ms(10), steady(3, 0)),
            Decision { refill: 0, decay: 0, low: 0, high: 1, again_after: None }
        );
        assert_eq!(reserve.decide(ms(20), steady(4, 0)).refill, 1);
    }

    #[test]
    fn fixed_bounds_keep_their_meaning() {
        let mut reserve = Reserve::new(ReservePolicy::Fixed { min: 5, max: 10 }, 1000, PAGE, DECAY);
        assert_eq!(reserve.decide(ms(0), steady(0, 2)).refill, 3);
        assert_eq!(reserve.decide(ms(1), steady(0, 7)).refill, 0);
        assert_eq!(reserve.decide(ms(2), steady(0, 10)).decay, 0);
        assert_eq!(reserve.decide(ms(3), steady(0, 14)).decay, 4);
        let mut none = Reserve::new(ReservePolicy::Fixed { min: 0, max: 0 }, 1000, PAGE, DECAY);
        assert_eq!(none.decide(ms(0), steady(0, 1)).decay, 1);
        assert_eq!(none.decide(ms(0), steady(0, 0)).refill, 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn decisions_are_possible_and_bounded(
            looks in prop::collection::vec((0u64..700, 0u32..300, 0u32..50, 0u32..300, 0u32..50), 1..60),
            page_count in 1u32..2000,
        ) {
            let mut reserve = Reserve::new(ReservePolicy::Auto, page_count, PAGE, DECAY);
            let bound = reserve.auto_max;
            let mut now = Duration::ZERO;
            for (wait, in_use, above, idle, below) in looks {
                now += ms(wait);
                let sample = Sample { in_use_peak: in_use + above, in_use, idle_trough: idle.saturating_sub(below), idle };
                let decision = reserve.decide(now, sample);
                prop_assert!(decision.refill <= bound && decision.decay <= sample.idle_trough);
                prop_assert!(decision.refill == 0 || decision.decay == 0, "never both ways at once");
                prop_assert!(idle - decision.decay >= 1 || idle == 0, "one page always stays");
                prop_assert!(decision.low <= decision.high && decision.low <= bound);
            }
        }

        /// Whatever happened before, a pool that is left alone ends with one idle page and no timer.
        #[test]
        fn every_history_ends_at_one_page(
            looks in prop::collection::vec((0u64..700, 0u32..300, 0u32..300), 1..40),
        ) {
            let mut reserve = auto();
            let (mut now, mut idle, mut in_use) = (Duration::ZERO, 0, 0);
            for (wait, used, left) in looks {
                now += ms(wait);
                (in_use, idle) = (used, left);
                reserve.decide(now, steady(in_use, idle));
            }
            let mut last = None;
            for _ in 0..60 {
                let decision = reserve.decide(now, steady(in_use, idle));
                idle = idle + decision.refill - decision.decay;
                last = decision.again_after;
                now += last.unwrap_or(ms(100));
            }
            prop_assert_eq!((idle, last), (1, None));
        }
    }
}
