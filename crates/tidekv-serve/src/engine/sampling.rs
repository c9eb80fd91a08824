//! Which token comes next, given the logits.
//!
//! A request's random numbers are a function of its seed and of how many tokens it has made, not of a generator that
//! somebody advances: a request that was preempted and computed again, or that shares its steps with others, draws the
//! same ones.

use crate::compute::likeliest;
use crate::handle::{Sampling, TokenLogprob};

/// A token by the request's rules; `made` tokens were chosen before it.
pub(super) fn choose(logits: &[f32], sampling: &Sampling, seed: u64, made: u32) -> u32 {
    if sampling.temperature <= 0.0 {
        return likeliest(logits);
    }
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |&logit: &f32| (f64::from(logit - largest) / f64::from(sampling.temperature)).exp();
    let mut weights: Vec<(f64, u32)> = logits.iter().map(weight).zip(0..).collect();
    let total: f64 = weights.iter().map(|(weight, _)| weight).sum();
    if !total.is_finite() {
        return likeliest(logits);
    }
    let mut kept = total;
    if sampling.top_p < 1.0 {
        weights.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let wanted = f64::from(sampling.top_p) * total;
        let mut sum = 0.0;
        // The first is always kept, and the one that reaches the bound.
        let count = weights.iter().take_while(|(weight, _)| {
            let goes_on = sum < wanted;
            sum += if goes_on { *weight } else { 0.0 };
            goes_on
        });
        let count = count.count().max(1);
        weights.truncate(count);
        kept = weights.iter().map(|(weight, _)| weight).sum();
    }
    let mut left = unit(seed, made) * kept;
    for &(weight, id) in &weights {
        left -= weight;
        if left < 0.0 {
            return id;
        }
    }
    // Rounding left a little over: the last one that can be chosen at all.
    weights.iter().rev().find(|(weight, _)| *weight > 0.0).map_or_else(|| likeliest(logits), |&(_, id)| id)
}

/// How likely `id` was, and the `top` likeliest tokens.
pub(super) fn logprob(logits: &[f32], id: u32, top: u8) -> TokenLogprob {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    #[expect(clippy::cast_possible_truncation, reason = "rounded to the precision of the logits")]
    let of = |logit: f32| (f64::from(logit - largest) - sum.ln()) as f32;
    let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let top = usize::from(top).min(order.len());
    if top > 0 {
        order.select_nth_unstable_by(top - 1, likelier);
    }
    order.truncate(top);
    order.sort_unstable_by(likelier);
    let top = order.into_iter().map(|(id, logit)| (id, of(logit))).collect();
    TokenLogprob { logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&logit| of(logit)), top }
}

/// Evenly from 0 to 1, a function of both numbers (SplitMix64).
#[expect(clippy::cast_precision_loss, reason = "53 bits fit a 64-bit float exactly")]
fn unit(seed: u64, made: u32) -> f64 {
    let state = seed.wrapping_add(u64::from(made).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(temperature: f32, top_p: f32) -> Sampling {
        Sampling { temperature, top_p, seed: None }
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(choose(&[1.0, 3.0, 3.0, f32::NAN], &Sampling::GREEDY, 0, 0), 1);
        assert_eq!(choose(&[f32::NAN; 3], &Sampling::GREEDY, 0, 0), 0);
        assert_eq!(choose(&[f32::NAN; 3], &at(1.0, 0.5), 0, 0), 0);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0f32, 2f32.ln(), 5f32.ln()];
        let draw = |sampling: Sampling| {
            let mut counts = [0i32; 3];
            (0..8000).for_each(|made| counts[choose(&logits, &sampling, 42, made) as usize] += 1);
            counts
        };
        let plain = draw(at(1.0, 1.0));
        for (count, wanted) in plain.iter().zip([1000, 2000, 5000]) {
            assert!((count - wanted).abs() < 200, "{plain:?}");
        }
        assert_eq!(draw(at(1.0, 0.6)), [0, 0, 8000], "5 of 8 is enough for 0.6");
        let two = draw(at(1.0, 0.7));
        assert!(two[0] == 0 && two[1] > 2000, "the one that reaches the bound is kept: {two:?}");
        let cold = draw(at(0.1, 1.0));
        assert!(cold[2] > 7900, "{cold:?}");
    }

    #[test]
    fn a_seed_and_a_number_are_a_draw() {
        let logits = [0.0; 100];
        let draws = |seed| (0..50).map(|made| choose(&logits, &at(1.0, 1.0), seed, made)).collect::<Vec<_>>();
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }

    #[test]
    fn logarithms_of_probabilities() {
        let logits = [0.0f32, 2f32.ln(), 5f32.ln()];
        let said = logprob(&logits, 1, 2);
        assert!((said.logprob - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!(said.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 1]);
        assert!((said.top[0].1 - 0.625f32.ln()).abs() < 1e-6);
        assert_eq!(logprob(&logits, 0, 0).top, []);
        assert_eq!(logprob(&logits, 0, 255).top.len(), 3);
    }
}
