//! What a batch may be, checked once, and the sizes of all arrays that follow from it.
//!
//! ```text
//!   row 0  [ id | id | ... | id ]..pad..     stride: whole cache lines, and an odd number of them. A step touches the
//!   row 1  [ id | id | ... | id ]..pad..     same column of many rows; with a power of two they would all fall into a
//!   row 2  [ id | id | ... | id ]..pad..     few sets of the cache and throw each other out.
//! ```

/// Ids per cache line of the block table.
const LINE_IDS: u32 = 16;
/// The longest block. Longer ones would waste most of the memory that paging saves.
const MAX_BLOCK_TOKENS: u32 = 4096;
/// Cells that an array may have: the device counts them in 32 bits.
const MAX_CELLS: u64 = i32::MAX as u64;

/// How large a batch may become. Everything is allocated for it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchConfig {
    /// Tokens per block: a power of two from 1 to 4,096.
    pub block_tokens: u32,
    /// Sequences in the batch at most.
    pub max_rows: u32,
    /// Tokens that one sequence may hold.
    pub max_row_tokens: u32,
    /// Query tokens in one step at most; every row must be able to decode.
    pub max_step_tokens: u32,
    /// Block ids that may be lent at the same time.
    pub max_ids: u32,
}

/// A batch cannot be like this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Slots are computed with shifts.
    #[error("blocks of {block_tokens} tokens: the number must be a power of two from 1 to {MAX_BLOCK_TOKENS}")]
    BlockTokens {
        /// What was asked for.
        block_tokens: u32,
    },
    /// A batch without rows, tokens or ids can do nothing.
    #[error("{what} is {value}: it must be from 1 to {most}")]
    OutOfRange {
        /// The field of [`BatchConfig`].
        what: &'static str,
        /// What was asked for.
        value: u32,
        /// The largest value.
        most: u32,
    },
    /// A full batch could never decode.
    #[error(
        "a step of {max_step_tokens} tokens cannot decode {max_rows} rows: raise max_step_tokens or lower max_rows"
    )]
    StepTooSmall {
        /// Query tokens per step.
        max_step_tokens: u32,
        /// Rows of the batch.
        max_rows: u32,
    },
    /// The block table would not be addressable.
    #[error(
        "a table of {max_rows} rows of {stride} ids has more than 2^31 - 1 cells: lower max_rows or max_row_tokens"
    )]
    TableTooLarge {
        /// Rows of the batch.
        max_rows: u32,
        /// Ids per row, with padding.
        stride: u64,
    },
    /// The system did not give the memory.
    #[error("{bytes} bytes for {what} cannot be had: lower the configured sizes or free memory")]
    OutOfMemory {
        /// What they are for.
        what: &'static str,
        /// How many.
        bytes: u64,
    },
}

/// A checked [`BatchConfig`] and what follows from it. A replica on a device has the same shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    config: BatchConfig,
    block_shift: u32,
    stride: u32,
    ring_cells: u32,
}

impl BatchShape {
    /// Checks `config`.
    pub fn new(config: BatchConfig) -> Result<Self, ConfigError> {
        let BatchConfig { block_tokens, max_rows, max_row_tokens, max_step_tokens, max_ids } = config;
        if !block_tokens.is_power_of_two() || block_tokens > MAX_BLOCK_TOKENS {
            return Err(ConfigError::BlockTokens { block_tokens });
        }
        let in_range = |what, value, most| match value {
            0 => Err(ConfigError::OutOfRange { what, value, most }),
            _ if value > most => Err(ConfigError::OutOfRange { what, value, most }),
            _ => Ok(()),
        };
        // Lengths, prefix sums and cells are i32 for the kernels; the ring is rounded up to a power of two.
        in_range("max_rows", max_rows, 1 << 20)?;
        in_range("max_row_tokens", max_row_tokens, 1 << 30)?;
        in_range("max_step_tokens", max_step_tokens, 1 << 30)?;
        in_range("max_ids", max_ids, 1 << 30)?;
        if max_step_tokens < max_rows {
            return Err(ConfigError::StepTooSmall { max_step_tokens, max_rows });
        }
        let lines = max_row_tokens.div_ceil(block_tokens).div_ceil(LINE_IDS) | 1;
        let stride = u64::from(lines) * u64::from(LINE_IDS);
        if stride * u64::from(max_rows) > MAX_CELLS {
            return Err(ConfigError::TableTooLarge { max_rows, stride });
        }
        Ok(Self {
            config,
            block_shift: block_tokens.trailing_zeros(),
            stride: lines * LINE_IDS,
            ring_cells: max_ids.next_power_of_two(),
        })
    }

    /// What it was made from.
    pub const fn config(&self) -> &BatchConfig {
        &self.config
    }

    /// `block_tokens` as a shift.
    pub const fn block_shift(&self) -> u32 {
        self.block_shift
    }

    /// Ids from one row of the block table to the next.
    pub const fn stride(&self) -> u32 {
        self.stride
    }

    /// Cells of the block table.
    pub const fn table_cells(&self) -> u32 {
        self.stride * self.config.max_rows
    }

    /// Cells of the lease ring: a power of two, so that a position's cell is a mask away.
    pub const fn ring_cells(&self) -> u32 {
        self.ring_cells
    }

    /// Blocks that hold `tokens` tokens.
    pub const fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.config.block_tokens)
    }
}

/// A zeroed array that is touched now, so that no step meets a page fault, or an error instead of an abort.
pub(crate) fn allocate<T: Copy>(what: &'static str, count: u32, zero: T) -> Result<Vec<T>, ConfigError> {
    let mut cells = Vec::new();
    let bytes = u64::from(count) * size_of::<T>() as u64;
    cells.try_reserve_exact(count as usize).map_err(|_| ConfigError::OutOfMemory { what, bytes })?;
    cells.resize(count as usize, zero);
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: BatchConfig =
        BatchConfig { block_tokens: 16, max_rows: 256, max_row_tokens: 4096, max_step_tokens: 8192, max_ids: 1000 };

    #[test]
    fn sizes_follow_from_the_configuration() {
        let shape = BatchShape::new(GOOD).unwrap();
        assert_eq!((shape.block_shift(), shape.ring_cells(), shape.stride()), (4, 1024, 272));
        assert_eq!([0, 1, 16, 17].map(|tokens| shape.blocks_for(tokens)), [0, 1, 1, 2]);
    }

    #[test]
    fn rows_never_alias_in_the_cache() {
        for max_row_tokens in [1, 16, 1 << 10, 1 << 14, 1 << 15, 1 << 17, 100_000] {
            for block_tokens in [1, 16, 64, 4096] {
                let shape = BatchShape::new(BatchConfig { block_tokens, max_row_tokens, ..GOOD }).unwrap();
                assert!(shape.stride() >= shape.blocks_for(max_row_tokens));
                assert_eq!(shape.stride() % LINE_IDS, 0);
                assert_eq!(shape.stride() / LINE_IDS % 2, 1, "rows go round over all sets of the cache");
            }
        }
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        for block_tokens in [0, 3, 24, 8192] {
            let refused = BatchShape::new(BatchConfig { block_tokens, ..GOOD });
            assert_eq!(refused, Err(ConfigError::BlockTokens { block_tokens }));
        }
        for (what, config) in [
            ("max_rows", BatchConfig { max_rows: 0, ..GOOD }),
            ("max_row_tokens", BatchConfig { max_row_tokens: u32::MAX, ..GOOD }),
            ("max_step_tokens", BatchConfig { max_step_tokens: 0, ..GOOD }),
            ("max_ids", BatchConfig { max_ids: 0, ..GOOD }),
        ] {
            let error = BatchShape::new(config).unwrap_err();
            assert!(matches!(error, ConfigError::OutOfRange { what: named, .. } if named == what), "{error}");
        }
        let narrow = BatchShape::new(BatchConfig { max_step_tokens: 255, ..GOOD });
        assert_eq!(narrow, Err(ConfigError::StepTooSmall { max_step_tokens: 255, max_rows: 256 }));
        let huge = BatchConfig { max_rows: 4096, max_step_tokens: 8192, max_row_tokens: 1 << 25, ..GOOD };
        assert!(matches!(BatchShape::new(huge), Err(ConfigError::TableTooLarge { .. })));
    }
}
