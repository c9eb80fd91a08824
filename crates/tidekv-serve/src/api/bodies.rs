//! Where bodies are read: short ones at once, long ones on threads that may be busy for a while, a few at a time.
//!
//! ```text
//!   body ── up to LONG_BODY_BYTES ──> read by the thread that received it
//!        └─ longer ── a place ──────> read by a thread of its own: JSON, template, tokens
//!                     one of LONG_BODIES
//! ```
//!
//! Two threads carry all connections, and each that parses, renders or tokenises megabytes is one that sends no tokens to anybody. What
//! takes long may be anywhere in a body (a role, a variable of the template, ids), so its length decides. A client that goes away
//! does not stop what it began, which therefore keeps its place until it is over.

use std::sync::Arc;

use axum::body::Bytes;
use tokio::sync::Semaphore;

use super::Service;
use super::error::ApiError;
use crate::handle::GenerateError;

/// Bodies longer than this are read elsewhere.
const LONG_BODY_BYTES: usize = 16 << 10;
/// So many of them at once: more would only keep each other, and a model on the processor, from it.
const LONG_BODIES: usize = 4;

/// Places of those that are being read elsewhere.
#[derive(Debug)]
pub(super) struct Places(Arc<Semaphore>);

impl Default for Places {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LONG_BODIES)))
    }
}

/// What `read` makes of a body.
pub(super) async fn read<T: Send + 'static>(
    service: &Arc<Service>,
    body: Bytes,
    read: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let own = Arc::clone(service);
    service.places.run(body.len(), move || read(&own, &body)).await
}

impl Places {
    async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        read: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= LONG_BODY_BYTES {
            return read();
        }
        let place = Arc::clone(&self.0).acquire_owned().await.expect("nobody closes the semaphore");
        let reading = tokio::task::spawn_blocking(move || {
            let _place = place;
            read()
        });
        match reading.await {
            Ok(read) => read,
            Err(error) => {
                Err(GenerateError::Compute { what: format!("the request could not be read: {error}") }.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use futures_util::FutureExt;

    use super::*;

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test)
    }

    /// The one thread of the runtime is needed to let the long ones go.
    #[test]
    fn long_bodies_hold_up_nobody() {
        let places = Places::default();
        let (go, told) = mpsc::channel();
        run(async {
            let long = places.run(LONG_BODY_BYTES + 1, move || {
                told.recv().expect("the short one tells");
                Ok("long")
            });
            let short = places.run(LONG_BODY_BYTES, move || {
                go.send(()).expect("the long one waits");
                Ok("short")
            });
            assert_eq!(tokio::join!(long, short), (Ok("long"), Ok("short")));
        });
    }

    #[test]
    fn only_so_many_are_read_at_once_though_clients_go_away() {
        let places = Places::default();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let one = || {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            places.run(LONG_BODY_BYTES + 1, move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // Long enough that one for whom there is no place would be seen beside it.
                let until = std::time::Instant::now() + std::time::Duration::from_millis(2);
                while std::time::Instant::now() < until {
                    std::thread::yield_now();
                }
                now.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            })
        };
        run(async {
            for _ in 0..20 {
                // Polled once, so that it begins where there is a place, and left.
                drop(one().now_or_never());
            }
            for outcome in futures_util::future::join_all((0..20).map(|_| one())).await {
                assert_eq!(outcome, Ok(()));
            }
        });
        let most = most.load(Ordering::SeqCst);
        assert!((1..=LONG_BODIES).contains(&most), "{most} at once");
    }
}
