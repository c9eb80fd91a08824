//! `/metrics`: Prometheus' text format. `kvcached_router_*` for what the router sees of each model, `kvcached_kv_cache_pool_*` for the
//! pools of this machine, with the names that engines use for their own.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::desk::{DeskView, PoolSight};
use super::model::{Sight, StateWord};
use super::traffic::{Counts, Percentiles, to_f64};
use super::{Gateway, status};

pub(super) async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let view = status::look(&gateway).await.unwrap_or_else(|error| {
        tracing::warn!("pools are missing in /metrics: {error}");
        DeskView::default()
    });
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page(&gateway, &view)).into_response()
}

/// Everything that is said of a model.
struct Row {
    name: String,
    sight: Sight,
    counts: Counts,
    ttft: Percentiles,
    itl: Percentiles,
}

fn page(gateway: &Gateway, view: &DeskView) -> String {
    let now = Instant::now();
    let row = |model: &Arc<super::Model>| {
        let (counts, ttft, itl) = model.traffic(|traffic| (traffic.all(), traffic.ttft_ms(now), traffic.itl_ms(now)));
        Row { name: model.spec().name.clone(), sight: model.sight(), counts, ttft, itl }
    };
    let rows: Vec<Row> = gateway.models.iter().map(row).collect();
    let mut page = Page::default();
    page.models(&rows, "requests_total", "counter", "Requests that came", |row| to_f64(row.counts.started));
    page.models(&rows, "requests_succeeded_total", "counter", "Answered below 400, to the last byte", |row| {
        to_f64(row.counts.good)
    });
    page.models(&rows, "requests_failed_total", "counter", "Refused, broken off or answered from 400 on", |row| {
        to_f64(row.counts.bad)
    });
    page.models(&rows, "requests_refused_total", "counter", "Told to come back because the queue was full", |row| {
        to_f64(row.sight.refused)
    });
    page.models(&rows, "request_seconds_total", "counter", "Time of all requests that ended", |row| row.counts.seconds);
    page.models(&rows, "requests_in_flight", "gauge", "With the engine now", |row| count(row.sight.in_flight));
    page.models(&rows, "requests_queued", "gauge", "Waiting in the router now", |row| count(row.sight.queued));
    page.models(&rows, "model_ready", "gauge", "1 while the engine can answer, asleep or awake", |row| {
        let is_there = matches!(row.sight.state, StateWord::Ready | StateWord::Sleeping | StateWord::Waking);
        f64::from(u8::from(is_there))
    });
    page.models(&rows, "model_sleeping", "gauge", "1 while it sleeps", |row| {
        f64::from(u8::from(row.sight.state == StateWord::Sleeping))
    });
    page.models(&rows, "sleeps_total", "counter", "Times it fell asleep", |row| to_f64(row.sight.sleeps));
    page.models(&rows, "wakes_total", "counter", "Times it was woken", |row| to_f64(row.sight.wakes));
    page.models(&rows, "restarts_total", "counter", "Times its process was started again", |row| {
        f64::from(row.sight.instance.restarts)
    });
    page.models(&rows, "idle_seconds", "gauge", "Since the end of its last request", |row| {
        row.sight.idle.as_secs_f64()
    });
    page.quantiles(&rows, "ttft_seconds", "Time to the first piece of an answer, over a minute", |row| row.ttft);
    page.quantiles(&rows, "itl_seconds", "Time between two pieces of an answer, over a minute", |row| row.itl);
    page.pools(&view.pools);
    page.text
}

#[expect(clippy::cast_precision_loss, reason = "a count of requests that are present")]
fn count(requests: usize) -> f64 {
    requests as f64
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn models(&mut self, rows: &[Row], name: &str, kind: &str, help: &str, value: impl Fn(&Row) -> f64) {
        let name = format!("kvcached_router_{name}");
        self.head(&name, kind, help);
        for row in rows {
            let _ = writeln!(self.text, "{name}{{model=\"{}\"}} {}", escaped(&row.name), value(row));
        }
    }

    fn quantiles(&mut self, rows: &[Row], name: &str, help: &str, value: impl Fn(&Row) -> Percentiles) {
        let name = format!("kvcached_router_{name}");
        self.head(&name, "gauge", help);
        for row in rows {
            let Percentiles { p50, p99 } = value(row);
            for (quantile, ms) in [("0.5", p50), ("0.99", p99)] {
                let Some(ms) = ms else { continue };
                let model = escaped(&row.name);
                let _ = writeln!(self.text, "{name}{{model=\"{model}\",quantile=\"{quantile}\"}} {}", ms / 1e3);
            }
        }
    }

    fn pools(&mut self, pools: &[PoolSight]) {
        type Value = fn(&PoolSight) -> u64;
        let figures: [(&str, &str, Value); 5] = [
            ("needed_bytes", "Held for running requests", |pool| pool.needed_bytes),
            ("cached_bytes", "Held for cached prefixes that no request uses", |pool| pool.cached_bytes),
            ("idle_bytes", "Held with nothing in it", |pool| pool.idle_bytes),
            ("capacity_bytes", "What it may hold at most", |pool| pool.capacity_bytes),
            ("demand_bytes", "Asked for and not got", |pool| pool.demand_bytes),
        ];
        for (name, help, value) in figures {
            let name = format!("kvcached_kv_cache_pool_{name}");
            self.head(&name, "gauge", help);
            for pool in pools {
                let (label, device) = (escaped(&pool.name), escaped(&pool.device));
                let _ = writeln!(self.text, "{name}{{pool=\"{label}\",device=\"{device}\"}} {}", value(pool));
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
