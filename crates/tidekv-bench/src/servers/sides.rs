//! The two sides of a comparison: A without elastic memory, B with it.
//!
//! | given                     | A                            | B                             | up                    |
//! |---------------------------|------------------------------|-------------------------------|-----------------------|
//! | nothing                   | kvserve `--kv static`        | kvserve `--kv elastic`        | both, one is silent   |
//! | `--a-cmd`, `--b-cmd`      | the one line                 | the other                     | one at a time, or both with `--both-up` |
//! | `--a-url`, `--b-url`      | the one server               | the other                     | both                  |
//!
//! Each kvserve has a folder and so a budget of its own: they never take memory from each other. On the processor it computes
//! with all cores but one, which is left to the client.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::Value;
use tidekv_core::units::Bytes;

use super::kvserve::{Backend, KvServe, Memory};
use super::session::Session;
use super::{Launch, Server};
use crate::bench_config::BenchConfig;
use crate::host::HostInfo;
use crate::lab::Lab;
use crate::load::{Api, BaseUrl, Endpoint};

const DEFAULT_MODEL: &str = "synthetic:tiny";
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Flags of everything that compares two servers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What is compared")]
pub struct SideArgs {
    /// What both sides serve: synthetic:tiny, synthetic:small, a folder or an id [default: synthetic:tiny; with URLs what
    /// they serve]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// What each side's kvserve computes on
    #[arg(long, value_enum, value_name = "NAME", default_value = "cpu")]
    pub backend: Backend,

    /// KV memory of each side's kvserve
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub kv_budget: Bytes,

    /// Start side A (without elastic memory) by this line, with a free port for {port}
    #[arg(long, value_name = "LINE")]
    pub a_cmd: Option<String>,

    /// Start side B (with elastic memory) by this line
    #[arg(long, value_name = "LINE")]
    pub b_cmd: Option<String>,

    /// Side A is there; or where --a-cmd listens, when its line has no {port}
    #[arg(long, value_name = "URL")]
    pub a_url: Option<BaseUrl>,

    /// Side B is there
    #[arg(long, value_name = "URL")]
    pub b_url: Option<BaseUrl>,

    /// Have the servers of --a-cmd and --b-cmd up at the same time: finer interleaving, where memory is enough for both
    #[arg(long)]
    pub both_up: bool,

    /// Seconds that a server may take to answer for the first time
    #[arg(long, value_name = "SEC", default_value_t = 600)]
    pub start_timeout: u64,

    /// Models, load and KVCACHED_* variables from the file of kvcached's guide
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// One side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Without elastic memory.
    A,
    /// With it.
    B,
}

impl Arm {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// 0 or 1.
    pub fn index(self) -> usize {
        usize::from(self == Self::B)
    }

    /// The one that this is not.
    pub fn other(self) -> Self {
        if self == Self::A { Self::B } else { Self::A }
    }

    /// The order of slices: A B, B A, A B, ... so that neither is always first.
    pub fn order(pair: usize) -> [Self; 2] {
        if pair.is_multiple_of(2) { [Self::A, Self::B] } else { [Self::B, Self::A] }
    }
}

/// What is to be compared, checked.
#[derive(Debug)]
pub struct Sides {
    launches: [Launch; 2],
    /// What results call the sides: `static` and `elastic`, or `a` and `b`.
    pub names: [&'static str; 2],
    model: Option<String>,
    /// Whether both are up at the same time.
    pub both_up: bool,
    timeout: Duration,
    _labs: Vec<Lab>,
}

impl Sides {
    /// What the flags and the file say.
    pub fn of(args: &SideArgs, config: Option<&BenchConfig>) -> anyhow::Result<Self> {
        let timeout = Duration::from_secs(args.start_timeout);
        let variables = config.map(BenchConfig::variables).unwrap_or_default();
        let foreign = [(&args.a_cmd, &args.a_url), (&args.b_cmd, &args.b_url)].map(|(line, url)| match (line, url) {
            (Some(line), url) => {
                Some(Launch::Command { line: line.clone(), url: url.clone(), variables: variables.clone() })
            }
            (None, Some(url)) => Some(Launch::Url(url.clone())),
            (None, None) => None,
        });
        match foreign {
            [Some(a), Some(b)] => {
                let is_started = |launch: &Launch| matches!(launch, Launch::Command { .. });
                let both_up = args.both_up || !(is_started(&a) && is_started(&b));
                let launches = [a, b];
                Ok(Self { launches, names: ["a", "b"], model: args.model.clone(), both_up, timeout, _labs: Vec::new() })
            }
            [None, None] => {
                let of_file = config.and_then(|config| config.models.first());
                let model = args.model.as_deref().or(of_file.map(|model| model.path.as_str())).unwrap_or(DEFAULT_MODEL);
                let budget_bytes = budget(args.kv_budget, config)?;
                let labs = vec![Lab::new()?, Lab::new()?];
                let kvserve = |lab: &Lab, memory: Memory| {
                    let mut kvserve = KvServe::new(lab, model, memory.name(), memory, budget_bytes);
                    kvserve.backend = args.backend;
                    kvserve.variables.clone_from(&variables);
                    if args.backend == Backend::Cpu {
                        kvserve.flags.extend(["--threads".into(), computing_threads().to_string().into()]);
                    }
                    Launch::KvServe(kvserve)
                };
                let launches = [kvserve(&labs[0], Memory::Static(None)), kvserve(&labs[1], Memory::Elastic)];
                Ok(Self { launches, names: ["static", "elastic"], model: None, both_up: true, timeout, _labs: labs })
            }
            _ => anyhow::bail!(
                "one side is given and the other is not: give both by --a-cmd or --a-url and --b-cmd or --b-url"
            ),
        }
    }

    /// The machine. What a command computes on nobody knows: if there is a GPU, that.
    pub fn host(&self) -> HostInfo {
        match &self.launches[0] {
            Launch::KvServe(kvserve) => kvserve.backend.host(),
            Launch::Command { .. } => Backend::Cuda.host(),
            Launch::Url(_) => HostInfo::current(),
        }
    }

    /// What is started, in words.
    pub fn description(&self, arm: Arm) -> String {
        match &self.launches[arm.index()] {
            Launch::KvServe(kvserve) => {
                let (backend, kv) = (kvserve.backend.name(), kvserve.memory.name());
                format!("kvserve {} --backend {backend} --kv {kv}", kvserve.model)
            }
            Launch::Command { line, .. } => line.clone(),
            Launch::Url(url) => url.to_string(),
        }
    }

    /// The servers, none of them up yet.
    pub fn arms<'a>(&'a self, session: &'a Session) -> Arms<'a> {
        Arms { sides: self, session, up: [None, None] }
    }
}

/// All cores but one, which is the client's. Where both want the same core, a step takes up to twice as long whenever the
/// client happens to read, and what is measured is who came first.
fn computing_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores.saturating_sub(1).max(1)
}

/// The budget of a server on the processor: what was asked for, or the part of it that the file allows.
pub fn budget(asked: Bytes, config: Option<&BenchConfig>) -> anyhow::Result<u64> {
    ensure!(asked > Bytes::ZERO, "--kv-budget is 0");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a u64, not negative")]
    let part = |part: f64| (crate::stats::to_f64(asked.0) * part) as u64;
    Ok(config.map_or(asked.0, |config| part(config.utilization())))
}

/// The servers of both sides: started when they are needed, stopped when they are in each other's way, and at the end.
#[derive(Debug)]
pub struct Arms<'a> {
    sides: &'a Sides,
    session: &'a Session,
    up: [Option<(Server, Endpoint)>; 2],
}

impl Arms<'_> {
    /// Whether a side's server is up.
    pub fn is_up(&self, arm: Arm) -> bool {
        self.up[arm.index()].is_some()
    }

    /// Whether both are started here, and can be once more.
    pub fn can_restart(&self) -> bool {
        !self.sides.launches.iter().any(|launch| matches!(launch, Launch::Url(_)))
    }

    /// Stops both.
    pub fn stop(&mut self) {
        Arm::BOTH.into_iter().for_each(|arm| self.end(arm));
    }

    fn end(&mut self, arm: Arm) {
        if let Some((server, _)) = self.up[arm.index()].take() {
            self.session.client().forget(server.url());
        }
    }

    /// Where a side's model answers. Starts its server if it is not up.
    pub fn endpoint(&mut self, arm: Arm) -> anyhow::Result<Endpoint> {
        if !self.sides.both_up {
            self.end(arm.other());
        }
        if let Some((_, endpoint)) = &self.up[arm.index()] {
            return Ok(endpoint.clone());
        }
        let launch = &self.sides.launches[arm.index()];
        let server = Server::start(launch, self.sides.timeout, self.session)?;
        let endpoint = match (launch, &self.sides.model) {
            (Launch::KvServe(kvserve), _) => Endpoint::new(server.url().clone(), Api::Completions, &kvserve.name),
            (_, Some(model)) => Endpoint::new(server.url().clone(), Api::Completions, model),
            (_, None) => {
                Endpoint::new(server.url().clone(), Api::Completions, served_model(self.session, server.url())?)
            }
        };
        self.up[arm.index()] = Some((server, endpoint.clone()));
        Ok(endpoint)
    }
}

/// The first model that a server lists.
pub fn served_model(session: &Session, url: &BaseUrl) -> anyhow::Result<String> {
    let page = session.page(url, "/v1/models", ASK_TIMEOUT);
    let page = page.with_context(|| format!("{url} does not say what it serves: is the server running there?"))?;
    let list: Option<Value> = serde_json::from_str(&page).ok();
    let id = list.as_ref().and_then(|list| list["data"][0]["id"].as_str());
    id.map(str::to_owned).with_context(|| format!("{url} lists no model: name it by --model"))
}
