//! Requests before the measured ones: as long as those, to the same endpoints, with prompts that share nothing with them. A
//! warm-up with the measured prompts would fill the prefix cache with them.

use crate::load::data::{Form, Made, Segment, Vocabulary, mixed};
use crate::load::plan::PlanError;
use crate::load::{Arrivals, Dataset, Item, Prompt, Scenario, Stream, plan};

/// At a time, where the stream has no cap.
const CONCURRENCY: usize = 16;

/// Tokens of a prompt whose length nobody knows.
const UNKNOWN_TOKENS: u32 = 64;

/// The seed of what is not measured.
const SEED: u64 = 0x7761_726D;

/// So many requests for each stream, one closed loop each.
pub(super) fn scenario(scenario: &Scenario, requests: usize, seed: u64) -> Result<Scenario, PlanError> {
    let schedule = plan(scenario, seed)?;
    let stream = |(index, stream): (usize, &Stream)| {
        let own = schedule.requests.iter().filter(|request| request.stream == index);
        let items: Vec<Item> =
            own.take(requests).zip(0u64..).map(|(request, label)| like(&request.item, label, stream)).collect();
        Stream {
            data: Dataset::Items(items),
            requests: Some(requests),
            duration: None,
            arrivals: Arrivals::Immediately,
            start: std::time::Duration::ZERO,
            max_concurrency: Some(stream.max_concurrency.unwrap_or(CONCURRENCY)),
            keep_text: false,
            ..stream.clone()
        }
    };
    let streams = scenario.streams.iter().enumerate().map(stream);
    // A stream without a single request has nothing to be warmed for.
    Ok(Scenario { streams: streams.filter(|stream| !stream.data.is_empty()).collect() })
}

/// As long, and different.
fn like(item: &Item, label: u64, stream: &Stream) -> Item {
    let (form, vocabulary) = match &item.prompt {
        Prompt::Made(made) => (made.form, made.vocabulary),
        Prompt::Tokens(_) => (Form::Tokens, Vocabulary::default()),
        Prompt::Text(_) => (Form::Words, Vocabulary::default()),
    };
    let tokens = item.input_tokens.unwrap_or(UNKNOWN_TOKENS);
    let segments = vec![Segment { seed: mixed(label, SEED), tokens }];
    let output_tokens = Some(item.output_tokens.unwrap_or(stream.sampling.max_tokens));
    Item {
        prompt: Prompt::Made(Made { segments, form, vocabulary }),
        input_tokens: Some(tokens),
        output_tokens,
        at: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::data::RandomData;
    use crate::load::{Api, BaseUrl, Endpoint};

    #[test]
    fn prompts_are_as_long_and_share_nothing() {
        let data = Dataset::Random(RandomData {
            input_tokens: 50,
            output_tokens: 9,
            range_ratio: 0.5,
            prefix_tokens: 20,
            form: Form::Tokens,
            vocabulary: Vocabulary::default(),
        });
        let endpoint = Endpoint::new(BaseUrl::new("a", 1), Api::Completions, "m");
        let measured = Scenario { streams: vec![Stream { requests: Some(5), ..Stream::new("s", endpoint, data) }] };
        let warm = scenario(&measured, 8, 3).unwrap();
        let (measured, warm) = (plan(&measured, 3).unwrap(), plan(&warm, 3).unwrap());
        assert_eq!(warm.requests.len(), 8);
        let tokens = |item: &Item| match &item.prompt {
            Prompt::Made(made) => made.tokens(),
            other => panic!("{other:?}"),
        };
        for (measured, warm) in measured.requests.iter().zip(&warm.requests) {
            assert_eq!((measured.item.input_tokens, measured.max_tokens), (warm.item.input_tokens, warm.max_tokens));
            assert_ne!(tokens(&measured.item)[..8], tokens(&warm.item)[..8]);
        }
    }
}
