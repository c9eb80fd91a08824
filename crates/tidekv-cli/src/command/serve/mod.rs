//! `kvserve`: finds the model, takes the port, starts the engine, and serves until told to stop.
//!
//! ```text
//!   ServeCli + variables ── request ──> ServeRequest ── tokenizer, port, engine ──> listening ── signal ──> drained
//!                           all that is wrong with       in this order: what is quick
//!                           the words is said here       to refuse is refused first
//! ```

mod model;
mod request;
mod signals;

use anyhow::Context as _;
use std::sync::Arc;

use tidekv_serve::api::Service;
use tidekv_serve::config::ModelSource;
use tidekv_serve::server::{Server, stop_channel};
use tidekv_serve::tokenizer::Tokenizer;

use crate::cli::ServeCli;
use crate::console::Console;
use crate::exit::Outcome;
use crate::logging;
use request::ServeRequest;

/// Does what was asked of `kvserve`.
pub fn run(cli: &ServeCli, console: &mut Console) -> anyhow::Result<Outcome> {
    for warning in logging::start(None)? {
        console.note(format_args!("warning: {warning}"));
    }
    let request = ServeRequest::new(cli, |name| std::env::var(name).ok())?;
    let tokenizer = match &request.engine.model {
        ModelSource::Folder(folder) => Tokenizer::from_folder(folder)?,
        ModelSource::Synthetic { .. } => Tokenizer::bytes(),
    };
    let server = Server::bind(&request.host, request.port, request.access)?.with_limits(request.clients);
    let (stop, stopped) = stop_channel();
    // From here on a signal drains; before, it ends the process as always.
    let second = signals::stop_on_signal(stop).context("signals cannot be caught")?;

    let engine = tidekv_serve::engine::start(request.engine)?;
    second.ends(&engine);
    let stats = engine.stats();
    let context_tokens = engine.model().context_tokens;
    let service = Service::new(engine, Arc::new(tokenizer), Some(request.name));
    console.line(format_args!(
        "serving {} with kv_mode={} in pool {} (at most {}, context {context_tokens} tokens)",
        service.name(),
        stats.kv_mode.name(),
        stats.pool,
        stats.limit_bytes,
    ))?;
    console.line(format_args!("listening on http://{}", server.address()))?;
    server.run(service, stopped, request.drain)?;
    second.finish();
    Ok(Outcome::Done)
}
