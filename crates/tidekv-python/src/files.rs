//! Names, pool segments and sizes, for what needs no pool: kvcached's command-line helpers, mostly.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tidekv_cli::cli::Cli;
use tidekv_cli::console::Console;
use tidekv_cli::exit::Outcome;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_ipc::{SocketDir, ipc_timeout_from_env};
use tidekv_shm::segment::{self, SegmentView};
use tidekv_shm::{PoolName, RuntimeDir};

use crate::error::Refused;
use crate::numbers;

fn dir_of(runtime_dir: Option<String>) -> RuntimeDir {
    runtime_dir.map_or_else(RuntimeDir::from_env, RuntimeDir::at)
}

/// Where a segment lies. A name that begins with `/` is a path already, as in kvcached.
fn path_of(name: &str, runtime_dir: Option<String>) -> Result<PathBuf, Refused> {
    if name.starts_with('/') {
        return Ok(name.into());
    }
    // Longer than a pool's name where a group's suffix is part of it, so only its letters are checked.
    if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)) {
        let advice = "use letters, digits, '_' and '-', or a path that begins with '/'";
        return Err(Refused::argument(format!("{name:?} cannot name a segment: {advice}")));
    }
    Ok(dir_of(runtime_dir).path().join(name))
}

fn socket_dir_of(pool: &str, socket_root: Option<String>) -> Result<SocketDir, Refused> {
    let pool = PoolName::new(pool)?;
    Ok(socket_root.map_or_else(|| SocketDir::from_env(&pool), |root| SocketDir::new(root, &pool)))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[pyfunction]
pub(crate) fn runtime_dir() -> String {
    text(RuntimeDir::from_env().path())
}

#[pyfunction]
pub(crate) fn sanitise_name(name: &str) -> Result<String, Refused> {
    Ok(PoolName::new(name)?.as_str().to_owned())
}

#[pyfunction]
pub(crate) fn default_pool_name(tag: &str) -> String {
    PoolName::default_for(tag).as_str().to_owned()
}

#[pyfunction]
#[pyo3(signature = (pool, *, socket_root = None))]
pub(crate) fn socket_dir(pool: &str, socket_root: Option<String>) -> Result<String, Refused> {
    Ok(text(socket_dir_of(pool, socket_root)?.path()))
}

#[pyfunction]
#[pyo3(signature = (pool, rank, *, stage = 0, socket_root = None))]
pub(crate) fn socket_path(pool: &str, rank: u32, stage: u32, socket_root: Option<String>) -> Result<String, Refused> {
    Ok(text(&socket_dir_of(pool, socket_root)?.socket_path(stage, rank)?))
}

#[pyfunction]
pub(crate) fn ipc_timeout() -> Option<f64> {
    ipc_timeout_from_env().as_ref().map(Duration::as_secs_f64)
}

#[pyfunction]
#[pyo3(signature = (name, *, group = 0, runtime_dir = None))]
pub(crate) fn segment_path(name: &str, group: u32, runtime_dir: Option<String>) -> Result<String, Refused> {
    if name.starts_with('/') {
        return Ok(name.to_owned());
    }
    let name = PoolName::new(name)?.with_group(GroupId(group));
    Ok(text(&dir_of(runtime_dir).segment_path(&name)))
}

#[pyfunction]
#[pyo3(signature = (name, *, runtime_dir = None))]
pub(crate) fn segment_read(
    py: Python<'_>,
    name: &str,
    runtime_dir: Option<String>,
) -> Result<Option<(i64, i64, i64)>, Refused> {
    let path = path_of(name, runtime_dir)?;
    let view = py.detach(|| segment::read(&path))?;
    Ok(view.map(|SegmentView { limit, used, prealloc }| (limit, used, prealloc)))
}

#[pyfunction]
#[pyo3(signature = (name, limit, *, runtime_dir = None))]
pub(crate) fn segment_create(
    py: Python<'_>,
    name: &str,
    limit: u64,
    runtime_dir: Option<String>,
) -> Result<(), Refused> {
    let path = path_of(name, runtime_dir)?;
    Ok(py.detach(|| segment::write_new(&path, Bytes(limit)))?)
}

#[pyfunction]
#[pyo3(signature = (name, limit, *, runtime_dir = None))]
pub(crate) fn segment_set_limit(
    py: Python<'_>,
    name: &str,
    limit: u64,
    runtime_dir: Option<String>,
) -> Result<bool, Refused> {
    let path = path_of(name, runtime_dir)?;
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Refused::argument(format!("{} names no file", path.display())));
    };
    let args: [OsString; 6] =
        ["kvctl".into(), "--dir".into(), dir.into(), "limit".into(), name.into(), limit.to_string().into()];
    py.detach(|| {
        let cli = Cli::parse_args(args).map_err(|error| Refused::argument(error.to_string()))?;
        let mut nobody = Console::to(std::io::sink(), std::io::sink(), false, None);
        match tidekv_cli::run(&cli, &mut nobody) {
            Ok(Outcome::Negative) => Ok(false),
            Ok(_) => Ok(true),
            Err(error) => Err(Refused::new("FileProblem", format!("{error:#}")).text("path", text(&path))),
        }
    })
}

#[pyfunction]
#[pyo3(signature = (name, used, prealloc, *, runtime_dir = None))]
pub(crate) fn segment_set_usage(
    py: Python<'_>,
    name: &str,
    used: u64,
    prealloc: u64,
    runtime_dir: Option<String>,
) -> Result<(), Refused> {
    let path = path_of(name, runtime_dir)?;
    Ok(py.detach(|| segment::write_usage(&path, Bytes(used), Bytes(prealloc)))?)
}

#[pyfunction]
#[pyo3(signature = (name, *, runtime_dir = None))]
pub(crate) fn segment_delete(py: Python<'_>, name: &str, runtime_dir: Option<String>) -> Result<bool, Refused> {
    let path = path_of(name, runtime_dir)?;
    Ok(py.detach(|| segment::delete(&path))?)
}

#[pyfunction]
#[pyo3(signature = (name, *, runtime_dir = None))]
pub(crate) fn segment_owned(py: Python<'_>, name: &str, runtime_dir: Option<String>) -> Result<bool, Refused> {
    let path = path_of(name, runtime_dir)?;
    Ok(py.detach(|| segment::has_owner(&path))?)
}

#[pyfunction]
#[pyo3(signature = (*, runtime_dir = None))]
pub(crate) fn segment_names(py: Python<'_>, runtime_dir: Option<String>) -> Vec<String> {
    let dir = dir_of(runtime_dir);
    py.detach(|| segment::list(&dir)).into_iter().map(|(name, _)| name).collect()
}

#[pyfunction]
pub(crate) fn parse_size(size: &str) -> Result<u64, Refused> {
    Ok(size.parse::<Bytes>()?.0)
}

#[pyfunction]
pub(crate) fn format_size(size: u64) -> String {
    Bytes(size).to_string()
}

/// Blocks by the page that their first byte is on: kvcached's `group_indices_by_page`.
#[pyfunction]
pub(crate) fn group_by_page<'py>(
    py: Python<'py>,
    blocks: &Bound<'py, PyAny>,
    block_bytes: u64,
    page_bytes: u64,
) -> PyResult<Bound<'py, PyDict>> {
    if block_bytes == 0 || page_bytes == 0 {
        return Err(Refused::argument("a block and a page have at least one byte").into());
    }
    let mut pages: Vec<(u64, Vec<u32>)> = Vec::new();
    let mut place = std::collections::HashMap::new();
    for block in numbers::ids(blocks)? {
        let page = u64::from(block).saturating_mul(block_bytes) / page_bytes;
        let at = *place.entry(page).or_insert_with(|| {
            pages.push((page, Vec::new()));
            pages.len() - 1
        });
        pages[at].1.push(block);
    }
    let dict = PyDict::new(py);
    for (page, blocks) in pages {
        dict.set_item(page, blocks)?;
    }
    Ok(dict)
}
