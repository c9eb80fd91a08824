//! From what is written to what is done: defaults filled in, everything checked that can be before anything is started.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde_saphyr::{Location, Spanned};
use tidekv_core::size::SizeError;
use tidekv_core::units::Bytes;
use tidekv_serve::access::{AccessError, HostName, Origin};
use tidekv_serve::connections::DEFAULT_BODY_BUDGET_BYTES;
use tidekv_serve::router::{EngineKind, MAX_BODY_BYTES, ModelSpec, SleepSettings, SloTarget};
use tidekv_shm::PoolName;

use super::error::Problem;
use super::yaml;
use crate::command::known_variables;
use crate::request::{ShareChange, segment_size};
use crate::text::nearest;

/// All that is to be started.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) router: RouterPlan,
    pub(crate) sleep: SleepSettings,
    pub(crate) slo_interval: Duration,
    /// Between the starts of two instances.
    pub(crate) launch_delay: Duration,
    pub(crate) instances: Vec<InstancePlan>,
    /// What looks wrong and need not be.
    pub(crate) warnings: Vec<String>,
}

/// Where clients come in.
#[derive(Debug)]
pub(crate) struct RouterPlan {
    pub(crate) is_enabled: bool,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) allowed_hosts: Vec<HostName>,
    pub(crate) allowed_origins: Vec<Origin>,
    pub(crate) request_timeout: Duration,
    pub(crate) stream_timeout: Duration,
    pub(crate) drain: Duration,
    /// What the bodies of requests may hold until an engine has them.
    pub(crate) body_budget_bytes: usize,
}

/// An instance to be started.
#[derive(Clone, Debug)]
pub(crate) struct InstancePlan {
    pub(crate) spec: ModelSpec,
    pub(crate) program: Program,
    pub(crate) args: Vec<String>,
    /// Variables, later ones over earlier ones.
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) host: String,
    /// 0 where the instance chooses one and says which.
    pub(crate) port: u16,
    pub(crate) startup_timeout: Duration,
    pub(crate) pool: PoolPlan,
}

/// The pool of an instance: its name, and the terms that it gets at each start of the instance.
#[derive(Clone, Debug)]
pub(crate) struct PoolPlan {
    pub(crate) name: PoolName,
    /// Whether the configuration names it; else it is named after the instance.
    pub(crate) is_named: bool,
    pub(crate) limit: Option<Bytes>,
    pub(crate) share: ShareChange,
}

impl PoolPlan {
    /// Whether the configuration says anything about its size or share.
    pub(crate) fn has_terms(&self) -> bool {
        self.limit.is_some() || !self.share.is_empty()
    }
}

/// What to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// Ours, found beside this one.
    Kvserve,
    /// A file, or a name to be found on `PATH`.
    File(PathBuf),
}

/// kvcached's default.
const ROUTER_PORT: u16 = 8080;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
const DRAIN: Duration = Duration::from_secs(30);
const SLO_INTERVAL: Duration = Duration::from_secs(5);
/// Weights are read from a disk.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(1800);
/// What an engine gets at once unless somebody says otherwise: engines have queues of their own.
const MAX_CONCURRENCY: usize = 1024;
const MAX_QUEUE: usize = 4096;
/// The variable that names a pool.
pub(crate) const IPC_NAME: &str = "KVCACHED_IPC_NAME";

pub(super) fn check(file: yaml::File, folder: &Path) -> Result<Plan, Problem> {
    let mut warnings = Vec::new();
    let shared = shared_variables(file.kvcached.unwrap_or_default(), &mut warnings);
    let written = file.router.unwrap_or_default();
    let limits = Limits {
        concurrency: positive_count(written.max_concurrency, "max_concurrency")?.unwrap_or(MAX_CONCURRENCY),
        queue: written.max_queue.unwrap_or(MAX_QUEUE),
    };
    let router = RouterPlan {
        is_enabled: written.enable_router.unwrap_or(true),
        host: written.router_host.unwrap_or_else(|| "127.0.0.1".to_owned()),
        port: written.router_port.unwrap_or(ROUTER_PORT),
        allowed_hosts: parsed(&written.allowed_hosts, "allowed_hosts")?,
        allowed_origins: parsed(&written.allowed_origins, "allowed_origins")?,
        request_timeout: positive(written.request_timeout_seconds, "request_timeout_seconds")?
            .unwrap_or(REQUEST_TIMEOUT),
        stream_timeout: positive(written.stream_timeout_seconds, "stream_timeout_seconds")?.unwrap_or(REQUEST_TIMEOUT),
        drain: seconds(written.drain_seconds, "drain_seconds")?.unwrap_or(DRAIN),
        body_budget_bytes: body_budget(written.body_budget)?,
    };
    let sleep = sleep(file.sleep_manager.unwrap_or_default())?;
    let mut instances: Vec<InstancePlan> = Vec::new();
    if file.instances.is_empty() {
        return Err(Problem { place: None, key: Some("instances".to_owned()), text: "there is none".to_owned() });
    }
    for written in file.instances {
        let at = written.name.as_ref().map_or(written.model.referenced, |name| name.referenced);
        let instance = instance(written, &shared, &limits, folder)?;
        distinct(&instances, &instance, &router, at)?;
        if sleep.is_automatic && instance.spec.engine == EngineKind::Vllm {
            warn_of_sleepless(&instance, &mut warnings);
        }
        instances.push(instance);
    }
    Ok(Plan {
        router,
        sleep,
        slo_interval: positive(file.slo_interval_seconds, "slo_interval_seconds")?.unwrap_or(SLO_INTERVAL),
        launch_delay: seconds(file.launch_delay_seconds, "launch_delay_seconds")?.unwrap_or_default(),
        instances,
        warnings,
    })
}

/// Bytes of bodies: one that is as long as may be has a place.
fn body_budget(written: Option<Spanned<String>>) -> Result<usize, Problem> {
    let Some(Spanned { value, referenced, .. }) = written else { return Ok(DEFAULT_BODY_BUDGET_BYTES) };
    let wrong = |text: String| Problem::at(referenced, "body_budget", text);
    let Bytes(bytes) = value.parse().map_err(|error: SizeError| wrong(error.to_string()))?;
    if bytes < MAX_BODY_BYTES as u64 {
        return Err(wrong(format!(
            "expected at least {}M, which one body may have, found {value}",
            MAX_BODY_BYTES >> 20
        )));
    }
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
}

struct Limits {
    concurrency: usize,
    queue: usize,
}

/// kvcached's section: any spelling, with and without the prefix.
fn shared_variables(yaml::Pairs(pairs): yaml::Pairs, warnings: &mut Vec<String>) -> Vec<(String, String)> {
    let mut variables = Vec::new();
    for (written, value) in pairs {
        let mut name = written.to_ascii_uppercase();
        if !name.starts_with("KVCACHED_") && name != "ENABLE_KVCACHED" {
            name.insert_str(0, "KVCACHED_");
        }
        if !known_variables().any(|known| known == name) {
            let meant =
                nearest(&name, known_variables()).map(|meant| format!(": did you mean {meant}?")).unwrap_or_default();
            warnings.push(format!("kvcached: {written}: nobody reads {name}{meant}"));
        }
        variables.push((name, value));
    }
    variables
}

fn sleep(written: yaml::SleepManager) -> Result<SleepSettings, Problem> {
    let usual = SleepSettings::default();
    let level = match written.level {
        None => usual.level,
        Some(Spanned { value: level @ (1 | 2), .. }) => level,
        Some(other) => {
            return Err(Problem::at(other.referenced, "level", "expected 1 (the KV cache) or 2 (weights too)"));
        }
    };
    Ok(SleepSettings {
        is_automatic: written.auto_sleep_enabled.unwrap_or(usual.is_automatic),
        idle_threshold: seconds(written.idle_threshold_seconds, "idle_threshold_seconds")?
            .unwrap_or(usual.idle_threshold),
        check_interval: positive(written.check_interval_seconds, "check_interval_seconds")?
            .unwrap_or(usual.check_interval),
        wakes_on_request: written.wakeup_on_request.unwrap_or(usual.wakes_on_request),
        min_sleep: seconds(written.min_sleep_duration, "min_sleep_duration")?.unwrap_or(usual.min_sleep),
        level,
    })
}

/// Seconds, not negative and not for ever.
fn seconds(written: Option<Spanned<f64>>, key: &str) -> Result<Option<Duration>, Problem> {
    let Some(Spanned { value, referenced, .. }) = written else { return Ok(None) };
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if duration <= Duration::from_secs(366 * 86_400) => Ok(Some(duration)),
        _ => Err(Problem::at(referenced, key, format!("expected seconds from 0 to a year, found {value}"))),
    }
}

fn positive(written: Option<Spanned<f64>>, key: &str) -> Result<Option<Duration>, Problem> {
    let at = written.as_ref().map(|written| written.referenced);
    match (seconds(written, key)?, at) {
        (Some(Duration::ZERO), Some(at)) => Err(Problem::at(at, key, "expected more than 0 seconds")),
        (duration, _) => Ok(duration),
    }
}

fn parsed<T: FromStr<Err = AccessError>>(written: &[Spanned<String>], key: &str) -> Result<Vec<T>, Problem> {
    let parse = |one: &Spanned<String>| {
        one.value.parse().map_err(|error: AccessError| Problem::at(one.referenced, key, error.to_string()))
    };
    written.iter().map(parse).collect()
}

fn positive_count(written: Option<Spanned<usize>>, key: &str) -> Result<Option<usize>, Problem> {
    match written {
        Some(Spanned { value: 0, referenced, .. }) => Err(Problem::at(referenced, key, "expected 1 or more")),
        written => Ok(written.map(|written| written.value)),
    }
}

const ENGINES: [(&str, EngineKind); 6] = [
    ("kvserve", EngineKind::Kvserve),
    ("tidekv", EngineKind::Kvserve),
    ("vllm", EngineKind::Vllm),
    ("sglang", EngineKind::Sglang),
    ("sgl", EngineKind::Sglang),
    ("command", EngineKind::Command),
];

fn engine(written: &Spanned<String>) -> Result<EngineKind, Problem> {
    let text = written.value.to_ascii_lowercase();
    if let Some((_, kind)) = ENGINES.iter().find(|(name, _)| *name == text) {
        return Ok(*kind);
    }
    let names = ENGINES.map(|(name, _)| name);
    let meant = nearest(&text, names).map(|meant| format!(": did you mean {meant}?")).unwrap_or_default();
    let text = format!("{:?} is none of {}{meant}", written.value, names.join(", "));
    Err(Problem::at(written.referenced, "engine", text))
}

fn instance(
    written: yaml::Instance,
    shared: &[(String, String)],
    limits: &Limits,
    folder: &Path,
) -> Result<InstancePlan, Problem> {
    let kind = engine(&written.engine)?;
    let model = text(&written.model, "model")?;
    let name = match &written.name {
        Some(name) => text(name, "name")?,
        None => model.rsplit('/').next().unwrap_or(&model).to_owned(),
    };
    if let (Some(_), Some(args)) = (&written.engine_args, &written.args) {
        return Err(Problem::at(args.referenced, "args", "engine_args is there too: give one of them"));
    }
    let args_at = written.engine_args.as_ref().or(written.args.as_ref()).map(|args| args.referenced);
    let mut args = written.engine_args.or(written.args).map(|args| args.value.0).unwrap_or_default();
    let venv = venv(written.using_venv, written.venv_path.as_ref(), folder)?;
    let python = venv.as_ref().map_or_else(|| PathBuf::from("python3"), |venv| venv.join("bin/python"));
    let start = |first: &[&str]| first.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    let at = written.engine.referenced;
    let (program, mut first) = match (kind, written.command) {
        (EngineKind::Command, Some(command)) => {
            let mut words = command.value.0.into_iter();
            let Some(program) = words.next() else {
                return Err(Problem::at(command.referenced, "command", "expected a program and its arguments"));
            };
            (Program::File(program.into()), words.collect())
        }
        (EngineKind::Command, None) => {
            return Err(Problem::at(at, "engine", "command needs the key command: [PROGRAM, ARGUMENT, ...]"));
        }
        (_, Some(command)) => {
            return Err(Problem::at(command.referenced, "command", "is for engine: command alone"));
        }
        (EngineKind::Kvserve, None) => (Program::Kvserve, start(&[&model])),
        (EngineKind::Vllm, None) => {
            (Program::File(python), start(&["-m", "vllm.entrypoints.openai.api_server", "--model", &model]))
        }
        (EngineKind::Sglang, None) => {
            (Program::File(python), start(&["-m", "sglang.launch_server", "--model-path", &model]))
        }
    };
    first.append(&mut args);
    let mut args = first;
    let host = flag(&args, "--host").unwrap_or("127.0.0.1").to_owned();
    let port = match (flag(&args, "--port"), kind) {
        (Some(text), _) => text
            .parse()
            .map_err(|_| Problem::at(args_at.unwrap_or(at), "engine_args", format!("--port {text} is not a port")))?,
        (None, EngineKind::Kvserve) => {
            args.extend(start(&["--port", "0"]));
            0
        }
        (None, EngineKind::Vllm) => 8000,
        (None, EngineKind::Sglang) => 30000,
        (None, EngineKind::Command) => {
            return Err(Problem::at(at, "command", "must have --port PORT in it: the router asks there"));
        }
    };
    if port == 0 && kind != EngineKind::Kvserve {
        let text = "--port 0 works with kvserve alone: nobody else says which port it got";
        return Err(Problem::at(args_at.unwrap_or(at), "engine_args", text));
    }
    let served_name = flag(&args, "--served-model-name").unwrap_or(&model).to_owned();
    let mut variables = shared.to_vec();
    variables.extend(written.kvcached_env.map(|pairs| pairs.value.0).unwrap_or_default());
    variables.extend(written.engine_env.map(|pairs| pairs.value.0).unwrap_or_default());
    if let Some(venv) = &venv {
        let path = std::env::var("PATH").unwrap_or_default();
        variables.push(("VIRTUAL_ENV".to_owned(), venv.display().to_string()));
        variables.push(("PATH".to_owned(), format!("{}/bin:{path}", venv.display())));
    }
    let slo = match written.slo {
        Some(yaml::Slo { ttft_ms }) if !ttft_ms.value.is_finite() || ttft_ms.value <= 0.0 => {
            return Err(Problem::at(ttft_ms.referenced, "ttft_ms", "expected milliseconds above 0"));
        }
        slo => slo.map(|slo| SloTarget { ttft_ms: slo.ttft_ms.value }),
    };
    let pool = pool(written.pool.unwrap_or_default(), &name, &args, &variables, at)?;
    let max_concurrency = positive_count(written.max_concurrency, "max_concurrency")?.unwrap_or(limits.concurrency);
    let startup_timeout = positive(written.startup_timeout_seconds, "startup_timeout_seconds")?;
    Ok(InstancePlan {
        spec: ModelSpec {
            name,
            model,
            served_name,
            engine: kind,
            max_concurrency,
            max_queue: written.max_queue.unwrap_or(limits.queue),
            slo,
        },
        program,
        args,
        variables,
        host,
        port,
        startup_timeout: startup_timeout.unwrap_or(STARTUP_TIMEOUT),
        pool,
    })
}

fn pool(
    written: yaml::Pool,
    instance: &str,
    args: &[String],
    variables: &[(String, String)],
    at: Location,
) -> Result<PoolPlan, Problem> {
    let variable = || Some(variables.iter().rfind(|(name, _)| name == IPC_NAME)?.1.as_str());
    let given = flag(args, "--pool-name").or_else(variable).filter(|name| !name.trim().is_empty());
    let name = given.map_or_else(|| format!("kvcached_{instance}"), str::to_owned);
    let name = PoolName::new(&name).map_err(|error| Problem::at(at, IPC_NAME, error.to_string()))?;
    let floor_at = written.floor.as_ref().map(|floor| floor.referenced);
    let limit = size(written.limit, "limit")?;
    let share = ShareChange {
        weight: match written.weight {
            Some(Spanned { value: 0, referenced, .. }) => {
                return Err(Problem::at(referenced, "weight", "expected a whole number of 1 or more"));
            }
            weight => weight.map(|weight| weight.value),
        },
        floor: size(written.floor, "floor")?,
        ceiling: size(written.ceiling, "ceiling")?,
        priority: written.priority,
    };
    for (bound, word) in [(limit, "limit"), (share.ceiling, "ceiling")] {
        if let (Some(at), Some(floor), Some(bound)) = (floor_at, share.floor, bound)
            && floor > bound
        {
            return Err(Problem::at(at, "floor", format!("{floor} is above the {word} of {bound}")));
        }
    }
    Ok(PoolPlan { name, is_named: given.is_some(), limit, share })
}

fn size(written: Option<Spanned<yaml::Scalar>>, key: &str) -> Result<Option<Bytes>, Problem> {
    let Some(Spanned { value: yaml::Scalar(text), referenced, .. }) = written else { return Ok(None) };
    let wrong = |error| Problem::at(referenced, key, format!("expected a size such as 512M: {error:#}"));
    segment_size(&text).map(Some).map_err(wrong)
}

fn text(written: &Spanned<String>, key: &str) -> Result<String, Problem> {
    let text = written.value.trim();
    if text.is_empty() || text.chars().any(char::is_control) {
        return Err(Problem::at(written.referenced, key, "expected a name"));
    }
    Ok(text.to_owned())
}

/// The virtual environment, if one is to be used: beside the configuration, or from here.
fn venv(using: Option<bool>, path: Option<&Spanned<String>>, folder: &Path) -> Result<Option<PathBuf>, Problem> {
    let Some(path) = path else {
        let text = "using_venv needs the key venv_path".to_owned();
        return if using == Some(true) {
            Err(Problem { place: None, key: Some("venv_path".to_owned()), text })
        } else {
            Ok(None)
        };
    };
    if using == Some(false) {
        return Ok(None);
    }
    let written = match (path.value.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(&path.value),
    };
    let here = std::env::current_dir().unwrap_or_default();
    let found = [folder.join(&written), here.join(&written)].into_iter().find(|venv| venv.join("bin/python").exists());
    match found.map(std::path::absolute) {
        Some(Ok(venv)) => Ok(Some(venv)),
        _ => {
            let text = format!("{} has no bin/python: expected a virtual environment", written.display());
            Err(Problem::at(path.referenced, "venv_path", text))
        }
    }
}

/// The value of `--flag VALUE` or `--flag=VALUE`, the last one that is there.
fn flag<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    let behind = |index: usize| args.get(index + 1).map(String::as_str);
    let mut values = args.iter().enumerate().filter_map(|(index, word)| match word.strip_prefix(name) {
        Some("") => behind(index),
        Some(rest) => rest.strip_prefix('='),
        None => None,
    });
    values.next_back()
}

fn distinct(known: &[InstancePlan], new: &InstancePlan, router: &RouterPlan, at: Location) -> Result<(), Problem> {
    let name = &new.spec.name;
    if name == "default" || name == "all" {
        return Err(Problem::at(at, "name", format!("{name} has a meaning of its own: choose another")));
    }
    if known.iter().any(|known| known.spec.name == *name) {
        return Err(Problem::at(at, "name", format!("another instance is called {name}: choose another name")));
    }
    if new.port == 0 {
        return Ok(());
    }
    if let Some(other) = known.iter().find(|known| known.port == new.port) {
        let text = format!("{name} and {} both have port {}", other.spec.name, new.port);
        return Err(Problem::at(at, "engine_args", text));
    }
    if router.is_enabled && router.port == new.port {
        return Err(Problem::at(at, "engine_args", format!("port {} is the router's", new.port)));
    }
    Ok(())
}

fn warn_of_sleepless(instance: &InstancePlan, warnings: &mut Vec<String>) {
    let name = &instance.spec.name;
    if !instance.args.iter().any(|arg| arg == "--enable-sleep-mode") {
        warnings.push(format!("{name}: vLLM sleeps only with --enable-sleep-mode"));
    }
    if !instance.variables.iter().any(|(variable, value)| variable == "VLLM_SERVER_DEV_MODE" && value == "1") {
        warnings.push(format!("{name}: vLLM's pages for sleeping need VLLM_SERVER_DEV_MODE=1 in engine_env"));
    }
}
