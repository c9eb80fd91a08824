//! What every benchmark of servers has for as long as it runs: a client, and an ear for Ctrl-C.
//!
//! The first SIGINT, SIGTERM or SIGHUP stops the load; the benchmark then stops its servers and ends. The second ends it at
//! once, and the guards do the rest.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::load::{Api, BaseUrl, Cancel, Client, Endpoint};

/// What servers answer with when all is well.
const OK: u16 = 200;

/// See the [module](self). Clones are the same session.
#[derive(Clone, Debug)]
pub struct Session {
    client: Arc<Client>,
    cancel: Cancel,
}

impl Session {
    /// A session that signals end.
    ///
    /// # Errors
    /// When there are no threads to be had or signals cannot be caught.
    pub fn begin() -> anyhow::Result<Self> {
        let session = Self::quiet()?;
        let cancel = session.cancel.clone();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signals cannot be caught")?;
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for signal in signals.forever() {
                if cancel.is_cancelled() {
                    let _ = emulate_default_handler(signal);
                }
                cancel.cancel();
            }
        })?;
        Ok(session)
    }

    /// A session that nobody interrupts: for tests.
    ///
    /// # Errors
    /// When there are no threads to be had.
    pub fn quiet() -> anyhow::Result<Self> {
        Ok(Self { client: Arc::new(Client::new(Client::default_threads())?), cancel: Cancel::new() })
    }

    /// What sends requests.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What ends a run early.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Whether somebody wants this to end.
    pub fn is_interrupted(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// The text of a page, if there is one and it says that all is well.
    pub fn page(&self, url: &BaseUrl, path: &str, within: Duration) -> Option<String> {
        let endpoint = Endpoint::new(url.clone(), Api::Completions, "");
        let (status, bytes) = self.client.page(&endpoint, path, within).ok()?;
        (status == OK).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The text that a page answers to `body` with, if it takes it.
    pub fn post(&self, url: &BaseUrl, path: &str, body: Vec<u8>, within: Duration) -> Option<String> {
        let endpoint = Endpoint::new(url.clone(), Api::Completions, "");
        let (status, bytes) = self.client.post(&endpoint, path, body, within).ok()?;
        (status == OK).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }
}
