//! As much HTTP/1.1 as a mock needs: requests with a length, answers in chunks, connections that are kept.

use std::io;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::MODEL;
use super::script::{Ending, MockRequest, Script, Step};
use crate::load::endpoint::Api;

/// No head of a client of ours comes near it.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_BODY_BYTES: usize = 64 << 20;

/// What stands before a body.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) content_length: usize,
    pub(super) closes: bool,
}

/// One connection, seen by the server.
#[derive(Debug)]
pub(super) struct Wire {
    socket: BufReader<TcpStream>,
    /// What goes out with the next write.
    out: Vec<u8>,
}

impl Wire {
    pub(super) fn new(socket: BufReader<TcpStream>) -> Self {
        Self { socket, out: Vec::new() }
    }

    /// The head of the next request; `None` when the client has closed the connection.
    pub(super) async fn head(&mut self) -> io::Result<Option<Head>> {
        let mut line = String::new();
        if self.socket.read_line(&mut line).await? == 0 {
            return Ok(None);
        }
        let mut words = line.split_whitespace();
        let mut word = || words.next().map(str::to_owned).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData));
        let (method, path) = (word()?, word()?);
        let mut head = Head { method, path, content_length: 0, closes: false };
        let mut bytes = 0;
        loop {
            line.clear();
            bytes += self.socket.read_line(&mut line).await?;
            let Some((name, value)) = line.trim_end().split_once(':') else { return Ok(Some(head)) };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" => head.content_length = value.parse().map_err(io::Error::other)?,
                "connection" => head.closes = value.eq_ignore_ascii_case("close"),
                _ => {}
            }
            if bytes > MAX_HEAD_BYTES || head.content_length > MAX_BODY_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }

    pub(super) async fn body(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut body = vec![0; length];
        self.socket.read_exact(&mut body).await?;
        Ok(body)
    }

    /// A page as a whole: JSON, or the text of a JSON string.
    pub(super) async fn page(&mut self, (status, page): (u16, Value)) -> io::Result<bool> {
        let (kind, text) = match page {
            Value::String(text) => ("text/plain; version=0.0.4", text),
            other => ("application/json", other.to_string()),
        };
        let head = format!("HTTP/1.1 {status} Mock\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", text.len());
        self.out.extend_from_slice(head.as_bytes());
        self.out.extend_from_slice(text.as_bytes());
        self.flush(&mut Vec::new()).await?;
        Ok(true)
    }

    /// Plays a script; says whether the connection may be used again.
    pub(super) async fn play(
        &mut self,
        script: &Script,
        request: &MockRequest,
        received: Instant,
        writes: &mut Vec<(Instant, Instant)>,
    ) -> io::Result<bool> {
        if script.status != 200 {
            let message = script.steps.iter().find_map(|step| match step {
                Step::Error(message) => Some(message.as_str()),
                _ => None,
            });
            return self.page((script.status, json!({"error": {"message": message.unwrap_or("no")}}))).await;
        }
        self.out.extend_from_slice(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        );
        let mut said = Said { request, text: String::new(), tokens: 0 };
        let mut waited = Duration::ZERO;
        for step in &script.steps {
            match step {
                Step::Wait(time) => {
                    self.flush(writes).await?;
                    waited += *time;
                    tokio::time::sleep_until((received + waited).into()).await;
                }
                Step::Tokens { text, count } => self.event(&said.tokens(text, *count)),
                Step::Opening => self.event(&said.tokens("", 0)),
                Step::Comment => self.chunk(b": still here\n\n"),
                Step::Error(message) => self.event(&json!({"error": {"message": message}})),
                Step::Raw(bytes) => self.chunk(bytes),
            }
        }
        match script.ending {
            Ending::Done | Ending::Close => {
                said.ending().iter().for_each(|event| self.event(event));
                self.chunk(b"data: [DONE]\n\n");
                self.out.extend_from_slice(b"0\r\n\r\n");
            }
            Ending::Silence => self.out.extend_from_slice(b"0\r\n\r\n"),
            // A length is announced that never comes.
            Ending::Disconnect => self.out.extend_from_slice(b"ff\r\ndata: "),
            Ending::Stall => {
                self.flush(writes).await?;
                // Until the client has enough: it sends nothing more, so this reads its end.
                self.socket.fill_buf().await?;
                return Ok(false);
            }
        }
        self.flush(writes).await?;
        Ok(!matches!(script.ending, Ending::Disconnect | Ending::Close))
    }

    fn event(&mut self, event: &Value) {
        self.chunk(format!("data: {event}\n\n").as_bytes());
    }

    fn chunk(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(format!("{:x}\r\n", bytes.len()).as_bytes());
        self.out.extend_from_slice(bytes);
        self.out.extend_from_slice(b"\r\n");
    }

    async fn flush(&mut self, writes: &mut Vec<(Instant, Instant)>) -> io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let before = Instant::now();
        self.socket.get_mut().write_all(&self.out).await?;
        writes.push((before, Instant::now()));
        self.out.clear();
        Ok(())
    }
}

/// An answer so far.
struct Said<'a> {
    request: &'a MockRequest,
    text: String,
    tokens: u64,
}

impl Said<'_> {
    fn tokens(&mut self, text: &str, count: u32) -> Value {
        self.tokens += u64::from(count);
        match self.request.api {
            Api::Completions => {
                json!({"object": "text_completion", "model": MODEL, "choices": [{"index": 0, "text": text, "finish_reason": null}]})
            }
            Api::Chat => {
                json!({"object": "chat.completion.chunk", "model": MODEL, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
            }
            Api::SglangGenerate => {
                self.text.push_str(text);
                self.sglang(&Value::Null)
            }
        }
    }

    /// What is said when all is said.
    fn ending(&mut self) -> Vec<Value> {
        let prompt_tokens = self.request.prompt_tokens;
        let usage = json!({"choices": [], "model": MODEL, "usage": {"prompt_tokens": prompt_tokens,
            "completion_tokens": self.tokens, "total_tokens": prompt_tokens + self.tokens}});
        match self.request.api {
            Api::SglangGenerate => vec![self.sglang(&json!({"type": "length", "length": self.tokens}))],
            Api::Completions | Api::Chat => Vec::from_iter(self.request.wants_usage.then_some(usage)),
        }
    }

    fn sglang(&self, finish_reason: &Value) -> Value {
        json!({"text": self.text, "meta_info": {"prompt_tokens": self.request.prompt_tokens, "cached_tokens": 0,
               "completion_tokens": self.tokens, "finish_reason": finish_reason}})
    }
}
