//! One request and its answer, every chunk with its time.

use std::sync::atomic::Ordering;

use hyper::body::{Bytes, Incoming};
use hyper::{Method, Response};

use super::gate::Job;
use super::{Lane, Shared};
use crate::load::dialect::{DONE, Event, Listener, message_of, shortened};
use crate::load::http::Connection;
use crate::load::record::{Chunk, ChunkKind, Failure, Record};
use crate::load::sse::SseReader;

/// As much of an error's body as is read.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// Sends a request and listens to the end of its answer, of its patience, or of the run.
pub(super) async fn exchange(shared: &Shared, lane: &Lane, job: Job) -> Record {
    let mut record = Record {
        stream: job.stream,
        index: job.index,
        api: lane.stream.endpoint.api,
        intended_ns: job.intended_ns,
        released_ns: job.released_ns,
        sent_ns: shared.now_ns(),
        first_byte_ns: None,
        chunks: Vec::new(),
        done_ns: 0,
        status: None,
        usage: None,
        planned_input_tokens: job.input_tokens,
        finish_reason: None,
        text: lane.stream.keep_text.then(String::new),
        connects: 0,
        resends: 0,
        failure: None,
    };
    shared.control.counters.sent.fetch_add(1, Ordering::Relaxed);
    let patience = shared.control.request_timeout;
    let outcome = tokio::select! {
        biased;
        outcome = answer(shared, lane, job.body, &mut record) => outcome,
        () = shared.control.cancel.cancelled() => Err(Failure::Cancelled),
        () = tokio::time::sleep(patience) => Err(Failure::Timeout { seconds: patience.as_secs() }),
    };
    record.failure = outcome.err();
    record.done_ns = shared.now_ns();
    record
}

async fn answer(shared: &Shared, lane: &Lane, body: Bytes, record: &mut Record) -> Result<(), Failure> {
    let (mut connection, response) = send(lane, body, record).await?;
    record.first_byte_ns = Some(shared.now_ns());
    let status = response.status().as_u16();
    record.status = Some(status);
    if status != 200 {
        let bytes = connection.rest(response.into_body(), MAX_ERROR_BYTES).await.unwrap_or_default();
        let message = serde_json::from_slice(&bytes).map_or_else(|_| shortened(&bytes), |error| message_of(&error));
        return Err(Failure::Status { status, message });
    }
    let is_stream = response.headers().get(hyper::header::CONTENT_TYPE).is_none_or(|kind| {
        kind.to_str().is_ok_and(|kind| kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream"))
    });
    if !is_stream {
        let bytes = connection.rest(response.into_body(), MAX_ERROR_BYTES).await.unwrap_or_default();
        return Err(Failure::Malformed { reason: format!("no stream of events but {:?}", shortened(&bytes)) });
    }
    let answer =
        Answer { shared, listener: Listener::new(lane.stream.endpoint.api), tokens: 0, is_over: false, record };
    answer.listen(&mut connection, response.into_body()).await?;
    lane.server.give_back(connection);
    Ok(())
}

/// Over a connection that was kept, or else over a new one. A server may close a kept connection at the very moment at which
/// it is used again; a request that got no byte of an answer that way goes to another connection, and is counted.
async fn send(lane: &Lane, body: Bytes, record: &mut Record) -> Result<(Connection, Response<Incoming>), Failure> {
    let endpoint = &lane.stream.endpoint;
    let malformed = |error: &dyn ToString| Failure::Malformed { reason: error.to_string() };
    loop {
        let request = lane.server.request(Method::POST, &endpoint.target(), &endpoint.headers, body.clone());
        let request = request.map_err(|error| malformed(&error))?;
        let (mut connection, is_new) = match lane.server.take().await {
            Some(kept) => (kept, false),
            None => {
                record.connects += 1;
                let connection = lane.server.connect().await;
                (connection.map_err(|error| Failure::Connect { reason: error.to_string() })?, true)
            }
        };
        match connection.send(request).await {
            Ok(response) => return Ok((connection, response)),
            Err(refused) if !is_new => record.resends += u32::from(!refused.is_unsent),
            Err(refused) => {
                let reason = refused.reason.to_string();
                return Err(Failure::Disconnected { after: "before an answer".to_owned(), reason });
            }
        }
    }
}

/// An answer that is being listened to.
struct Answer<'a> {
    shared: &'a Shared,
    listener: Listener,
    /// Tokens of it so far, if the server says.
    tokens: u64,
    /// `[DONE]` was heard.
    is_over: bool,
    record: &'a mut Record,
}

impl Answer<'_> {
    async fn listen(mut self, connection: &mut Connection, mut body: Incoming) -> Result<(), Failure> {
        let mut reader = SseReader::new();
        let mut heard = Ok(());
        while let Some(bytes) = connection.next(&mut body).await {
            let at_ns = self.shared.now_ns();
            let bytes = match bytes {
                Ok(bytes) => bytes,
                // The answer was whole; that its connection breaks now costs nobody anything but the connection.
                Err(_) if self.is_over => return Ok(()),
                Err(error) => return Err(self.disconnected(&error)),
            };
            let pushed = reader.push(&bytes, |data| {
                if heard.is_ok() {
                    heard = self.hear(data, at_ns);
                }
            });
            pushed.map_err(|error| Failure::Malformed { reason: error.to_string() })?;
            std::mem::replace(&mut heard, Ok(()))?;
        }
        let at_ns = self.shared.now_ns();
        reader.finish(|data| heard = self.hear(data, at_ns));
        heard?;
        if self.record.chunks.iter().all(|chunk| chunk.kind == ChunkKind::Usage) {
            return Err(Failure::Malformed { reason: "the stream ended without a choice".to_owned() });
        }
        if !self.is_over && self.record.finish_reason.is_none() {
            return Err(self.disconnected(&"the stream ended without [DONE] and without a reason"));
        }
        Ok(())
    }

    fn disconnected(&self, reason: &dyn ToString) -> Failure {
        let after = format!("after {} chunks", self.record.chunks.len());
        Failure::Disconnected { after, reason: reason.to_string() }
    }

    fn hear(&mut self, data: &[u8], at_ns: u64) -> Result<(), Failure> {
        if data == DONE {
            self.is_over = true;
            return Ok(());
        }
        let event = self.listener.hear(data).map_err(|reason| Failure::Malformed { reason })?;
        let Event { is_choice, text, tokens_so_far, usage, finish_reason, error } = event;
        if let Some(message) = error {
            return Err(Failure::Server { message });
        }
        self.record.usage = usage.or(self.record.usage);
        self.record.finish_reason = finish_reason.or(self.record.finish_reason.take());
        let kind = match (is_choice, usage) {
            (true, _) => ChunkKind::Choice { has_text: !text.is_empty() },
            (false, Some(_)) => ChunkKind::Usage,
            // Neither: a server that says something of its own.
            (false, None) => return Ok(()),
        };
        let tokens = tokens_so_far.map(|tokens| {
            let new = tokens.saturating_sub(self.tokens);
            self.tokens = tokens;
            u32::try_from(new).unwrap_or(u32::MAX)
        });
        self.record.chunks.push(Chunk { at_ns, kind, tokens });
        self.shared.control.counters.chunks.fetch_add(1, Ordering::Relaxed);
        if let Some(kept) = &mut self.record.text {
            kept.push_str(&text);
        }
        Ok(())
    }
}
