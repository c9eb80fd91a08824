//! `kvbench mock`: a server that answers like an engine and computes nothing, to try scenarios and clients with.

use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use serde_json::json;
use tidekv_cli::exit::Outcome;

use super::spec::Seconds;
use crate::load::mock::{Mock, Timing};
use crate::output::print;
use crate::subprocess::follow_the_parent;

/// Arguments of `kvbench mock`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MockArgs {
    /// Address to listen at
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,

    /// Port; 0 lets the kernel choose, and the line on stdout says which
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,

    /// Time to the first token
    #[arg(long, value_name = "TIME", default_value = "20ms")]
    pub ttft: Seconds,

    /// And so much more for each token of the prompt
    #[arg(long, value_name = "TIME", default_value = "0ms")]
    pub ttft_per_token: Seconds,

    /// Time from each token to the next
    #[arg(long, value_name = "TIME", default_value = "5ms")]
    pub itl: Seconds,

    /// Tokens in one event
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tokens_per_chunk: u32,

    /// Threads
    #[arg(long, value_name = "N", default_value_t = NonZero::<usize>::MIN)]
    pub threads: NonZero<usize>,

    /// Say where as one JSON object
    #[arg(long)]
    pub json: bool,

    /// End when standard input does, and with whoever started it
    #[arg(long, hide = true)]
    pub with_parent: bool,
}

const EXAMPLES: &str = "\
Examples:
  kvbench mock --port 8000 --ttft 50ms --itl 10ms
  kvbench mock --port 0 --json                        # {\"base_url\": \"http://127.0.0.1:41003\"}
  kvbench serve --base-url http://127.0.0.1:8000 --request-rate 50 --num-prompts 500

Waits are kept to the millisecond; times within an answer count from its request, so none adds to the next.";

/// Serves until it is ended.
pub fn run_mock(args: &MockArgs) -> anyhow::Result<Outcome> {
    ensure!(args.tokens_per_chunk > 0, "--tokens-per-chunk is 0: give at least 1");
    if args.with_parent {
        follow_the_parent()?;
    }
    let timing = Timing {
        first: args.ttft.0,
        per_prompt_token: args.ttft_per_token.0,
        gap: args.itl.0,
        tokens_per_chunk: args.tokens_per_chunk,
    };
    let address = SocketAddr::new(args.host, args.port);
    let mock = Mock::listen(address, args.threads, false, Box::new(move |request| timing.script(request)))
        .with_context(|| format!("cannot listen at {address}"))?;
    let base_url = mock.base_url();
    let line = if args.json {
        json!({"base_url": base_url.to_string()}).to_string()
    } else {
        format!("listening at {base_url}")
    };
    print(&(line + "\n"))?;
    if args.with_parent {
        // Nothing is ever said; this reads the end.
        let _ = std::io::stdin().read(&mut [0]);
        return Ok(Outcome::Done);
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
