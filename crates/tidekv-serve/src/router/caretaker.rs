//! What happens without anybody asking: idle models fall asleep, and weights follow targets.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::MissedTickBehavior;

use super::desk::{DeskError, DeskView, PoolSight, ShareTerms};
use super::slo::{Controller, Decision, Seen};
use super::{Gateway, Model, status};

/// For as long as the router runs.
pub(super) async fn care(gateway: Arc<Gateway>) {
    tokio::join!(put_to_sleep(Arc::clone(&gateway)), keep_targets(gateway));
}

async fn put_to_sleep(gateway: Arc<Gateway>) {
    let settings = gateway.settings.sleep;
    if !settings.is_automatic {
        return;
    }
    let mut ticks = tokio::time::interval(settings.check_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        for model in &gateway.models {
            let Some(errand) = model.begin_idle_sleep(&settings) else { continue };
            // One engine that takes its time must not keep the others awake.
            let (gateway, model) = (Arc::clone(&gateway), Arc::clone(model));
            tokio::spawn(async move {
                let reason = match gateway.sleep(&model, &errand).await {
                    Ok(()) => format!("idle for {} s", settings.idle_threshold.as_secs_f64()),
                    Err(error) => format!("idle, and the engine refused: {error}"),
                };
                gateway.decided(&model, None, "sleep", reason);
            });
        }
    }
}

async fn keep_targets(gateway: Arc<Gateway>) {
    if gateway.models.iter().all(|model| model.spec().slo.is_none()) {
        return;
    }
    let mut controller = Controller::default();
    let mut ticks = tokio::time::interval(gateway.settings.slo_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let view = match status::look(&gateway).await {
            Ok(view) => view,
            Err(error) => {
                tracing::warn!("targets are not looked at: {error}");
                continue;
            }
        };
        let seen: Vec<Seen> = gateway.models.iter().filter_map(|model| seen(model, &view)).collect();
        for decision in controller.decide(&seen) {
            carry_out(&gateway, &mut controller, &seen, &decision).await;
        }
    }
}

async fn carry_out(gateway: &Arc<Gateway>, controller: &mut Controller, seen: &[Seen], decision: &Decision) {
    let Decision { model, pool, weight, reason } = decision;
    let before = seen.iter().find(|seen| seen.pool == *pool).map_or(*weight, |seen| seen.weight);
    let (desk, name, terms) =
        (Arc::clone(&gateway.desk), pool.clone(), ShareTerms { weight: Some(*weight), floor: None });
    let outcome = tokio::task::spawn_blocking(move || desk.set_share(&name, terms)).await;
    let outcome = outcome.unwrap_or_else(|error| Err(DeskError::Failed(error.to_string())));
    let Some(model) = gateway.models.iter().find(|known| known.spec().name == *model) else { return };
    match outcome {
        Ok(()) => gateway.decided(model, Some(pool), &format!("weight {before} -> {weight}"), reason.clone()),
        Err(error) => {
            controller.undo(pool, before);
            tracing::warn!("the weight of {pool} stays {before}: {error}");
        }
    }
}

/// What concerns the targets of a model, if it has any and its pool is there.
fn seen(model: &Arc<Model>, view: &DeskView) -> Option<Seen> {
    let spec = model.spec();
    let target = spec.slo?;
    let is_its = |pool: &&PoolSight| pool.model.as_deref() == Some(&spec.name);
    let pool = view.pools.iter().find(is_its)?;
    let now = Instant::now();
    Some(Seen {
        model: spec.name.clone(),
        pool: pool.name.clone(),
        target,
        ttft_p99_ms: model.traffic(|traffic| traffic.ttft_ms(now)).p99,
        queued: model.sight().queued,
        demand_bytes: pool.demand_bytes,
        weight: pool.weight,
    })
}
