//! Prompts from files: ShareGPT, lines of JSON, and timed traces in Mooncake's form.
//!
//! | reader | a file is | one request |
//! |--------|-----------|-------------|
//! | [`sharegpt`] | an array of `{"conversations": [{"value": ..}, {"value": ..}]}` | the first turn; as long an answer as the second |
//! | [`jsonl`] | lines of `{"prompt": .., "output_tokens": ..}` | as it says |
//! | [`timed_trace`] | lines of `{"timestamp", "input_length", "output_length", "hash_ids"}` | made tokens; equal ids are equal blocks |
//!
//! They read text and know no files: whoever opens one says its name in the error.

use std::time::Duration;

use serde::Deserialize;

use super::{Form, Item, Made, Prompt, Segment, Vocabulary};

/// Letters of a token, where nobody has counted: what English text comes to.
const LETTERS_PER_TOKEN: usize = 4;

/// What vLLM leaves out of ShareGPT: turns of fewer tokens, longer prompts, and longer prompts with their answers.
const SHORTEST_TURN: usize = 4;
const LONGEST_PROMPT: usize = 1024;
const LONGEST_PAIR: usize = 2048;

/// Why a file holds no prompts.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A line that is not what the format wants.
    #[error("line {line}: {reason}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The whole is not what the format wants.
    #[error("{reason}")]
    Whole {
        /// What is wrong, and where.
        reason: String,
    },
    /// Nothing that could be asked.
    #[error("there is no request in it")]
    Empty,
}

/// ShareGPT's conversations. Lengths are estimated from letters: a tokenizer would count, and is not here.
pub fn sharegpt(text: &str, output_tokens: Option<u32>) -> Result<Vec<Item>, DataError> {
    #[derive(Deserialize)]
    struct Conversation {
        #[serde(default)]
        conversations: Vec<Turn>,
    }
    #[derive(Deserialize)]
    struct Turn {
        #[serde(default)]
        value: String,
    }
    let read: Vec<Conversation> = serde_json::from_str(text).map_err(|error| DataError::Whole {
        reason: format!("this is not ShareGPT's array of conversations: {error}"),
    })?;
    let items = read.into_iter().filter_map(|conversation| {
        let [asked, answered, ..] = &conversation.conversations[..] else { return None };
        let (input, output) = (tokens_of(&asked.value), tokens_of(&answered.value));
        let fits = input <= LONGEST_PROMPT && (output_tokens.is_some() || input + output <= LONGEST_PAIR);
        let is_short = input < SHORTEST_TURN || (output_tokens.is_none() && output < SHORTEST_TURN);
        (fits && !is_short).then(|| Item {
            input_tokens: u32::try_from(input).ok(),
            output_tokens: output_tokens.or_else(|| u32::try_from(output).ok()),
            ..Item::text(asked.value.as_str())
        })
    });
    some(items.collect())
}

fn tokens_of(text: &str) -> usize {
    text.chars().count().div_ceil(LETTERS_PER_TOKEN)
}

/// One object a line.
pub fn jsonl(text: &str) -> Result<Vec<Item>, DataError> {
    #[derive(Deserialize)]
    struct Line {
        prompt: String,
        #[serde(alias = "output_len", alias = "max_tokens")]
        output_tokens: Option<u32>,
    }
    lines(text, |line: Line| Ok(Item { output_tokens: line.output_tokens, ..Item::text(line.prompt) }))
}

/// How a trace is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceForm {
    /// Tokens of one block of `hash_ids`.
    pub block_tokens: u32,
    /// Seconds of one unit of `timestamp`.
    pub seconds_per_unit: f64,
    /// How prompts are sent.
    pub form: Form,
    /// What they are drawn from.
    pub vocabulary: Vocabulary,
}

impl TraceForm {
    /// As Mooncake's traces are: blocks of 512 tokens, milliseconds.
    pub const fn mooncake(form: Form, vocabulary: Vocabulary) -> Self {
        Self { block_tokens: 512, seconds_per_unit: 0.001, form, vocabulary }
    }
}

/// Requests with their times. Blocks of equal numbers get equal tokens, so that prefixes are shared as they were.
pub fn timed_trace(text: &str, trace: TraceForm) -> Result<Vec<Item>, DataError> {
    #[derive(Deserialize)]
    struct Line {
        timestamp: f64,
        input_length: u32,
        output_length: u32,
        #[serde(default)]
        hash_ids: Vec<u64>,
    }
    let item = |line: Line| {
        let at = Duration::try_from_secs_f64(line.timestamp * trace.seconds_per_unit)
            .map_err(|error| format!("timestamp is {}: {error}", line.timestamp))?;
        if line.input_length == 0 {
            return Err("input_length is 0".to_owned());
        }
        let blocks = line.input_length.div_ceil(trace.block_tokens.max(1));
        let known = u32::try_from(line.hash_ids.len()).unwrap_or(u32::MAX);
        if known != 0 && known < blocks {
            return Err(format!(
                "{} tokens are {blocks} blocks of {}, and there are {known} hash_ids",
                line.input_length, trace.block_tokens
            ));
        }
        let segments = segments(&line.hash_ids, line.input_length, trace.block_tokens);
        let prompt = Prompt::Made(Made { segments, form: trace.form, vocabulary: trace.vocabulary });
        let (input_tokens, output_tokens) = (Some(line.input_length), Some(line.output_length.max(1)));
        Ok(Item { prompt, input_tokens, output_tokens, at: Some(at) })
    };
    lines(text, item)
}

/// One segment for each block, the last one as long as is left; a prompt without numbers is one of its own.
fn segments(ids: &[u64], tokens: u32, block_tokens: u32) -> Vec<Segment> {
    if ids.is_empty() {
        return vec![Segment { seed: u64::from(tokens), tokens }];
    }
    let mut left = tokens;
    let take = |&seed: &u64| {
        let tokens = left.min(block_tokens);
        left -= tokens;
        Segment { seed, tokens }
    };
    ids.iter().map(take).filter(|segment| segment.tokens > 0).collect()
}

/// Every line that is not empty, as its type.
fn lines<'a, L: Deserialize<'a>>(
    text: &'a str,
    item: impl Fn(L) -> Result<Item, String>,
) -> Result<Vec<Item>, DataError> {
    let mut items = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let at_line = |reason: String| DataError::Line { line: number, reason };
        let read = serde_json::from_str(line).map_err(|error| {
            // The line of a one-line text says nothing.
            let reason = error.to_string();
            at_line(reason.split(" at line ").next().unwrap_or(&reason).to_owned())
        })?;
        items.push(item(read).map_err(at_line)?);
    }
    some(items)
}

fn some(items: Vec<Item>) -> Result<Vec<Item>, DataError> {
    if items.is_empty() { Err(DataError::Empty) } else { Ok(items) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sharegpt_is_asked_for_its_first_turn() {
        let text = r#"[
            {"id": "a", "conversations": [{"from": "human", "value": "How are you, my friend?"},
                                          {"from": "gpt", "value": "Fine, and how about yourself?"}, {"value": "x"}]},
            {"conversations": [{"value": "too short to be answered, alone"}]},
            {"conversations": [{"value": "ok"}, {"value": "an answer to a prompt that is too short"}]}]"#;
        let items = sharegpt(text, None).unwrap();
        assert_eq!(items.len(), 1);
        assert_eq!(items[0].prompt, Prompt::Text("How are you, my friend?".into()));
        assert_eq!((items[0].input_tokens, items[0].output_tokens), (Some(6), Some(8)));
        assert_eq!(sharegpt(text, Some(77)).unwrap()[0].output_tokens, Some(77));
        assert!(sharegpt("{}", None).unwrap_err().to_string().contains("array"));
        assert_eq!(sharegpt("[]", None), Err(DataError::Empty));
    }

    #[test]
    fn a_line_that_is_wrong_is_named() {
        let items = jsonl("{\"prompt\": \"a\", \"output_tokens\": 3}\n\n{\"prompt\": \"b\", \"more\": 1}\n").unwrap();
        assert_eq!((items.len(), items[0].output_tokens, items[1].output_tokens), (2, Some(3), None));
        let error = jsonl("{\"prompt\": \"a\"}\n{\"promt\": \"b\"}").unwrap_err().to_string();
        assert_eq!(error, "line 2: missing field `prompt`");
        assert_eq!(jsonl("\n\n"), Err(DataError::Empty));
    }

    fn mooncake(text: &str) -> Result<Vec<Item>, DataError> {
        timed_trace(text, TraceForm::mooncake(Form::Tokens, Vocabulary::default()))
    }

    #[test]
    fn a_trace_in_mooncakes_form() {
        let items = mooncake(
            "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [7, 8]}\n\
             {\"timestamp\": 1500, \"input_length\": 1024, \"output_length\": 0, \"hash_ids\": [7, 9]}\n",
        )
        .unwrap();
        let segments = |item: &Item| match &item.prompt {
            Prompt::Made(made) => made.segments.iter().map(|it| (it.seed, it.tokens)).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(segments(&items[0]), [(7, 512), (8, 88)]);
        assert_eq!(segments(&items[1]), [(7, 512), (9, 512)]);
        assert_eq!(items[1].at, Some(Duration::from_millis(1500)));
        assert_eq!((items[0].output_tokens, items[1].output_tokens), (Some(5), Some(1)), "an answer has a token");
    }

    #[test]
    fn traces_that_cannot_be_are_refused() {
        let line = |timestamp: &str, input: u32, ids: &str| {
            format!(
                "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": 1, \"hash_ids\": {ids}}}"
            )
        };
        assert!(mooncake(&line("-1", 5, "[1]")).unwrap_err().to_string().contains("timestamp is -1"));
        assert!(mooncake(&line("0", 0, "[1]")).unwrap_err().to_string().contains("input_length is 0"));
        assert!(mooncake(&line("0", 513, "[1]")).unwrap_err().to_string().contains("2 blocks of 512"));
        assert_eq!(mooncake(&line("0", 513, "[]")).unwrap()[0].input_tokens, Some(513));
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = (sharegpt(&text, None), jsonl(&text), mooncake(&text));
        }

        #[test]
        fn segments_are_as_long_as_the_prompt(tokens in 1..100_000u32, block in 1..2000u32) {
            let ids: Vec<u64> = (0..u64::from(tokens.div_ceil(block))).collect();
            let segments = segments(&ids, tokens, block);
            prop_assert_eq!(segments.len(), ids.len());
            prop_assert_eq!(segments.iter().map(|it| it.tokens).sum::<u32>(), tokens);
        }
    }
}
