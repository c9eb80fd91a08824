//! A router that runs, engines behind it, and a client in a few lines.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use tidekv_core::units::Bytes;
use tidekv_serve::access::{Access, ApiKey};
use tidekv_serve::connections::ConnectionLimits;
use tidekv_serve::router::{
    self, Desk, DeskError, DeskView, DeviceSight, EngineKind, Gateway, Instance, Life, Model, ModelSpec, PoolSight,
    Settings, ShareTerms, SleepSettings, StopRouter,
};
use tidekv_serve::server::Server;

use crate::engine::{self, Script};

/// Long enough that only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A desk of pools that a test made up.
#[derive(Debug, Default)]
pub(crate) struct FakeDesk {
    pub(crate) pools: Mutex<Vec<PoolSight>>,
}

impl Desk for FakeDesk {
    fn look(&self) -> Result<DeskView, DeskError> {
        let device = DeviceSight {
            name: "host".to_owned(),
            total_bytes: 1 << 30,
            budget_bytes: 1 << 29,
            used_bytes: 3,
            others_bytes: 1,
            device_free_bytes: 1,
            free_bytes: 1,
            pools_bytes: 2,
        };
        Ok(DeskView { pools: self.pools.lock().unwrap().clone(), devices: vec![device] })
    }

    fn set_limit(&self, pool: &str, limit: Bytes) -> Result<(), DeskError> {
        self.change(pool, |pool| pool.limit_bytes = Some(limit.0))
    }

    fn set_share(&self, pool: &str, terms: ShareTerms) -> Result<(), DeskError> {
        if terms.floor.is_some_and(|floor| floor > Bytes::gib(1)) {
            return Err(DeskError::Refused("a floor that does not fit".to_owned()));
        }
        self.change(pool, |pool| pool.weight = terms.weight.unwrap_or(pool.weight))
    }

    fn belongs_to(&self, pid: u32, instance: u32) -> bool {
        pid == instance
    }
}

impl FakeDesk {
    fn change(&self, name: &str, change: impl FnOnce(&mut PoolSight)) -> Result<(), DeskError> {
        let mut pools = self.pools.lock().unwrap();
        match pools.iter_mut().find(|pool| pool.name == name) {
            Some(pool) => {
                change(pool);
                Ok(())
            }
            None => Err(DeskError::NoSuchPool { name: name.to_owned(), known: "p".to_owned() }),
        }
    }
}

pub(crate) fn pool(name: &str, pid: u32, demand_bytes: u64) -> PoolSight {
    PoolSight {
        name: name.to_owned(),
        device: "host".to_owned(),
        pid: Some(pid),
        needed_bytes: 1,
        cached_bytes: 2,
        idle_bytes: 1,
        limit_bytes: None,
        capacity_bytes: 1 << 30,
        share: 0.5,
        weight: 4,
        floor_bytes: 0,
        demand_bytes,
        standing: "within-share",
        why: None,
        model: None,
    }
}

pub(crate) fn spec(name: &str) -> ModelSpec {
    ModelSpec {
        name: name.to_owned(),
        model: format!("org/{name}"),
        served_name: format!("served-{name}"),
        engine: EngineKind::Kvserve,
        max_concurrency: 100,
        max_queue: 100,
        slo: None,
    }
}

pub(crate) fn settings() -> Settings {
    Settings {
        request_timeout: PATIENCE,
        stream_timeout: PATIENCE,
        sleep: SleepSettings { min_sleep: Duration::ZERO, ..SleepSettings::default() },
        slo_interval: Duration::from_millis(20),
    }
}

/// How a router is started.
pub(crate) struct Setup {
    pub(crate) settings: Settings,
    pub(crate) access: Access,
    pub(crate) bound: &'static str,
}

impl From<Settings> for Setup {
    fn from(settings: Settings) -> Self {
        Self { settings, access: Access::default(), bound: "127.0.0.1" }
    }
}

pub(crate) fn with_key() -> Setup {
    Setup { access: Access::new(ApiKey::new("secret"), Vec::new(), Vec::new()), ..settings().into() }
}

/// A router with one engine for each model, all of them ready.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) models: Vec<Arc<Model>>,
    pub(crate) desk: Arc<FakeDesk>,
    stop: StopRouter,
    router: Option<JoinHandle<()>>,
    /// The engines live in it.
    _engines: tokio::runtime::Runtime,
}

impl Running {
    pub(crate) fn start(setup: impl Into<Setup>, models: Vec<(ModelSpec, Arc<Script>)>) -> Self {
        Self::with_limits(setup, models, ConnectionLimits::default())
    }

    /// Clients may take so much and no more.
    pub(crate) fn with_limits(
        setup: impl Into<Setup>,
        models: Vec<(ModelSpec, Arc<Script>)>,
        limits: ConnectionLimits,
    ) -> Self {
        let engines = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let desk = Arc::new(FakeDesk::default());
        let mut known = Vec::new();
        for (number, (spec, script)) in models.into_iter().enumerate() {
            let address = engines.block_on(engine::start(script));
            let model = Arc::new(Model::new(spec));
            model.set_instance(ready(address, number));
            known.push(model);
        }
        let Setup { settings, access, bound } = setup.into();
        let server = Server::bind(bound, 0, access).unwrap().with_limits(limits);
        let address = server.address();
        let gateway = Arc::new(Gateway::new(settings, known.clone(), Arc::clone(&desk) as Arc<dyn Desk>));
        let stop = StopRouter::new();
        let told = stop.clone();
        let router = std::thread::spawn(move || router::run(server, gateway, &told).unwrap());
        Self { address, models: known, desk, stop, router: Some(router), _engines: engines }
    }

    /// One model `m`, whose engine does as it is told.
    pub(crate) fn one(setup: impl Into<Setup>, script: &Arc<Script>) -> Self {
        Self::start(setup, vec![(spec("m"), Arc::clone(script))])
    }

    /// A request on a connection of its own, sent.
    pub(crate) fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n{lines}\r\n",
            self.address,
            body.len()
        );
        socket.write_all((head + body).as_bytes()).unwrap();
        socket
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        Answer::read(self.open(method, path, headers, body))
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        let answer = self.send("GET", path, &[], "");
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.json()
    }

    pub(crate) fn complete(&self, body: &Value) -> Answer {
        self.send("POST", "/v1/completions", &[], &body.to_string())
    }

    pub(crate) fn open_complete(&self, body: &Value) -> TcpStream {
        self.open("POST", "/v1/completions", &[], &body.to_string())
    }

    /// What `/api/status` says of a model.
    pub(crate) fn status(&self, name: &str) -> Value {
        let status = self.get("/api/status");
        let models = status["models"].as_array().unwrap();
        models.iter().find(|model| model["name"] == name).unwrap().clone()
    }

    /// Waits until `/api/status` says so of a model.
    pub(crate) fn wait_for(&self, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status(name);
            if is_so(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{name}: waited for {what}: {status}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.stop(Duration::ZERO);
        if let Some(router) = self.router.take()
            && router.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the router failed");
        }
    }
}

pub(crate) fn ready(address: SocketAddr, number: usize) -> Instance {
    let pid = u32::try_from(number).unwrap() + 1;
    Instance { life: Life::Ready, address: Some(address.to_string()), pid: Some(pid), restarts: 0 }
}

/// An answer to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn read(mut socket: TcpStream) -> Self {
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        Self::of(&text)
    }

    fn of(text: &str) -> Self {
        let (head, rest) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        if !head.contains("transfer-encoding: chunked") {
            return Self { status, body: rest.to_owned(), head };
        }
        let (mut body, mut rest) = (String::new(), rest);
        while let Some((size, after)) = rest.split_once("\r\n") {
            let size = usize::from_str_radix(size, 16).unwrap();
            body += &after[..size];
            rest = after[size..].trim_start_matches("\r\n");
            if size == 0 {
                break;
            }
        }
        Self { status, head, body }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The code of a refusal.
    pub(crate) fn code(&self) -> (u16, String) {
        (self.status, self.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    }
}

/// Reads from a socket until what has come contains `text`.
pub(crate) fn read_until(socket: &mut TcpStream, text: &str) -> String {
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    while !seen.contains(text) {
        let count = socket.read(&mut buffer).unwrap();
        assert!(count > 0, "ended before {text:?}: {seen}");
        seen += &String::from_utf8_lossy(&buffer[..count]);
    }
    seen
}
