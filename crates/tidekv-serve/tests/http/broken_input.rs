//! Requests that are wrong: the right status, a sentence that names the field, and the server goes on.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tidekv_serve::api::MAX_BODY_BYTES;
use tidekv_serve::handle::GenerateError;

use crate::client::{Events, block_on, get, post, send};
use crate::echo::CONTEXT_TOKENS;
use crate::running::Running;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[test]
fn every_wrong_request_is_refused_with_its_field() {
    let user = json!([{"role": "user", "content": "x"}]);
    let too_long = "x".repeat(CONTEXT_TOKENS as usize);
    let table: Vec<(&str, Value, u16, Value, &str)> = vec![
        (TEXT, json!([1]), 400, Value::Null, "not an object"),
        (TEXT, json!({"model": "gpt-5", "prompt": "x"}), 404, json!("model"), "\"org/echo\""),
        (TEXT, json!({"model": 5, "prompt": "x"}), 400, json!("model"), "expected a string"),
        (TEXT, json!({}), 400, json!("prompt"), "missing field `prompt`"),
        (TEXT, json!({"prompt": {"a": 1}}), 400, json!("prompt"), "a list of token ids"),
        (TEXT, json!({"prompt": [1, "a"]}), 400, json!("prompt"), "a list of strings"),
        (TEXT, json!({"prompt": [-1]}), 400, json!("prompt"), "token ids"),
        (TEXT, json!({"prompt": [300]}), 400, json!("prompt"), "token 300 is not in the model's vocabulary of 260"),
        (TEXT, json!({"prompt": [[], [1]]}), 400, json!("prompt"), "the prompt is empty"),
        (TEXT, json!({"prompt": vec!["x"; 1025]}), 400, json!("prompt"), "1 to 1024"),
        (TEXT, json!({"prompt": too_long}), 400, json!("prompt"), "4097 tokens and the model's context is 4096"),
        (CHAT, json!({"messages": [{"role": "user", "content": too_long}]}), 400, json!("prompt"), "context is 4096"),
        (TEXT, json!({"prompt": "x", "max_tokens": 4096}), 400, json!("max_tokens"), "at most 4094 tokens"),
        (
            TEXT,
            json!({"prompt": "x", "max_tokens": 1_000_000_000_000_000_000_u64}),
            400,
            json!("max_tokens"),
            "at most 4094 tokens",
        ),
        (TEXT, json!({"prompt": "x", "max_tokens": 1e30}), 400, json!("max_tokens"), "max_tokens: "),
        (TEXT, json!({"prompt": "x", "max_tokens": 0}), 400, json!("max_tokens"), "at least one token"),
        (TEXT, json!({"prompt": "x", "max_tokens": -1}), 400, json!("max_tokens"), "-1"),
        (TEXT, json!({"prompt": "x", "max_tokens": "5"}), 400, json!("max_tokens"), "string \"5\""),
        (CHAT, json!({"messages": user, "max_completion_tokens": 0}), 400, json!("max_completion_tokens"), "is 0"),
        (TEXT, json!({"prompt": "x", "temperature": -0.1}), 400, json!("temperature"), "0 to 2"),
        (TEXT, json!({"prompt": "x", "temperature": "hot"}), 400, json!("temperature"), "temperature: "),
        (TEXT, json!({"prompt": "x", "top_p": 0}), 400, json!("top_p"), "above 0 and at most 1"),
        (TEXT, json!({"prompt": "x", "seed": 1.5}), 400, json!("seed"), "seed: "),
        (TEXT, json!({"prompt": "x", "stop": [1]}), 400, json!("stop"), "a list of strings"),
        (TEXT, json!({"prompt": "x", "stop": vec!["s"; 17]}), 400, json!("stop"), "at most 16"),
        (TEXT, json!({"prompt": "x", "stop_token_ids": vec![7; 129]}), 400, json!("stop_token_ids"), "at most 128"),
        (CHAT, json!({"messages": user, "stop_token_ids": vec![7; 129]}), 400, json!("stop_token_ids"), "has 129 ids"),
        (TEXT, json!({"prompt": "x", "stream": "yes"}), 400, json!("stream"), "stream: "),
        (
            TEXT,
            json!({"prompt": "x", "stream_options": {"include_usage": 1}}),
            400,
            json!("stream_options.include_usage"),
            "boolean",
        ),
        (TEXT, json!({"prompt": "x", "logprobs": 21}), 400, json!("logprobs"), "at most 20"),
        (TEXT, json!({"prompt": "x", "cache_salt": ""}), 400, json!("cache_salt"), "1 to 128 letters"),
        (TEXT, json!({"prompt": "x", "cache_salt": "s".repeat(129)}), 400, json!("cache_salt"), "1 to 128 letters"),
        (CHAT, json!({"messages": user, "cache_salt": 7}), 400, json!("cache_salt"), "expected a string"),
        (TEXT, json!({"prompt": "x", "n": 2}), 400, json!("n"), "n = 1"),
        (TEXT, json!({"prompt": "x", "echo": true}), 400, json!("echo"), "not supported"),
        (CHAT, json!({"messages": user, "tools": [{}]}), 400, json!("tools"), "not supported"),
        (
            CHAT,
            json!({"messages": user, "response_format": {"type": "json_object"}}),
            400,
            json!("response_format"),
            "not supported",
        ),
        (TEXT, json!({"prompt": "x", "allowed_token_ids": []}), 400, json!("allowed_token_ids"), "not supported"),
        (TEXT, json!({"prompt": "x", "bad_words": ["y"]}), 400, json!("bad_words"), "not supported"),
        (
            TEXT,
            json!({"prompt": "x", "truncate_prompt_tokens": 1}),
            400,
            json!("truncate_prompt_tokens"),
            "not supported",
        ),
        (TEXT, json!({"prompt": "x", "add_special_tokens": false}), 400, json!("add_special_tokens"), "not supported"),
        (
            CHAT,
            json!({"messages": user, "add_special_tokens": true}),
            400,
            json!("add_special_tokens"),
            "not supported",
        ),
        (CHAT, json!({"messages": user, "chat_template": "{{ 1 }}"}), 400, json!("chat_template"), "not supported"),
        (CHAT, json!({"messages": user, "documents": [{"text": "x"}]}), 400, json!("documents"), "not supported"),
        (CHAT, json!({"messages": user, "tool_choice": "required"}), 400, json!("tool_choice"), "not supported"),
        ("/tokenize", json!({"messages": user, "chat_template": "x"}), 400, json!("chat_template"), "not supported"),
        (
            "/tokenize",
            json!({"messages": user, "add_special_tokens": true}),
            400,
            json!("add_special_tokens"),
            "not supp",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
            400,
            json!("messages[1].tool_calls"),
            "not supported",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
            400,
            json!("messages[0].function_call"),
            "not supported",
        ),
        (CHAT, json!({"messages": user, "top_logprobs": 2}), 400, json!("top_logprobs"), "without"),
        (CHAT, json!({"messages": []}), 400, json!("messages"), "at least one"),
        (CHAT, json!({"messages": "hi"}), 400, json!("messages"), "messages: "),
        (CHAT, json!({"messages": [{"content": "x"}]}), 400, json!("messages[0]"), "missing field `role`"),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": 5}]}),
            400,
            json!("messages[0].content"),
            "a string or a list of parts",
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            400,
            json!("messages[0].content[0]"),
            "image_url",
        ),
    ];
    let server = Running::start();
    block_on(async {
        for (path, body, status, param, part) in table {
            let shown: String = body.to_string().chars().take(80).collect();
            for stream in [false, true] {
                let mut body = body.clone();
                if stream && body.is_object() && body.get("stream").is_none() {
                    body["stream"] = true.into();
                }
                let answer = post(server.address, path, &body).await;
                let error = &answer.json()["error"];
                assert_eq!((answer.status.as_u16(), &error["param"]), (status, &param), "{shown}: {}", answer.text);
                assert!(error["message"].as_str().unwrap().contains(part), "{shown}: {}", answer.text);
                assert_eq!(error["type"], "invalid_request_error");
                assert!(error["code"].is_string());
            }
        }
        assert!(server.engine.is_idle(), "nothing of them was kept");
        let good = post(server.address, TEXT, &json!({"prompt": "still here", "max_tokens": 50})).await.good();
        assert_eq!(good["choices"][0]["text"], "still here");
    });
}

#[test]
fn what_changes_nothing_is_accepted() {
    let server = Running::start();
    block_on(async {
        let message = json!({"role": "user", "content": null, "name": "x", "tool_calls": [], "function_call": null});
        let request = json!({"messages": [message], "n": 1, "tool_choice": "none", "documents": [], "bad_words": [],
            "allowed_token_ids": null, "chat_template": null, "truncate_prompt_tokens": null, "add_special_tokens": false, "frequency_penalty": 0.0,
            "presence_penalty": 0, "logit_bias": {}, "tools": null, "user": "me", "metadata": {"a": 1}, "seed": -7, "store": false,
            "response_format": {"type": "text"}, "top_k": -1, "stop": null, "stream_options": null, "temperature": 0, "top_p": 1,
            "stop_token_ids": vec![7; 128]});
        post(server.address, CHAT, &request).await.good();
        let request = json!({"prompt": "x", "add_special_tokens": true});
        post(server.address, TEXT, &request).await.good();
        // Nothing is added to ids, whatever is asked for.
        let request = json!({"prompt": [104], "add_special_tokens": false});
        post(server.address, TEXT, &request).await.good();
    });
}

#[test]
fn bodies_that_are_no_json_or_too_large() {
    let server = Running::start();
    block_on(async {
        for body in ["", "{", "{\"prompt\": \"x\"", "\u{0}", "null", "{\"a\":1}}", &"[".repeat(100_000)] {
            let answer = send(server.address, "POST", TEXT, body.to_owned()).await;
            assert_eq!(
                (answer.status.as_u16(), &answer.json()["error"]["code"]),
                (400, &json!("invalid_json")),
                "{body:.20}"
            );
        }
        let answer = send(server.address, "POST", TEXT, vec![0xff, 0xfe, b'{']).await;
        assert_eq!(answer.status.as_u16(), 400);
        // One byte too many: it is refused when all of it was read, so that nothing on the way cuts the answer off.
        let answer = send(server.address, "POST", TEXT, vec![b' '; MAX_BODY_BYTES + 1]).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (413, &json!("request_too_large")));
        // A long text is tokenised elsewhere and refused all the same.
        let answer = post(server.address, TEXT, &json!({"prompt": "x".repeat(1 << 20)})).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    });
}

#[test]
fn pages_that_are_not_there_and_methods_that_do_not_fit() {
    let server = Running::start();
    block_on(async {
        for (method, path, status, code) in [
            ("GET", "/v1/complete", 404, "unknown_url"),
            ("GET", TEXT, 405, "method_not_supported"),
            ("POST", "/health", 405, "method_not_supported"),
            ("GET", "/v1/models/other", 404, "model_not_found"),
        ] {
            let answer = send(server.address, method, path, "").await;
            assert_eq!(
                (answer.status.as_u16(), &answer.json()["error"]["code"]),
                (status, &json!(code)),
                "{method} {path}"
            );
        }
    });
}

#[test]
fn a_full_queue_and_a_failing_engine_are_told_apart() {
    let server = Running::start();
    let request = json!({"prompt": "hello", "max_tokens": 50});
    block_on(async {
        server.engine.hold_at(Some(1));
        server.engine.limit.store(1, Ordering::SeqCst);
        let mut first = Events::open(server.address, TEXT, &json!({"prompt": "hello", "stream": true})).await;
        first.next().await.unwrap();
        let refused = post(server.address, TEXT, &request).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["type"]), (429, &json!("rate_limit_error")));
        assert_eq!(refused.headers["retry-after"], "1");
        drop(first);
        server.engine.wait_until("the first is gone", |_, active| active == 0);
        server.engine.hold_at(None);

        let failure = GenerateError::Compute { what: "a step went wrong".to_owned() };
        *server.engine.fail_at.lock().unwrap() = Some((2, failure));
        let failed = post(server.address, TEXT, &request).await;
        assert_eq!((failed.status.as_u16(), &failed.json()["error"]["code"]), (500, &json!("engine_failed")));
        let events = Events::open(server.address, TEXT, &json!({"prompt": "hello", "stream": true})).await.rest().await;
        let (last, parts) = events.split_last().unwrap();
        assert!(last["error"]["message"].as_str().unwrap().contains("a step went wrong"));
        assert_eq!(parts.len(), 2);

        *server.engine.fail_at.lock().unwrap() = None;
        post(server.address, TEXT, &request).await.good();
        let page = get(server.address, "/metrics").await.text;
        assert!(
            page.contains("finished_reason=\"error\"} 2") && page.contains("finished_reason=\"abort\"} 1"),
            "{page}"
        );
    });
}
