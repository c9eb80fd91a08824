//! Many models, one address.
//!
//! ```text
//!   client ──> relay ──────────> model ──────────> upstream ──> engine        pieces of answers go back as they come
//!              whose? (Gateway)  may it come in?   connections
//!                                permits, queue,   that are kept
//!                                sleep (rest)
//!   operator ─> status, kvcached, metrics, page ──> desk ──> ledgers and segments, which somebody else knows
//!   nobody ───> caretaker ──> puts idle models to sleep (rest), shifts weights (slo)
//! ```
//!
//! The router starts no process: whoever does tells each [`Model`] what has become of its instance. Decisions (`rest`, `slo`, `traffic`)
//! know no socket and no clock, and are tested alone.

mod caretaker;
mod desk;
mod error;
mod kvcached;
mod metrics;
mod model;
mod page;
mod relay;
mod rest;
mod slo;
mod status;
mod traffic;
mod upstream;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::sync::{broadcast, watch};

pub use desk::{Desk, DeskError, DeskView, DeviceSight, PoolSight, ShareTerms};
pub use model::{EngineKind, Instance, Life, Model, ModelSpec};
pub use relay::MAX_BODY_BYTES;
pub use rest::SleepSettings;
pub use slo::SloTarget;

use crate::access::KeyRule;
use crate::api::DEFAULT_MODEL;
use crate::connections;
use crate::pages::{self, Page, Route};
use crate::server::{ServeError, Server};
use error::Refusal;
use model::Errand;
use upstream::Upstream;

/// Decisions that a slow listener may be behind.
const DECISIONS_KEPT: usize = 256;
/// Connections wait for requests and tokens; two threads carry thousands.
const IO_THREADS: usize = 2;

/// How the router behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// From the arrival of a request until its answer begins: queue, waking up and the engine together.
    pub request_timeout: Duration,
    /// The longest silence in the middle of an answer.
    pub stream_timeout: Duration,
    /// When models sleep.
    pub sleep: SleepSettings,
    /// How often targets are looked at, where a model has one.
    pub slo_interval: Duration,
}

/// All models and what the router does with them.
pub struct Gateway {
    settings: Settings,
    models: Vec<Arc<Model>>,
    /// By every name that clients may use.
    names: HashMap<String, usize>,
    desk: Arc<dyn Desk>,
    upstream: Upstream,
    decisions: broadcast::Sender<Decided>,
    /// Whether those who watch should go.
    closing: watch::Sender<bool>,
    started: Instant,
}

/// Something that was decided without anybody asking, for those who watch.
#[derive(Clone, Debug, Serialize)]
pub struct Decided {
    /// Seconds since 1970.
    pub time: u64,
    /// About which model.
    pub model: String,
    /// And which pool, where it is about one.
    pub pool: Option<String>,
    /// What was done.
    pub action: String,
    /// Why.
    pub reason: String,
}

/// What is being decided, for whoever shows it.
#[derive(Debug)]
pub struct Decisions(broadcast::Receiver<Decided>);

impl Decisions {
    /// The next one that is there already. Of those that nobody fetched in time the oldest are lost.
    pub fn take(&mut self) -> Option<Decided> {
        loop {
            match self.0.try_recv() {
                Ok(decided) => return Some(decided),
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
            }
        }
    }
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("settings", &self.settings).field("models", &self.names).finish_non_exhaustive()
    }
}

impl Gateway {
    /// Models in the order of the configuration: the first is `default`. Where two have a name in common it means the first.
    pub fn new(settings: Settings, models: Vec<Arc<Model>>, desk: Arc<dyn Desk>) -> Self {
        let mut names = HashMap::new();
        // An instance's own name means it, whatever models the others have.
        let kinds: [fn(&ModelSpec) -> &str; 3] = [|spec| &spec.name, |spec| &spec.model, |spec| &spec.served_name];
        for of in kinds {
            for (index, model) in models.iter().enumerate() {
                names.entry(of(model.spec()).to_owned()).or_insert(index);
            }
        }
        names.entry(DEFAULT_MODEL.to_owned()).or_insert(0);
        Self {
            settings,
            models,
            names,
            desk,
            upstream: Upstream::new(),
            decisions: broadcast::Sender::new(DECISIONS_KEPT),
            closing: watch::Sender::new(false),
            started: Instant::now(),
        }
    }

    /// All of them, in the order of the configuration.
    pub fn models(&self) -> &[Arc<Model>] {
        &self.models
    }

    /// Decisions from now on.
    pub fn watch_decisions(&self) -> Decisions {
        Decisions(self.decisions.subscribe())
    }

    fn find(&self, asked: &str) -> Result<Arc<Model>, Refusal> {
        let found = self.names.get(asked).and_then(|&index| self.models.get(index));
        found.cloned().ok_or_else(|| Refusal::UnknownModel { asked: asked.to_owned(), known: self.known() })
    }

    /// The names that there are, for people.
    fn known(&self) -> String {
        let names: Vec<_> = self.models.iter().map(|model| format!("{:?}", model.spec().name)).collect();
        names.join(", ")
    }

    /// Wakes a model up whether or not whoever asked for it stays.
    fn wake_in_background(self: &Arc<Self>, model: &Arc<Model>, errand: Errand) {
        let (gateway, model) = (Arc::clone(self), Arc::clone(model));
        tokio::spawn(async move {
            let outcome = gateway.wake(&model, &errand).await;
            let reason = match &outcome {
                Ok(()) => "a request came".to_owned(),
                Err(error) => format!("a request came, and the engine refused: {error}"),
            };
            gateway.decided(&model, None, "wake up", reason);
        });
    }

    async fn wake(&self, model: &Arc<Model>, errand: &Errand) -> Result<(), String> {
        let spec = model.spec();
        let outcome = self.upstream.wake(spec.engine, &errand.address, &spec.model).await;
        model.end_wake(errand, &outcome);
        outcome
    }

    async fn sleep(&self, model: &Arc<Model>, errand: &Errand) -> Result<(), String> {
        let engine = model.spec().engine;
        let mut outcome = self.upstream.sleep(engine, &errand.address, self.settings.sleep.level).await;
        if let Err(reason) = &outcome
            && self.upstream.is_sleeping(engine, &errand.address).await == Some(true)
        {
            // Its answer was lost, or late: what counts is what became of it.
            tracing::warn!("{}: it sleeps, although the order failed: {reason}", model.spec().name);
            outcome = Ok(());
        }
        model.end_sleep(errand, &outcome);
        outcome
    }

    fn decided(&self, model: &Model, pool: Option<&str>, action: &str, reason: String) {
        let name = &model.spec().name;
        tracing::info!("{name}: {action}: {reason}");
        let decided = Decided {
            time: crate::api::unix_seconds(),
            model: name.clone(),
            pool: pool.map(str::to_owned),
            action: action.to_owned(),
            reason,
        };
        // Nobody watches: the log has it.
        let _ = self.decisions.send(decided);
    }
}

/// Pages of engines that are found by the model in the body. Nothing else of a request's path reaches an engine.
const RELAYED: [&str; 9] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/detokenize",
    "/pooling",
];

/// All pages.
fn pages() -> Vec<Page<Arc<Gateway>>> {
    let mut pages = vec![
        Page::get("/v1/models", KeyRule::Open, status::models),
        Page::get("/v1/models/{*name}", KeyRule::Open, status::model),
        Page::get("/api/status", KeyRule::Open, status::status),
        Page::get("/api/pools", KeyRule::Open, status::pools),
        Page::post("/api/pools/{name}/limit", KeyRule::Required, status::set_limit),
        Page::post("/api/pools/{name}/share", KeyRule::Required, status::set_share),
        Page::get("/api/events", KeyRule::Open, status::events),
        Page::get("/metrics", KeyRule::Open, metrics::metrics),
    ];
    pages.extend(RELAYED.map(|path| Page::post(path, KeyRule::BeyondLoopback, relay::relay)));
    pages.extend(kvcached::pages());
    pages.extend(page::pages());
    pages
}

/// The routes of the router.
pub fn routes() -> Vec<Route> {
    pages().into_iter().map(|page| page.route).collect()
}

/// Told to stop, and by when.
#[derive(Clone, Debug)]
pub struct StopRouter(watch::Sender<Option<Duration>>);

impl StopRouter {
    /// Not yet.
    pub fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Nothing new is accepted; what is being answered has so long.
    pub fn stop(&self, drain: Duration) {
        self.0.send_replace(Some(drain));
    }
}

impl Default for StopRouter {
    fn default() -> Self {
        Self::new()
    }
}

/// Serves until told to stop, on threads of its own.
///
/// # Errors
/// [`ServeError::Start`].
pub fn run(server: Server, gateway: Arc<Gateway>, stop: &StopRouter) -> Result<(), ServeError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(IO_THREADS).thread_name("kvctl-router").enable_all().build();
    let runtime = runtime.map_err(ServeError::Start)?;
    let result = runtime.block_on(serve(server, gateway, stop.0.subscribe()));
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

async fn serve(
    server: Server,
    gateway: Arc<Gateway>,
    mut stopped: watch::Receiver<Option<Duration>>,
) -> Result<(), ServeError> {
    let (listener, limits, access) = server.listen()?;
    let caretaker = tokio::spawn(caretaker::care(Arc::clone(&gateway)));
    let mut told = stopped.clone();
    let closing = Arc::clone(&gateway);
    let stop = async move {
        // An error means that nobody can tell us any more.
        let _ = told.wait_for(Option::is_some).await;
        closing.closing.send_replace(true);
    };
    let all = pages::router(pages(), access, "docs/launching.md").with_state(gateway);
    let serving = connections::serve(listener, all, limits, relay::MAX_BODY_BYTES, stop);
    let time_is_up = async {
        let drain = stopped.wait_for(Option::is_some).await.ok().and_then(|drain| *drain);
        tokio::time::sleep(drain.unwrap_or_default()).await;
    };
    tokio::select! {
        () = serving => {}
        () = time_is_up => {}
    }
    caretaker.abort();
    Ok(())
}
