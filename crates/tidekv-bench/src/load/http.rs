//! Connections to one server: kept open, warmed before a run, driven by whoever waits for an answer.
//!
//! ```text
//!   idle: [conn][conn]  ── take ──> request ── answer ── read to its end ──> give back
//!                └ closed by the server meanwhile: thrown away, another is opened, the record says so
//! ```
//!
//! The task that waits for an answer polls the socket itself. With a task for each connection every chunk would cross
//! from one task to another before it is timed.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::endpoint::BaseUrl;

/// The largest answer that is no stream: a page of metrics, an error.
const MAX_WHOLE_BYTES: usize = 16 << 20;

type Driver = http1::Connection<TokioIo<TcpStream>, Full<Bytes>>;

/// The connections to one server.
#[derive(Clone, Debug)]
pub(super) struct Server {
    url: BaseUrl,
    idle: Arc<Mutex<Vec<Connection>>>,
}

impl Server {
    pub(super) fn new(url: BaseUrl) -> Self {
        Self { url, idle: Arc::default() }
    }

    pub(super) fn url(&self) -> &BaseUrl {
        &self.url
    }

    /// One that is open still, if there is one.
    pub(super) async fn take(&self) -> Option<Connection> {
        loop {
            let mut connection = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if connection.is_open().await {
                return Some(connection);
            }
        }
    }

    pub(super) async fn connect(&self) -> io::Result<Connection> {
        Connection::open(&self.url).await
    }

    pub(super) fn give_back(&self, connection: Connection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }

    /// Opens connections until `count` lie ready.
    pub(super) async fn warm(&self, count: usize) -> io::Result<()> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).len();
        for _ in idle..count {
            let connection = self.connect().await?;
            self.give_back(connection);
        }
        Ok(())
    }

    /// A request to this server.
    pub(super) fn request(
        &self,
        method: Method,
        target: &str,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let mut request = Request::builder().method(method).uri(target).header(HOST, self.url.authority());
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request = request.header(ACCEPT, "*/*");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.body(Full::new(body))
    }

    /// A whole page: its status and its bytes.
    pub(super) async fn page(
        &self,
        method: Method,
        target: &str,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> io::Result<(u16, Vec<u8>)> {
        let request = self.request(method, target, headers, body).map_err(io::Error::other)?;
        // A connection of its own: a page is asked for beside a run and must not take one that was warmed for it.
        let mut connection = self.connect().await?;
        let response = connection.send(request).await.map_err(|refused| io::Error::other(refused.reason))?;
        let (parts, body) = response.into_parts();
        let bytes = connection.rest(body, MAX_WHOLE_BYTES).await.map_err(io::Error::other)?;
        Ok((parts.status.as_u16(), bytes))
    }
}

/// A request that was not answered.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) reason: hyper::Error,
    /// Whether not a byte of it was sent.
    pub(super) is_unsent: bool,
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: Pin<Box<Driver>>,
    is_over: bool,
}

impl Connection {
    async fn open(url: &BaseUrl) -> io::Result<Self> {
        let socket = TcpStream::connect((url.host.as_str(), url.port)).await?;
        // A request is one write; it must not wait for an acknowledgement of the one before.
        socket.set_nodelay(true)?;
        let (sender, driver) = http1::handshake(TokioIo::new(socket)).await.map_err(io::Error::other)?;
        Ok(Self { sender, driver: Box::pin(driver), is_over: false })
    }

    /// Waits for `wanted` and does meanwhile what the connection has to do.
    async fn drive<T>(driver: &mut Pin<Box<Driver>>, is_over: &mut bool, wanted: impl Future<Output = T>) -> T {
        let mut wanted = pin!(wanted);
        poll_fn(|context| {
            if let Poll::Ready(value) = wanted.as_mut().poll(context) {
                return Poll::Ready(value);
            }
            if !*is_over && driver.as_mut().poll(context).is_ready() {
                // Whatever ended it reaches `wanted` as well.
                *is_over = true;
            }
            wanted.as_mut().poll(context)
        })
        .await
    }

    /// Whether the server has kept it open.
    async fn is_open(&mut self) -> bool {
        let Self { sender, driver, is_over } = self;
        poll_fn(|context| {
            if !*is_over && driver.as_mut().poll(context).is_ready() {
                *is_over = true;
            }
            Poll::Ready(())
        })
        .await;
        !*is_over && sender.is_ready()
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Refused> {
        let Self { sender, driver, is_over } = self;
        let answer = sender.try_send_request(request);
        Self::drive(driver, is_over, answer)
            .await
            .map_err(|mut error| Refused { is_unsent: error.take_message().is_some(), reason: error.into_error() })
    }

    /// The next bytes of an answer; `None` at its end.
    pub(super) async fn next(&mut self, body: &mut Incoming) -> Option<hyper::Result<Bytes>> {
        loop {
            let frame = Self::drive(&mut self.driver, &mut self.is_over, body.frame()).await?;
            match frame.map(hyper::body::Frame::into_data) {
                Ok(Ok(data)) => return Some(Ok(data)),
                // Trailers say nothing that is asked for.
                Ok(Err(_)) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The rest of an answer that is no stream, or its beginning where it is longer than `most`.
    pub(super) async fn rest(&mut self, mut body: Incoming, most: usize) -> hyper::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(data) = self.next(&mut body).await {
            bytes.extend_from_slice(&data?);
            if bytes.len() > most {
                bytes.truncate(most);
                break;
            }
        }
        Ok(bytes)
    }
}
