//! A fixed sequence of random numbers (xorshift64), so that two runs do the same things in the same order.

/// The sequence.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of every benchmark.
    pub const fn new() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }

    /// Another sequence for each seed.
    pub const fn seeded(seed: u64) -> Self {
        // An odd multiplier keeps different seeds different; zero is the one state that xorshift never leaves.
        let state = Self::new().0 ^ seed.wrapping_mul(0xD134_2543_DE82_EF95);
        Self(if state == 0 { 1 } else { state })
    }

    /// The next number.
    pub const fn next_word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: usize) -> usize {
        // The high half: the low bits of xorshift are its weakest. The bias of a remainder is of no matter here.
        usize::try_from(self.next_word() >> 32).map_or(0, |number| number % bound)
    }

    /// A number of `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        let span = u64::from(high - low) + 1;
        low + u32::try_from((self.next_word() >> 32) % span).unwrap_or(0)
    }

    /// A number above 0 and at most 1, each of 2^53 as likely as any other.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub fn unit(&mut self) -> f64 {
        ((self.next_word() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Any order of the items, each as likely as any other.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_a_permutation() {
        let mut items: Vec<usize> = (0..1000).collect();
        Random::new().shuffle(&mut items);
        assert!(items.windows(2).any(|pair| pair[0] > pair[1]));
        items.sort_unstable();
        assert!(items.into_iter().eq(0..1000));
    }

    #[test]
    fn seeds_differ_and_repeat() {
        let first = |seed| Random::seeded(seed).next_word();
        assert_ne!(first(1), first(2));
        assert_eq!(first(7), first(7));
        assert!((0..100).all(|_| (3..=5).contains(&Random::new().between(3, 5))));
        let mut random = Random::new();
        assert!((0..1000).map(|_| random.unit()).all(|unit| unit > 0.0 && unit <= 1.0));
    }
}
