//! An event as a line of JSON: every word of the record, with names that do not change.

use anyhow::Context;
use serde::Serialize;
use tidekv_shm::UNLIMITED;

use super::tapes::{News, Told};
use super::{line, shown_name};

/// An event. What does not apply is null.
#[derive(Serialize)]
struct Row<'a> {
    time: String,
    device: &'a str,
    sequence: u64,
    at_ms: u64,
    kind: &'static str,
    reason: &'static str,
    count: u32,
    ipc: Option<String>,
    group: Option<u32>,
    pid: u32,
    slot: u32,
    bytes: u64,
    held_bytes: u64,
    demand_bytes: u64,
    share_bytes: u64,
    budget_bytes: u64,
    limit_bytes: Option<u64>,
    free_bytes: u64,
    weight: u32,
    priority: i32,
    peer: Option<String>,
    text: String,
}

/// Events that were overwritten before they could be read.
#[derive(Serialize)]
struct Missed<'a> {
    device: &'a str,
    kind: &'static str,
    count: u64,
}

pub(super) fn text(told: &Told) -> anyhow::Result<String> {
    let device = told.device.as_str();
    let json = match &told.news {
        News::Missed(count) => serde_json::to_string(&Missed { device, kind: "missed", count: *count }),
        News::Event(event) => serde_json::to_string(&Row {
            time: super::local_time(event).timestamp().to_string(),
            device,
            sequence: event.sequence,
            at_ms: event.at_ms,
            kind: event.kind.word(),
            reason: event.reason.word(),
            count: event.count,
            ipc: event.pool.as_ref().map(shown_name),
            group: event.pool.as_ref().map(|pool| pool.group.0),
            pid: event.pid,
            slot: event.slot,
            bytes: event.bytes.0,
            held_bytes: event.held.0,
            demand_bytes: event.demand.0,
            share_bytes: event.share.0,
            budget_bytes: event.budget.0,
            limit_bytes: (event.limit != UNLIMITED).then_some(event.limit.0),
            free_bytes: event.free.0,
            weight: event.weight,
            priority: event.priority,
            peer: event.peer.as_ref().map(shown_name),
            text: line::sentence(event),
        }),
    };
    json.context("cannot write JSON")
}
