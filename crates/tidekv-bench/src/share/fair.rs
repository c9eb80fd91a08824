//! What each worker should hold: weighted max-min, one page at a time.
//!
//! Dull on purpose. The pools compute their shares with `tidekv_core::share`; what they are judged by must not be the
//! same code.

/// One worker's claim, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) weight: u32,
    pub(super) floor: u32,
    /// What it would hold if it could.
    pub(super) target: u32,
}

/// Fair shares of `budget` pages.
///
/// Floors are hard: what a worker does not want of its floor stays free for it, and is nobody else's. Of the rest, the
/// next page always goes to whoever has the fewest for its weight and wants more.
pub(super) fn shares(budget: u32, claims: &[Claim]) -> Vec<u32> {
    let mut shares: Vec<u32> = claims.iter().map(|claim| claim.floor.min(claim.target)).collect();
    let kept_free: u32 = claims.iter().map(|claim| claim.floor.saturating_sub(claim.target)).sum();
    let mut left = budget.saturating_sub(kept_free + shares.iter().sum::<u32>());
    while left > 0 {
        let hungry = claims.iter().enumerate().filter(|(worker, claim)| shares[*worker] < claim.target);
        // share / weight against the other's, without division.
        let poorest = hungry.min_by(|(a, claim_a), (b, claim_b)| {
            let [of_a, of_b] = [(*a, claim_b.weight), (*b, claim_a.weight)]
                .map(|(worker, weight)| u64::from(shares[worker]) * u64::from(weight));
            of_a.cmp(&of_b)
        });
        let Some((worker, _)) = poorest else { break };
        shares[worker] += 1;
        left -= 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(all: &[(u32, u32, u32)]) -> Vec<Claim> {
        all.iter().map(|&(weight, floor, target)| Claim { weight, floor, target }).collect()
    }

    #[test]
    fn by_weight_under_full_demand() {
        let all = claims(&[(1, 0, 400), (1, 0, 400), (2, 0, 400), (4, 0, 400)]);
        assert_eq!(shares(400, &all), [50, 50, 100, 200]);
    }

    #[test]
    fn what_one_does_not_want_the_others_get() {
        let all = claims(&[(1, 0, 10), (1, 0, 400), (2, 0, 400)]);
        assert_eq!(shares(400, &all), [10, 130, 260]);
    }

    #[test]
    fn an_idle_floor_is_nobody_elses() {
        let all = claims(&[(1, 40, 0), (1, 0, 400), (2, 0, 400)]);
        assert_eq!(shares(400, &all), [0, 120, 240]);
    }

    #[test]
    fn a_floor_above_the_share_is_kept() {
        let all = claims(&[(1, 200, 400), (1, 0, 400), (2, 0, 400)]);
        assert_eq!(shares(400, &all), [200, 67, 133]);
    }
}
