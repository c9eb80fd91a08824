//! Variables that will not do what they were set for, and the versions of what reads them.
//!
//! Names are kvcached's; ours are marked. What a variable may be is what its readers take: a value that they would pass
//! over in silence (`ENABLE_KVCACHED=yes` is "no") is a finding as well as one that stops them.

use tidekv_core::geometry::ChunkChoice;
use tidekv_core::units::Bytes;
use tidekv_shm::PoolName;

use super::super::check::{Check, ENVIRONMENT, VERSIONS};
use super::super::facts::{PACKAGES, Python};
use crate::logging;
use crate::text::nearest;

/// What a variable may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Truth,
    /// Above 0 and at most 1.
    Part,
    Pages,
    Integer,
    Seconds,
    PageSize,
    Size,
    LogLevel,
    PoolName,
    Folder,
    /// Read, and never used.
    Dead,
    Any,
}

const VARIABLES: [(&str, Value); 30] = [
    ("ENABLE_KVCACHED", Value::Truth),
    ("KVCACHED_AUTOPATCH", Value::Truth),
    ("KVCACHED_IPC_NAME", Value::PoolName),
    ("KVCACHED_PAGE_SIZE_MB", Value::PageSize),
    ("KVCACHED_GPU_UTILIZATION", Value::Part),
    ("KVCACHED_PAGE_PREALLOC_ENABLED", Value::Truth),
    (MIN_RESERVED, Value::Pages),
    (MAX_RESERVED, Value::Pages),
    ("KVCACHED_MAX_CACHED_TOKENS", Value::Integer),
    ("KVCACHED_MAX_CACHED_BLOCKS", Value::Dead),
    ("KVCACHED_CONTIGUOUS_LAYOUT", Value::Truth),
    ("KVCACHED_SANITY_CHECK", Value::Truth),
    ("KVCACHED_IPC_TIMEOUT", Value::Seconds),
    ("KVCACHED_LOG_LEVEL", Value::LogLevel),
    ("KVCACHED_LOG_COLOR", Value::Truth),
    ("KVCACHED_LOG_COLOR_CODE", Value::Any),
    ("KVCACHED_TEST_MODEL", Value::Any),
    ("KVCACHED_BENCH_VERBOSE", Value::Any),
    ("KVCACHED_NIXL_CONTIGUOUS_LAYOUT", Value::Truth),
    ("KVCACHED_BACKEND", Value::Any),
    ("KVCACHED_ENGINECORE_NO_CUDA", Value::Truth),
    ("KVCACHED_PHYSICAL_GROWTH_LOCK_DIR", Value::Folder),
    ("KVCACHED_WEB_API_KEY", Value::Any),
    // Ours.
    ("KVCACHED_RUNTIME_DIR", Value::Folder),
    ("KVCACHED_HOST_BUDGET", Value::Size),
    ("KVCACHED_ALLOWED_HOSTS", Value::Any),
    ("KVCACHED_ALLOWED_ORIGINS", Value::Any),
    ("KVCACHED_LOG_FILE", Value::Any),
    // Set by `kvctl up` for what it starts.
    ("KVCACHED_UP_ID", Value::Any),
    ("KVCACHED_UP_INSTANCE", Value::Any),
];

const MIN_RESERVED: &str = "KVCACHED_MIN_RESERVED_PAGES";
const MAX_RESERVED: &str = "KVCACHED_MAX_RESERVED_PAGES";
/// kvcached's, which complete the one of the two that is set alone.
const RESERVED_DEFAULTS: (u32, u32) = (5, 10);

/// A value is shown up to here.
const SHOWN_MAX: usize = 60;

/// The names of variables that somebody reads.
pub fn known_variables() -> impl Iterator<Item = &'static str> {
    VARIABLES.iter().map(|(name, _)| *name)
}

pub(super) fn judge(environment: &[(String, String)]) -> Vec<Check> {
    let mut set: Vec<&(String, String)> = environment.iter().filter(|(name, value)| concerns_us(name, value)).collect();
    set.sort();
    let mut checks: Vec<Check> = set.iter().filter_map(|(name, value)| judge_variable(name, value)).collect();
    checks.extend(judge_reserve(&set));
    if checks.is_empty() {
        let names: Vec<&str> = set.iter().map(|(name, _)| name.as_str()).collect();
        checks.push(ENVIRONMENT.ok(if names.is_empty() { "none set".to_owned() } else { names.join(", ") }));
    }
    checks
}

/// Whether somebody who set this may have meant us. Kubernetes sets variables named after services, which are not meant.
fn concerns_us(name: &str, value: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let ours = name.starts_with("KVCACHE") || name.starts_with("ENABLE_KVCACHE");
    let service = name.contains("_SERVICE_") || name.contains("_PORT_") || value.starts_with("tcp://");
    ours && !service
}

fn judge_variable(name: &str, value: &str) -> Option<Check> {
    let Some(&(_, kind)) = VARIABLES.iter().find(|(known, _)| *known == name) else {
        return Some(unknown(name).about(name));
    };
    let trimmed = value.trim();
    if trimmed.is_empty() {
        // As good as unset, to all who read it.
        return None;
    }
    let check = match kind {
        Value::Dead => ENVIRONMENT.note("nothing reads it", "it changes nothing").advice(format!("unset {name}")),
        Value::PoolName => renamed(value)?,
        _ => {
            let (wanted, example) = complaint(kind, trimmed)?;
            ENVIRONMENT.finding(
                format!("{} is not {wanted}", shown(name, value)),
                "engines refuse to start with it, or take it for something else in silence",
                format!("export {name}={example}"),
            )
        }
    };
    Some(check.about(name))
}

fn unknown(name: &str) -> Check {
    let means = "nobody reads it";
    match nearest(name, VARIABLES.iter().map(|(known, _)| *known)) {
        Some(meant) => ENVIRONMENT.finding(
            format!("there is no such variable; {meant} is the nearest"),
            means,
            format!("export {meant}=\"${name}\"; unset {name}"),
        ),
        None => ENVIRONMENT.finding("there is no such variable", means, format!("unset {name}")),
    }
}

/// What the value should be, and one that is; `None` if all is well.
fn complaint(kind: Value, value: &str) -> Option<(&'static str, &'static str)> {
    let (good, wanted, example) = match kind {
        Value::Truth => (is_truth(value), "true, false, 1 or 0", "true"),
        Value::Part => {
            let part = value.parse::<f64>().is_ok_and(|part| part > 0.0 && part <= 1.0);
            (part, "a number above 0 and at most 1", "0.95")
        }
        Value::Pages => (value.parse::<u32>().is_ok(), "a number of pages", "5"),
        Value::Integer => (value.parse::<i64>().is_ok(), "a whole number", "16000"),
        Value::Seconds => (value.parse::<f64>().is_ok_and(f64::is_finite), "a number of seconds", "60"),
        Value::PageSize => {
            let good = ChunkChoice::from_page_size_mb(Some(value)).is_ok();
            (good, "a whole number of MiB above 0", "2")
        }
        Value::Size => (value.parse::<Bytes>().is_ok(), "a size such as 20G or 1.5GiB", "20G"),
        Value::LogLevel => (logging::is_level(value), "a level: DEBUG, INFO, WARNING, ERROR or CRITICAL", "WARNING"),
        Value::Folder => (value.starts_with('/'), "a path from the root, the same for every process", "/dev/shm"),
        Value::PoolName | Value::Dead | Value::Any => return None,
    };
    (!good).then_some((wanted, example))
}

fn is_truth(value: &str) -> bool {
    ["true", "false", "1", "0"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

/// A name that the pool will not have as it was written.
fn renamed(value: &str) -> Option<Check> {
    let name = PoolName::new(value).ok()?;
    (name.as_str() != value).then(|| {
        let means = "a name has at most 64 characters of A-Z, a-z, 0-9, '_' and '-'; others become '-'";
        ENVIRONMENT.note(format!("the pool will be called {name}"), means)
    })
}

fn judge_reserve(set: &[&(String, String)]) -> Option<Check> {
    let pages = |wanted: &str| {
        let value = set.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.trim());
        value.filter(|value| !value.is_empty()).map(str::parse::<u32>)
    };
    let (min, max) = (pages(MIN_RESERVED).transpose().ok()?, pages(MAX_RESERVED).transpose().ok()?);
    if min.is_none() && max.is_none() {
        return None;
    }
    let (min, max) = (min.unwrap_or(RESERVED_DEFAULTS.0), max.unwrap_or(RESERVED_DEFAULTS.1));
    (min > max).then(|| {
        ENVIRONMENT
            .finding(
                format!("at least {min} reserved pages, and at most {max}"),
                "engines refuse to start with that",
                format!("export {MAX_RESERVED}={min}"),
            )
            .about(MIN_RESERVED)
    })
}

/// `NAME="value"`, without secrets and of bounded length.
fn shown(name: &str, value: &str) -> String {
    if name.contains("KEY") {
        return format!("the value of {name}");
    }
    let start: String = value.chars().take(SHOWN_MAX).collect();
    format!("{start:?}{}", if start.len() < value.len() { "..." } else { "" })
}

pub(super) fn versions(python: Result<&Python, &String>) -> Check {
    let python = match python {
        Ok(python) => python,
        Err(why) => return VERSIONS.skipped(why),
    };
    let version = |name: &str| python.packages.get(name).map(|version| format!("{name} {version}"));
    let found: Vec<String> = PACKAGES.into_iter().filter_map(version).collect();
    let found = if found.is_empty() { format!("none of {}", PACKAGES.join(", ")) } else { found.join(", ") };
    VERSIONS.ok(format!("{found} (Python {}, {})", python.python, python.executable))
}
