//! How many blocks go into a page.
//!
//! A driver charges per handle, an idle model pays per page: small pages cost time, large ones cost memory. The
//! automatic choice takes the page of 16-32 MiB with the least slack, and of equals the one nearest to 20 MiB:
//!
//! ```text
//!   32 layers, 32 KiB blocks: 2 MiB per block row -> 20 MiB = 10 rows, no slack
//!   36 layers, 32 KiB blocks: 2.25 MiB per row    -> 18 MiB =  8 rows, no slack   (20 MiB would waste 10 %)
//!   80 layers, 32 KiB blocks: 5 MiB per row       -> 20 MiB =  4 rows, no slack
//! ```
//!
//! Why 20 (`docs/decisions/0003`): a GiB then takes a tenth of the handles that 2 MiB per layer and buffer takes, and
//! one page id a sixth of the memory.

use super::GeometryError;
use crate::units::Bytes;

/// kvcached's page size, the default of the two compatible layouts: 2 MiB per layer and buffer.
pub const DEFAULT_CHUNK: Bytes = Bytes::mib(2);

/// Chunks start at multiples of this, so that every layer's view is aligned for vector loads.
pub(super) const CHUNK_ALIGN: u64 = 256;

const SLAB_PAGE_MIN: u64 = 16 << 20;
const SLAB_PAGE_MAX: u64 = 32 << 20;
const SLAB_PAGE_AIM: u64 = 20 << 20;
const SLAB_CHUNK_MAX: u64 = 2 << 20;

/// Bytes per layer and buffer in one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChunkChoice {
    /// Chosen from the model's shape.
    #[default]
    Auto,
    /// As asked for; kvcached's page size.
    Bytes(Bytes),
}

impl ChunkChoice {
    /// Reads `KVCACHED_PAGE_SIZE_MB` (or `page_size_mb` of a YAML file): n MiB per layer and per K or V, unset or
    /// empty for an automatic choice.
    ///
    /// # Errors
    /// [`GeometryError::BadPageSizeMb`] for anything but a positive whole number.
    pub fn from_page_size_mb(text: Option<&str>) -> Result<Self, GeometryError> {
        let Some(text) = text.map(str::trim).filter(|text| !text.is_empty()) else {
            return Ok(Self::Auto);
        };
        let bad = || GeometryError::BadPageSizeMb { text: text.to_owned() };
        let mib: u64 = text.parse().map_err(|_| bad())?;
        match mib.checked_mul(1 << 20) {
            Some(bytes) if bytes > 0 => Ok(Self::Bytes(Bytes(bytes))),
            _ => Err(bad()),
        }
    }
}

/// One slab page: `blocks` of every buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlabPage {
    pub(super) blocks: u64,
    pub(super) chunk_pitch: u64,
    pub(super) page_bytes: u64,
}

impl SlabPage {
    /// The page that holds `blocks` blocks of each of `buffers` buffers.
    pub(super) fn with_blocks(blocks: u64, block: u64, buffers: u64, granularity: u64) -> Result<Self, GeometryError> {
        let overflow = || GeometryError::Overflow { what: "the size of a page" };
        let chunk_pitch =
            blocks.checked_mul(block).and_then(|b| b.checked_next_multiple_of(CHUNK_ALIGN)).ok_or_else(overflow)?;
        let page_bytes = chunk_pitch
            .checked_mul(buffers)
            .and_then(|b| b.checked_next_multiple_of(granularity))
            .ok_or_else(overflow)?;
        Ok(Self { blocks, chunk_pitch, page_bytes })
    }

    /// The automatic choice.
    pub(super) fn choose(block: u64, buffers: u64, granularity: u64) -> Result<Self, GeometryError> {
        let most_blocks = (SLAB_CHUNK_MAX / block).max(1);
        let page_of = |blocks| Self::with_blocks(blocks, block, buffers, granularity);
        // One candidate per possible page size. A small model's chunks reach their bound before its page reaches
        // the window, a huge model's single block passes it: both ends are what `clamp` leaves.
        let first = SLAB_PAGE_MIN.next_multiple_of(granularity);
        let mut best: Option<Self> = None;
        for page_bytes in (first..=SLAB_PAGE_MAX.max(first)).step_by(usize::try_from(granularity).unwrap_or(usize::MAX))
        {
            let per_buffer = page_bytes / buffers / CHUNK_ALIGN * CHUNK_ALIGN;
            let candidate = page_of((per_buffer / block).clamp(1, most_blocks))?;
            if best.is_none_or(|best| candidate.is_better_than(&best, block, buffers)) {
                best = Some(candidate);
            }
        }
        best.ok_or(GeometryError::BadGranularity { granularity: Bytes(granularity) })
    }

    fn is_better_than(&self, other: &Self, block: u64, buffers: u64) -> bool {
        // used / page against other.used / other.page, without division.
        let used = |page: &Self| u128::from(page.blocks) * u128::from(block) * u128::from(buffers);
        let (mine, theirs) = (used(self) * u128::from(other.page_bytes), used(other) * u128::from(self.page_bytes));
        let distance = |page: &Self| page.page_bytes.abs_diff(SLAB_PAGE_AIM);
        mine > theirs || (mine == theirs && distance(self) < distance(other))
    }
}

/// Blocks of `stride` bytes that lie wholly inside *every* window of `span` bytes, wherever the window starts among
/// the multiples of `span`. Window `p` begins up to `stride - gcd` bytes before its first whole block.
pub(super) fn whole_blocks_per_span(span: u64, stride: u64) -> u64 {
    span.saturating_sub(stride - gcd(span, stride)) / stride
}

pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
