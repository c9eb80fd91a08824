//! What every benchmark of servers has for as long as it runs: a client, and an ear for [Ctrl-C](Interrupt).

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;

use crate::interrupt::Interrupt;
use crate::load::{Api, BaseUrl, Cancel, Client, Endpoint};

/// What servers answer with when all is well.
const OK: u16 = 200;

/// See the [module](self). Clones are the same session.
#[derive(Clone, Debug)]
pub struct Session {
    client: Arc<Client>,
    interrupt: Interrupt,
}

impl Session {
    /// A session that signals end.
    ///
    /// # Errors
    /// When there are no threads to be had or signals cannot be caught.
    pub fn begin() -> anyhow::Result<Self> {
        Self::heeding(Interrupt::catch().context("signals cannot be caught")?)
    }

    /// A session that nobody interrupts: for tests.
    ///
    /// # Errors
    /// When there are no threads to be had.
    pub fn quiet() -> anyhow::Result<Self> {
        Self::heeding(Interrupt::never())
    }

    fn heeding(interrupt: Interrupt) -> anyhow::Result<Self> {
        Ok(Self { client: Arc::new(Client::new(Client::default_threads())?), interrupt })
    }

    /// What sends requests.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What ends a run early.
    pub fn cancel(&self) -> &Cancel {
        self.interrupt.cancel()
    }

    /// Whether somebody wants this to end.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.is_pressed()
    }

    /// Ctrl-C itself.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// What came of a part of a benchmark, or `None` where it was interrupted: what the other parts brought is kept, so how this
    /// one ended does not matter.
    ///
    /// # Errors
    /// Those of the part, where nobody interrupted it.
    pub fn unless_interrupted<T>(&self, part: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
        if self.is_interrupted() { Ok(None) } else { part.map(Some) }
    }

    /// The text of a page, if there is one and it says that all is well.
    pub fn page(&self, url: &BaseUrl, path: &str, within: Duration) -> Option<String> {
        let endpoint = Endpoint::new(url.clone(), Api::Completions, "");
        let (status, bytes) = self.client.page(&endpoint, path, within).ok()?;
        (status == OK).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The same page of several servers, asked for at the same moment.
    pub fn pages(&self, urls: &[BaseUrl], path: &str, within: Duration) -> Vec<Option<String>> {
        let endpoint = |url: &BaseUrl| Endpoint::new(url.clone(), Api::Completions, "");
        let endpoints: Vec<Endpoint> = urls.iter().map(endpoint).collect();
        let text =
            |(status, bytes): (u16, Vec<u8>)| (status == OK).then(|| String::from_utf8_lossy(&bytes).into_owned());
        self.client.pages(&endpoints, path, within).into_iter().map(|page| page.ok().and_then(text)).collect()
    }

    /// The text that a page answers to `body` with, if it takes it.
    pub fn post(&self, url: &BaseUrl, path: &str, body: Vec<u8>, within: Duration) -> Option<String> {
        let endpoint = Endpoint::new(url.clone(), Api::Completions, "");
        let (status, bytes) = self.client.post(&endpoint, path, body, within).ok()?;
        (status == OK).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }
}
