//! Names, sites and the key, at every route of `kvserve`.

use tidekv_serve::api;

use crate::client::{block_on, get};
use crate::running::Running;
use crate::support::{access, ask, check_every_route, check_listed_site};

#[test]
fn every_route_knows_names_sites_and_the_key() {
    for (bound, has_key) in [("127.0.0.1", false), ("127.0.0.1", true), ("0.0.0.0", true)] {
        let server = Running::at(bound, access(has_key));
        check_every_route(server.address.port(), &api::routes(), has_key, bound == "0.0.0.0");
    }
}

/// Its page is the "same origin" for the browser, and may even know the key.
#[test]
fn a_rebound_name_reads_and_changes_nothing() {
    for (bound, has_key) in [("127.0.0.1", false), ("0.0.0.0", true)] {
        let server = Running::at(bound, access(has_key));
        let port = server.address.port();
        for route in api::routes() {
            let lines = format!(
                "host: rebound.example:{port}\r\norigin: http://rebound.example:{port}\r\nauthorization: Bearer secret\r\n"
            );
            let said = ask(port, route.method.as_str(), &route.path.replace("{*name}", "org/echo"), &lines);
            assert_eq!((said.status, said.code.as_deref()), (403, Some("foreign_host")), "{}", route.path);
        }
        block_on(async {
            assert_eq!(get(server.address, "/is_sleeping").await.good(), serde_json::json!({"is_sleeping": false}));
        });
    }
}

#[test]
fn a_listed_site_is_let_in() {
    let server = Running::at("127.0.0.1", access(true));
    check_listed_site(server.address.port(), "/v1/chat/completions");
}
