//! Sharing by targets: who misses its target because memory is short gets a larger weight, and gives it back when it is well.
//!
//! ```text
//!   look every few seconds:   misses its target, and memory is what it lacks  ──> weight * 3/2, at most 8 times its own
//!                             well within it, three looks in a row            ──> back towards its own weight, by a third
//!                             anything else                                   ──> as it is
//! ```
//!
//! Weights alone are changed. Floors are kept by the ledger before weights are looked at, and a limit holds whatever the weight is, so
//! both win over every decision made here. A pool that waits for nothing is left alone: no weight would make it faster.
//! Pure: it is told what was seen and says what to do and why.

use std::collections::BTreeMap;

/// What a model's answers should be like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SloTarget {
    /// The 99th percentile of the time to the first token.
    pub ttft_ms: f64,
}

/// What was seen of a model with a target.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) model: String,
    pub(crate) pool: String,
    pub(crate) target: SloTarget,
    /// None where nothing was answered lately.
    pub(crate) ttft_p99_ms: Option<f64>,
    /// Requests that wait in the router.
    pub(crate) queued: usize,
    /// What the pool asked for and did not get.
    pub(crate) demand_bytes: u64,
    pub(crate) weight: u32,
}

/// What to do, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) model: String,
    pub(crate) pool: String,
    pub(crate) weight: u32,
    pub(crate) reason: String,
}

/// At most so many times its own weight.
const MOST: u32 = 8;
/// Well within its target: below this part of it.
const SLACK: f64 = 0.5;
/// Looks in a row that must be well before a weight goes back.
const CALM_LOOKS: u32 = 3;

/// Remembers the weights that pools had of their own, and for how long each was well.
#[derive(Debug, Default)]
pub(crate) struct Controller {
    pools: BTreeMap<String, Remembered>,
}

#[derive(Debug)]
struct Remembered {
    own_weight: u32,
    /// What we set last: another weight is an operator's, and becomes the pool's own.
    set: u32,
    calm: u32,
}

impl Controller {
    /// One look at all models that have a target.
    pub(crate) fn decide(&mut self, seen: &[Seen]) -> Vec<Decision> {
        // A pool that is gone, or is somebody else's now, is forgotten.
        self.pools.retain(|pool, _| seen.iter().any(|seen| seen.pool == *pool));
        seen.iter().filter_map(|seen| self.decide_one(seen)).collect()
    }

    fn decide_one(&mut self, seen: &Seen) -> Option<Decision> {
        let known = self.pools.entry(seen.pool.clone()).or_insert(Remembered {
            own_weight: seen.weight,
            set: seen.weight,
            calm: 0,
        });
        if seen.weight != known.set {
            *known = Remembered { own_weight: seen.weight, set: seen.weight, calm: 0 };
        }
        let ttft = seen.ttft_p99_ms.unwrap_or(0.0);
        let is_late = ttft > seen.target.ttft_ms || seen.queued > 0;
        let lacks_memory = seen.demand_bytes > 0;
        let is_calm = ttft < seen.target.ttft_ms * SLACK && seen.queued == 0 && !lacks_memory;
        known.calm = if is_calm { known.calm + 1 } else { 0 };

        let most = known.own_weight.saturating_mul(MOST);
        let (weight, reason) = if is_late && lacks_memory {
            let weight = (seen.weight.saturating_mul(3) / 2).max(seen.weight.saturating_add(1)).min(most);
            let reason = format!(
                "TTFT p99 {ttft:.0} ms against a target of {:.0} ms, {} queued, {} MiB asked for and not got",
                seen.target.ttft_ms,
                seen.queued,
                seen.demand_bytes >> 20
            );
            (weight, reason)
        } else if known.calm >= CALM_LOOKS && seen.weight > known.own_weight {
            known.calm = 0;
            let excess = seen.weight - known.own_weight;
            let weight = seen.weight - excess.div_ceil(3);
            (weight, format!("TTFT p99 {ttft:.0} ms, well within {:.0} ms, and nothing waits", seen.target.ttft_ms))
        } else {
            return None;
        };
        if weight == seen.weight {
            return None;
        }
        known.set = weight;
        Some(Decision { model: seen.model.clone(), pool: seen.pool.clone(), weight, reason })
    }

    /// The decision could not be carried out: the weight is as it was.
    pub(crate) fn undo(&mut self, pool: &str, weight: u32) {
        if let Some(known) = self.pools.get_mut(pool) {
            known.set = weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seen(ttft: f64, queued: usize, demand_bytes: u64, weight: u32) -> Seen {
        Seen {
            model: "m".to_owned(),
            pool: "p".to_owned(),
            target: SloTarget { ttft_ms: 100.0 },
            ttft_p99_ms: Some(ttft),
            queued,
            demand_bytes,
            weight,
        }
    }

    #[test]
    fn late_for_lack_of_memory_gets_more_and_gives_it_back() {
        let mut controller = Controller::default();
        let late = |weight| seen(250.0, 2, 64 << 20, weight);
        let first = controller.decide(&[late(4)]);
        assert_eq!(first[0].weight, 6);
        assert_eq!(
            first[0].reason,
            "TTFT p99 250 ms against a target of 100 ms, 2 queued, 64 MiB asked for and not got"
        );
        assert_eq!(controller.decide(&[late(6)])[0].weight, 9);
        let calm = |weight| seen(20.0, 0, 0, weight);
        assert!(controller.decide(&[calm(9)]).is_empty());
        assert!(controller.decide(&[calm(9)]).is_empty());
        assert_eq!(controller.decide(&[calm(9)])[0].weight, 7, "a third of what is above its own, rounded up");
    }

    #[test]
    fn no_weight_helps_where_memory_is_not_what_is_missing() {
        let mut controller = Controller::default();
        for _ in 0..10 {
            assert!(controller.decide(&[seen(900.0, 50, 0, 1)]).is_empty());
            assert!(controller.decide(&[seen(60.0, 0, 1 << 20, 1)]).is_empty(), "in time: it may wait for memory");
        }
    }

    #[test]
    fn an_operators_weight_is_the_new_own_weight() {
        let mut controller = Controller::default();
        assert_eq!(controller.decide(&[seen(200.0, 0, 1, 1)])[0].weight, 2);
        // Somebody says 10: that is where it comes back to.
        for _ in 0..20 {
            assert!(controller.decide(&[seen(1.0, 0, 0, 10)]).is_empty());
        }
    }

    proptest! {
        /// Whatever is seen: never below its own weight, never above eight times it, and calm brings it back.
        #[test]
        fn weights_stay_in_bounds_and_come_back(
            own in 1u32..1000,
            looks in prop::collection::vec((0.0f64..500.0, 0usize..3, 0u64..3), 0..200),
        ) {
            let mut controller = Controller::default();
            let mut weight = own;
            for (ttft, queued, demand) in looks {
                for decision in controller.decide(&[seen(ttft, queued, demand, weight)]) {
                    prop_assert_ne!(decision.weight, weight);
                    weight = decision.weight;
                }
                prop_assert!((own..=own * MOST).contains(&weight), "{} of {}", weight, own);
            }
            for _ in 0..200 {
                for decision in controller.decide(&[seen(1.0, 0, 0, weight)]) {
                    weight = decision.weight;
                }
            }
            prop_assert_eq!(weight, own);
        }
    }
}
