//! A scheduler and its workers as real processes: killed, stopped, restarted, out of memory, routed, worn out.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod crew;
mod deaths;
mod endurance;
mod memory;
mod routing;
mod slowness;

/// The processes that the tests start.
#[test]
fn process() {
    let Some((role, dir)) = crew::role() else { return };
    match role[0].as_str() {
        "worker" => crew::be_worker(&role[1..], &dir),
        "busy" => endurance::be_busy(&role[1..], &dir),
        "scheduler" => deaths::be_scheduler(&role[1..], &dir),
        other => panic!("no role {other}"),
    }
}

/// Every way in which orders are sent.
pub(crate) fn strategies() -> impl Iterator<Item = &'static str> {
    tidekv_ipc::broadcast::STRATEGIES.iter().map(|strategy| strategy.name)
}
