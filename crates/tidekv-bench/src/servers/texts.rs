//! Asking for whole answers, in the order of the questions: what accuracy is measured on.

use std::num::NonZero;

use anyhow::ensure;
use serde_json::Value;

use super::drive::{Pace, drive_until_interrupted};
use super::session::Session;
use crate::load::{Dataset, Endpoint, Item, Stream};

/// How answers are to be made. Greedy in any case: two runs that sample cannot be compared text by text.
#[derive(Clone, Debug)]
pub struct Asking {
    /// Longest answer, in tokens.
    pub max_tokens: u32,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Whether an answer goes on to its full length.
    pub ignore_eos: bool,
    /// Questions under way at a time.
    pub parallel: NonZero<usize>,
    /// Nothing that the server has cached of requests with another salt is used. vLLM, SGLang and kvserve know this.
    pub cache_salt: Option<String>,
}

/// One answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextAnswer {
    /// What was said; the reason where nothing was.
    pub text: Result<String, String>,
    /// How long it is.
    pub tokens: u64,
}

/// Answers in the order of the questions, and how long all of them took.
#[derive(Clone, Debug)]
pub struct TextAnswers {
    /// One for each question; where somebody interrupted, for each of the first ones.
    pub answers: Vec<TextAnswer>,
    /// Seconds from the first question to the last answer.
    pub seconds: f64,
}

/// Asks all questions. Whoever interrupts gets the answers up to the first that is missing.
///
/// # Errors
/// When nobody listens, or not a single answer came.
pub fn ask(session: &Session, endpoint: Endpoint, items: Vec<Item>, asking: &Asking) -> anyhow::Result<TextAnswers> {
    let count = items.len();
    let mut stream = Stream::new("questions", endpoint, Dataset::Items(items));
    stream.requests = Some(count);
    stream.max_concurrency = Some(asking.parallel.get());
    stream.keep_text = true;
    stream.sampling.max_tokens = asking.max_tokens;
    stream.sampling.ignore_eos = asking.ignore_eos;
    stream.sampling.top_p = Some(1.0);
    let stop = (!asking.stop.is_empty()).then(|| ("stop".to_owned(), Value::from(asking.stop.clone())));
    let salt = asking.cache_salt.clone().map(|salt| ("cache_salt".to_owned(), Value::from(salt)));
    stream.sampling.extra_body = stop.into_iter().chain(salt).collect();
    let driven = drive_until_interrupted(session, vec![stream], 0, Pace::WATCHED)?;
    let unanswered = || TextAnswer { text: Err("it was never sent".to_owned()), tokens: 0 };
    let mut answers = vec![unanswered(); count];
    let mut has_ended = vec![false; count];
    let (mut first, mut last) = (u64::MAX, 0);
    for record in &driven.records {
        first = first.min(record.sent_ns);
        last = last.max(record.done_ns);
        let text = match &record.failure {
            None => Ok(record.text.clone().unwrap_or_default()),
            Some(failure) => Err(failure.to_string()),
        };
        answers[record.index] = TextAnswer { text, tokens: record.output_tokens() };
        has_ended[record.index] = !record.is_cancelled();
    }
    if session.is_interrupted() {
        answers.truncate(has_ended.iter().take_while(|has_ended| **has_ended).count());
    }
    let failure = answers.iter().find_map(|answer| answer.text.as_ref().err());
    let all_failed = answers.iter().all(|answer| answer.text.is_err());
    ensure!(
        answers.is_empty() || !all_failed,
        "not one of {count} questions was answered: {}",
        failure.map_or("", String::as_str)
    );
    Ok(TextAnswers { answers, seconds: crate::stats::to_f64(last.saturating_sub(first)) / 1e9 })
}
