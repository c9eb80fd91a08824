//! Whether something answers at an address, and how it is, asked from a thread that may wait.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use serde_json::Value;

const CONNECT: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(5);
/// An answer is short.
const ANSWER_BYTES: u64 = 64 << 10;
/// What kvserve says of itself when it can never answer again, and lives to say so.
const BEYOND_HOPE: [&str; 2] = ["device_lost", "stopped"];

/// How an instance is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// `/health` is 200.
    Well,
    /// It says that it will never be well again, and why.
    Lost(String),
    /// Anything else: it starts, it is busy, it has no such page.
    Unknown,
}

/// What `/health` says.
pub(super) fn health(address: &str) -> Health {
    answer(address).map_or(Health::Unknown, |answer| judge(&answer))
}

/// Whether `/health` is answered with 200.
pub(super) fn is_well(address: &str) -> bool {
    health(address) == Health::Well
}

fn judge(answer: &str) -> Health {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    match head.split(' ').nth(1) {
        Some("200") => Health::Well,
        Some("503") => {
            let body: Value = serde_json::from_str(body).unwrap_or_default();
            let word = body["status"].as_str().filter(|word| BEYOND_HOPE.contains(word));
            word.map_or(Health::Unknown, |word| Health::Lost(body["reason"].as_str().unwrap_or(word).to_owned()))
        }
        _ => Health::Unknown,
    }
}

/// Whether anything takes connections there.
pub(super) fn is_listening(address: &str) -> bool {
    connect(address).is_some()
}

fn connect(address: &str) -> Option<TcpStream> {
    address.to_socket_addrs().ok()?.find_map(|address| TcpStream::connect_timeout(&address, CONNECT).ok())
}

fn answer(address: &str) -> Option<String> {
    let mut socket = connect(address)?;
    socket.set_read_timeout(Some(ANSWER)).ok()?;
    socket.set_write_timeout(Some(ANSWER)).ok()?;
    let request = format!("GET /health HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).ok()?;
    let mut answer = Vec::new();
    // Whoever keeps the connection open has said what counts all the same.
    let _ = socket.take(ANSWER_BYTES).read_to_end(&mut answer);
    Some(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_says_so_is_beyond_hope() {
        let said = |status: u16, body: &str| judge(&format!("HTTP/1.1 {status} X\r\na: b\r\n\r\n{body}"));
        assert_eq!(said(200, ""), Health::Well);
        let lost = r#"{"status": "device_lost", "reason": "an illegal address"}"#;
        assert_eq!(said(503, lost), Health::Lost("an illegal address".to_owned()));
        assert_eq!(said(503, r#"{"status": "stopped"}"#), Health::Lost("stopped".to_owned()));
        for (status, body) in [(500, lost), (503, r#"{"status": "loading"}"#), (503, "busy"), (404, "")] {
            assert_eq!(said(status, body), Health::Unknown, "{status} {body}");
        }
        assert_eq!(judge("no HTTP at all"), Health::Unknown);
    }
}
