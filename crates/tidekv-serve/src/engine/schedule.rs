//! How a step's tokens are shared out between the rows: a pure decision.
//!
//! ```text
//!   budget 8     row:        a    b    c    d            a and d have one token to compute: they are making text
//!                remaining:  1    9    20   1            b and c are still at their prompts
//!                query:      1    6    0    1            text first, so that nobody's stream stalls behind a long
//! ```                                                    prompt; then prompts, the oldest first, in chunks
//!
//! Whoever gets nothing keeps its row and its blocks and is served by the next step.

/// Query tokens for each row, given how many each still has to compute; rows are in the order of their age. There are
/// not more rows than `budget`.
pub(super) fn share_out(remaining: &[u32], budget: u32) -> Vec<u32> {
    let making_text = u32::try_from(remaining.iter().filter(|&&tokens| tokens == 1).count()).unwrap_or(u32::MAX);
    let mut left = budget.saturating_sub(making_text);
    let query = |&tokens: &u32| {
        if tokens == 1 {
            return 1;
        }
        let chunk = tokens.min(left);
        left -= chunk;
        chunk
    };
    remaining.iter().map(query).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_first_then_the_oldest_prompt() {
        assert_eq!(share_out(&[1, 9, 20, 1], 8), [1, 6, 0, 1]);
        assert_eq!(share_out(&[3, 2, 1], 100), [3, 2, 1]);
        assert_eq!(share_out(&[], 8), [0; 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn nothing_is_wasted_and_nobody_overtakes(
            remaining in prop::collection::vec(1u32..40, 0..20),
            spare in 0u32..60,
        ) {
            let budget = u32::try_from(remaining.len()).unwrap() + spare;
            let query = share_out(&remaining, budget);
            prop_assert!(query.iter().zip(&remaining).all(|(query, remaining)| query <= remaining));
            let used: u32 = query.iter().sum();
            prop_assert_eq!(used, budget.min(remaining.iter().sum()), "the budget is used while there is work");
            prop_assert!(query.iter().zip(&remaining).all(|(&query, &remaining)| remaining > 1 || query == 1));
            let prompts: Vec<_> = query.iter().zip(&remaining).filter(|(_, remaining)| **remaining > 1).collect();
            let cut = prompts.iter().position(|(query, remaining)| query < remaining).unwrap_or(prompts.len());
            prop_assert!(prompts.iter().skip(cut + 1).all(|(query, _)| **query == 0), "in the order of age");
        }
    }
}
