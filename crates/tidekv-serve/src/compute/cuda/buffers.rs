//! What a step needs besides weights and pages, for the largest step there can be: made once, at addresses that captured graphs keep.
//!
//! ```text
//!   pinned   tokens ── read by the embedding ──────────────────> the device reads it over the bus, once a step
//!            best   <─ written by the choice of the next tokens
//!            token_rows, tiles, wanted ── one copy ──> device    read by every layer; not needed by decode steps
//!   device   state (floats) | normed | qkv | attended | gate_up | gated | logits (floats) | parts | partial (floats)
//! ```

use tidekv_batch::cuda::gpu::{Gpu, Stream};
use tidekv_core::units::Bytes;
use tidekv_mem::MemError;
use tidekv_mem::cuda::{DeviceMemory, PinnedMemory};

use super::kernels::BEST_PARTS;
use super::weights::Places;
use crate::compute::ComputeError;
use crate::config::Precision;
use crate::model::ModelShape;

/// The largest step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows.
    pub max_rows: u32,
    /// Query tokens.
    pub max_step_tokens: u32,
}

impl StepLimits {
    /// Tokens and rows are the second dimension of some launches, and CUDA has so many blocks there.
    const MOST: u32 = 65_535;

    /// Refuses steps that no launch could have, before anybody waits for one.
    pub(super) fn check(self) -> Result<(), ComputeError> {
        let tokens = self.max_rows.max(self.max_step_tokens);
        if tokens > Self::MOST { Err(ComputeError::StepTooLarge { tokens, most: Self::MOST }) } else { Ok(()) }
    }
}

/// Addresses on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) state: u64,
    pub(super) normed: u64,
    pub(super) qkv: u64,
    pub(super) attended: u64,
    pub(super) gate_up: u64,
    pub(super) gated: u64,
    pub(super) logits: u64,
    pub(super) partial: u64,
    pub(super) tokens: u64,
    pub(super) best: u64,
    pub(super) token_rows: u64,
    pub(super) tiles: u64,
    pub(super) wanted: u64,
    pub(super) parts: u64,
}

#[derive(Debug)]
pub(super) struct Buffers {
    pub(super) at: At,
    pub(super) limits: StepLimits,
    vocab: usize,
    logits_offset: u64,
    memory: DeviceMemory,
    pinned: PinnedMemory,
}

impl Buffers {
    pub(super) fn new(
        gpu: &Gpu,
        shape: &ModelShape,
        precision: Precision,
        limits: StepLimits,
        partial: Bytes,
    ) -> Result<Self, MemError> {
        let (tokens, rows) = (u64::from(limits.max_step_tokens), u64::from(limits.max_rows));
        let element = u64::from(precision.bytes());
        let (hidden, query, kv) = (shape.hidden as u64, shape.query_size() as u64, shape.kv_size() as u64);
        let mut places = Places::default();
        let offsets = [
            tokens * hidden * 4,
            tokens.max(rows) * hidden * element,
            tokens * (query + 2 * kv) * element,
            tokens * query * element,
            tokens * 2 * shape.intermediate as u64 * element,
            tokens * shape.intermediate as u64 * element,
            rows * shape.vocab as u64 * 4,
            partial.0,
            tokens * 4,
            tokens * 2 * 4,
            tokens * 4,
            rows * u64::from(BEST_PARTS) * 8,
        ]
        .map(|bytes| places.take(bytes));
        let memory = DeviceMemory::zeroed(&gpu.device, places.bytes())?;
        // Tokens, choices, then what is copied: rows of tokens, tiles, wanted tokens.
        let words = usize::try_from(tokens * 6).expect("64 bits");
        let pinned = PinnedMemory::zeroed(&gpu.device, words * size_of::<u32>())?;
        let [state, normed, qkv, attended, gate_up, gated, logits, partial, token_rows, tiles, wanted, parts] =
            offsets.map(|offset| memory.address() + offset);
        let at = At {
            state,
            normed,
            qkv,
            attended,
            gate_up,
            gated,
            logits,
            partial,
            tokens: pinned.address(),
            best: pinned.address() + tokens * 4,
            token_rows,
            tiles,
            wanted,
            parts,
        };
        Ok(Self { at, limits, vocab: shape.vocab, logits_offset: offsets[6], memory, pinned })
    }

    /// What it takes of the card.
    pub(super) fn bytes(&self) -> Bytes {
        self.memory.bytes()
    }

    /// The pinned words from `first` on, counted in steps of the most tokens.
    fn words(&mut self, first: usize, count: usize) -> &mut [u32] {
        let tokens = self.limits.max_step_tokens as usize;
        assert!(first * tokens + count <= self.pinned.len() / size_of::<u32>(), "within the pinned memory");
        // SAFETY: inside the allocation, as just seen, which is aligned to a page.
        let at = unsafe { self.pinned.as_ptr().cast::<u32>().add(first * tokens) };
        // SAFETY: words of the allocation, initialised (zeroed) and borrowed with `self`; the device is done with them, because
        // every step is waited for.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), count) }
    }

    /// The step's tokens, and behind them enough of token 0 for `padded`.
    pub(super) fn set_tokens(&mut self, tokens: &[u32], padded: u32) {
        let words = self.words(0, padded as usize);
        words[..tokens.len()].copy_from_slice(tokens);
        words[tokens.len()..].fill(0);
    }

    /// The ids that the device chose, once the step is over.
    pub(super) fn best(&mut self, count: usize) -> &[u32] {
        self.words(1, count)
    }

    /// Sends an array of words to one of the places at most twice as long as the tokens. The context is current.
    fn send(&mut self, first: usize, words: &[u32], to: u64, stream: &Stream) -> Result<(), MemError> {
        if words.is_empty() {
            return Ok(());
        }
        let staged = self.words(first, words.len());
        staged.copy_from_slice(words);
        let from = staged.as_ptr().cast();
        // SAFETY: both sides have room for the words and stay; the pinned side is not written before the step is over.
        unsafe { stream.copy_in(to, from, size_of_val(words)) }
    }

    /// Rows of tokens and tiles of a step that is not a decode step. The context is current.
    pub(super) fn send_rows(&mut self, token_rows: &[u32], tiles: &[u32], stream: &Stream) -> Result<(), MemError> {
        self.send(2, token_rows, self.at.token_rows, stream)?;
        self.send(3, tiles, self.at.tiles, stream)
    }

    /// The tokens whose logits are wanted. The context is current.
    pub(super) fn send_wanted(&mut self, wanted: &[u32], stream: &Stream) -> Result<(), MemError> {
        self.send(5, wanted, self.at.wanted, stream)
    }

    /// Appends a row of logits to `out`. The step is over.
    pub(super) fn logits(&self, row: usize, out: &mut Vec<f32>) -> Result<(), MemError> {
        let from = out.len();
        out.resize(from + self.vocab, 0.0);
        let floats = &mut out[from..];
        // SAFETY: floats have no invalid bits, and these are borrowed exclusively.
        let bytes = unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<u8>(), size_of_val(floats)) };
        let offset = self.logits_offset + (row * self.vocab * size_of::<f32>()) as u64;
        // SAFETY: the step that wrote them was waited for.
        unsafe { self.memory.read_at(offset, bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_no_launch_could_have_are_refused_in_one_sentence() {
        let check = |max_rows, max_step_tokens| StepLimits { max_rows, max_step_tokens }.check();
        assert!(check(256, 65_535).is_ok());
        for error in [check(256, 65_536), check(70_000, 2048)] {
            let sentence = error.unwrap_err().to_string();
            assert!(sentence.contains("--max-num-batched-tokens") && sentence.contains("65535"), "{sentence}");
        }
    }
}
