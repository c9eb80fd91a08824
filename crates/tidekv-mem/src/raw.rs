//! The bare calls beneath a back-end, one at a time, so that a benchmark can put our path beside them in one run.
//!
//! Deliberately dull: no page states, no metering, no rollback, the same system or driver calls in the same order as
//! [`Region`](crate::Region). Pages lie side by side in an address range of their own.

use std::fmt;

use crate::MemError;

/// Pages that are driven call by call. A page goes `create`, `map`, `set_access`, `unmap`, `release`; a call out of that
/// order answers with the system's own error or does nothing, and dropping gives everything back. Stays on the thread
/// that made it, where a back-end may have set up what its calls need.
pub trait RawPages: fmt::Debug {
    /// Takes physical memory for a page.
    ///
    /// # Errors
    /// The system's refusal.
    fn create(&mut self, page: usize) -> Result<(), MemError>;

    /// Puts it behind the page's addresses.
    ///
    /// # Errors
    /// The system's refusal.
    fn map(&mut self, page: usize) -> Result<(), MemError>;

    /// Makes the addresses usable.
    ///
    /// # Errors
    /// The system's refusal.
    fn set_access(&mut self, page: usize) -> Result<(), MemError>;

    /// Takes the memory away from the addresses.
    ///
    /// # Errors
    /// The system's refusal.
    fn unmap(&mut self, page: usize) -> Result<(), MemError>;

    /// Gives the memory back.
    ///
    /// # Errors
    /// The system's refusal.
    fn release(&mut self, page: usize) -> Result<(), MemError>;
}
