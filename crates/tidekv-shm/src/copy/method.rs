//! Ways to copy bytes, each of them whole: any length, any alignment, never a byte outside.
//!
//! | method | stores | good for |
//! | --- | --- | --- |
//! | `Plain` | the C library's `memcpy` | data that the processor reads next |
//! | `Movsb` | `rep movsb`, microcode | the same; on some processors a little faster |
//! | `NonTemporal` | past the caches, 64, 32 or 16 bytes wide | blocks that nobody here reads soon |
//!
//! A plain store first reads the line that it is about to overwrite; a non-temporal one does not. So a copy of cold
//! memory moves two thirds of the bytes, and the caches keep what they held. The price is paid by whoever reads the
//! destination next: it is not in a cache.
//!
//! On processors other than x86-64, and under Miri, there is `Plain` alone. (Arm's `STNP` is a hint that its
//! implementations are free to ignore; the ones we know of copy as fast without it.)

use super::overlap::{self, CopyError};

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::x86 as wide;

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Method {
    /// `memcpy`.
    Plain,
    /// `rep movsb`.
    Movsb,
    /// Stores that pass the caches by, with the widest registers that this processor has.
    NonTemporal,
}

impl Method {
    /// All of them, `Plain` first.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Movsb, Self::NonTemporal];

    /// The methods of this processor.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|method| method.is_available())
    }

    /// Whether this processor has it.
    pub const fn is_available(self) -> bool {
        match self {
            Self::Plain => true,
            Self::Movsb | Self::NonTemporal => cfg!(all(target_arch = "x86_64", not(miri))),
        }
    }

    /// Its name in profiles and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "memcpy",
            Self::Movsb => "movsb",
            Self::NonTemporal => "nt",
        }
    }

    /// The method of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }

    /// Copies `source` over `destination`, which has the same length. A method that this processor lacks copies
    /// plainly.
    pub fn copy(self, destination: &mut [u8], source: &[u8]) -> Result<(), CopyError> {
        overlap::check_lengths(destination.len(), source.len())?;
        // SAFETY: two references of this length, one of them exclusive, so that they cannot overlap.
        unsafe { self.copy_unchecked(destination.as_mut_ptr(), source.as_ptr(), source.len()) };
        Ok(())
    }

    /// Copies `len` bytes.
    ///
    /// # Safety
    ///
    /// `source` is valid for reads of `len` bytes and `destination` for writes of as many, the two do not overlap, and
    /// nobody writes to the one or touches the other for the time of the call.
    pub(crate) unsafe fn copy_unchecked(self, destination: *mut u8, source: *const u8, len: usize) {
        match self {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller's promise, word for word.
            Self::NonTemporal => unsafe { wide::copy_non_temporal(destination, source, len) },
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the same.
            Self::Movsb => unsafe { wide::copy_movsb(destination, source, len) },
            // SAFETY: the same.
            _ => unsafe { std::ptr::copy_nonoverlapping(source, destination, len) },
        }
    }
}

/// How wide the non-temporal stores of this processor are, in bytes; `None` where there are none.
pub fn non_temporal_width() -> Option<usize> {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    return Some(wide::width().bytes());
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    return None;
}
