//! Requests at appointed times, and many answers held open: sockets and threads, nothing between them and the clock.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::Plan;
use crate::stats::Samples;

/// Requests of one connection are so far apart that the answer before has ended: pieces come every millisecond.
const MAX_CONNECTIONS: u32 = 512;
const PATIENCE: Duration = Duration::from_secs(60);
/// The last bytes of a chunked answer.
const END: &[u8] = b"\r\n0\r\n\r\n";

/// What one round measured.
pub(super) struct Timed {
    pub(super) first_piece: Samples,
    pub(super) send_lag: Samples,
}

/// One round at one address, in open loop: the n-th request is sent at its time by the thread whose turn it is.
pub(super) fn round(address: &str, plan: &Plan) -> anyhow::Result<Timed> {
    let address: SocketAddr = address.parse().context("an address")?;
    let gap = Duration::from_secs(1) / plan.rate;
    let count = u32::try_from(plan.round().as_nanos() / gap.as_nanos().max(1)).unwrap_or(u32::MAX).max(1);
    // Twice as many as would do if each answer took what its pieces take.
    let busy = Duration::from_millis(u64::from(plan.pieces) + 10) * 2;
    let connections = u32::try_from(busy.as_nanos() / gap.as_nanos().max(1)).unwrap_or(u32::MAX);
    let connections = connections.clamp(1, MAX_CONNECTIONS).min(count);
    let request = request("POST", "/v1/completions", address, &body(plan.pieces, ""));
    // Connections are made before the first request is due.
    let start = Instant::now() + Duration::from_millis(50);
    let threads: Vec<_> = (0..connections)
        .map(|turn| {
            let request = request.clone();
            thread::spawn(move || -> anyhow::Result<(Samples, Samples)> {
                let mut socket = connect(address)?;
                let (mut first, mut lag) = (Samples::new(), Samples::new());
                for number in (turn..count).step_by(connections as usize) {
                    let due = start + gap * number;
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let sent = Instant::now();
                    lag.push_duration(sent - due.min(sent));
                    socket.write_all(&request)?;
                    first.push_duration(read_answer(&mut socket, sent)?);
                }
                Ok((first, lag))
            })
        })
        .collect();
    let mut timed = Timed { first_piece: Samples::new(), send_lag: Samples::new() };
    for thread in threads {
        let Ok(outcome) = thread.join() else { bail!("a thread of the client failed") };
        let (first, lag) = outcome?;
        timed.first_piece.extend(&first);
        timed.send_lag.extend(&lag);
    }
    Ok(timed)
}

/// Begins answers until so many are open, has the upstream end them, and reads each to its end.
pub(super) fn hold(router: &str, upstream: &str, streams: u32) -> anyhow::Result<u32> {
    let address: SocketAddr = router.parse().context("an address")?;
    let hold = request("POST", "/v1/completions", address, &body(1, "hold"));
    let mut held = Vec::new();
    for number in 0..streams {
        let mut socket = connect(address).with_context(|| format!("stream {number}"))?;
        socket.write_all(&hold)?;
        held.push(socket);
    }
    // All have begun, and none has ended: so many are open.
    let mut begun = Vec::new();
    for (number, socket) in held.iter_mut().enumerate() {
        begun.push(read_until(socket, b"\n\n\r\n").with_context(|| format!("stream {number}"))?);
    }
    let upstream: SocketAddr = upstream.parse().context("an address")?;
    let mut release = connect(upstream)?;
    release.write_all(&request("POST", "/release", upstream, ""))?;
    read_until(&mut release, b"\r\n\r\n")?;
    for (number, (socket, begun)) in held.iter_mut().zip(&begun).enumerate() {
        let rest = read_until(socket, END).with_context(|| format!("the end of stream {number}"))?;
        let text = String::from_utf8_lossy(begun).into_owned() + &String::from_utf8_lossy(&rest);
        ensure!(text.starts_with("HTTP/1.1 200") && text.contains("data: [DONE]"), "stream {number} broke off: {text}");
    }
    Ok(streams)
}

/// Whether the router answers a request with the upstream's answer.
pub(super) fn is_answered(address: &str) -> anyhow::Result<()> {
    let address: SocketAddr = address.parse().context("an address")?;
    let mut socket = connect(address)?;
    socket.write_all(&request("POST", "/v1/completions", address, &body(1, "")))?;
    read_answer(&mut socket, Instant::now()).map(drop)
}

fn connect(address: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

fn body(pieces: u32, user: &str) -> String {
    format!(
        "{{\"model\": \"up\", \"prompt\": \"x\", \"max_tokens\": {pieces}, \"stream\": true, \"user\": \"{user}\"}}"
    )
}

fn request(method: &str, path: &str, host: SocketAddr, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    (head + body).into_bytes()
}

/// Reads an answer to its end; the time from `sent` until its first piece was there.
fn read_answer(socket: &mut TcpStream, sent: Instant) -> anyhow::Result<Duration> {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    let mut first = None;
    loop {
        let count = socket.read(&mut buffer)?;
        ensure!(count > 0, "the connection ended: {}", String::from_utf8_lossy(&seen));
        seen.extend(&buffer[..count]);
        if first.is_none() && contains(&seen, b"data: ") {
            first = Some(sent.elapsed());
        }
        let is_refused = !seen.starts_with(b"HTTP/1.1 200") && contains(&seen, b"\r\n\r\n");
        ensure!(!is_refused, "refused: {}", String::from_utf8_lossy(&seen));
        if seen.ends_with(END) {
            return first.context("the answer was empty");
        }
    }
}

fn read_until(socket: &mut TcpStream, end: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    while !contains(&seen, end) {
        let count = socket.read(&mut buffer)?;
        ensure!(count > 0, "the connection ended: {}", String::from_utf8_lossy(&seen));
        seen.extend(&buffer[..count]);
    }
    Ok(seen)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
