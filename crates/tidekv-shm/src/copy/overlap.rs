//! What is refused before a byte is copied.

/// Why nothing was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// A block goes into a block of its own size.
    #[error("the destination has {destination} bytes and the source {source_bytes}: they must have as many")]
    LengthsDiffer {
        /// Bytes of the destination.
        destination: usize,
        /// Bytes of the source.
        source_bytes: usize,
    },
    /// A byte is in both. Which value it ends with would depend on the method.
    #[error("source and destination overlap within {len} bytes: copy by way of a third block")]
    Overlap {
        /// Bytes that were to be copied.
        len: usize,
    },
    /// The range goes past the end of the address space, so no memory can be there.
    #[error("{len} bytes from {address:#x} go past the end of the address space")]
    NoSuchRange {
        /// Where it starts.
        address: usize,
        /// Its length.
        len: usize,
    },
}

pub(super) const fn check_lengths(destination: usize, source_bytes: usize) -> Result<(), CopyError> {
    if destination == source_bytes { Ok(()) } else { Err(CopyError::LengthsDiffer { destination, source_bytes }) }
}

/// Whether `len` bytes at the two addresses are ranges, and have none in common.
pub(super) const fn check_ranges(destination: usize, source: usize, len: usize) -> Result<(), CopyError> {
    let Some(destination_end) = destination.checked_add(len) else {
        return Err(CopyError::NoSuchRange { address: destination, len });
    };
    let Some(source_end) = source.checked_add(len) else {
        return Err(CopyError::NoSuchRange { address: source, len });
    };
    if len > 0 && destination < source_end && source < destination_end {
        return Err(CopyError::Overlap { len });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_do_not_overlap() {
        assert_eq!(check_ranges(100, 200, 100), Ok(()));
        assert_eq!(check_ranges(200, 100, 100), Ok(()));
        assert_eq!(check_ranges(100, 199, 100), Err(CopyError::Overlap { len: 100 }));
        assert_eq!(check_ranges(100, 100, 0), Ok(()));
        assert_eq!(
            check_ranges(usize::MAX - 9, 0, 10),
            Err(CopyError::NoSuchRange { address: usize::MAX - 9, len: 10 })
        );
    }

    proptest! {
        /// By the definition: a byte that is in both.
        #[test]
        fn an_overlap_is_a_common_byte(destination in 0..200usize, source in 0..200usize, len in 0..100usize) {
            let common = (destination..destination + len).any(|byte| (source..source + len).contains(&byte));
            prop_assert_eq!(check_ranges(destination, source, len).is_err(), common);
        }
    }
}
