//! An engine that does nothing but answer: a thread for each connection, pieces at appointed times. In a process of its own, so that it
//! takes nothing from the client's.
//!
//! | request                           | answer                                                                  |
//! |-----------------------------------|-------------------------------------------------------------------------|
//! | `GET /health`                     | 200                                                                     |
//! | `POST /v1/completions`            | `max_tokens` pieces, the first at once, then one every millisecond      |
//! | the same with `"user": "hold"`    | one piece at once, the end when somebody asks for the next              |
//! | `POST /release`                   | ends all that is held                                                   |

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::subprocess::{follow_the_parent, orders, say};
use tidekv_cli::exit::Outcome;

const BETWEEN: Duration = Duration::from_millis(1);
/// Enough for a request that we make ourselves.
const MAX_BODY: usize = 1 << 16;
/// A thousand threads are to be cheap.
const STACK: usize = 128 << 10;

/// Arguments of `kvbench router-upstream`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  kvbench router-upstream      # speaks lines of JSON; `kvbench router` starts it")]
pub struct UpstreamArgs {}

/// What it says once it listens.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Listening {
    pub(super) port: u16,
}

/// Held answers wait for the number to change.
#[derive(Debug, Default)]
struct Release {
    number: Mutex<u64>,
    changed: Condvar,
}

/// Serves until standard input closes.
pub fn run(_: &UpstreamArgs) -> anyhow::Result<Outcome> {
    follow_the_parent()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // A thousand clients may come at once.
    rustix::net::listen(&listener, 4096)?;
    say(&Listening { port: listener.local_addr()?.port() })?;
    let release = Arc::new(Release::default());
    thread::Builder::new().name("upstream".to_owned()).spawn(move || {
        for connection in listener.incoming().map_while(Result::ok) {
            let release = Arc::clone(&release);
            let serve = move || {
                // A client that went away is its own business.
                let _ = serve(&connection, &release);
            };
            if thread::Builder::new().stack_size(STACK).spawn(serve).is_err() {
                return;
            }
        }
    })?;
    orders::<serde_json::Value>().for_each(drop);
    Ok(Outcome::Done)
}

#[derive(Deserialize)]
struct Asked {
    #[serde(default)]
    max_tokens: u32,
    #[serde(default)]
    user: String,
}

fn serve(connection: &TcpStream, release: &Release) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection);
    let mut writer = connection;
    while let Some((path, body)) = request(&mut reader)? {
        match path.as_str() {
            "/v1/completions" => {
                let asked: Asked = serde_json::from_slice(&body)?;
                stream(&mut writer, &asked, release)?;
            }
            "/release" => {
                *release.number.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                release.changed.notify_all();
                writer.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
            }
            _ => writer.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?,
        }
    }
    Ok(())
}

/// The path and the body of the next request; none at the end of the connection.
fn request(reader: &mut impl BufRead) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut length = 0;
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let Some((name, value)) = line.split_once(':') else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().map_err(io::Error::other)?;
        }
    }
    if length > MAX_BODY {
        return Err(io::Error::other("the body is too large"));
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some((path, body)))
}

fn stream(writer: &mut impl Write, asked: &Asked, release: &Release) -> io::Result<()> {
    let before = *release.number.lock().unwrap_or_else(PoisonError::into_inner);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let piece = "data: {\"choices\": [{\"index\": 0, \"text\": \"x\"}]}\n\n";
    let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
    writer.write_all(format!("{head}{chunk}").as_bytes())?;
    if asked.user == "hold" {
        let number = release.number.lock().unwrap_or_else(PoisonError::into_inner);
        drop(release.changed.wait_while(number, |number| *number == before).unwrap_or_else(PoisonError::into_inner));
    } else {
        let start = Instant::now();
        for number in 1..asked.max_tokens {
            thread::sleep((BETWEEN * number).saturating_sub(start.elapsed()));
            writer.write_all(chunk.as_bytes())?;
        }
    }
    writer.write_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
}
