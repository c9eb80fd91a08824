//! `kvctl up`: checks everything, takes the router's port, starts the instances, and keeps them until told to stop.
//!
//! ```text
//!   configuration ──> port ──> house ──> router + a thread for each instance
//!   in this order: nothing is started before all that can be refused was looked at
//!
//!   first signal   the router takes nothing new and lets requests end, then instances are stopped
//!   second signal  nobody is waited for
//! ```

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tidekv_serve::connections::ConnectionLimits;
use tidekv_serve::router::{self, Decisions, Gateway, Life, Model, Settings, StopRouter};
use tidekv_serve::server::{ServeError, Server};
use tidekv_shm::{PoolName, RuntimeDir, segment};

use crate::command::access::access;
use crate::console::{Colour, Console};
use crate::exit::Outcome;
use crate::launch::config::{self, Plan, Program};
use crate::launch::desk::{self, PoolDesk};
use crate::launch::house::{self, InstanceState, OwnHouse, State};
use crate::launch::instance::{Keeper, StopFlag, Told, find_kvserve};
use crate::logging;
use crate::request::UpRequest;

/// Lines that wait to be shown; more are in the logs alone.
const LINES_KEPT: usize = 4096;
/// How often the state on disk is brought up to date.
const STATE_EVERY: Duration = Duration::from_millis(250);
/// With it limits can be changed over HTTP.
const KEY: &str = "KVCACHED_WEB_API_KEY";

pub(super) fn run(dir: &RuntimeDir, request: &UpRequest, console: &mut Console) -> anyhow::Result<Outcome> {
    for warning in logging::start(None)? {
        console.note(format_args!("warning: {warning}"));
    }
    let mut plan = match &request.config {
        Some(path) => config::read(path)?,
        None => config::without_file(),
    };
    plan.router.host = request.host.clone().unwrap_or(plan.router.host);
    plan.router.port = request.port.unwrap_or(plan.router.port);
    for warning in &plan.warnings {
        console.note(format_args!("warning: {warning}"));
    }
    if request.check {
        return say_plan(&plan, console);
    }
    let programs = programs(&plan)?;
    let renamed = name_pools(&mut plan, dir)?;
    let (hosts, origins) = (plan.router.allowed_hosts.clone(), plan.router.allowed_origins.clone());
    let access = access(&request.access, KEY, |name| std::env::var(name).ok(), hosts, origins)?;
    let clients = ConnectionLimits { body_budget_bytes: plan.router.body_budget_bytes, ..ConnectionLimits::default() };
    let bind = || Server::bind(&plan.router.host, plan.router.port, access).map(|server| server.with_limits(clients));
    let server = plan.router.is_enabled.then(bind).transpose()?;
    let orders = Orders::catch().context("signals cannot be caught")?;
    let own = OwnHouse::build(dir)?;
    let up = Up::start(dir, &plan, programs, request.config.clone(), server, own, console)?;
    for told in renamed {
        up.show_one(told, console);
    }
    up.attend(&plan, &orders, console)
}

/// Names each pool after its instance, with a number where a living pool or another supervisor's instance has the name: that may be
/// starting again just now. Says which got one. A name in the configuration stands.
fn name_pools(plan: &mut Plan, dir: &RuntimeDir) -> anyhow::Result<Vec<Told>> {
    let others = house::houses(dir)?.into_iter().filter(|house| house.is_alive).filter_map(|house| house.state);
    let mut taken: HashSet<String> =
        others.flat_map(|state| state.instances).filter_map(|instance| instance.pool).collect();
    taken.extend(plan.instances.iter().filter(|one| one.pool.is_named).map(|one| one.pool.name.to_string()));
    let mut renamed = Vec::new();
    for one in plan.instances.iter_mut().filter(|one| !one.pool.is_named) {
        let asked = one.pool.name.clone();
        let is_free = |name: &PoolName| {
            !taken.contains(name.as_str()) && !segment::has_owner(&dir.segment_path(name)).unwrap_or(false)
        };
        let numbered = (2..).map(|number| asked.numbered(number));
        one.pool.name = std::iter::once(asked.clone()).chain(numbered).find(is_free).unwrap_or_else(|| asked.clone());
        taken.insert(one.pool.name.to_string());
        if one.pool.name != asked {
            let text = format!("its pool is called {}: {asked} is another's", one.pool.name);
            renamed.push(Told::News { name: one.spec.name.clone(), text });
        }
    }
    Ok(renamed)
}

/// What would be started.
fn say_plan(plan: &Plan, console: &mut Console) -> anyhow::Result<Outcome> {
    if plan.router.is_enabled {
        console.line(format_args!("router at http://{}:{}", plan.router.host, plan.router.port))?;
    }
    for one in &plan.instances {
        let program = match &one.program {
            Program::Kvserve => "kvserve".to_owned(),
            Program::File(path) => path.display().to_string(),
        };
        let words = std::iter::once(program).chain(one.args.iter().cloned());
        console.line(format_args!("{}: {}", one.spec.name, shell_words::join(words)))?;
    }
    console.line("The configuration is right.")?;
    Ok(Outcome::Done)
}

/// What to start for each instance.
fn programs(plan: &Plan) -> anyhow::Result<Vec<PathBuf>> {
    let find = |program: &Program| match program {
        Program::File(path) => Ok(path.clone()),
        Program::Kvserve => {
            find_kvserve().context("kvserve is neither beside kvctl nor on PATH: install it, or choose another engine")
        }
    };
    plan.instances.iter().map(|one| find(&one.program)).collect()
}

/// A screen that cannot be written (a full disk, a terminal that is gone) is no reason to stop serving, nor to stop without order.
fn say(console: &mut Console, what: impl fmt::Display) {
    let _ = console.line(what);
}

/// Signals as something to ask about.
struct Orders(Receiver<()>);

impl Orders {
    fn catch() -> anyhow::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let (tell, told) = mpsc::channel();
        thread::Builder::new().name("kvctl-signals".to_owned()).spawn(move || {
            for _ in signals.forever() {
                if tell.send(()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self(told))
    }

    /// Whether another one came.
    fn came(&self) -> bool {
        self.0.try_recv().is_ok()
    }
}

/// Everything that runs.
struct Up {
    models: Vec<Arc<Model>>,
    keepers: Vec<JoinHandle<()>>,
    router: Option<JoinHandle<Result<(), ServeError>>>,
    stop_router: StopRouter,
    stop: Arc<StopFlag>,
    told: Receiver<Told>,
    decisions: Decisions,
    state: State,
    dir: RuntimeDir,
    own: OwnHouse,
}

impl Up {
    fn start(
        dir: &RuntimeDir,
        plan: &Plan,
        programs: Vec<PathBuf>,
        config: Option<PathBuf>,
        server: Option<Server>,
        own: OwnHouse,
        console: &mut Console,
    ) -> anyhow::Result<Self> {
        let stop = Arc::new(StopFlag::new()?);
        let (tell, told) = mpsc::sync_channel(LINES_KEPT);
        let models: Vec<Arc<Model>> = plan.instances.iter().map(|one| Arc::new(Model::new(one.spec.clone()))).collect();
        let address = server.as_ref().map(Server::address);
        let settings = Settings {
            request_timeout: plan.router.request_timeout,
            stream_timeout: plan.router.stream_timeout,
            sleep: plan.sleep,
            slo_interval: plan.slo_interval,
        };
        let gateway = Arc::new(Gateway::new(settings, models.clone(), Arc::new(PoolDesk::new(dir.clone()))));
        let decisions = gateway.watch_decisions();
        let stop_router = StopRouter::new();
        let router = server.map(|server| {
            let stop = stop_router.clone();
            thread::Builder::new().name("kvctl-router".to_owned()).spawn(move || router::run(server, gateway, &stop))
        });
        let router = router.transpose()?;
        let mut state = State {
            pid: std::process::id(),
            config,
            router: address.map(|at| format!("http://{at}")),
            instances: Vec::new(),
        };
        if let Some(address) = &state.router {
            say(console, format_args!("listening on {address}"));
        }
        let mut keepers = Vec::new();
        for (number, (one, program)) in plan.instances.iter().zip(programs).enumerate() {
            let log = own.log_path(number + 1, &one.spec.name);
            let keeper = Keeper {
                plan: one.clone(),
                program,
                model: Arc::clone(&models[number]),
                dir: dir.clone(),
                id: own.id().to_owned(),
                log: log.clone(),
                stop: Arc::clone(&stop),
                tell: tell.clone(),
                delay: plan.launch_delay.saturating_mul(u32::try_from(number).unwrap_or(u32::MAX)),
            };
            state.instances.push(InstanceState {
                name: one.spec.name.clone(),
                model: one.spec.model.clone(),
                engine: one.spec.engine.name().to_owned(),
                state: String::new(),
                pid: None,
                address: None,
                restarts: 0,
                log,
                pool: Some(one.pool.name.to_string()),
            });
            let name = format!("keep {}", one.spec.name);
            keepers.push(thread::Builder::new().name(name).spawn(move || keeper.run())?);
        }
        Ok(Self { models, keepers, router, stop_router, stop, told, decisions, state, dir: dir.clone(), own })
    }

    /// Shows what happens until told to stop, then stops everything.
    fn attend(mut self, plan: &Plan, orders: &Orders, console: &mut Console) -> anyhow::Result<Outcome> {
        let mut why_ended = None;
        // From the first moment on `kvctl ps` and `kvctl gc` know of it.
        self.write_state();
        loop {
            self.show(console, STATE_EVERY);
            self.write_state();
            if orders.came() {
                break;
            }
            if self.router.as_ref().is_some_and(JoinHandle::is_finished) {
                why_ended = Some("the router ended");
                break;
            }
            if self.models.iter().all(|model| model.instance().life == Life::Failed) {
                why_ended = Some("no instance could be started");
                break;
            }
        }
        say(console, "stopping: nothing new is accepted, running requests may end");
        self.stop_router.stop(if why_ended.is_some() { Duration::ZERO } else { plan.router.drain });
        let served = self.wait_for_router(orders, console);
        self.stop.raise();
        while self.keepers.iter().any(|keeper| !keeper.is_finished()) {
            self.show(console, Duration::from_millis(20));
            if orders.came() {
                say(console, "stopping at once");
                // Asked again at the end, where it counts.
                let _ = house::end_marked(self.own.id(), None);
            }
        }
        for keeper in self.keepers.drain(..) {
            // One that panicked has said so; what it started carries the mark.
            let _ = keeper.join();
        }
        self.show(console, Duration::ZERO);
        let ended = house::end_marked(self.own.id(), None);
        if ended.is_err() {
            self.own.leave();
        }
        // What did not end in time left its entries.
        desk::notice_deaths(&self.dir);
        ended.context("`kvctl gc` ends what is left when it can be ended")?;
        served?;
        match why_ended {
            Some(why) => bail!("{why}: nothing runs any more"),
            None => Ok(Outcome::Done),
        }
    }

    fn wait_for_router(&mut self, orders: &Orders, console: &mut Console) -> anyhow::Result<()> {
        let Some(router) = self.router.take() else { return Ok(()) };
        while !router.is_finished() {
            self.show(console, Duration::from_millis(20));
            if orders.came() {
                self.stop_router.stop(Duration::ZERO);
            }
        }
        match router.join() {
            Ok(served) => Ok(served?),
            Err(_) => bail!("the router ended unexpectedly"),
        }
    }

    /// Shows what there is to show, for so long.
    fn show(&mut self, console: &mut Console, time: Duration) {
        let until = Instant::now() + time;
        loop {
            while let Some(decided) = self.decisions.take() {
                let text = format!("{}: {}", decided.action, decided.reason);
                self.show_one(Told::News { name: decided.model, text }, console);
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.told.recv_timeout(left) {
                Ok(told) => {
                    let is_news = matches!(told, Told::News { .. });
                    self.show_one(told, console);
                    // Who is killed the next moment has said which processes are its own.
                    if is_news {
                        self.write_state();
                    }
                }
                Err(RecvTimeoutError::Timeout) => return,
                // All threads have ended.
                Err(RecvTimeoutError::Disconnected) => return thread::sleep(left),
            }
        }
    }

    fn show_one(&self, told: Told, console: &mut Console) {
        const COLOURS: [Colour; 3] = [Colour::Green, Colour::Yellow, Colour::BoldCyan];
        let (name, text, sign) = match told {
            Told::Line { name, line } => (name, line, '|'),
            Told::News { name, text } => (name, text, '>'),
        };
        let at = self.state.instances.iter().position(|one| one.name == name).unwrap_or(0);
        let prefix = console.paint(&format!("{name} {sign}"), COLOURS[at % COLOURS.len()]);
        say(console, format_args!("{prefix} {text}"));
    }

    fn write_state(&mut self) {
        let mut now = self.state.clone();
        for (one, model) in now.instances.iter_mut().zip(&self.models) {
            let instance = model.instance();
            one.state = model.state_word().to_owned();
            (one.pid, one.address, one.restarts) = (instance.pid, instance.address, instance.restarts);
        }
        if now == self.state {
            return;
        }
        if let Err(error) = self.own.write(&now) {
            tracing::warn!("`kvctl ps` shows an older state: {error}");
        }
        self.state = now;
    }
}
