//! Who may ask, over real HTTP: every route of a server, under every name and from every site.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;
use tidekv_serve::access::{Access, ApiKey, KeyRule};
use tidekv_serve::pages::Route;

/// Long enough that only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);
const KEY: &str = "secret";
/// A name and a site that the operator wrote down.
const NAME: &str = "chat.example.com";
pub(crate) const SITE: &str = "https://app.example.com";

/// What servers of these tests are started with.
pub(crate) fn access(has_key: bool) -> Access {
    let key = has_key.then(|| ApiKey::new(KEY).unwrap());
    Access::new(key, vec![NAME.parse().unwrap()], vec![SITE.parse().unwrap()])
}

/// The head of an answer in small letters, and the code of a refusal.
pub(crate) struct Said {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) code: Option<String>,
}

/// Sends a request with these lines for its head, and reads the answer; of a good one its head alone, because streams do not end.
pub(crate) fn ask(port: u16, method: &str, path: &str, lines: &str) -> Said {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: 2\r\n{lines}\r\n{{}}");
    socket.write_all(head.as_bytes()).unwrap();
    let (mut answer, mut piece) = (String::new(), [0; 4096]);
    loop {
        let count = socket.read(&mut piece).unwrap();
        answer += &String::from_utf8_lossy(&piece[..count]);
        if count == 0 || (answer.starts_with("HTTP/1.1 2") && answer.contains("\r\n\r\n")) {
            break;
        }
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
    let code =
        serde_json::from_str::<Value>(body).ok().and_then(|body| Some(body["error"]["code"].as_str()?.to_owned()));
    Said { status: head.split(' ').nth(1).unwrap().parse().unwrap(), head: head.to_ascii_lowercase(), code }
}

/// What browsers and programs send, and the code with which it is refused.
fn asks(port: u16) -> Vec<(String, Option<&'static str>)> {
    const HOST: Option<&str> = Some("foreign_host");
    const ORIGIN: Option<&str> = Some("foreign_origin");
    let own_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let mut asks = Vec::new();
    for (host, refused) in [
        ("127.0.0.1", None),
        ("localhost", None),
        ("[::1]", None),
        ("192.0.2.7", None),
        (own_name.trim(), None),
        (NAME, None),
        ("rebound.example", HOST),
        ("127.0.0.1.rebound.example", HOST),
        ("host.docker.internal", HOST),
    ] {
        asks.push((format!("host: {host}:{port}\r\n"), refused));
        // The browser takes a page of that name for one of ours.
        let origin = format!("host: {host}:{port}\r\norigin: http://{host}:{port}\r\n");
        asks.push((origin + "sec-fetch-site: same-origin\r\n", refused));
    }
    // No browser.
    asks.push((String::new(), None));
    asks.push((format!("host: {NAME}\r\norigin: https://{NAME}\r\n"), None));
    for (lines, refused) in [
        ("origin: https://evil.example\r\n", ORIGIN),
        ("origin: https://evil.example\r\ncontent-type: text/plain\r\n", ORIGIN),
        ("origin: https://evil.example\r\nsec-fetch-site: cross-site\r\nsec-fetch-mode: cors\r\n", ORIGIN),
        ("origin: null\r\ncontent-type: application/x-www-form-urlencoded\r\n", ORIGIN),
        ("origin: http://127.0.0.1:1\r\nsec-fetch-site: same-site\r\n", ORIGIN),
        ("sec-fetch-site: cross-site\r\nsec-fetch-mode: no-cors\r\nsec-fetch-dest: image\r\n", ORIGIN),
        ("sec-fetch-site: same-site\r\nsec-fetch-mode: no-cors\r\n", ORIGIN),
        ("sec-fetch-site: same-origin\r\n", None),
        ("sec-fetch-site: none\r\nsec-fetch-mode: navigate\r\n", None),
        ("origin: https://app.example.com\r\nsec-fetch-site: cross-site\r\n", None),
    ] {
        asks.push((format!("host: 127.0.0.1:{port}\r\n{lines}"), refused));
    }
    asks
}

/// Asks every route, and two that are none, for what the table of `access.rs` says. `is_public`: the server is bound to 0.0.0.0.
pub(crate) fn check_every_route(port: u16, routes: &[Route], has_key: bool, is_public: bool) {
    let (mut asked, mut wrong) = (0, Vec::new());
    let given = routes.iter().map(|route| (route.method.as_str(), route.path, route.rule));
    let others = [("GET", "/no/such/page", KeyRule::Open), ("PUT", "/health", KeyRule::Open)];
    for (method, path, rule) in given.chain(others) {
        let path = &path.replace("{*name}", "m").replace("{*model}", "m").replace("{name}", "p");
        let mut check = |lines: &str, expected: Option<&str>| {
            let said = ask(port, method, path, lines);
            asked += 1;
            let code = said.code.as_deref().filter(|_| matches!(said.status, 401 | 403));
            if code != expected || !said.head.contains("cross-origin-resource-policy: same-origin") {
                wrong.push(format!("{method} {path} {lines:?}: {} {code:?} and not {expected:?}", said.status));
            }
        };
        let key = format!("authorization: Bearer {KEY}\r\n");
        let no_key_set = (rule == KeyRule::Required && !has_key).then_some("no_key_set");
        for (lines, refused) in asks(port) {
            // Who knows the key is a stranger all the same.
            check(&format!("{lines}{key}"), refused.or(no_key_set));
        }
        let needs_key = match rule {
            KeyRule::Open => false,
            KeyRule::BeyondLoopback => has_key && is_public,
            KeyRule::IfSet | KeyRule::Required => has_key,
        };
        let without_key = needs_key.then_some("wrong_key").or(no_key_set);
        check(&format!("host: 127.0.0.1:{port}\r\n"), without_key);
        check(&format!("host: 127.0.0.1:{port}\r\nauthorization: Bearer wrong\r\n"), without_key);
        check(&format!("host: rebound.example:{port}\r\n"), Some("foreign_host"));
    }
    assert!(wrong.is_empty(), "{} of {asked} were answered as they should not be:\n{}", wrong.len(), wrong.join("\n"));
}

/// Pages of a listed site are let in by their browser, all others are not.
pub(crate) fn check_listed_site(port: u16, path: &str) {
    let host = format!("host: 127.0.0.1:{port}\r\n");
    let wants = "access-control-request-method: POST\r\naccess-control-request-headers: authorization,x-mine\r\n";
    let asked = ask(port, "OPTIONS", path, &format!("{host}origin: {SITE}\r\n{wants}"));
    assert_eq!(asked.status, 204, "{}", asked.head);
    for line in [
        "access-control-allow-origin: https://app.example.com",
        "access-control-allow-methods: get, post",
        "access-control-allow-headers: authorization,x-mine",
        "vary: origin",
    ] {
        assert!(asked.head.contains(line), "{line}: {}", asked.head);
    }
    let answered = ask(port, "GET", "/health", &format!("{host}origin: {SITE}\r\nsec-fetch-site: cross-site\r\n"));
    assert!(answered.status == 200 && answered.head.contains("access-control-allow-origin: https://app.example.com"));
    for lines in [format!("{host}origin: https://evil.example\r\n{wants}"), format!("{host}{wants}")] {
        let refused = ask(port, "OPTIONS", path, &lines);
        assert!(refused.status >= 400 && !refused.head.contains("access-control"), "{lines}: {}", refused.head);
    }
    // No server says it of its own accord.
    assert!(!ask(port, "GET", "/health", &host).head.contains("access-control"));
}
