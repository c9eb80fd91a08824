//! Before the first request: is the server there, does it know the model, what is it, and who else is on the device?
//!
//! ```text
//!   /v1/models    there at all; the model where none was named; `owned_by` says which engine
//!   /version      vLLM's and kvserve's     /get_server_info  SGLang's
//!   /health       kvserve's `kv_mode`      /metrics          the same in labels; pools of kvcached
//!   one request   the model answers; else its refusal is the error, before anything is measured
//! ```

use std::env;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value};
use tidekv_cli::gpu::GpuReport;

use crate::interrupt::Interrupt;
use crate::load::{Client, Control, Dataset, Endpoint, Item, Run, Scenario, Stream, plan};
use crate::result::FIELDS;

/// How long a page beside the answers may take.
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_EVERY: Duration = Duration::from_millis(500);

/// What a server says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerFacts {
    /// `vllm`, `sglang`, `tidekv`, or whatever owns its models.
    pub engine: Option<String>,
    /// The engine's version.
    pub version: Option<String>,
    /// `elastic` or `static`, where it says so.
    pub kv_mode: Option<String>,
    /// Its models.
    pub models: Vec<String>,
}

/// Finds the server of an endpoint and asks it what it is; fills in the model where none was named.
pub fn inspect(
    client: &Client,
    endpoint: &mut Endpoint,
    patience: Duration,
    interrupt: &Interrupt,
) -> anyhow::Result<ServerFacts> {
    let deadline = Instant::now() + patience;
    loop {
        match client.warm(endpoint, 1) {
            Ok(()) => break,
            Err(error) if Instant::now() >= deadline => return Err(error.into()),
            Err(_) => {
                let left = deadline.saturating_duration_since(Instant::now());
                ensure!(interrupt.wait(RETRY_EVERY.min(left)), "interrupted before {} answered", endpoint.base_url);
            }
        }
    }
    let json = |path: &str| -> Option<Value> {
        let (status, bytes) = client.page(endpoint, path, PAGE_TIMEOUT).ok()?;
        if status == 200 { serde_json::from_slice(&bytes).ok() } else { None }
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let models = json("/v1/models").unwrap_or_default();
    let entries = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut facts = ServerFacts {
        engine: entries.first().and_then(|model| text(&model["owned_by"])),
        models: entries.iter().filter_map(|model| text(&model["id"])).collect(),
        version: json("/version").and_then(|page| text(&page["version"])),
        kv_mode: json("/health").and_then(|page| text(&page["kv_mode"])),
    };
    if facts.version.is_none() {
        let info = json("/get_server_info").or_else(|| json("/server_info")).unwrap_or_default();
        facts.version = text(&info["version"]);
        facts.engine = facts.engine.or_else(|| info.get("tp_size").map(|_| "sglang".to_owned()));
    }
    if facts.kv_mode.is_none() {
        let page = client.page(endpoint, "/metrics", PAGE_TIMEOUT).ok();
        facts.kv_mode = page.and_then(|(_, bytes)| kv_mode_of(&String::from_utf8_lossy(&bytes)));
    }
    if endpoint.model.is_empty() {
        let first = facts
            .models
            .first()
            .with_context(|| format!("{} lists no model under /v1/models: name it with --model", endpoint.base_url))?;
        endpoint.model.clone_from(first);
    }
    Ok(facts)
}

/// From labels, or from the presence of kvcached's pools.
fn kv_mode_of(metrics: &str) -> Option<String> {
    let label = metrics.split_once("kv_mode=\"").and_then(|(_, rest)| rest.split_once('"'));
    match label {
        Some((mode, _)) => Some(mode.to_owned()),
        None => metrics.contains("kvcached_kv_cache_pool_").then(|| "elastic".to_owned()),
    }
}

/// Asks one small thing, to hear now what every request would hear.
pub fn try_once(client: &Client, stream: &Stream, control: &Control) -> anyhow::Result<()> {
    let mut once = Stream { requests: Some(1), duration: None, ..stream.clone() };
    once.start = Duration::ZERO;
    once.arrivals = crate::load::Arrivals::Immediately;
    once.data = Dataset::Items(vec![Item { output_tokens: Some(2), ..Item::text("Hello") }]);
    let Run { records, .. } = client.run(&plan(&Scenario { streams: vec![once] }, 0)?, control);
    match records.first().map(|record| &record.failure) {
        None => bail!("interrupted"),
        Some(None) => Ok(()),
        Some(Some(failure)) => {
            let (url, model) = (stream.endpoint.url(), &stream.endpoint.model);
            bail!("{url} does not answer a first request for model {model:?}: {failure}")
        }
    }
}

/// Sentences about what makes a result worth less.
pub fn warnings(gpus: Option<&GpuReport>) -> Vec<String> {
    let mut warnings = Vec::new();
    if is_launch_blocking() {
        warnings.push(
            "CUDA_LAUNCH_BLOCKING is set: every kernel is waited for, so times are not those of serving".to_owned(),
        );
    }
    for gpu in gpus.into_iter().flat_map(|report| &report.gpus) {
        let users = gpu.users.as_deref().unwrap_or_default();
        if users.len() > 1 {
            let user = |user: &tidekv_cli::gpu::GpuUser| {
                let name = user.name.as_deref().unwrap_or("unknown");
                user.memory.map_or_else(|| format!("{} {name}", user.pid), |it| format!("{} {name} ({it})", user.pid))
            };
            let list = users.iter().map(user).collect::<Vec<_>>().join(", ");
            warnings.push(format!("GPU {} is used by {} processes: {list}", gpu.index, users.len()));
        }
    }
    warnings
}

fn is_launch_blocking() -> bool {
    env::var("CUDA_LAUNCH_BLOCKING").is_ok_and(|value| !matches!(value.trim(), "" | "0"))
}

/// The environment as a table of words: servers, GPUs, variables.
pub fn environment(servers: &[(String, Endpoint, ServerFacts)], gpus: Option<&GpuReport>) -> Map<String, Value> {
    let mut table = Map::new();
    for (name, endpoint, facts) in servers {
        let prefix = if servers.len() == 1 { "server".to_owned() } else { format!("server {name}") };
        table.insert(prefix.clone(), endpoint.base_url.to_string().into());
        let engine = facts.engine.clone().unwrap_or_else(|| "unknown".to_owned());
        table.insert(format!("{prefix} engine"), engine.clone().into());
        if let Some(version) = &facts.version {
            table.insert(format!("{prefix} version"), version.clone().into());
            // Under the engine's own name as well: that is where people look for it.
            table.entry(engine).or_insert_with(|| version.clone().into());
        }
        if let Some(mode) = &facts.kv_mode {
            table.insert(format!("{prefix} kv_mode"), mode.clone().into());
        }
    }
    if let Some(report) = gpus {
        report.driver.iter().for_each(|driver| drop(table.insert("driver".to_owned(), driver.clone().into())));
        report.cuda.iter().for_each(|cuda| drop(table.insert("cuda".to_owned(), cuda.clone().into())));
        for gpu in &report.gpus {
            table.insert(format!("gpu {}", gpu.index), gpu.name.clone().into());
            gpu.memory.iter().for_each(|memory| {
                table.insert(format!("gpu {} memory_bytes", gpu.index), memory.total.0.into());
            });
            let users =
                gpu.users.iter().flatten().map(|user| format!("{} {}", user.pid, user.name.as_deref().unwrap_or("")));
            table.insert(format!("gpu {} processes", gpu.index), users.collect::<Vec<_>>().join(", ").into());
        }
    }
    for variable in ["PYTHONHASHSEED", "CUDA_LAUNCH_BLOCKING", "ENABLE_KVCACHED", "KVCACHED_AUTOPATCH"] {
        env::var(variable).ok().map(|value| table.insert(variable.to_owned(), value.into()));
    }
    table
}

/// The seed of whoever gives none: `PYTHONHASHSEED` if it is a number, else 0.
pub fn default_seed() -> u64 {
    env::var("PYTHONHASHSEED").ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Checks a name that stands at the top level of a result.
pub fn check_metadata(key: &str) -> anyhow::Result<()> {
    ensure!(!FIELDS.contains(&key), "--metadata {key}=...: every result has a field of that name");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidekv_cli::gpu::{Gpu, GpuUser};

    #[test]
    fn the_mode_of_a_server_is_found_in_its_metrics() {
        assert_eq!(kv_mode_of("a{kv_mode=\"static\",x=\"y\"} 1\n").as_deref(), Some("static"));
        assert_eq!(kv_mode_of("kvcached_kv_cache_pool_used_bytes 5\n").as_deref(), Some("elastic"));
        assert_eq!(kv_mode_of("vllm:num_requests_running 1\n"), None);
    }

    #[test]
    fn a_shared_device_is_warned_about() {
        let user = |pid| GpuUser { pid, name: Some("python".to_owned()), memory: None };
        let gpu = |users| Gpu {
            index: 3,
            name: "x".to_owned(),
            uuid: "GPU-x".to_owned(),
            memory: None,
            compute_mode: None,
            persistence: None,
            mig: None,
            users: Some(users),
        };
        let report = |users| GpuReport { gpus: vec![gpu(users)], ..GpuReport::default() };
        assert!(warnings(Some(&report(vec![user(1)]))).iter().all(|warning| !warning.starts_with("GPU")));
        let shared = warnings(Some(&report(vec![user(1), user(2)])));
        assert!(
            shared.iter().any(|warning| warning == "GPU 3 is used by 2 processes: 1 python, 2 python"),
            "{shared:?}"
        );
    }
}
