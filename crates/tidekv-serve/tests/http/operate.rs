//! The pages for operators.

use serde_json::json;
use tidekv_serve::handle::GenerateError;

use crate::client::{block_on, get, post, send};
use crate::running::Running;

#[test]
fn models_health_and_version() {
    let server = Running::start();
    block_on(async {
        let list = get(server.address, "/v1/models").await.good();
        assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("org/echo")));
        assert_eq!(list["data"][0]["root"], "synthetic:echo");
        for name in ["org/echo", "default"] {
            let model = get(server.address, &format!("/v1/models/{name}")).await.good();
            assert_eq!((&model["id"], &model["max_model_len"]), (&json!("org/echo"), &json!(4096)));
        }
        let health = get(server.address, "/health").await.good();
        assert_eq!((&health["status"], &health["kv_mode"]), (&json!("healthy"), &json!("elastic")));
        assert!(get(server.address, "/version").await.good()["version"].is_string());
    });
}

/// Probes see it, people read why, and a stream that was under way ends in the same words.
#[test]
fn a_lost_device_is_a_503_with_its_reason() {
    let server = Running::start();
    let reason = "cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)";
    block_on(async {
        let error = GenerateError::DeviceLost { what: reason.to_owned() };
        *server.engine.fail_at.lock().unwrap() = Some((2, error));
        let streamed = post(server.address, "/v1/completions", &json!({"prompt": "hello", "stream": true})).await;
        assert!(
            streamed.text.contains("\"code\":\"device_lost\"") && streamed.text.contains(reason),
            "{}",
            streamed.text
        );
        *server.engine.lost.lock().unwrap() = Some(reason.to_owned());
        for path in ["/health", "/ping"] {
            let health = get(server.address, path).await;
            assert_eq!((health.status.as_u16(), &health.json()["status"]), (503, &json!("device_lost")), "{path}");
            assert!(health.json()["reason"].as_str().unwrap().contains(reason), "{}", health.text);
        }
        let refused = post(server.address, "/v1/completions", &json!({"prompt": "hello"})).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status.as_u16(), &error["code"]), (503, &json!("device_lost")));
        let message = error["message"].as_str().unwrap().to_owned();
        assert!(message.contains("until the server is started again") && message.contains(reason), "{message}");
    });
}

#[test]
fn metrics_have_their_names_their_mode_and_whole_lines() {
    let server = Running::start();
    block_on(async {
        post(server.address, "/v1/completions", &json!({"prompt": "hi"})).await.good();
        let page = get(server.address, "/metrics").await;
        assert!(page.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
        let labels = "{model_name=\"org/echo\",kv_mode=\"elastic\"";
        for line in [
            format!("vllm:num_requests_running{labels}}} 0"),
            format!("vllm:generation_tokens_total{labels}}} 3"),
            format!("vllm:kv_cache_usage_perc{labels}}} 0.25"),
            format!("vllm:request_success_total{labels},finished_reason=\"stop\"}} 1"),
            format!("vllm:time_to_first_token_seconds_count{labels}}} 1"),
            format!("vllm:inter_token_latency_seconds_bucket{labels},le=\"+Inf\"}} 2"),
            format!("kvcached_kv_cache_pool_mapped_bytes{labels},pool_name=\"kvcached_echo\"}} 12288"),
        ] {
            assert!(page.text.lines().any(|found| found == line), "{line}\n{}", page.text);
        }
        for line in page.text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.ends_with('}') && value.parse::<f64>().is_ok(), "{line}");
        }
    });
}

#[test]
fn sleep_in_every_spelling() {
    let server = Running::start();
    let request = json!({"prompt": "hi"});
    block_on(async {
        for (path, body) in [
            ("/sleep", ""),
            ("/sleep?level=2", ""),
            ("/sleep", "{\"level\": \"1\"}"),
            ("/sleep", "{\"level\": 1}"),
            ("/sleep", "{}"),
        ] {
            assert_eq!(
                send(server.address, "POST", path, body).await.good(),
                json!({"is_sleeping": true}),
                "{path} {body}"
            );
            assert_eq!(get(server.address, "/is_sleeping").await.good(), json!({"is_sleeping": true}));
            let refused = post(server.address, "/v1/completions", &request).await;
            assert_eq!((refused.status.as_u16(), &refused.json()["error"]["code"]), (503, &json!("model_asleep")));
            get(server.address, "/health").await.good();
            assert_eq!(send(server.address, "POST", "/wake_up", "").await.good(), json!({"is_sleeping": false}));
            post(server.address, "/v1/completions", &request).await.good();
        }
        for (path, body) in [
            ("/sleep?level=9", ""),
            ("/sleep?level=x", ""),
            ("/sleep", "{\"level\": \"deep\"}"),
            ("/sleep", "{\"level\": 300}"),
        ] {
            let refused = send(server.address, "POST", path, body).await;
            assert_eq!(
                (refused.status.as_u16(), &refused.json()["error"]["param"]),
                (400, &json!("level")),
                "{path} {body}"
            );
        }
        assert_eq!(get(server.address, "/is_sleeping").await.good(), json!({"is_sleeping": false}));
    });
}

#[test]
fn tokens_of_a_prompt_and_of_a_conversation() {
    let server = Running::start();
    block_on(async {
        let tokens = post(server.address, "/tokenize", &json!({"prompt": "hi"})).await.good();
        assert_eq!(tokens, json!({"count": 3, "max_model_len": 4096, "tokens": [256, 104, 105]}));
        let bare = json!({"prompt": "hi", "add_special_tokens": false});
        assert_eq!(post(server.address, "/tokenize", &bare).await.good()["tokens"], json!([104, 105]));
        let chat = json!({"messages": [{"role": "u", "content": "x"}], "add_generation_prompt": false});
        assert_eq!(
            post(server.address, "/tokenize", &chat).await.good()["tokens"],
            json!([256, 258, 117, 10, 120, 259])
        );
        let text = post(server.address, "/detokenize", &json!({"tokens": [256, 104, 105, 257]})).await.good();
        assert_eq!(text, json!({"prompt": "hi"}));
        for (path, body, param) in
            [("/tokenize", json!({}), "prompt"), ("/detokenize", json!({"tokens": "x"}), "tokens")]
        {
            let refused = post(server.address, path, &body).await;
            assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!(param)));
        }
    });
}
