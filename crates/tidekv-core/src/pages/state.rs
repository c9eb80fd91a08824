//! The six states of a page and the one function that leads from one to the next.

use std::fmt;

/// What a page is, at one moment.
///
/// | from      | event       | to        | caused by                                              |
/// |-----------|-------------|-----------|--------------------------------------------------------|
/// | Reserved  | Claimed     | Mapping   | allocator or refill                                    |
/// | Mapping   | Mapped      | Idle      | the driver mapped it                                   |
/// | Mapping   | Refused     | Reserved  | the driver refused, or the plan was given up           |
/// | Idle      | Leased      | InUse     | allocator                                              |
/// | InUse     | Returned    | Idle      | its last block was freed; the page keeps its fences    |
/// | Idle      | Retired     | Draining  | decay, lowered limit, balloon, trim                    |
/// | Draining  | FencePassed | Unmapping | every step that may read it is over                    |
/// | Unmapping | Unmapped    | Reserved  | the driver took its memory back                        |
///
/// An unmap that fails changes nothing: the page stays Unmapping until a retry succeeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageState {
    /// Address space without memory. The only state in which nobody holds the page.
    #[default]
    Reserved,
    /// Someone holds its claim and asks the driver for memory.
    Mapping,
    /// Has memory and no block in use: the pool's cache.
    Idle,
    /// At least one of its blocks is taken.
    InUse,
    /// Leaving: waits for the device to be done with it.
    Draining,
    /// Someone holds its claim and gives the memory back to the driver.
    Unmapping,
}

/// What can happen to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageEvent {
    /// Chosen to be mapped.
    Claimed,
    /// The driver put memory behind it.
    Mapped,
    /// The driver refused, or nobody wants the page any more.
    Refused,
    /// Its first block was taken.
    Leased,
    /// Its last block came back.
    Returned,
    /// Chosen to be unmapped.
    Retired,
    /// The device is done with everything that may touch it.
    FencePassed,
    /// The driver took its memory back.
    Unmapped,
}

impl PageState {
    /// Every state, in the order of a page's life.
    pub const ALL: [Self; 6] =
        [Self::Reserved, Self::Mapping, Self::Idle, Self::InUse, Self::Draining, Self::Unmapping];

    /// The state after `event`: the table above, row by row.
    ///
    /// # Errors
    ///
    /// [`IllegalTransition`] for every pair that is not a row of the table.
    pub const fn next(self, event: PageEvent) -> Result<Self, IllegalTransition> {
        match (self, event) {
            (Self::Reserved, PageEvent::Claimed) => Ok(Self::Mapping),
            (Self::Mapping, PageEvent::Mapped) => Ok(Self::Idle),
            (Self::Mapping, PageEvent::Refused) => Ok(Self::Reserved),
            (Self::Idle, PageEvent::Leased) => Ok(Self::InUse),
            (Self::InUse, PageEvent::Returned) => Ok(Self::Idle),
            (Self::Idle, PageEvent::Retired) => Ok(Self::Draining),
            (Self::Draining, PageEvent::FencePassed) => Ok(Self::Unmapping),
            (Self::Unmapping, PageEvent::Unmapped) => Ok(Self::Reserved),
            (from, event) => Err(IllegalTransition { from, event }),
        }
    }
}

impl fmt::Display for PageState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reserved => "reserved",
            Self::Mapping => "mapping",
            Self::Idle => "idle",
            Self::InUse => "in use",
            Self::Draining => "draining",
            Self::Unmapping => "unmapping",
        })
    }
}

/// An event that cannot happen in a state. The page is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a page that is {from} cannot be {event:?}: the caller's view of the page is out of date")]
pub struct IllegalTransition {
    /// The state the page is in, and stays in.
    pub from: PageState,
    /// What was said to have happened.
    pub event: PageEvent,
}

#[cfg(test)]
mod tests {
    use super::PageEvent::{Claimed, FencePassed, Leased, Mapped, Refused, Retired, Returned, Unmapped};
    use super::PageState::{Draining, Idle, InUse, Mapping, Reserved, Unmapping};
    use super::*;

    const EVENTS: [PageEvent; 8] = [Claimed, Mapped, Refused, Leased, Returned, Retired, FencePassed, Unmapped];
    const TABLE: [(PageState, PageEvent, PageState); 8] = [
        (Reserved, Claimed, Mapping),
        (Mapping, Mapped, Idle),
        (Mapping, Refused, Reserved),
        (Idle, Leased, InUse),
        (InUse, Returned, Idle),
        (Idle, Retired, Draining),
        (Draining, FencePassed, Unmapping),
        (Unmapping, Unmapped, Reserved),
    ];

    #[test]
    fn the_table_and_nothing_but_the_table() {
        for from in PageState::ALL {
            for event in EVENTS {
                let row = TABLE.iter().find(|row| (row.0, row.1) == (from, event));
                assert_eq!(from.next(event), row.map(|row| row.2).ok_or(IllegalTransition { from, event }));
            }
        }
    }

    #[test]
    fn memory_is_freed_by_way_of_the_fence_alone() {
        let into_reserved: Vec<_> = TABLE.iter().filter(|row| row.2 == Reserved).map(|row| row.0).collect();
        assert_eq!(into_reserved, [Mapping, Unmapping]);
        let into_unmapping: Vec<_> = TABLE.iter().filter(|row| row.2 == Unmapping).map(|row| row.0).collect();
        assert_eq!(into_unmapping, [Draining]);
    }
}
