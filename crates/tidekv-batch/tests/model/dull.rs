//! The model: what the tables should say, with no regard for speed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use tidekv_batch::{BatchConfig, Metadata, Padding, SeqId};

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) seq: SeqId,
    pub(crate) tokens: u32,
    pub(crate) ids: Vec<u32>,
    pub(crate) shared: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Dull {
    config: BatchConfig,
    pub(crate) free: VecDeque<u32>,
    pub(crate) rows: Vec<Row>,
}

impl Dull {
    pub(crate) fn new(config: BatchConfig) -> Self {
        Self { config, free: VecDeque::new(), rows: Vec::new() }
    }

    fn blocks(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.config.block_tokens) as usize
    }

    /// Each shared block once, with the number of rows that begin with it.
    pub(crate) fn shared_ids(&self) -> BTreeMap<u32, u32> {
        let mut sharers = BTreeMap::new();
        for id in self.rows.iter().flat_map(|row| &row.ids[..row.shared]) {
            *sharers.entry(*id).or_default() += 1;
        }
        sharers
    }

    fn own_ids(&self) -> BTreeSet<u32> {
        self.free.iter().chain(self.rows.iter().flat_map(|row| &row.ids[row.shared..])).copied().collect()
    }

    fn position(&self, seq: SeqId) -> Option<usize> {
        self.rows.iter().position(|row| row.seq == seq)
    }

    pub(crate) fn lend(&mut self, ids: Range<u32>) -> bool {
        let (own, shared) = (self.own_ids(), self.shared_ids());
        let fits = own.len() + ids.len() <= self.config.max_ids as usize;
        let new = ids.clone().all(|id| !own.contains(&id) && !shared.contains_key(&id));
        if fits && new {
            self.free.extend(ids);
        }
        fits && new
    }

    pub(crate) fn withdraw(&mut self, ids: Vec<u32>) -> bool {
        let distinct: BTreeSet<u32> = ids.iter().copied().collect();
        let done = distinct.len() == ids.len() && ids.iter().all(|id| self.free.contains(id));
        if done {
            self.free.retain(|id| !distinct.contains(id));
        }
        done
    }

    pub(crate) fn take_back(&mut self, count: u32) -> VecDeque<u32> {
        self.free.split_off(self.free.len().saturating_sub(count as usize))
    }

    /// The shared start of some row, or less of it.
    pub(crate) fn shared_start(&self, row: usize, blocks: u32) -> Vec<u32> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let row = &self.rows[row % self.rows.len()];
        row.ids[..row.shared.min(blocks as usize)].to_vec()
    }

    pub(crate) fn admit(&mut self, seq: SeqId, tokens: u32, prefix: &[u32]) -> Option<u32> {
        let blocks = self.blocks(tokens);
        let own = if prefix.is_empty() { BTreeSet::new() } else { self.own_ids() };
        let possible = self.position(seq).is_none()
            && self.rows.len() < self.config.max_rows as usize
            && tokens <= self.config.max_row_tokens
            && prefix.len() <= (tokens / self.config.block_tokens) as usize
            && prefix.iter().all(|id| !own.contains(id))
            && blocks - prefix.len() <= self.free.len();
        possible.then(|| {
            let popped = self.free.drain(..blocks - prefix.len());
            let ids = prefix.iter().copied().chain(popped).collect();
            self.rows.push(Row { seq, tokens, ids, shared: prefix.len() });
            self.rows.len() as u32 - 1
        })
    }

    /// Tokens that nobody holds any more, and what the caller is handed.
    pub(crate) fn leave(&mut self, seq: SeqId, to_ring: bool) -> Option<(u32, Vec<u32>)> {
        let row = self.rows.swap_remove(self.position(seq)?);
        let left = self.shared_ids();
        let (shared, own) = row.ids.split_at(row.shared);
        let mut out: Vec<u32> = shared.iter().copied().filter(|id| !left.contains_key(id)).collect();
        let kept = (shared.len() - out.len()) as u32 * self.config.block_tokens;
        if to_ring {
            self.free.extend(own);
        } else {
            out.extend(own);
        }
        Some((row.tokens - kept, out))
    }

    pub(crate) fn swap(&mut self, a: SeqId, b: SeqId) -> bool {
        let places = self.position(a).zip(self.position(b));
        if let Some((a, b)) = places {
            self.rows.swap(a, b);
        }
        places.is_some()
    }

    pub(crate) fn truncate(&mut self, seq: SeqId, tokens: u32) -> bool {
        let Some(position) = self.position(seq) else { return false };
        let (blocks, row) = (self.blocks(tokens), &mut self.rows[position]);
        let possible = tokens <= row.tokens && tokens >= row.shared as u32 * self.config.block_tokens;
        if possible {
            row.tokens = tokens;
            self.free.extend(row.ids.split_off(blocks));
        }
        possible
    }

    pub(crate) fn share(&mut self, seq: SeqId, blocks: u32) -> Option<Vec<u32>> {
        let position = self.position(seq)?;
        let row = &mut self.rows[position];
        (blocks * self.config.block_tokens <= row.tokens).then(|| {
            row.shared = row.shared.max(blocks as usize);
            row.ids[..blocks as usize].to_vec()
        })
    }

    /// The arrays of a step and the blocks it took, or what was short: `None` if something else forbids it.
    pub(crate) fn step(&mut self, queries: &[u32], padding: Padding) -> Result<(Metadata, u32), Option<(u32, usize)>> {
        let config = self.config;
        let too_long = self.rows.iter().zip(queries).any(|(row, query)| row.tokens + query > config.max_row_tokens);
        let tokens: u32 = queries.iter().sum();
        if too_long || tokens > config.max_step_tokens {
            return Err(None);
        }
        let grown = self.rows.iter().zip(queries).map(|(row, query)| self.blocks(row.tokens + query) - row.ids.len());
        let needed: usize = grown.sum();
        if needed > self.free.len() {
            return Err(Some((needed as u32, self.free.len())));
        }
        let mut step = Metadata { query_start_loc: vec![0], seq_start_loc: vec![0], ..Metadata::default() };
        let (mut query_total, mut seq_total) = (0, 0);
        for (row, &query) in self.rows.iter_mut().zip(queries) {
            let context = row.tokens;
            for position in context..context + query {
                if position.is_multiple_of(config.block_tokens) {
                    row.ids.push(self.free.pop_front().unwrap());
                }
                let id = row.ids[(position / config.block_tokens) as usize];
                step.slot_mapping
                    .push(i64::from(id) * i64::from(config.block_tokens) + i64::from(position % config.block_tokens));
            }
            row.tokens += query;
            query_total += query as i32;
            seq_total += row.tokens as i32;
            step.context_lens.push(context as i32);
            step.seq_lens.push(row.tokens as i32);
            step.query_start_loc.push(query_total);
            step.seq_start_loc.push(seq_total);
        }
        step.batch = self.rows.len() as u32;
        step.tokens = tokens;
        step.max_query_len = queries.iter().copied().max().unwrap_or(0);
        step.max_seq_len = self.rows.iter().map(|row| row.tokens).max().unwrap_or(0);
        step.num_prefills = queries.iter().filter(|&&query| query > 1).count() as u32;
        step.num_prefill_tokens = queries.iter().filter(|&&query| query > 1).sum();
        step.num_decode_tokens = queries.iter().filter(|&&query| query == 1).sum();
        while step.seq_lens.len() < padding.rows as usize {
            step.seq_lens.push(0);
            step.context_lens.push(0);
            step.query_start_loc.push(query_total);
            step.seq_start_loc.push(seq_total);
        }
        while step.slot_mapping.len() < padding.tokens as usize {
            step.slot_mapping.push(-1);
        }
        Ok((step, needed as u32))
    }
}
