//! kvserve from inside kvbench: `kvbench kvserve ...` is kvserve, where the feature `serve` is there.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use super::ServerError;
use crate::host::{self, HostInfo};
use crate::lab::Lab;

/// Arguments of `kvbench kvserve`: those of kvserve.
#[derive(Args, Clone, Debug)]
#[command(
    disable_help_flag = true,
    after_help = "\
Examples:
  kvbench kvserve synthetic:tiny --port 0        # kvserve, without a second binary
  kvbench kvserve --help"
)]
pub struct KvServeArgs {
    /// What kvserve takes
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARG")]
    pub args: Vec<OsString>,
}

/// Becomes kvserve.
#[cfg(feature = "serve")]
pub fn run(args: &KvServeArgs) -> anyhow::Result<Outcome> {
    use clap::Parser as _;
    use tidekv_cli::cli::ServeCli;
    use tidekv_cli::console::Console;

    let words = std::iter::once(OsString::from("kvserve")).chain(args.args.iter().cloned());
    match ServeCli::try_parse_from(words) {
        Ok(cli) => tidekv_cli::run_serve(&cli, &mut Console::standard()),
        Err(answer) => {
            // `--help` comes here too. A reader that went away is no error.
            let _ = answer.print();
            Ok(if answer.use_stderr() { Outcome::Code(tidekv_cli::exit::ERROR_CODE) } else { Outcome::Done })
        }
    }
}

/// Says what is missing.
#[cfg(not(feature = "serve"))]
pub fn run(_: &KvServeArgs) -> anyhow::Result<Outcome> {
    anyhow::bail!("this kvbench was built without its server: run kvserve itself")
}

/// The words that start kvserve, whichever it is.
fn program() -> Result<Vec<OsString>, ServerError> {
    if cfg!(feature = "serve") {
        let own = tidekv_cli::program::named_path().map_err(|source| ServerError::NoProgram { source })?;
        return Ok(vec![own.into(), "kvserve".into()]);
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join("kvserve")).find(|file| file.is_file());
    Ok(vec![found.ok_or(ServerError::NoKvServe)?.into()])
}

/// What a kvserve of a benchmark computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The processor
    Cpu,
    /// The first GPU
    Cuda,
}

impl Backend {
    /// As kvserve's flag says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// The machine, with its GPU where that computes.
    pub fn host(self) -> HostInfo {
        let gpus = (self == Self::Cuda).then(host::gpus).flatten();
        HostInfo::current().beside(gpus.as_ref())
    }
}

/// Where a kvserve of a benchmark gets its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Mapped while tokens need it.
    Elastic,
    /// All of it held from the start; `None` for the whole budget.
    Static(Option<u64>),
}

impl Memory {
    /// The name of the mode, as `/metrics` says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Elastic => "elastic",
            Self::Static(_) => "static",
        }
    }
}

/// A kvserve to be started: everything that differs between the sides of a comparison.
#[derive(Clone, Debug)]
pub struct KvServe {
    /// `synthetic:tiny`, a folder, or an id.
    pub model: String,
    /// The pool's name, and the model's for clients.
    pub name: String,
    /// Where memory comes from.
    pub memory: Memory,
    /// What computes.
    pub backend: Backend,
    /// What all servers of one folder may hold together.
    pub budget_bytes: u64,
    /// Folder of the ledger and the segments; servers that share it share the budget.
    pub dir: PathBuf,
    /// 0 for any.
    pub port: u16,
    /// Flags that both sides have.
    pub flags: Vec<OsString>,
    /// Variables that both sides have.
    pub variables: Vec<(String, String)>,
}

impl KvServe {
    /// A server on the processor, on any port.
    pub fn new(lab: &Lab, model: &str, name: &str, memory: Memory, budget_bytes: u64) -> Self {
        Self {
            model: model.to_owned(),
            name: name.to_owned(),
            memory,
            backend: Backend::Cpu,
            budget_bytes,
            dir: lab.path().to_owned(),
            port: 0,
            flags: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// The whole command line.
    pub(super) fn command(&self) -> Result<Vec<OsString>, ServerError> {
        let kv = match self.memory {
            Memory::Elastic => "elastic".to_owned(),
            Memory::Static(None) => "static".to_owned(),
            Memory::Static(Some(bytes)) => format!("static:{bytes}"),
        };
        let mut words = program()?;
        words.push(self.model.clone().into());
        for (flag, value) in [
            ("--served-model-name", self.name.clone()),
            ("--pool-name", format!("kvbench_{}", self.name)),
            ("--port", self.port.to_string()),
            ("--backend", self.backend.name().to_owned()),
            ("--kv", kv),
            ("--kv-budget", self.budget_bytes.to_string()),
            ("--drain", "0".to_owned()),
        ] {
            words.extend([flag.into(), value.into()]);
        }
        words.extend(["--dir".into(), self.dir.clone().into()]);
        words.extend(self.flags.iter().cloned());
        Ok(words)
    }
}
