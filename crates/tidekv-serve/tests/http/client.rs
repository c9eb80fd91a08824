//! A client over one connection for each request: it goes away when it is dropped.

use std::net::SocketAddr;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HeaderMap;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

/// Runs a test's client side. The test may wait for the engine meanwhile: connections are driven by another thread.
pub(crate) fn block_on<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(test)
}

/// A connection, closed when it is dropped.
pub(crate) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The task owns the socket.
        self.driver.abort();
    }
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(socket)).await.unwrap();
        Self { sender, driver: tokio::spawn(connection).abort_handle() }
    }

    pub(crate) async fn send(&mut self, method: &str, path: &str, body: impl Into<Bytes>) -> Response<Incoming> {
        self.try_send(method, path, body).await.unwrap()
    }

    /// The same for a server that may close the connection.
    pub(crate) async fn try_send(
        &mut self,
        method: &str,
        path: &str,
        body: impl Into<Bytes>,
    ) -> hyper::Result<Response<Incoming>> {
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        self.send_whole(request.body(Full::new(body.into())).unwrap()).await
    }

    /// The same with headers of the test's own.
    pub(crate) async fn send_whole(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        self.sender.send_request(request).await
    }
}

/// An answer that has arrived.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {:?}", self.text))
    }

    /// The answer of a request that was right.
    pub(crate) fn good(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }
}

pub(crate) async fn send(address: SocketAddr, method: &str, path: &str, body: impl Into<Bytes>) -> Answer {
    let mut connection = Connection::open(address).await;
    let response = connection.send(method, path, body).await;
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    Answer { status: parts.status, headers: parts.headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, "GET", path, "").await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    send(address, "POST", path, body.to_string()).await
}

/// A stream of events that may be left at any time.
pub(crate) struct Events {
    body: Incoming,
    buffer: String,
    _connection: Connection,
}

impl Events {
    pub(crate) async fn open(address: SocketAddr, path: &str, body: &Value) -> Self {
        let mut connection = Connection::open(address).await;
        let response = connection.send("POST", path, body.to_string()).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { body: response.into_body(), buffer: String::new(), _connection: connection }
    }

    /// The data of the next event; `None` when the stream is over.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.buffer.split_once("\n\n") {
                let data = event.strip_prefix("data: ").map(str::to_owned);
                self.buffer = rest.to_owned();
                match data {
                    Some(data) => return Some(data),
                    // A comment, to keep the connection open.
                    None => continue,
                }
            }
            let frame = self.body.frame().await?.unwrap();
            self.buffer += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
        }
    }

    /// All events up to `[DONE]`, behind which there is nothing.
    pub(crate) async fn rest(mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(data) = self.next().await {
            if data == "[DONE]" {
                assert_eq!(self.next().await, None);
                return events;
            }
            events.push(serde_json::from_str(&data).unwrap());
        }
        panic!("the stream ended without [DONE]: {events:?}");
    }
}
