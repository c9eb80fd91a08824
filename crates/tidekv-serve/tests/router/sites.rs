//! Names, sites and the key, at every route of the router.

use std::sync::Arc;

use serde_json::json;
use tidekv_serve::router;

use crate::engine::Script;
use crate::running::{Running, Setup, pool, settings, with_key};
use crate::support::{SITE, access, ask, check_every_route, check_listed_site};

#[test]
fn every_route_knows_names_sites_and_the_key() {
    for (bound, has_key) in [("127.0.0.1", false), ("127.0.0.1", true), ("0.0.0.0", true)] {
        let script = Arc::new(Script::default());
        let router = Running::one(Setup { bound, access: access(has_key), ..settings().into() }, &script);
        router.desk.pools.lock().unwrap().push(pool("p", 1, 0));
        check_every_route(router.address.port(), &router::routes(), has_key, bound == "0.0.0.0");
    }
}

#[test]
fn a_rebound_name_reads_and_changes_nothing() {
    let script = Arc::new(Script::default());
    let router = Running::one(Setup { bound: "0.0.0.0", ..with_key() }, &script);
    let port = router.address.port();
    for route in router::routes() {
        let lines = format!(
            "host: rebound.example:{port}\r\norigin: http://rebound.example:{port}\r\nauthorization: Bearer secret\r\n"
        );
        let path = route.path.replace("{*name}", "m").replace("{*model}", "m").replace("{name}", "p");
        let said = ask(port, route.method.as_str(), &path, &lines);
        assert_eq!((said.status, said.code.as_deref()), (403, Some("foreign_host")), "{path}");
    }
    assert!(script.asked.lock().unwrap().is_empty(), "no engine heard of it");
}

/// A link to the dashboard works from anywhere; nothing else of another site does.
#[test]
fn the_dashboard_may_be_visited() {
    let router = Running::one(settings(), &Arc::default());
    let port = router.address.port();
    let visit = format!("host: 127.0.0.1:{port}\r\nsec-fetch-site: cross-site\r\nsec-fetch-mode: navigate\r\n");
    assert_eq!(ask(port, "GET", "/", &visit).status, 200);
    for path in ["/app.js", "/api/status", "/metrics", "/v1/models"] {
        assert_eq!(ask(port, "GET", path, &visit).status, 403, "{path}");
    }
}

/// The engine has another name, and a list of its own without that site.
#[test]
fn a_listed_site_is_let_in_and_the_engine_does_not_hear_of_it() {
    let script = Arc::new(Script::default());
    let router = Running::one(Setup { access: access(true), ..settings().into() }, &script);
    check_listed_site(router.address.port(), "/v1/completions");
    let headers = [("origin", SITE), ("sec-fetch-site", "cross-site"), ("authorization", "Bearer secret")];
    let answer = router.send("POST", "/v1/completions", &headers, &json!({"model": "m"}).to_string());
    assert!(answer.status == 200 && answer.head.contains("access-control-allow-origin: https://app.example.com"));
    let own = format!("http://{}", router.address);
    let answer = router.send("POST", "/v1/completions", &[("origin", &own)], &json!({"model": "m"}).to_string());
    assert!(answer.status == 200 && !answer.head.contains("access-control"), "{}", answer.head);
    let asked = script.asked_of("/v1/completions");
    assert_eq!(asked.len(), 2);
    for (asked, name) in asked.iter().flat_map(|asked| headers.map(|(name, _)| (asked, name))) {
        assert!(!asked.headers.contains_key(name), "{name}");
    }
}
