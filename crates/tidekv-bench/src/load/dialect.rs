//! The three dialects: what a request says, and what an event of its answer means. Pure.
//!
//! | | completions | chat | SGLang's generate |
//! |---|---|---|---|
//! | prompt | `prompt`: text or tokens | one message of the user | `text` or `input_ids` |
//! | a piece of text | `choices[0].text` | `choices[0].delta.content` | the end of `text`, which is the answer so far |
//! | tokens | `usage`, in the last event or in each | the same | `meta_info` in each |
//!
//! An event whose text is empty counts: a chat opens with one, and so do servers that announce a first token.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::data::{Form, Prompt};
use super::endpoint::Api;
use super::plan::{Planned, Stream};
use super::record::Usage;

/// What ends an answer.
pub(super) const DONE: &[u8] = b"[DONE]";

/// The body of a request.
pub(super) fn body(stream: &Stream, request: &Planned) -> Vec<u8> {
    let endpoint = &stream.endpoint;
    let mut fields = Map::new();
    let mut set = |key: &str, value: Value| fields.insert(key.to_owned(), value);
    let prompt = written(&request.item.prompt);
    let sampling = &stream.sampling;
    match endpoint.api {
        Api::Completions | Api::Chat => {
            set("model", endpoint.model.clone().into());
            match (endpoint.api, prompt) {
                (Api::Chat, Written::Text(text)) => set("messages", json!([{"role": "user", "content": text}])),
                // A chat has no other way to say tokens; the planner of `serve` makes words for chats.
                (Api::Chat, Written::Tokens(tokens)) => {
                    set("messages", json!([{"role": "user", "content": format!("{tokens:?}")}]))
                }
                (_, Written::Text(text)) => set("prompt", text.into()),
                (_, Written::Tokens(tokens)) => set("prompt", tokens.into()),
            };
            set("max_tokens", request.max_tokens.into());
            sampling.temperature.into_iter().for_each(|value| drop(set("temperature", value.into())));
            sampling.top_p.into_iter().for_each(|value| drop(set("top_p", value.into())));
            if sampling.ignore_eos {
                set("ignore_eos", true.into());
            }
            set("stream", true.into());
            set("stream_options", json!({"include_usage": true}));
        }
        Api::SglangGenerate => {
            match prompt {
                Written::Text(text) => set("text", text.into()),
                Written::Tokens(tokens) => set("input_ids", tokens.into()),
            };
            let mut params = json!({"max_new_tokens": request.max_tokens, "ignore_eos": sampling.ignore_eos});
            sampling.temperature.into_iter().for_each(|value| params["temperature"] = value.into());
            sampling.top_p.into_iter().for_each(|value| params["top_p"] = value.into());
            set("sampling_params", params);
            set("stream", true.into());
        }
    }
    fields.extend(sampling.extra_body.iter().map(|(key, value)| (key.clone(), value.clone())));
    Value::Object(fields).to_string().into_bytes()
}

enum Written<'a> {
    Text(Cow<'a, str>),
    Tokens(Vec<u32>),
}

fn written(prompt: &Prompt) -> Written<'_> {
    match prompt {
        Prompt::Text(text) => Written::Text(Cow::Borrowed(text)),
        Prompt::Tokens(tokens) => Written::Tokens(tokens.to_vec()),
        Prompt::Made(made) => match made.form {
            Form::Tokens => Written::Tokens(made.tokens()),
            Form::Words => Written::Text(Cow::Owned(made.words())),
        },
    }
}

/// What one event says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Event {
    /// Whether it is a piece of the answer; else it has a count at most.
    pub(super) is_choice: bool,
    /// The text it adds.
    pub(super) text: String,
    /// Tokens of the answer up to here, if it says.
    pub(super) tokens_so_far: Option<u64>,
    pub(super) usage: Option<Usage>,
    pub(super) finish_reason: Option<String>,
    /// The server gives up.
    pub(super) error: Option<String>,
}

/// Reads the events of one answer.
#[derive(Debug)]
pub(super) struct Listener {
    api: Api,
    /// Bytes of text so far: SGLang repeats them in each event.
    text_bytes: usize,
}

impl Listener {
    pub(super) fn new(api: Api) -> Self {
        Self { api, text_bytes: 0 }
    }

    /// What an event means, or why it means nothing.
    pub(super) fn hear(&mut self, data: &[u8]) -> Result<Event, String> {
        let event = match self.api {
            Api::Completions | Api::Chat => openai(data),
            Api::SglangGenerate => self.sglang(data),
        };
        event.map_err(|error| format!("{error} in {:?}", shortened(data)))
    }

    fn sglang(&mut self, data: &[u8]) -> Result<Event, serde_json::Error> {
        let said: SglangEvent<'_> = serde_json::from_slice(data)?;
        let Some(text) = said.text else {
            return Ok(Event { error: said.error.map(|error| message_of(&error)), ..Event::default() });
        };
        // An answer that is shorter than before was changed behind us; all of it is new then.
        let added = text.get(self.text_bytes..).unwrap_or(&text).to_owned();
        self.text_bytes = text.len();
        let meta = said.meta_info;
        let usage = meta.completion_tokens.map(|completion_tokens| Usage {
            prompt_tokens: meta.prompt_tokens.unwrap_or(0),
            completion_tokens,
            cached_tokens: meta.cached_tokens,
        });
        Ok(Event {
            is_choice: true,
            text: added,
            tokens_so_far: meta.completion_tokens,
            usage,
            finish_reason: meta.finish_reason.map(|reason| match reason {
                Value::Object(fields) => fields.get("type").and_then(Value::as_str).unwrap_or("stop").to_owned(),
                other => message_of(&other),
            }),
            error: said.error.map(|error| message_of(&error)),
        })
    }
}

fn openai(data: &[u8]) -> Result<Event, serde_json::Error> {
    let said: OpenAiEvent<'_> = serde_json::from_slice(data)?;
    let usage = said.usage.map(|usage| Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens),
    });
    let choice = said.choices.into_iter().next();
    let is_choice = choice.is_some();
    let (text, finish_reason) = choice.map_or((None, None), |choice| {
        let delta = choice.delta.unwrap_or_default();
        (choice.text.or(delta.content).or(delta.reasoning_content), choice.finish_reason)
    });
    Ok(Event {
        is_choice,
        text: text.map(Cow::into_owned).unwrap_or_default(),
        tokens_so_far: usage.filter(|_| is_choice).map(|usage| usage.completion_tokens),
        usage,
        finish_reason: finish_reason.map(Cow::into_owned),
        error: said.error.map(|error| message_of(&error)),
    })
}

#[derive(Deserialize)]
struct OpenAiEvent<'a> {
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    usage: Option<OpenAiUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

#[derive(Default, Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    /// What a model thinks before it answers is made of tokens too.
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct OpenAiUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct SglangEvent<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(default)]
    meta_info: MetaInfo,
    error: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MetaInfo {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    finish_reason: Option<Value>,
}

/// The sentence of an error body in any of the usual shapes: `{"error": {"message": ..}}`, `{"message": ..}`, bare text.
pub(super) fn message_of(error: &Value) -> String {
    match error {
        Value::String(text) => text.clone(),
        Value::Object(fields) => match fields.get("error").or(fields.get("message")).or(fields.get("detail")) {
            Some(inner) => message_of(inner),
            None => error.to_string(),
        },
        other => other.to_string(),
    }
}

/// The beginning of something that may be long.
pub(super) fn shortened(bytes: &[u8]) -> String {
    const MOST: usize = 200;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MOST)]).into_owned();
    if bytes.len() > MOST { text + "..." } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::data::{Dataset, Item, Made, Segment, Vocabulary};
    use crate::load::endpoint::{BaseUrl, Endpoint};
    use crate::load::plan::Sampling;

    fn said(api: Api, prompt: Prompt) -> Value {
        let endpoint = Endpoint::new(BaseUrl::new("a", 1), api, "m");
        let sampling = Sampling { ignore_eos: true, ..Sampling::default() };
        let mut stream = Stream { sampling, ..Stream::new("s", endpoint, Dataset::Items(vec![])) };
        stream.sampling.extra_body.insert("min_p".to_owned(), 0.5.into());
        let item = Item { prompt, input_tokens: None, output_tokens: None, at: None };
        let request = Planned { at_ns: 0, stream: 0, index: 0, item, max_tokens: 9 };
        serde_json::from_slice(&body(&stream, &request)).unwrap()
    }

    #[test]
    fn a_request_in_each_dialect() {
        let text = || Prompt::Text("Why?".into());
        assert_eq!(
            said(Api::Completions, text()),
            json!({"model": "m", "prompt": "Why?", "max_tokens": 9, "temperature": 0.0, "ignore_eos": true, "stream": true,
                   "stream_options": {"include_usage": true}, "min_p": 0.5})
        );
        assert_eq!(said(Api::Chat, text())["messages"], json!([{"role": "user", "content": "Why?"}]));
        let sglang = said(Api::SglangGenerate, text());
        assert_eq!((&sglang["text"], &sglang["sampling_params"]["max_new_tokens"]), (&json!("Why?"), &json!(9)));
        let made = |form| {
            let segments = vec![Segment { seed: 1, tokens: 3 }];
            Prompt::Made(Made { segments, form, vocabulary: Vocabulary { first: 5, count: 1 } })
        };
        assert_eq!(said(Api::Completions, made(Form::Tokens))["prompt"], json!([5, 5, 5]));
        assert_eq!(said(Api::SglangGenerate, made(Form::Tokens))["input_ids"], json!([5, 5, 5]));
        assert_eq!(
            said(Api::Chat, made(Form::Words))["messages"][0]["content"].as_str().unwrap().split(' ').count(),
            3
        );
    }

    fn heard(api: Api, events: &[&str]) -> Vec<Event> {
        let mut listener = Listener::new(api);
        events.iter().map(|event| listener.hear(event.as_bytes()).unwrap()).collect()
    }

    #[test]
    fn events_of_openai() {
        let events = heard(
            Api::Completions,
            &[
                r#"{"choices":[{"index":0,"text":"a\n","finish_reason":null}],"usage":{"prompt_tokens":4,"completion_tokens":2}}"#,
                r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#,
                r#"{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}"#,
                r#"{"error":{"message":"no memory","code":500}}"#,
            ],
        );
        assert_eq!((events[0].text.as_str(), events[0].tokens_so_far), ("a\n", Some(2)));
        assert_eq!(events[1].finish_reason.as_deref(), Some("stop"));
        let usage = Usage { prompt_tokens: 4, completion_tokens: 3, cached_tokens: Some(1) };
        assert_eq!((events[2].is_choice, events[2].usage, events[2].tokens_so_far), (false, Some(usage), None));
        assert_eq!(events[3].error.as_deref(), Some("no memory"));
        let chat = heard(
            Api::Chat,
            &[
                r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
                r#"{"choices":[{"delta":{"content":"x"}}]}"#,
                r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#,
            ],
        );
        assert!(chat.iter().all(|event| event.is_choice));
        assert_eq!(chat[1].text, "x");
    }

    #[test]
    fn events_of_sglang_repeat_what_was_said() {
        let events = heard(
            Api::SglangGenerate,
            &[
                r#"{"text":"a","meta_info":{"prompt_tokens":5,"completion_tokens":1,"finish_reason":null}}"#,
                r#"{"text":"abc","meta_info":{"prompt_tokens":5,"completion_tokens":3,"finish_reason":{"type":"length","length":3}}}"#,
            ],
        );
        assert_eq!((events[1].text.as_str(), events[1].tokens_so_far), ("bc", Some(3)));
        assert_eq!(events[1].finish_reason.as_deref(), Some("length"));
        assert_eq!(events[1].usage.unwrap().prompt_tokens, 5);
    }

    #[test]
    fn what_is_no_event_is_quoted() {
        let error = Listener::new(Api::Chat).hear(b"<html>").unwrap_err();
        assert!(error.contains("<html>"), "{error}");
    }
}
