//! Completions and chats, whole and streamed: the same text, OpenAI's shapes.

use std::time::Duration;

use serde_json::{Value, json};
use tidekv_serve::handle::GenerateError;

use crate::client::{Events, block_on, post};
use crate::echo::CACHED_TOKENS;
use crate::running::Running;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn streamed_text(events: &[Value]) -> String {
    let text = |event: &Value| event["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
    events.iter().map(text).collect()
}

fn streamed_chat(events: &[Value]) -> String {
    let text = |event: &Value| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned();
    events.iter().map(text).collect()
}

#[test]
fn a_completion_whole_and_streamed() {
    let server = Running::start();
    block_on(async {
        let mut request = json!({"model": "org/echo", "prompt": "Grüße 😀", "max_tokens": 100});
        let whole = post(server.address, TEXT, &request).await.good();
        assert!(whole["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!((&whole["object"], &whole["model"]), (&json!("text_completion"), &json!("org/echo")));
        let choice = json!({"index": 0, "text": "Grüße 😀", "logprobs": null, "finish_reason": "stop"});
        assert_eq!(whole["choices"], json!([choice]));
        let bytes = "Grüße 😀".len();
        let usage = json!({"prompt_tokens": bytes + 1, "completion_tokens": bytes + 1, "total_tokens": 2 * bytes + 2,
                           "prompt_tokens_details": {"cached_tokens": 1}});
        assert_eq!(whole["usage"], usage);

        request["stream"] = true.into();
        request["stream_options"] = json!({"include_usage": true});
        let events = Events::open(server.address, TEXT, &request).await.rest().await;
        let (last, parts) = events.split_last().unwrap();
        assert_eq!((&last["usage"], &last["choices"]), (&usage, &json!([])));
        assert_eq!(streamed_text(parts), "Grüße 😀");
        assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], "stop");
        assert!(parts.iter().all(|part| part["id"] == last["id"] && part.get("usage").is_none()));
        assert!(parts.len() > 5, "it came in pieces");
    });
}

#[test]
fn a_chat_whole_and_streamed() {
    let server = Running::start();
    block_on(async {
        let messages = json!([{"role": "system", "content": "Be brief."},
                              {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}]);
        let mut request = json!({"model": "default", "messages": messages});
        let whole = post(server.address, CHAT, &request).await.good();
        let said = "system\nBe brief.user\nHi\nthereassistant\n";
        assert_eq!(
            (&whole["object"], &whole["choices"][0]["finish_reason"]),
            (&json!("chat.completion"), &json!("stop"))
        );
        assert_eq!(whole["choices"][0]["message"], json!({"role": "assistant", "content": said}));

        request["stream"] = true.into();
        let events = Events::open(server.address, CHAT, &request).await.rest().await;
        assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk" && event.get("usage").is_none()));
        assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(streamed_chat(&events), said);
        let last = &events.last().unwrap()["choices"][0];
        assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("stop")));
    });
}

/// The first chunk is what clients measure the time to the first token by.
#[test]
fn a_chat_says_nothing_before_its_first_token() {
    let server = Running::start();
    server.engine.hold_at(Some(0));
    block_on(async {
        let request = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true});
        let mut events = Events::open(server.address, CHAT, &request).await;
        server.engine.wait_until("it was accepted", |_, active| active == 1);
        // What was sent too early would be here by then.
        assert!(tokio::time::timeout(Duration::from_millis(200), events.next()).await.is_err());
        server.engine.hold_at(Some(1));
        let first: Value = serde_json::from_str(&events.next().await.unwrap()).unwrap();
        assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        let second: Value = serde_json::from_str(&events.next().await.unwrap()).unwrap();
        assert_eq!(second["choices"][0]["delta"], json!({"content": "u"}));
        server.engine.hold_at(None);
        events.rest().await;

        *server.engine.fail_at.lock().unwrap() = Some((0, GenerateError::Asleep));
        let failed = Events::open(server.address, CHAT, &request).await.rest().await;
        assert_eq!((failed.len(), &failed[0]["error"]["code"]), (1, &json!("model_asleep")));
    });
}

#[test]
fn several_prompts_are_several_choices() {
    let server = Running::start();
    block_on(async {
        let texts = json!({"prompt": ["one", "", "three"], "max_tokens": 3});
        let whole = post(server.address, TEXT, &texts).await.good();
        let choices: Vec<_> =
            whole["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect();
        assert_eq!(choices, ["one", "", "thr"]);
        assert_eq!(whole["choices"][2]["finish_reason"], "length");
        assert_eq!(whole["usage"]["completion_tokens"], 3 + 1 + 3);

        let tokens = json!({"prompt": [104, 105], "max_tokens": 9});
        assert_eq!(post(server.address, TEXT, &tokens).await.good()["choices"][0]["text"], "hi");
        let several = json!({"prompt": [[104, 105], [106]], "max_tokens": 9, "stream": true});
        let events = Events::open(server.address, TEXT, &several).await.rest().await;
        for (index, wanted) in [(0, "hi"), (1, "j")] {
            let own: Vec<_> = events.iter().filter(|event| event["choices"][0]["index"] == index).cloned().collect();
            assert_eq!(streamed_text(&own), wanted);
            assert_eq!(own.last().unwrap()["choices"][0]["finish_reason"], "stop");
        }
    });
}

#[test]
fn stop_strings_end_the_text_before_them_and_cancel_the_rest() {
    let server = Running::start();
    block_on(async {
        for stream in [false, true] {
            let request = json!({"prompt": "one two three", "max_tokens": 4000, "ignore_eos": true, "stop": ["two", "xyz"],
                                 "stream": stream, "stream_options": {"include_usage": true}});
            let (text, finish, usage) = if stream {
                let events = Events::open(server.address, TEXT, &request).await.rest().await;
                let (last, parts) = events.split_last().unwrap();
                let finish = parts.last().unwrap()["choices"][0]["finish_reason"].clone();
                (streamed_text(parts), finish, last["usage"].clone())
            } else {
                let whole = post(server.address, TEXT, &request).await.good();
                let choice = &whole["choices"][0];
                let text = choice["text"].as_str().unwrap().to_owned();
                (text, choice["finish_reason"].clone(), whole["usage"].clone())
            };
            assert_eq!((text.as_str(), finish, &usage["completion_tokens"]), ("one ", json!("stop"), &json!(7)));
            assert_eq!(usage["prompt_tokens_details"], json!({"cached_tokens": CACHED_TOKENS}), "said before the end");
        }
        server.engine.wait_until("both are cancelled", |engine, active| {
            active == 0 && engine.cancelled.load(std::sync::atomic::Ordering::SeqCst) == 2
        });
        // A stop token of the request's own counts although the model's do not.
        let request = json!({"prompt": "abc", "max_tokens": 50, "ignore_eos": true, "stop_token_ids": [98]});
        let whole = post(server.address, TEXT, &request).await.good();
        assert_eq!((&whole["choices"][0]["text"], &whole["usage"]["completion_tokens"]), (&json!("a"), &json!(2)));
    });
}

#[test]
fn ignoring_the_end_makes_as_many_tokens_as_asked_for() {
    let server = Running::start();
    block_on(async {
        let request = json!({"prompt": "ab", "max_tokens": 7, "ignore_eos": true});
        let whole = post(server.address, TEXT, &request).await.good();
        let choice = &whole["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("abababa"), &json!("length")));
        // A completion that does not say how many has OpenAI's 16.
        let whole = post(server.address, TEXT, &json!({"prompt": "ab", "ignore_eos": true})).await.good();
        assert_eq!(whole["usage"]["completion_tokens"], 16);
    });
}

#[test]
fn half_a_character_at_the_end_is_not_lost() {
    let server = Running::start();
    block_on(async {
        let request = json!({"prompt": "é", "max_tokens": 1});
        assert_eq!(post(server.address, TEXT, &request).await.good()["choices"][0]["text"], "\u{fffd}");
    });
}

#[test]
fn log_probabilities_in_both_shapes() {
    let server = Running::start();
    block_on(async {
        let request = json!({"prompt": "hi", "logprobs": 2});
        let whole = post(server.address, TEXT, &request).await.good();
        let logprobs = &whole["choices"][0]["logprobs"];
        assert_eq!(logprobs["tokens"], json!(["h", "i", "<|end|>"]));
        assert_eq!(logprobs["text_offset"], json!([0, 1, 2]));
        assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5, -0.5]));
        assert_eq!(logprobs["top_logprobs"][0], json!({"a": -0.5, "b": -9999.0}));

        let messages = json!([{"role": "u", "content": "é"}]);
        let mut request = json!({"messages": messages, "logprobs": true, "top_logprobs": 1, "max_tokens": 4});
        let whole = post(server.address, CHAT, &request).await.good();
        let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
        let top = json!([{"token": "a", "logprob": -0.5, "bytes": [97]}]);
        assert_eq!(content[0], json!({"token": "u", "logprob": -0.5, "bytes": [117], "top_logprobs": top}));
        assert_eq!(content[2]["bytes"], json!([0xc3]));
        request["stream"] = true.into();
        let events = Events::open(server.address, CHAT, &request).await.rest().await;
        let parts = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
        assert_eq!(parts.flatten().cloned().collect::<Vec<_>>(), content);
    });
}
