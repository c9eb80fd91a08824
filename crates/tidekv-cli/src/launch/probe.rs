//! Whether something answers at an address, and how it is, asked from a thread that may wait.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::Value;

const CONNECT: Duration = Duration::from_secs(1);
/// For the answer of one that starts: SGLang computes before it says that it is well.
const ANSWER: Duration = Duration::from_secs(5);
/// An answer is short.
const ANSWER_BYTES: usize = 64 << 10;
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

/// What `/health` says within `patience`: whoever asks hears of nothing else meanwhile.
pub(super) fn health(address: &str, patience: Duration) -> Health {
    answer(address, patience).map_or(Health::Unknown, |answer| judge(&answer))
}

/// Whether `/health` is answered with 200.
pub(super) fn is_well(address: &str) -> bool {
    health(address, ANSWER) == Health::Well
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

fn answer(address: &str, patience: Duration) -> Option<String> {
    let mut socket = connect(address)?;
    socket.set_read_timeout(Some(patience)).ok()?;
    socket.set_write_timeout(Some(patience)).ok()?;
    let request = format!("GET /health HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).ok()?;
    Some(read(&mut socket, Instant::now() + patience))
}

/// What is sent until the connection is closed, or the time is up: whoever keeps it open has said what counts all the same. Of a
/// good answer its first line is enough.
fn read(socket: &mut impl Read, deadline: Instant) -> String {
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    while Instant::now() < deadline && answer.len() < ANSWER_BYTES && !is_good(&answer) {
        match socket.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(count) => answer.extend_from_slice(&piece[..count]),
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

fn is_good(answer: &[u8]) -> bool {
    answer.starts_with(b"HTTP/1.") && answer.get(8..13) == Some(b" 200 ")
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

    /// Sends a letter whenever it is asked, and never ends.
    struct Drip<'a>(std::iter::Cycle<std::slice::Iter<'a, u8>>, usize);

    impl Read for Drip<'_> {
        fn read(&mut self, piece: &mut [u8]) -> std::io::Result<usize> {
            self.1 += 1;
            piece[0] = *self.0.next().expect("it never ends");
            Ok(1)
        }
    }

    #[test]
    fn whoever_never_ends_keeps_nobody() {
        let mut good = Drip(b"HTTP/1.1 200 OK\r\n".iter().cycle(), 0);
        assert_eq!(judge(&read(&mut good, Instant::now() + 1000 * ANSWER)), Health::Well);
        assert_eq!(good.1, 13, "its first line is enough");
        let mut bad = Drip(b"HTTP/1.1 503 X\r\n".iter().cycle(), 0);
        assert_eq!(read(&mut bad, Instant::now() + 1000 * ANSWER).len(), ANSWER_BYTES);
        let mut late = Drip(b"x".iter().cycle(), 0);
        assert_eq!(read(&mut late, Instant::now()), "");
    }
}
