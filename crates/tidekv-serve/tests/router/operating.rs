//! Pages for operators: who may change what, what is shown, and what the router decides on its own.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tidekv_serve::router::{ModelSpec, Settings, SleepSettings, SloTarget};

use crate::engine::Script;
use crate::running::{Answer, Running, pool, read_until, settings, spec, with_key};

const KEY: (&str, &str) = ("authorization", "Bearer secret");

#[test]
fn limits_change_with_the_key_alone() {
    let open = Running::one(settings(), &Arc::default());
    let keyed = Running::one(with_key(), &Arc::default());
    for router in [&open, &keyed] {
        router.desk.pools.lock().unwrap().push(pool("p", 1, 0));
    }
    let limit = |router: &Running, headers: &[(&str, &str)], body: &str| {
        router.send("POST", "/api/pools/p/limit", headers, body).status
    };
    assert_eq!(limit(&open, &[], "{\"bytes\": 5}"), 403);
    assert_eq!(limit(&open, &[KEY], "{\"bytes\": 5}"), 403);
    assert_eq!(limit(&keyed, &[], "{\"bytes\": 5}"), 401);
    assert_eq!(limit(&keyed, &[("authorization", "Bearer wrong")], "{\"bytes\": 5}"), 401);
    let foreign = ("origin", "http://evil.example");
    assert_eq!(limit(&keyed, &[KEY, foreign], "{\"bytes\": 5}"), 403);
    assert!(keyed.desk.pools.lock().unwrap()[0].limit_bytes.is_none(), "nothing of that may have changed it");
    let own = format!("http://{}", keyed.address);
    assert_eq!(limit(&keyed, &[KEY, ("origin", &own)], "{\"bytes\": 5}"), 200);
    assert_eq!(limit(&keyed, &[KEY], "{\"size\": \"2G\"}"), 200);
    assert_eq!(keyed.desk.pools.lock().unwrap()[0].limit_bytes, Some(2 << 30));
    for wrong in
        ["", "{}", "{\"bytes\": -1}", "{\"size\": \"much\"}", "{\"bytes\": 1, \"size\": \"1\"}", "{\"byte\": 1}"]
    {
        assert_eq!(limit(&keyed, &[KEY], wrong), 422, "{wrong}");
    }
    assert_eq!(keyed.send("POST", "/api/pools/q/limit", &[KEY], "{\"bytes\": 5}").code().0, 404);
    assert_eq!(keyed.send("POST", "/action/sleep/m", &[], "").status, 401);
    assert_eq!(open.send("POST", "/action/sleep/m", &[foreign], "").status, 403);
}

#[test]
fn shares_are_set_and_refused_with_the_reason() {
    let router = Running::one(with_key(), &Arc::default());
    router.desk.pools.lock().unwrap().push(pool("p", 1, 0));
    let share = |body: &str| router.send("POST", "/api/pools/p/share", &[KEY], body);
    assert_eq!(share("{\"weight\": 9}").json()["ok"], true);
    assert_eq!(router.get("/api/pools")["pools"][0]["weight"], 9);
    assert_eq!(share("{\"weight\": 0}").status, 422);
    assert_eq!(share("{}").status, 422);
    let refused = share("{\"floor\": \"2G\"}");
    assert_eq!(
        (refused.status, refused.json()["error"]["message"].as_str().unwrap()),
        (422, "a floor that does not fit")
    );
}

#[test]
fn status_and_pools_know_each_other() {
    let router = Running::one(with_key(), &Arc::default());
    router.desk.pools.lock().unwrap().extend([pool("p", 1, 0), pool("stranger", 77, 0)]);
    let status = router.get("/api/status");
    assert_eq!((&status["auth_required"], &status["devices"][0]["total_bytes"]), (&json!(true), &json!(1 << 30)));
    let model = &status["models"][0];
    assert_eq!((&model["pool"], &model["pid"], &model["engine"]), (&json!("p"), &json!(1), &json!("kvserve")));
    assert_eq!((&model["ttft_ms"]["p50"], &model["state"]), (&Value::Null, &json!("ready")));
    assert!(model["endpoint"].as_str().unwrap().starts_with("http://127.0.0.1:"));
    let pools = router.get("/api/pools");
    assert_eq!((&pools["pools"][0]["model"], &pools["pools"][1]["model"]), (&json!("m"), &Value::Null));
    let page = router.send("GET", "/metrics", &[], "").body;
    for line in [
        "kvcached_router_model_ready{model=\"m\"} 1",
        "kvcached_kv_cache_pool_needed_bytes{pool=\"p\",device=\"host\"} 1",
        "kvcached_kv_cache_pool_cached_bytes{pool=\"p\",device=\"host\"} 2",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}\n{page}");
    }
}

#[test]
fn the_pages_of_kvcached() {
    let router = Running::start(settings(), vec![(spec("a"), Arc::default()), (spec("b"), Arc::default())]);
    assert_eq!(router.complete(&json!({"model": "a"})).status, 200);
    assert_eq!(router.get("/health"), json!({"status": "healthy"}));
    assert_eq!(router.get("/health/all")["health"], json!({"a": true, "b": true}));
    assert_eq!(router.get("/health/org/a")["health"]["a"], true);
    let endpoint = &router.get("/models")["models"]["a"]["endpoint"];
    assert!(endpoint["host"] == "127.0.0.1" && endpoint["port"].as_u64().unwrap() > 0, "{endpoint}");
    let stats = router.get("/traffic/stats?window=10");
    assert_eq!((&stats["window_seconds"], &stats["traffic_stats"]["a"]["total_requests"]), (&json!(10), &json!(1)));
    let one = router.get("/traffic/stats/org/a");
    assert_eq!(
        (&one["model_stats"]["successful_requests"], &one["model_stats"]["is_idle"]),
        (&json!(1), &json!(false))
    );
    assert_eq!(router.get("/models/idle?threshold=0")["idle_models_count"], 2);
    assert_eq!(router.get("/models/active")["active_models"], json!(["a", "b"]));
    assert_eq!(router.get("/sleep/status")["sleeping_models"], json!({}));
    assert_eq!(router.get("/sleep/candidates")["sleep_candidates"], json!([]));
    assert_eq!(router.send("GET", "/traffic/stats/nobody", &[], "").status, 404);
    assert_eq!(router.send("GET", "/traffic/stats?window=soon", &[], "").status, 400);
    assert_eq!(
        router.send("POST", "/action/sleep/a", &[], "").json(),
        json!({"model_name": "a", "success": true, "message": "a is asleep"})
    );
    assert!(router.get("/sleep/status")["sleeping_models"]["a"]["sleep_duration"].is_number());
}

#[test]
fn the_page_comes_with_its_policy() {
    let router = Running::one(settings(), &Arc::default());
    let scripts = ["/app.js", "/changes.js", "/parts.js", "/words.js"].map(|path| (path, "text/javascript"));
    for (path, kind) in [("/", "text/html"), ("/app.css", "text/css")].into_iter().chain(scripts) {
        let answer = router.send("GET", path, &[], "");
        assert!(answer.status == 200 && answer.head.contains(kind), "{path}: {}", answer.head);
        assert!(answer.head.contains("content-security-policy: default-src 'self'"), "{}", answer.head);
    }
}

#[test]
fn those_who_watch_are_told_and_see_decisions() {
    let sleep = SleepSettings {
        is_automatic: true,
        idle_threshold: Duration::from_millis(20),
        check_interval: Duration::from_millis(10),
        min_sleep: Duration::ZERO,
        ..SleepSettings::default()
    };
    let router = Running::one(Settings { sleep, ..settings() }, &Arc::default());
    let mut socket = router.open("GET", "/api/events", &[], "");
    read_until(&mut socket, "event: pools");
    // It may have fallen asleep before we looked: woken, it does so again.
    let _ = router.send("POST", "/action/wakeup/m", &[], "");
    let seen = read_until(&mut socket, "event: decision");
    let seen =
        if seen.contains("\"action\":\"sleep\"") { seen } else { read_until(&mut socket, "\"action\":\"sleep\"") };
    assert!(seen.contains("idle for 0.02 s"), "{seen}");
}

#[test]
fn who_misses_its_target_for_lack_of_memory_gets_a_larger_weight() {
    let script = Arc::new(Script { is_gated: true, ..Script::default() });
    let narrow = ModelSpec { max_concurrency: 1, slo: Some(SloTarget { ttft_ms: 1.0 }), ..spec("m") };
    let router = Running::start(settings(), vec![(narrow, Arc::clone(&script))]);
    router.desk.pools.lock().unwrap().extend([pool("p", 1, 1 << 20), pool("stranger", 77, 1 << 20)]);
    let mut watch = router.open("GET", "/api/events", &[], "");
    read_until(&mut watch, "event: pools");
    let sockets: Vec<_> = (0..2).map(|_| router.open_complete(&json!({"model": "m"}))).collect();
    let seen = read_until(&mut watch, "weight 4 -> 6");
    assert!(seen.contains("\"pool\":\"p\""), "{seen}");
    script.gate.add_permits(2);
    for socket in sockets {
        assert_eq!(Answer::read(socket).status, 200);
    }
    let pools = router.desk.pools.lock().unwrap();
    assert!((6..=32).contains(&pools[0].weight), "{}", pools[0].weight);
    assert_eq!(pools[1].weight, 4, "nobody's target");
}
