//! The command line: `kvbench <vmm|alloc|frag|idle|share|map-parallel|tp-ipc|prepare-batch|router|shm|shm-alloc|
//! shm-lookup|shm-transfer|serve|mock|overhead|latency-benefit|multi-model|attention|decode|interference|gsm8k|accuracy|
//! links|hold|compare|report|completions|man>`.
//!
//! Each subcommand owns its arguments, its examples and its `run`; this module only lists them. What a
//! subcommand reports is an [`Outcome`] or an error, and [`exit`](tidekv_cli::exit) turns either into a code.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use clap::{Parser, Subcommand};

use tidekv_cli::logging;

use crate::links::with_own_name;
use crate::output::warn;
use crate::shm::gflags::with_long_flags;
use crate::{
    accuracy, alloc, attention, compare, crew, decode, frag, generate, gsm8k, hold, idle, interference,
    latency_benefit, links, map_parallel, multi_model, overhead, prepare_batch, report, router, serve, servers, share,
    shm, tp_ipc, vmm,
};
use tidekv_cli::exit::Outcome;

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TIDEKV_COMMIT"), ")");

/// Benchmarks of tidekv, elastic KV-cache memory for LLM serving
#[derive(Debug, Parser)]
#[command(name = "kvbench", version = VERSION, after_help = EXAMPLES)]
pub struct Cli {
    /// Also append logs to FILE [default: $KVCACHED_LOG_FILE]; KVCACHED_LOG_LEVEL says which
    #[arg(long, global = true, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  kvbench vmm                                  # cost of mapping and unmapping pages here
  kvbench alloc --quick                        # cost of leasing and freeing blocks, a first look
  kvbench share                                # processes that share one budget
  kvbench shm                                  # blocks in shared memory: allocate, look up, copy
  kvbench serve --port 8000 --request-rate 8   # latency of a server under load
  kvbench vmm --output before.json             # keep the result ...
  kvbench compare before.json after.json --fail-above 10%   # ... and hold a later one against it
  kvbench report runs/                         # plots and tables of all results in a folder

Exit status: 0 done, 1 the answer is no, 2 error.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Map and unmap pages, beside the raw calls that this takes
    Vmm(vmm::VmmArgs),
    /// Lease and free blocks of pools of several sizes
    Alloc(alloc::AllocArgs),
    /// Retain a few blocks of a full pool and see what they pin
    Frag(frag::FragArgs),
    /// Serve requests of staggered lengths and see what an idle model holds
    Idle(idle::IdleArgs),
    /// Let processes compete for one budget
    Share(share::ShareArgs),
    /// Map pages from several processes at once and see what runs side by side
    MapParallel(map_parallel::MapParallelArgs),
    /// Map pages on all workers of a scheduler, and see what the message costs
    TpIpc(tp_ipc::TpIpcArgs),
    /// Prepare steps: block tables and attention metadata, on the CPU and on a GPU
    PrepareBatch(prepare_batch::PrepareBatchArgs),
    /// See what the router of `kvctl up` adds to the first token
    Router(router::RouterArgs),
    /// Answer requests at once (what `router` starts)
    #[command(hide = true)]
    RouterUpstream(router::UpstreamArgs),
    /// Shared memory: the next three, one after the other
    Shm(shm::suite::ShmArgs),
    /// Allocate blocks of shared memory, by system calls and from the arena
    ShmAlloc(shm::alloc::ShmAllocArgs),
    /// Find blocks of shared memory, by searching and by handle
    ShmLookup(shm::lookup::ShmLookupArgs),
    /// Copy blocks of shared memory, by every method
    ShmTransfer(shm::transfer::ShmTransferArgs),
    /// Allocate and free beside another process (what `shm-alloc` starts)
    #[command(hide = true)]
    ShmPeer(shm::alloc::PeerArgs),
    /// Send requests to a server, or to several, and time the answers
    Serve(Box<serve::ServeArgs>),
    /// Answer like an engine and compute nothing: a server to try `serve` with
    Mock(serve::MockArgs),
    /// Serve with elastic and with static memory, at every rate, and see what elastic costs
    Overhead(overhead::OverheadArgs),
    /// Serve models whose peaks do not meet, and see how much sooner elastic memory answers
    LatencyBenefit(latency_benefit::LatencyBenefitArgs),
    /// See how many models fit into one budget, and what sharing it costs
    MultiModel(multi_model::MultiModelArgs),
    /// See how fast decode attention reads the KV cache of a GPU, in every layout
    Attention(attention::AttentionArgs),
    /// Time decode steps of a model, beside one reading of its weights
    Decode(decode::DecodeArgs),
    /// Serve while a neighbour maps and unmaps pages, and see whether answers feel it
    Interference(interference::InterferenceArgs),
    /// Map and unmap pages until told to rest (what `interference` starts)
    #[command(hide = true)]
    MapNeighbour(interference::NeighbourArgs),
    /// Put the problems of GSM8K to a server
    Gsm8k(gsm8k::Gsm8kArgs),
    /// Put the same prompts to two servers and compare the answers, token by token
    Accuracy(accuracy::AccuracyArgs),
    /// Make links under the names of scripts that people know
    Links(links::LinksArgs),
    /// Be kvserve (what benchmarks of serving start)
    #[command(hide = true, name = "kvserve")]
    KvServe(servers::kvserve::KvServeArgs),
    /// Watch over a server (what benchmarks of serving start)
    #[command(hide = true)]
    ServerGuard(servers::guard::GuardArgs),
    /// Hold memory under a name, to have something to look at
    Hold(hold::HoldArgs),
    /// Follow orders on standard input (what `share` starts)
    #[command(hide = true)]
    Worker(crew::WorkerArgs),
    /// Map pages at appointed moments (what `map-parallel` starts)
    #[command(hide = true)]
    MapWorker(map_parallel::MapWorkerArgs),
    /// Serve a scheduler (what `tp-ipc` starts)
    #[command(hide = true)]
    TpWorker(tp_ipc::TpWorkerArgs),
    /// Compare two results of one benchmark, or several runs a side
    Compare(compare::CompareArgs),
    /// Make one HTML page of all results in a folder
    Report(report::ReportArgs),
    /// Print completions for a shell
    Completions(generate::CompletionsArgs),
    /// Write the man pages
    Man(generate::ManArgs),
}

impl Cli {
    /// Parses the arguments of this process, program name first.
    pub fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(with_long_flags(with_dashes(with_own_name(args.into_iter().collect())).collect()))
    }

    /// Does what was asked.
    pub fn run(&self) -> anyhow::Result<Outcome> {
        logging::start(self.log_file.as_deref())?.iter().for_each(|warning| warn(warning));
        match &self.command {
            Command::Vmm(args) => vmm::run(args),
            Command::Alloc(args) => alloc::run(args),
            Command::Frag(args) => frag::run(args),
            Command::Idle(args) => idle::run(args),
            Command::Share(args) => share::run(args),
            Command::MapParallel(args) => map_parallel::run(args),
            Command::TpIpc(args) => tp_ipc::run(args),
            Command::PrepareBatch(args) => prepare_batch::run(args),
            Command::Router(args) => router::run(args),
            Command::RouterUpstream(args) => router::run_upstream(args),
            Command::Shm(args) => shm::suite::run(args),
            Command::ShmAlloc(args) => shm::alloc::run(args),
            Command::ShmLookup(args) => shm::lookup::run(args),
            Command::ShmTransfer(args) => shm::transfer::run(args),
            Command::ShmPeer(args) => shm::alloc::run_peer(args),
            Command::Serve(args) => serve::run(args),
            Command::Mock(args) => serve::run_mock(args),
            Command::Overhead(args) => overhead::run(args),
            Command::LatencyBenefit(args) => latency_benefit::run(args),
            Command::MultiModel(args) => multi_model::run(args),
            Command::Attention(args) => attention::run(args),
            Command::Decode(args) => decode::run(args),
            Command::Interference(args) => interference::run(args),
            Command::MapNeighbour(args) => interference::run_neighbour(args),
            Command::Gsm8k(args) => gsm8k::run(args),
            Command::Accuracy(args) => accuracy::run(args),
            Command::Links(args) => links::run(args),
            Command::KvServe(args) => servers::kvserve::run(args),
            Command::ServerGuard(args) => servers::guard::run(args),
            Command::Hold(args) => hold::run(args),
            Command::Worker(args) => crew::run(args),
            Command::MapWorker(args) => map_parallel::run_worker(args),
            Command::TpWorker(args) => tp_ipc::run_worker(args),
            Command::Compare(args) => compare::run(args),
            Command::Report(args) => report::run(args),
            Command::Completions(args) => generate::completions(args),
            Command::Man(args) => generate::man(args),
        }
    }
}

/// Underscores in the names of long flags become dashes, so `--num_layers` works as `--num-layers` does.
/// Values and everything behind a bare `--` stay as they are.
fn with_dashes(args: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut flags_are_over = false;
    args.into_iter().map(move |arg| {
        flags_are_over |= arg == "--";
        if flags_are_over { arg } else { dashed(&arg) }
    })
}

fn dashed(arg: &OsStr) -> OsString {
    let bytes = arg.as_bytes();
    if !bytes.starts_with(b"--") {
        return arg.to_owned();
    }
    let name_end = bytes.iter().position(|&byte| byte == b'=').unwrap_or(bytes.len());
    let dash = |&byte: &u8| if byte == b'_' { b'-' } else { byte };
    OsString::from_vec(bytes[..name_end].iter().map(dash).chain(bytes[name_end..].iter().copied()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn dashes(args: &[&str]) -> Vec<OsString> {
        with_dashes(args.iter().map(OsString::from)).collect()
    }

    #[test]
    fn clap_finds_nothing_wrong_with_the_definitions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn both_spellings_of_a_flag() {
        assert_eq!(dashes(&["kvbench", "vmm", "--num_layers", "4"]), ["kvbench", "vmm", "--num-layers", "4"]);
        assert_eq!(dashes(&["--output=a_b.json", "a_b.json"]), ["--output=a_b.json", "a_b.json"]);
        assert_eq!(dashes(&["--fail_above=10%"]), ["--fail-above=10%"]);
        assert_eq!(dashes(&["--", "--a_b"]), ["--", "--a_b"]);
        let args = ["kvbench", "compare", "a.json", "b.json", "--fail_above", "10 %"];
        assert!(Cli::parse_args(args.map(OsString::from)).is_ok());
    }

    #[test]
    fn every_subcommand_has_examples() {
        for command in Cli::command().get_subcommands() {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Examples:\n"), "{} has none", command.get_name());
        }
    }
}
