//! A process between a benchmark and a server that it started: whatever becomes of the benchmark, the server ends.
//!
//! ```text
//!   kvbench overhead ──stdin──> kvbench server-guard ──> vllm serve ...      a process group of its own
//!        │                          │                       └─> its workers
//!        └── ends, is killed: the   └── told so by the end of its input: SIGTERM to the group,
//!            pipe closes                after --grace SIGKILL
//! ```
//!
//! Servers that people give as a command know nothing of us, and some start processes of their own: only a group can be
//! ended as a whole, and only somebody who outlives the benchmark can end it. A guard has a group to itself, so that
//! Ctrl-C reaches the benchmark alone, which then stops its servers one after the other.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tidekv_cli::exit::{ERROR_CODE, Outcome};

/// What a shell adds to the number of the signal that ended a program.
const SIGNALLED: i32 = 128;

/// Arguments of the hidden `kvbench server-guard`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  kvbench server-guard -- vllm serve model --port 8001      # what a benchmark starts; ends when its input does")]
pub struct GuardArgs {
    /// Milliseconds from SIGTERM to SIGKILL
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    pub grace_ms: u64,

    /// The server's program and arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Runs the command until it ends or standard input does.
pub fn run(args: &GuardArgs) -> anyhow::Result<Outcome> {
    let (program, rest) = args.command.split_first().context("a command is needed behind --")?;
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).process_group(0);
    // For the case that this process is killed itself. This thread waits for the server.
    tidekv_fork::end_with_parent(&mut command);
    let mut server = command.spawn().with_context(|| format!("{} cannot be started", program.display()))?;
    let group = i32::try_from(server.id()).ok().and_then(Pid::from_raw).context("the server has no process id")?;
    let grace = Duration::from_millis(args.grace_ms);
    let (end, ended) = channel();
    thread::Builder::new().name("stop".to_owned()).spawn(move || stop_after_input(group, &ended, grace))?;
    // Until it is waited for, nobody else can get its number, which is that of the group.
    waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).context("waiting for the server")?;
    drop(end);
    // Whatever it started goes with it.
    let _ = kill_process_group(group, Signal::KILL);
    Ok(Outcome::Code(code_of(server.wait().context("waiting for the server")?)))
}

/// Waits until there is no input any more, then asks the group to end, and after `grace` does not ask.
fn stop_after_input(group: Pid, ended: &Receiver<()>, grace: Duration) {
    let mut ignored = [0; 64];
    let mut input = io::stdin().lock();
    while matches!(input.read(&mut ignored), Ok(1..)) {}
    let _ = kill_process_group(group, Signal::TERM);
    // Nothing is ever sent: the other end goes when the server has ended.
    if ended.recv_timeout(grace) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// As a shell would say it.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| SIGNALLED + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(ERROR_CODE)
}
