//! Whether something answers at an address, asked from a thread that may wait.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

const CONNECT: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(5);
/// The first line of an answer is short.
const LINE_BYTES: u64 = 256;

/// Whether `/health` is answered with 200.
pub(super) fn is_well(address: &str) -> bool {
    status(address) == Some(200)
}

/// Whether anything takes connections there.
pub(super) fn is_listening(address: &str) -> bool {
    connect(address).is_some()
}

fn connect(address: &str) -> Option<TcpStream> {
    address.to_socket_addrs().ok()?.find_map(|address| TcpStream::connect_timeout(&address, CONNECT).ok())
}

fn status(address: &str) -> Option<u16> {
    let mut socket = connect(address)?;
    socket.set_read_timeout(Some(ANSWER)).ok()?;
    socket.set_write_timeout(Some(ANSWER)).ok()?;
    let request = format!("GET /health HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).ok()?;
    let mut line = String::new();
    BufReader::new(socket.take(LINE_BYTES)).read_line(&mut line).ok()?;
    line.split(' ').nth(1)?.parse().ok()
}
