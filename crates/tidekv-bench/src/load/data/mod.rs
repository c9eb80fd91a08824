//! What is asked: prompts that were given, read from files, or made from a seed.
//!
//! ```text
//!   file ── sharegpt, jsonl, trace ──> Items ─┐
//!   random, prefix repetition (recipes) ──────┴─ plan ──> Item { prompt, input tokens, output tokens, time }
//! ```
//!
//! A made prompt is kept as its recipe, a list of (seed, tokens), and written out when it is sent: two prompts that
//! begin with the same segment begin with the same tokens, and a trace of a hundred million tokens takes little memory.
//! Where the dialect allows it, made prompts are sent as token numbers, so that their length is exact whatever the model's
//! tokenizer; else as common English words, of which most tokenizers make one token each.

mod files;
mod made;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

pub use files::{DataError, TraceForm, jsonl, sharegpt, timed_trace};
pub use made::{Form, Made, Segment, Vocabulary, mixed};

use super::digest::Digest;
use crate::random::Random;

/// What one request asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The prompt.
    pub prompt: Prompt,
    /// Its length, if it is known before a server has counted it.
    pub input_tokens: Option<u32>,
    /// How long the answer may be; the stream's own bound where this is `None`.
    pub output_tokens: Option<u32>,
    /// When it was asked, in a trace.
    pub at: Option<Duration>,
}

impl Item {
    /// A text, with the stream's bound for the answer.
    pub fn text(text: impl Into<Arc<str>>) -> Self {
        Self { prompt: Prompt::Text(text.into()), input_tokens: None, output_tokens: None, at: None }
    }
}

/// A prompt, or how to make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// As it is.
    Text(Arc<str>),
    /// As token numbers.
    Tokens(Arc<[u32]>),
    /// Made from seeds when it is sent.
    Made(Made),
}

/// Where a stream's prompts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Dataset {
    /// These, from the first on; again from the first where more are asked for.
    Items(Vec<Item>),
    /// These, in an order that the seed chooses; the same order again where more are asked for.
    Shuffled(Vec<Item>),
    /// Prompts that have nothing in common but a prefix.
    Random(RandomData),
    /// Groups of prompts with a prefix each.
    PrefixRepetition(PrefixData),
}

/// Prompts of random tokens.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RandomData {
    /// Tokens of a prompt, the common prefix not counted.
    pub input_tokens: u32,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// Both lengths are drawn from `length * (1 - ratio)` to `length * (1 + ratio)`.
    pub range_ratio: f64,
    /// Tokens that all prompts begin with.
    pub prefix_tokens: u32,
    /// How they are sent.
    pub form: Form,
    /// What they are drawn from.
    pub vocabulary: Vocabulary,
}

/// Prompts that begin with one of a few prefixes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct PrefixData {
    /// How many prefixes there are.
    pub prefixes: u32,
    /// Tokens of each.
    pub prefix_tokens: u32,
    /// Tokens that follow and belong to one prompt alone.
    pub suffix_tokens: u32,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// How they are sent.
    pub form: Form,
    /// What they are drawn from.
    pub vocabulary: Vocabulary,
}

impl Dataset {
    /// How many there are, where that is bounded.
    pub fn len(&self) -> Option<usize> {
        match self {
            Self::Items(items) | Self::Shuffled(items) => Some(items.len()),
            Self::Random(_) | Self::PrefixRepetition(_) => None,
        }
    }

    /// Whether there is nothing to ask.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// What is asked, for whoever compares two results: the lengths of made prompts, and of others how many there are and a
    /// number that is the same for the same ones, wherever their file lies.
    pub fn facts(&self) -> Value {
        let given = |items: &[Item], are_shuffled: bool| {
            let mut digest = Digest::default();
            for item in items {
                digest.add_prompt(item);
                digest.add(&item.output_tokens.unwrap_or(0).to_le_bytes());
            }
            json!({"items": items.len(), "digest": digest.to_hex(), "are_shuffled": are_shuffled})
        };
        match self {
            Self::Items(items) => given(items, false),
            Self::Shuffled(items) => given(items, true),
            Self::Random(data) => json!(data),
            Self::PrefixRepetition(data) => json!(data),
        }
    }

    /// The first `count` requests for a seed: the same for the same seed, whatever machine and build.
    pub(super) fn draw(&self, count: usize, seed: u64) -> Vec<Item> {
        match self {
            Self::Items(items) => items.iter().cycle().take(count).map(|item| seeded(item, seed)).collect(),
            Self::Shuffled(items) => {
                let mut order: Vec<usize> = (0..items.len()).collect();
                Random::seeded(seed).shuffle(&mut order);
                order.iter().cycle().take(count).map(|&index| seeded(&items[index], seed)).collect()
            }
            Self::Random(data) => data.draw(count, seed),
            Self::PrefixRepetition(data) => data.draw(count, seed),
        }
    }
}

/// The prefix that all random prompts share, and then one label for each prompt.
const COMMON: u64 = u64::MAX;

impl RandomData {
    fn draw(&self, count: usize, seed: u64) -> Vec<Item> {
        let mut random = Random::seeded(seed);
        let inputs = range(self.input_tokens, self.range_ratio);
        let outputs = range(self.output_tokens, self.range_ratio);
        let mut labels = 0u64..;
        let item = |_| {
            let (input, output) = (random.between(inputs.0, inputs.1), random.between(outputs.0, outputs.1));
            let own = Segment { seed: labels.next().unwrap_or(0), tokens: input };
            let mut segments = vec![own];
            if self.prefix_tokens > 0 {
                segments.insert(0, Segment { seed: COMMON, tokens: self.prefix_tokens });
            }
            made(segments, self.form, self.vocabulary, output, seed)
        };
        (0..count).map(item).collect()
    }
}

/// vLLM's: whole numbers from `length * (1 - ratio)` rounded down to `length * (1 + ratio)` rounded up, at least 1.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and twice a u32, clamped")]
fn range(length: u32, ratio: f64) -> (u32, u32) {
    let length = f64::from(length);
    let low = (length * (1.0 - ratio)).floor().clamp(1.0, f64::from(u32::MAX)) as u32;
    let high = (length * (1.0 + ratio)).ceil().clamp(1.0, f64::from(u32::MAX)) as u32;
    (low, high.max(low))
}

impl PrefixData {
    fn draw(&self, count: usize, seed: u64) -> Vec<Item> {
        let prefixes = u64::from(self.prefixes.max(1));
        let mut order: Vec<u64> = (0u64..).take(count).map(|index| index % prefixes).collect();
        // Every prefix is asked for equally often, in no order that a cache could learn.
        Random::seeded(seed).shuffle(&mut order);
        let item = |(index, group): (u64, u64)| {
            let prefix = Segment { seed: COMMON - group, tokens: self.prefix_tokens };
            let suffix = Segment { seed: index, tokens: self.suffix_tokens };
            made(vec![prefix, suffix], self.form, self.vocabulary, self.output_tokens, seed)
        };
        (0u64..).zip(order).map(item).collect()
    }
}

fn made(segments: Vec<Segment>, form: Form, vocabulary: Vocabulary, output_tokens: u32, seed: u64) -> Item {
    let input_tokens = segments.iter().map(|segment| segment.tokens).sum();
    let prompt = Prompt::Made(Made { segments, form, vocabulary }.seeded(seed));
    Item { prompt, input_tokens: Some(input_tokens), output_tokens: Some(output_tokens), at: None }
}

/// The same with the run's seed in it.
fn seeded(item: &Item, seed: u64) -> Item {
    let prompt = match &item.prompt {
        Prompt::Made(made) => Prompt::Made(made.clone().seeded(seed)),
        given => given.clone(),
    };
    Item { prompt, ..item.clone() }
}

/// The same with a prompt that no run with another salt sends: as long in tokens, but for a given text, which gets a word before it.
/// Prompts of one run that begin alike still do.
pub(super) fn salted(item: &Item, salt: u64) -> Item {
    let prompt = match &item.prompt {
        Prompt::Made(made) => Prompt::Made(made.clone().seeded(salt)),
        Prompt::Text(text) => Prompt::Text(format!("{salt:016x} {text}").into()),
        Prompt::Tokens(tokens) => {
            let vocabulary = Vocabulary::default();
            let segments = vec![Segment { seed: salt, tokens: 8 }];
            let mut first = Made { segments, form: Form::Tokens, vocabulary }.tokens();
            first.truncate(tokens.len());
            let rest = tokens[first.len()..].iter().copied();
            Prompt::Tokens(first.into_iter().chain(rest).collect())
        }
    };
    Item { prompt, ..item.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn random_data(ratio: f64, prefix_tokens: u32) -> Dataset {
        Dataset::Random(RandomData {
            input_tokens: 100,
            output_tokens: 20,
            range_ratio: ratio,
            prefix_tokens,
            form: Form::Tokens,
            vocabulary: Vocabulary::default(),
        })
    }

    fn tokens(item: &Item) -> Vec<u32> {
        match &item.prompt {
            Prompt::Made(made) => made.tokens(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_same_seed_is_the_same_prompts_and_another_is_not() {
        let data = random_data(0.5, 7);
        assert_eq!(data.draw(20, 1), data.draw(20, 1));
        assert_ne!(data.draw(20, 1), data.draw(20, 2));
        assert_eq!(data.draw(20, 1)[..5], data.draw(5, 1)[..], "asking for more changes nothing about the first");
    }

    #[test]
    fn lengths_are_what_was_asked_and_prefixes_are_shared() {
        for item in random_data(0.0, 7).draw(10, 3) {
            assert_eq!((item.input_tokens, item.output_tokens, tokens(&item).len()), (Some(107), Some(20), 107));
        }
        let items = random_data(0.0, 7).draw(2, 3);
        let (a, b) = (tokens(&items[0]), tokens(&items[1]));
        assert_eq!(a[..7], b[..7]);
        assert_ne!(a[7..20], b[7..20]);
    }

    #[test]
    fn every_prefix_is_asked_for_equally_often() {
        let data = Dataset::PrefixRepetition(PrefixData {
            prefixes: 4,
            prefix_tokens: 10,
            suffix_tokens: 5,
            output_tokens: 3,
            form: Form::Tokens,
            vocabulary: Vocabulary::default(),
        });
        let mut prefixes: Vec<Vec<u32>> = data.draw(20, 1).iter().map(|item| tokens(item)[..10].to_vec()).collect();
        prefixes.sort();
        assert!(prefixes.chunk_by(|a, b| a == b).all(|group| group.len() == 5));
        prefixes.dedup();
        assert_eq!(prefixes.len(), 4);
    }

    #[test]
    fn given_prompts_come_in_their_order_and_shuffled_ones_each_once() {
        let items: Vec<Item> = (0..10).map(|n| Item::text(n.to_string())).collect();
        let twice = Dataset::Items(items.clone()).draw(20, 1);
        assert_eq!([&items[..], &items[..]].concat(), twice);
        let shuffled = Dataset::Shuffled(items.clone()).draw(10, 1);
        assert_ne!(shuffled, items);
        assert!(items.iter().all(|item| shuffled.contains(item)));
    }

    proptest! {
        #[test]
        fn lengths_stay_in_their_range(length in 1..5000u32, ratio in 0.0..1.0f64) {
            let (low, high) = range(length, ratio);
            prop_assert!(low >= 1 && low <= length && high >= length);
            prop_assert!(f64::from(high) <= f64::from(length) * (1.0 + ratio) + 1.0);
            prop_assert!(f64::from(low) + 1.0 >= f64::from(length) * (1.0 - ratio));
        }
    }
}
