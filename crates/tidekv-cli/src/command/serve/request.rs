//! What `kvserve` is to do, with everything checked that words and variables can get wrong.

use std::time::Duration;

use anyhow::{Context as _, bail};
use tidekv_core::geometry::ChunkChoice;
use tidekv_core::units::Bytes;
use tidekv_pool::max_cached_tokens;
use tidekv_serve::access::Access;
use tidekv_serve::api::MAX_BODY_BYTES;
use tidekv_serve::config::{EngineConfig, KvBudget, KvChoice};
use tidekv_serve::connections::ConnectionLimits;
use tidekv_shm::{PoolName, RuntimeDir};

use super::model;
use crate::cli::ServeCli;
use crate::command::access::access;
use crate::text::parse_duration;

/// vLLM's.
const KEY: &str = "VLLM_API_KEY";
const DEFAULT_MODEL: &str = "synthetic:tiny";

/// A server to be started.
#[derive(Debug)]
pub(super) struct ServeRequest {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) access: Access,
    /// The model's name for clients.
    pub(super) name: String,
    pub(super) drain: Duration,
    pub(super) clients: ConnectionLimits,
    pub(super) engine: EngineConfig,
}

impl ServeRequest {
    /// `variable` is the environment.
    pub(super) fn new(cli: &ServeCli, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let written = model_word(cli)?;
        let kv_budget = match &cli.kv_budget {
            Some(text) => KvBudget::Given(text.parse().context("--kv-budget is not a size")?),
            None => KvBudget::Derived {
                utilization: utilization(cli.gpu_memory_utilization, get("KVCACHED_GPU_UTILIZATION"))?,
                host: get("KVCACHED_HOST_BUDGET")
                    .map(|text| text.parse().context("KVCACHED_HOST_BUDGET is not a size"))
                    .transpose()?,
            },
        };
        let kv = match &cli.kv {
            Some(text) => text.parse()?,
            None if is_enabled(get("ENABLE_KVCACHED"))? => KvChoice::Elastic,
            None => KvChoice::Static(None),
        };
        let pool_name = match cli.pool_name.clone().or_else(|| get("KVCACHED_IPC_NAME")) {
            Some(name) => PoolName::new(&name)?,
            None => PoolName::default_for("kvserve"),
        };
        let chunk = match &cli.kv_chunk {
            Some(text) => ChunkChoice::Bytes(text.parse().context("--kv-chunk is not a size")?),
            None => ChunkChoice::from_page_size_mb(get("KVCACHED_PAGE_SIZE_MB").as_deref())?,
        };
        let engine = EngineConfig {
            model: model::find(&written, &variable)?,
            kv,
            kv_budget,
            pool_name,
            runtime_dir: cli.dir.as_ref().map_or_else(RuntimeDir::from_env, RuntimeDir::at),
            compute: cli.backend.parse()?,
            max_batch_rows: cli.max_num_seqs,
            // Every sequence of a step has a token in it.
            max_step_tokens: cli.max_num_batched_tokens.max(cli.max_num_seqs),
            max_waiting: cli.max_num_waiting,
            max_cached_tokens: max_cached_tokens(get("KVCACHED_MAX_CACHED_TOKENS").as_deref())?,
            context_tokens: cli.max_model_len,
            block_tokens: cli.block_size,
            chunk,
            reserve: tidekv_pool::ReservePolicy::Auto.with_variables(get)?,
            threads: cli.threads.map(usize::from),
        };
        let drain = parse_duration(&cli.drain).with_context(|| format!("--drain {}", cli.drain))?;
        let name = cli.served_model_name.clone().unwrap_or(written);
        let places = usize::try_from(cli.max_connections).unwrap_or(usize::MAX);
        let body_budget_bytes = body_budget(&cli.body_budget)?;
        let clients = ConnectionLimits { places, body_budget_bytes, ..ConnectionLimits::default() };
        let access = access(&cli.access, KEY, &variable, Vec::new(), Vec::new())?;
        Ok(Self { host: cli.host.clone(), port: cli.port, access, name, drain, clients, engine })
    }
}

/// Bytes of bodies: one that is as long as may be has a place.
fn body_budget(text: &str) -> anyhow::Result<usize> {
    let Bytes(bytes) = text.parse().context("--body-budget is not a size")?;
    if bytes < MAX_BODY_BYTES as u64 {
        bail!("--body-budget {text} is less than one body may have: give at least {}M", MAX_BODY_BYTES >> 20);
    }
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// `kvserve MODEL`, `kvserve serve MODEL`, `kvserve --model MODEL`, or none of them.
fn model_word(cli: &ServeCli) -> anyhow::Result<String> {
    let words: Vec<_> = cli.words.iter().map(String::as_str).collect();
    let word = match words.as_slice() {
        [] | ["serve"] => None,
        ["serve", word] | [word] => Some((*word).to_owned()),
        [first, ..] => bail!("one model at a time: {first:?} is not \"serve\", and there is a word behind it"),
    };
    match (word, &cli.model) {
        (Some(word), Some(model)) if word != *model => {
            bail!("one model at a time: {word:?} and --model {model:?} are two")
        }
        (Some(word), _) => Ok(word),
        (None, Some(model)) => Ok(model.clone()),
        (None, None) => Ok(DEFAULT_MODEL.to_owned()),
    }
}

/// The part of a GPU that may be filled: the flag or kvcached's variable.
fn utilization(flag: Option<f64>, variable: Option<String>) -> anyhow::Result<Option<f64>> {
    let (name, part) = match (flag, variable) {
        (Some(part), _) => ("--gpu-memory-utilization", Some(part)),
        (None, Some(text)) => ("KVCACHED_GPU_UTILIZATION", text.trim().parse().ok()),
        (None, None) => return Ok(None),
    };
    match part {
        Some(part) if part > 0.0 && part <= 1.0 => Ok(Some(part)),
        _ => bail!("{name} is not a number above 0 and at most 1"),
    }
}

/// kvcached's switch; on where nobody says otherwise.
fn is_enabled(value: Option<String>) -> anyhow::Result<bool> {
    let Some(text) = value else { return Ok(true) };
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => bail!("ENABLE_KVCACHED={text:?} is not true or false"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tidekv_core::units::Bytes;
    use tidekv_serve::config::ComputeChoice;

    use super::*;

    fn request(args: &[&str], variables: &[(&str, &str)]) -> Result<ServeRequest, String> {
        let cli = ServeCli::try_parse_from(["kvserve"].iter().chain(args)).map_err(|error| error.to_string())?;
        let get = |name: &str| variables.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned());
        ServeRequest::new(&cli, get).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn a_model_in_every_spelling() {
        for args in [
            &["synthetic:small"][..],
            &["serve", "synthetic:small"],
            &["--model", "synthetic:small"],
            &["serve", "--model", "synthetic:small"],
            &["synthetic:small", "--model", "synthetic:small"],
        ] {
            let request = request(args, &[]).unwrap();
            assert_eq!(
                (request.engine.model.to_string().as_str(), request.name.as_str()),
                ("synthetic:small", "synthetic:small")
            );
        }
        for args in [&[][..], &["serve"]] {
            assert_eq!(request(args, &[]).unwrap().name, "synthetic:tiny");
        }
        for args in [&["a", "b"][..], &["synthetic:tiny", "--model", "synthetic:small"]] {
            assert!(request(args, &[]).unwrap_err().contains("one model at a time"));
        }
        assert_eq!(request(&["--served-model-name", "chat"], &[]).unwrap().name, "chat");
    }

    #[test]
    fn the_mode_follows_the_flag_then_the_switch() {
        let mode =
            |args: &[&str], variables: &[(&str, &str)]| request(args, variables).map(|request| request.engine.kv);
        let off = [("ENABLE_KVCACHED", "False")];
        assert_eq!(mode(&[], &[]), Ok(KvChoice::Elastic));
        assert_eq!(mode(&[], &[("ENABLE_KVCACHED", "true")]), Ok(KvChoice::Elastic));
        assert_eq!(mode(&[], &off), Ok(KvChoice::Static(None)));
        assert_eq!(mode(&["--kv", "elastic"], &off), Ok(KvChoice::Elastic));
        assert_eq!(mode(&["--kv", "static:8M"], &[]), Ok(KvChoice::Static(Some(Bytes::mib(8)))));
        assert!(mode(&[], &[("ENABLE_KVCACHED", "maybe")]).unwrap_err().contains("maybe"));
    }

    #[test]
    fn the_budget_is_what_was_given_and_nothing_else() {
        let budget = |args: &[&str], variables: &[(&str, &str)]| request(args, variables).unwrap().engine.kv_budget;
        let derived = |utilization, host| KvBudget::Derived { utilization, host };
        assert_eq!(budget(&[], &[]), derived(None, None));
        let part = ("KVCACHED_GPU_UTILIZATION", "0.5");
        assert_eq!(budget(&[], &[part, ("KVCACHED_HOST_BUDGET", "2G")]), derived(Some(0.5), Some(Bytes::gib(2))));
        assert_eq!(budget(&["--gpu-memory-utilization", "0.8"], &[part]), derived(Some(0.8), None));
        assert_eq!(budget(&["--kv-budget", "64M"], &[part]), KvBudget::Given(Bytes::mib(64)));
    }

    #[test]
    fn variables_and_flags_reach_the_engine() {
        let request = request(
            &[
                "--backend",
                "cpu",
                "--block-size",
                "32",
                "--threads",
                "3",
                "--max-model-len",
                "512",
                "--drain",
                "500ms",
                "--max-connections",
                "7",
                "--body-budget",
                "64M",
            ],
            &[
                ("KVCACHED_IPC_NAME", "my pool"),
                ("KVCACHED_MAX_CACHED_TOKENS", "100"),
                ("KVCACHED_PAGE_SIZE_MB", "2"),
                ("KVCACHED_MIN_RESERVED_PAGES", "1"),
            ],
        )
        .unwrap();
        let engine = request.engine;
        assert_eq!((engine.compute, engine.block_tokens, engine.threads), (ComputeChoice::Cpu, 32, Some(3)));
        assert_eq!((engine.context_tokens, engine.max_cached_tokens), (Some(512), Some(100)));
        assert_eq!((engine.pool_name.as_str(), engine.chunk), ("my-pool", ChunkChoice::Bytes(Bytes::mib(2))));
        assert_eq!(engine.reserve, tidekv_pool::ReservePolicy::Fixed { min: 1, max: 10 });
        assert_eq!((request.drain, request.clients.places), (Duration::from_millis(500), 7));
        assert_eq!(request.clients.body_budget_bytes, 64 << 20);
    }

    #[test]
    fn the_bound_of_the_prefix_cache_is_kvcacheds() {
        let bound = |value: &[(&str, &str)]| request(&[], value).unwrap().engine.max_cached_tokens;
        assert_eq!(bound(&[]), Some(16_000));
        for (value, tokens) in [("", Some(16_000)), ("0", Some(0)), (" 64 ", Some(64)), ("-1", None)] {
            assert_eq!(bound(&[("KVCACHED_MAX_CACHED_TOKENS", value)]), tokens, "{value:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (args, variables, part) in [
            (&["--kv", "rubber"][..], &[][..], "\"rubber\" is not a KV mode"),
            (&["--kv", "static:much"], &[], "static: needs a size"),
            (&["--kv-budget", "much"], &[], "--kv-budget is not a size"),
            (&["--gpu-memory-utilization", "0"], &[], "--gpu-memory-utilization is not a number above 0"),
            (&["--gpu-memory-utilization", "0.5", "--kv-budget", "1G"], &[], "cannot be used with"),
            (&[], &[("KVCACHED_GPU_UTILIZATION", "95")], "KVCACHED_GPU_UTILIZATION is not a number above 0"),
            (&["--backend", "tpu"], &[], "cpu, cuda or auto"),
            (&["--drain", "soon"], &[], "--drain soon"),
            (&["--port", "70000"], &[], "70000"),
            (&["--body-budget", "15M"], &[], "at least 16M"),
            (&["--block-size", "0"], &[], "0 is not in 1.."),
            (&[], &[("KVCACHED_HOST_BUDGET", "x")], "KVCACHED_HOST_BUDGET"),
            (&[], &[("KVCACHED_MAX_CACHED_TOKENS", "x")], "KVCACHED_MAX_CACHED_TOKENS"),
        ] {
            let error = request(args, variables).unwrap_err();
            assert!(error.contains(part), "{args:?}: {error}");
        }
    }
}
