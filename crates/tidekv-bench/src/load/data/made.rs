//! Prompts made from seeds.

use std::fmt::Write as _;

use crate::random::Random;

/// A prompt as a recipe: segments one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The segments.
    pub segments: Vec<Segment>,
    /// How it is sent.
    pub form: Form,
    /// What it is drawn from.
    pub vocabulary: Vocabulary,
}

/// A part of a prompt: the same tokens wherever the same seed and vocabulary stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its seed.
    pub seed: u64,
    /// Its length.
    pub tokens: u32,
}

/// How a made prompt is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// As token numbers: exactly as long as it was asked to be.
    Tokens,
    /// As English words: about as many tokens as words.
    Words,
}

/// The token numbers that made prompts have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Vocabulary {
    /// The smallest. What lies below is where many tokenizers keep their special tokens.
    pub first: u32,
    /// How many there are, counted from the smallest.
    pub count: u32,
}

impl Default for Vocabulary {
    /// Numbers that every vocabulary has, one of single bytes included.
    fn default() -> Self {
        Self { first: 10, count: 240 }
    }
}

impl Made {
    /// The same recipe for a run with this seed.
    #[must_use]
    pub(super) fn seeded(mut self, seed: u64) -> Self {
        for segment in &mut self.segments {
            segment.seed = mixed(segment.seed, seed);
        }
        self
    }

    /// Its token numbers.
    pub fn tokens(&self) -> Vec<u32> {
        let mut tokens = Vec::new();
        self.for_each(self.vocabulary.count.max(1), |number| tokens.push(self.vocabulary.first + number));
        tokens
    }

    /// Its words.
    pub fn words(&self) -> String {
        let mut text = String::new();
        let count = u32::try_from(WORDS.len()).unwrap_or(u32::MAX);
        self.for_each(count, |number| {
            let word = usize::try_from(number).map_or(WORDS[0], |index| WORDS[index]);
            let space = if text.is_empty() { "" } else { " " };
            // Writing to a string does not fail.
            let _ = write!(text, "{space}{word}");
        });
        text
    }

    fn for_each(&self, count: u32, mut each: impl FnMut(u32)) {
        for segment in &self.segments {
            let mut random = Random::seeded(segment.seed);
            (0..segment.tokens).for_each(|_| each(random.between(0, count - 1)));
        }
    }
}

/// Two seeds as one that depends on every bit of both.
pub fn mixed(a: u64, b: u64) -> u64 {
    // Multiply and shift until neighbouring inputs have nothing in common.
    let mut word = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.rotate_left(32).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    for factor in [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB] {
        word = (word ^ (word >> 31)).wrapping_mul(factor);
    }
    word ^ (word >> 29)
}

/// Common words, each a token of its own in the vocabularies of today.
const WORDS: [&str; 128] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were", "all",
    "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no", "more", "if",
    "out", "so", "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other", "time", "new",
    "some", "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now", "over", "such", "our",
    "man", "me", "even", "most", "made", "after", "also", "well", "did", "many", "before", "must", "years", "back",
    "through", "much", "where", "your", "way", "down", "should", "because", "long", "each", "just", "state", "those",
    "people", "too", "little", "world", "still", "own", "work", "life", "day", "get", "here", "old", "between", "both",
    "being", "under", "three", "never", "know", "same", "last", "us", "house",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn made(segments: &[(u64, u32)]) -> Made {
        let segments = segments.iter().map(|&(seed, tokens)| Segment { seed, tokens }).collect();
        Made { segments, form: Form::Words, vocabulary: Vocabulary { first: 100, count: 50 } }
    }

    #[test]
    fn a_segment_is_the_same_wherever_it_stands() {
        let (a, b) = (made(&[(1, 5), (2, 5)]).tokens(), made(&[(2, 5), (1, 3)]).tokens());
        assert_eq!((a.len(), b.len()), (10, 8));
        assert_eq!(a[5..], b[..5]);
        assert_eq!(a[..3], b[5..], "a shorter segment is the beginning of a longer one");
        assert!(a.iter().all(|token| (100..150).contains(token)));
    }

    #[test]
    fn words_are_words() {
        let text = made(&[(1, 200)]).words();
        assert_eq!(text.split(' ').count(), 200);
        assert!(text.split(' ').all(|word| WORDS.contains(&word)));
        let mut distinct = WORDS.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), WORDS.len());
    }

    /// A change here makes every result incomparable with those before it.
    #[test]
    fn prompts_are_the_same_for_ever() {
        assert_eq!(made(&[(7, 6)]).seeded(42).tokens(), KNOWN);
    }

    const KNOWN: [u32; 6] = [127, 131, 110, 104, 100, 100];

    #[test]
    fn mixing_depends_on_both() {
        let words: std::collections::BTreeSet<u64> = (0..30).flat_map(|a| (0..30).map(move |b| mixed(a, b))).collect();
        assert_eq!(words.len(), 900);
    }
}
