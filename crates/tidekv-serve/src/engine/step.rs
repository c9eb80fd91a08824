//! One step: who is in it, where their tokens go, the arithmetic, and what comes out.
//!
//! ```text
//!   plan     rows that run: tokens for each, blocks for those; short of blocks -> the youngest waits, plan again
//!   admit    from the queue, the oldest first, while tokens, rows and memory are within reach
//!   ask      neighbours, for what the next steps or the next in the queue will lack: it comes while this one is computed
//!   compute  Compute::forward: tables -> metadata -> arithmetic
//!   finish   publish full blocks, choose tokens, end what is done
//! ```

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tidekv_batch::SeqId;

use super::blocks::BlocksError;
use super::schedule::share_out;
use super::worker::Worker;
use crate::compute::{Outputs, StepInput, Wanted};
use crate::handle::{FinishReason, GenerateError};

/// How long one allocation waits for neighbours when nothing else can be done.
const PATIENCE: Duration = Duration::from_millis(20);

/// How often neighbours are asked again for the same: a word to them holds for longer, and an allocation in between takes
/// it back.
const ASK_AGAIN: Duration = Duration::from_millis(25);

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Tokens were computed, or a request ended.
    Stepped,
    /// There is work and no memory for it.
    Stalled,
    /// There is no work.
    Idle,
    /// Nobody can ask for work any more.
    Over,
}

/// Who computes how many tokens.
#[derive(Debug, Default)]
struct Plan {
    rows: Vec<(SeqId, u32)>,
    tokens: u32,
    blocks: u32,
}

impl Worker {
    /// Computes one step, if there is anything to compute and memory for it.
    pub(super) fn step(&mut self) -> Progress {
        if self.running.is_empty() && self.waiting.is_empty() {
            let spared = self.blocks.return_spare();
            self.report(spared);
            self.stalled_since = None;
            self.giving_way.forget();
            return Progress::Idle;
        }
        if self.is_resting() {
            return self.stalled();
        }
        let (mut plan, was_short) = match self.plan_running() {
            Ok(planned) => planned,
            Err(progress) => return progress,
        };
        // Who owes memory lets nobody in, but somebody always runs.
        let mut needed = 0;
        if !was_short && (self.running.is_empty() || !self.is_owing()) {
            needed = self.admit(&mut plan);
        }
        self.ask_ahead(&plan, needed);
        if plan.tokens == 0 {
            return self.stalled();
        }
        self.giving_way.stepped();
        let begun = Instant::now();
        self.compute_plan(&plan);
        // What is computed again after others were let past is no progress, though no waiting either.
        let has_rested = self.giving_way.has_rested();
        self.stalled_since = self.stalled_since.filter(|_| has_rested).map(|since| since + begun.elapsed());
        Progress::Stepped
    }

    /// Whether neighbours were let past, and there is not enough yet for the oldest request.
    fn is_resting(&mut self) -> bool {
        let oldest = self.running.values().chain(self.waiting.values()).next();
        let needed = oldest.map_or(0, |oldest| self.blocks.tables().shape().blocks_for(oldest.len() + 1));
        let is_resting = self.giving_way.is_resting(Instant::now(), || self.blocks.within_reach() >= needed);
        if is_resting {
            self.ask_ahead(&Plan::default(), needed);
        }
        is_resting
    }

    /// Blocks that a request needs to go from `from` tokens to `to`.
    fn blocks_between(&self, from: u32, to: u32) -> u32 {
        let shape = self.blocks.tables().shape();
        shape.blocks_for(to) - shape.blocks_for(from)
    }

    /// A plan for the rows that run, with its blocks in the ring; and whether somebody had to make room for it.
    fn plan_running(&mut self) -> Result<(Plan, bool), Progress> {
        let mut was_short = false;
        loop {
            let remaining: Vec<u32> = self.running.values().map(|seq| seq.remaining()).collect();
            let query = share_out(&remaining, self.max_step_tokens);
            let mut plan = Plan::default();
            for (seq, &tokens) in self.running.values().zip(&query) {
                plan.rows.push((seq.id, tokens));
                plan.tokens += tokens;
                plan.blocks += self.blocks_between(seq.computed, seq.computed + tokens);
            }
            let wait = if self.running.len() > 1 { Duration::ZERO } else { PATIENCE };
            match self.blocks.reserve(plan.blocks, wait) {
                Ok(()) => return Ok((plan, was_short)),
                Err(BlocksError::Short { .. }) if self.preempt_youngest() => was_short = true,
                Err(BlocksError::Short { .. }) => return Err(self.stalled()),
                Err(error) => {
                    self.fail_rows(&plan, &error.to_string());
                    return Err(Progress::Stepped);
                }
            }
        }
    }

    /// Lets requests in from the queue. Who would have to be thrown out again soon is not let in, unless nobody runs. Says
    /// how many blocks would have to be within reach for the next one; 0 where something else keeps it out.
    fn admit(&mut self, plan: &mut Plan) -> u32 {
        while let Some(mut entry) = self.waiting.first_entry() {
            if self.running.len() == self.max_rows || plan.tokens >= self.max_step_tokens {
                return 0;
            }
            let (id, seq) = (*entry.key(), entry.get_mut());
            let known = self.blocks.known(seq);
            // All of its text, the next token, and a block for each of the others.
            let rows = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
            let wanted = self.blocks.tables().shape().blocks_for(seq.len() + 1) - known + plan.blocks + rows;
            if rows > 0 && self.blocks.within_reach().saturating_sub(known) < wanted {
                return wanted.saturating_add(known);
            }
            let mut seq = entry.remove();
            let outcome = self.blocks.admit(id, &mut seq).and_then(|cached| {
                let tokens = seq.remaining().min(self.max_step_tokens - plan.tokens);
                let blocks = plan.blocks + self.blocks_between(seq.computed, seq.computed + tokens);
                let wait = if rows > 0 { Duration::ZERO } else { PATIENCE };
                self.blocks.reserve(blocks, wait).map(|()| (cached, tokens, blocks))
            });
            match outcome {
                Ok((cached, tokens, blocks)) => {
                    *plan = Plan { rows: std::mem::take(&mut plan.rows), tokens: plan.tokens + tokens, blocks };
                    plan.rows.push((id, tokens));
                    if let Some(cached) = seq.admitted(cached) {
                        self.counters.prefix_queried_tokens.fetch_add(u64::from(seq.len()), Relaxed);
                        self.counters.prefix_hit_tokens.fetch_add(u64::from(cached), Relaxed);
                    }
                    self.counters.waiting.fetch_sub(1, Relaxed);
                    self.running.insert(id, seq);
                }
                Err(error) => {
                    if self.blocks.tables().row_of(id).is_some() {
                        let left = self.blocks.leave(id);
                        self.report(left);
                    }
                    if matches!(error, BlocksError::Short { .. }) {
                        seq.preempted();
                        self.waiting.insert(id, seq);
                    } else {
                        self.counters.waiting.fetch_sub(1, Relaxed);
                        seq.fail(GenerateError::Compute { what: error.to_string() });
                    }
                    return 0;
                }
            }
        }
        0
    }

    /// Asks neighbours for what will be missing soon: what the next in the queue `needed`, or a block for each row. They
    /// answer within a step; who asks only when it is short has to stop a request until they do.
    fn ask_ahead(&mut self, plan: &Plan, needed: u32) {
        let rows = u32::try_from(self.running.len()).unwrap_or(u32::MAX);
        let needed = needed.max(plan.blocks.saturating_add(rows));
        if self.is_owing() || self.blocks.within_reach() >= needed {
            self.asked = None;
            return;
        }
        if self.asked.is_some_and(|(most, at)| needed <= most && at.elapsed() < ASK_AGAIN) {
            return;
        }
        self.asked = Some((needed, Instant::now()));
        if let Err(error) = self.blocks.ask(needed) {
            tracing::debug!(%error, "neighbours were not asked for memory");
        }
    }

    /// Nothing can be computed. Usually memory comes back by itself; a request that the limit in force can never hold, or
    /// that was there for too long without anything being computed, is given up. Then the next one is looked at: as long
    /// as nobody makes progress, all of them have waited.
    fn stalled(&mut self) -> Progress {
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        let oldest = self.running.values().chain(self.waiting.values()).next();
        let Some(oldest) = oldest else { return Progress::Idle };
        let (id, len, waited) = (oldest.id, oldest.len(), since.max(oldest.accepted).elapsed());
        let block_tokens = u64::from(self.blocks.tables().shape().config().block_tokens);
        let capacity = self.blocks.kv().limit_blocks();
        let needed_tokens = u64::from(len);
        let error = if self.blocks.tables().shape().blocks_for(len) > capacity {
            GenerateError::OutOfMemory { needed_tokens, capacity_tokens: u64::from(capacity) * block_tokens }
        } else if waited >= self.patience.starved {
            GenerateError::Starved { needed_tokens, waited }
        } else {
            if self.giving_way.is_due(Instant::now(), self.patience.give_way) {
                self.give_way();
            }
            return Progress::Stalled;
        };
        if self.running.contains_key(&id) {
            self.end(id, |seq| seq.fail(error));
        } else if let Some(seq) = self.waiting.remove(&id) {
            self.counters.waiting.fetch_sub(1, Relaxed);
            seq.fail(error);
        }
        Progress::Stepped
    }

    fn compute_plan(&mut self, plan: &Plan) {
        // The plan is in the order of age, the step in that of the rows.
        let planned: HashMap<SeqId, u32> = plan.rows.iter().copied().collect();
        let sequences = self.blocks.tables().sequences().iter();
        let rows: Vec<(SeqId, u32)> = sequences.map(|&id| (id, planned.get(&id).copied().unwrap_or(0))).collect();
        let query: Vec<u32> = rows.iter().map(|row| row.1).collect();
        let (mut tokens, mut wanted, mut speakers) = (Vec::new(), Vec::new(), Vec::new());
        for &(id, query) in &rows {
            let seq = &self.running[&id];
            tokens.extend_from_slice(&seq.tokens[seq.computed as usize..(seq.computed + query) as usize]);
            if query > 0 && seq.remaining() == query {
                let token = u32::try_from(tokens.len() - 1).expect("a step's tokens are counted in 32 bits");
                wanted.push(Wanted { token, logits: seq.needs_logits() });
                speakers.push(id);
            }
        }
        match self.forward(&query, &tokens, &wanted) {
            Ok(outputs) => {
                self.counters.steps.fetch_add(1, Relaxed);
                self.finish_step(&rows, &speakers, &outputs);
            }
            Err(what) => self.fail_rows(plan, &what),
        }
    }

    /// The arithmetic. A panic in it is a failure of this step like any other.
    fn forward(&mut self, query: &[u32], tokens: &[u32], wanted: &[Wanted]) -> Result<Outputs, String> {
        let compute = self.compute.as_mut().ok_or("the weights are not there")?;
        let (kv, tables) = self.blocks.kv_and_tables();
        kv.begin_step();
        let step = StepInput { query, tokens, wanted };
        let outcome = catch_unwind(AssertUnwindSafe(|| compute.forward(kv, tables, &step)));
        // Whatever became of it, nothing of it is under way any more.
        kv.end_step();
        match outcome {
            Ok(Ok(outputs)) => Ok(outputs),
            Ok(Err(error)) => Err(with_sources(&error)),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                Err(format!("the step panicked: {}", text.unwrap_or_default()))
            }
        }
    }

    fn finish_step(&mut self, rows: &[(SeqId, u32)], speakers: &[SeqId], outputs: &Outputs) {
        for &(id, query) in rows {
            let seq = self.running.get_mut(&id).expect("rows are requests that run");
            seq.computed += query;
            let published = self.blocks.publish(id, seq);
            self.report(published);
        }
        let mut logits = outputs.logits.rows();
        for (&id, &best) in speakers.iter().zip(&outputs.best) {
            let seq = self.running.get_mut(&id).expect("rows are requests that run");
            let logits = if seq.needs_logits() { logits.next() } else { None };
            let ended = seq.advance(best, logits);
            self.counters.generated_tokens.fetch_add(1, Relaxed);
            self.giving_way.forget();
            if let Some(reason) = ended {
                if reason == FinishReason::Cancelled {
                    self.counters.cancelled.fetch_add(1, Relaxed);
                }
                self.end(id, |seq| seq.finish(reason));
            }
        }
    }

    /// Everybody who was in a step that failed fails with it; who only held a row goes on, unless the device is lost to all.
    fn fail_rows(&mut self, plan: &Plan, what: &str) {
        if self.look_for_loss().is_some() {
            return;
        }
        tracing::error!(what, "a step failed, and its requests with it");
        for &(id, _) in plan.rows.iter().filter(|row| row.1 > 0) {
            self.end(id, |seq| seq.fail(GenerateError::Compute { what: what.to_owned() }));
        }
    }
}

/// An error and what caused it, as one sentence.
pub(super) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
