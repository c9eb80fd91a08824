//! What an arena is told when it is made, and what a process is told when it attaches.

use tidekv_core::units::Bytes;

/// How an arena is made. [`Default`] suits KV blocks of 4 KiB to a few MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// What sizes are counted in: a power of two from 4 KiB to 1 MiB. Blocks are multiples of it.
    pub grain: Bytes,
    /// By how much it grows: a power of two, 64 to 1,048,576 grains. No block is larger.
    pub segment: Bytes,
    /// What it never grows beyond, rounded up to whole segments; at most 16,384 of them.
    pub limit: Bytes,
    /// What it has from the start, rounded up to whole segments and to at least one.
    pub initial: Bytes,
    /// What its pages should be.
    pub huge_pages: HugePages,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self {
            grain: Bytes::kib(4),
            segment: Bytes::mib(64),
            limit: Bytes::gib(64),
            initial: Bytes::mib(64),
            huge_pages: HugePages::Off,
        }
    }
}

/// What pages an arena should have. What it got, [`Arena::pages`](super::Arena::pages) says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HugePages {
    /// Those of the file system.
    #[default]
    Off,
    /// Ask for transparent huge pages.
    Thp,
    /// Those of hugetlbfs, if the folder is on one; otherwise as `Thp`.
    Hugetlb,
}

/// What pages an attachment has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pages {
    /// Ordinary ones.
    Small,
    /// The kernel was asked for transparent huge pages and is set up to give them where it can.
    ThpAdvised,
    /// Those of hugetlbfs.
    Hugetlb,
}

/// Who makes the first touch of a page, which costs 0.15 to 2 us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prefault {
    /// Whoever uses it first.
    #[default]
    Off,
    /// A thread of this attachment, in chunks, also after the arena has grown.
    Background,
    /// `create` and `attach` before they return; what is added later, a thread.
    Now,
}
