//! The head of an arena's file, and which bytes of it are locks. `docs/formats/arena.md` is this in words.
//!
//! | offset | type | word |
//! | --- | --- | --- |
//! | 0 | 8 bytes | magic `TIDEARNA`, written last |
//! | 8 | u32 | version |
//! | 12 | u32 | bytes of the head, 4096 |
//! | 16 | 16 bytes | identity: random, chosen anew for every arena that is made |
//! | 32 | u32 | uid |
//! | 36 | u32 | log2 of the grain |
//! | 40 | u32 | log2 of the segment |
//! | 44 | u32 | segments at most |
//! | 48 | u32 | members at most |
//! | 52 | u32 | caches at most |
//! | 56 | u32 | huge pages asked for: 0 off, 1 thp, 2 hugetlb |
//! | 60 | u32 | 0 |
//! | 64 | u64 | when it was made, ms of `CLOCK_MONOTONIC` |
//! | 72 | u64 | checksum of bytes 8 to 71 |
//! | 128 | u64 | segments that exist; only grows |
//! | 192 | u64 | how often a span was left without owner |
//! | 256 | u64 | handle of the exchange's directory, or 0 |
//!
//! The words before 128 never change. They are read once, by `pread`, checked, and never looked at again.

use super::config::HugePages;
use super::geometry::{CACHES, Geometry, MEMBERS};

pub(super) const MAGIC: [u8; 8] = *b"TIDEARNA";
/// The format that this code reads and writes.
pub const VERSION: u32 = 1;
/// What is read and checked before anything is mapped.
pub(super) const HEAD_BYTES: usize = 4096;
pub(super) const CHECKED: usize = 80;
pub(super) const SEGMENTS_AT: usize = 128;
pub(super) const ORPHANS_AT: usize = 192;
pub(super) const EXCHANGE_AT: usize = 256;

/// The first of the members' locks. Locks need no bytes in the file, so they lie far beyond its end.
pub(super) const MEMBER_LOCK: u64 = 1 << 62;
/// Held by whoever adds a segment.
pub(super) const GROW_LOCK: u64 = MEMBER_LOCK + 1024;
/// Held by whoever makes the file, while it has its temporary name.
pub(super) const MAKE_LOCK: u64 = MEMBER_LOCK + 1025;

/// Which arena it is: another one of the same name has another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ArenaId(pub(super) [u8; 16]);

impl std::fmt::Display for ArenaId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl std::fmt::Debug for ArenaId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ArenaId({self})")
    }
}

/// What the head says, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) id: ArenaId,
    pub(super) uid: u32,
    pub(super) geometry: Geometry,
    pub(super) huge_pages: HugePages,
    pub(super) made_ms: u64,
}

/// Why a head is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeadError {
    HalfBuilt,
    NotAnArena,
    Version(u32),
    Damaged(&'static str),
}

impl Head {
    pub(super) fn encode(&self) -> [u8; CHECKED] {
        let mut bytes = [0; CHECKED];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[16..32].copy_from_slice(&self.id.0);
        let huge_pages = match self.huge_pages {
            HugePages::Off => 0,
            HugePages::Thp => 1,
            HugePages::Hugetlb => 2,
        };
        let Geometry { grain_shift, segment_shift, max_segments } = self.geometry;
        let words = [
            (8, VERSION),
            (12, 4096),
            (32, self.uid),
            (36, grain_shift),
            (40, segment_shift),
            (44, max_segments),
            (48, MEMBERS),
            (52, CACHES),
            (56, huge_pages),
        ];
        for (at, word) in words {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[64..72].copy_from_slice(&self.made_ms.to_le_bytes());
        let sum = checksum(&bytes[8..72]);
        bytes[72..80].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, HeadError> {
        let Some(bytes) = bytes.first_chunk::<CHECKED>() else { return Err(HeadError::HalfBuilt) };
        if bytes[..8] == [0; 8] {
            return Err(HeadError::HalfBuilt);
        }
        if bytes[..8] != MAGIC {
            return Err(HeadError::NotAnArena);
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(8) != VERSION {
            return Err(HeadError::Version(word(8)));
        }
        if checksum(&bytes[8..72]) != long(72) {
            return Err(HeadError::Damaged("its head has the wrong checksum"));
        }
        if (word(12), word(48), word(52)) != (4096, MEMBERS, CACHES) {
            return Err(HeadError::Damaged("its tables have other sizes than ours"));
        }
        let huge_pages = match word(56) {
            0 => HugePages::Off,
            1 => HugePages::Thp,
            2 => HugePages::Hugetlb,
            _ => return Err(HeadError::Damaged("its kind of pages is unknown")),
        };
        let geometry = Geometry::new(word(36), word(40), word(44));
        let geometry = geometry.map_err(|_| HeadError::Damaged("its sizes do not fit together"))?;
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[16..32]);
        Ok(Self { id: ArenaId(id), uid: word(32), geometry, huge_pages, made_ms: long(64) })
    }
}

/// FNV-1a over 64-bit words, as in the ledger.
fn checksum(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    let step = |sum: u64, chunk| (sum ^ word(chunk)).wrapping_mul(0x0100_0000_01b3);
    let sum = bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, step);
    sum ^ (sum >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        let geometry = Geometry::new(12, 26, 1024).unwrap();
        Head { id: ArenaId([7; 16]), uid: 1000, geometry, huge_pages: HugePages::Thp, made_ms: 1 << 40 }
    }

    #[test]
    fn a_head_comes_back() {
        assert_eq!(Head::decode(&head().encode()), Ok(head()));
    }

    #[test]
    fn the_offsets_are_those_of_the_page() {
        let bytes = head().encode();
        assert_eq!(&bytes[..12], b"TIDEARNA\x01\0\0\0");
        assert_eq!((bytes[36], bytes[40], bytes[45], bytes[48], bytes[53], bytes[56]), (12, 26, 4, 32, 4, 1));
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        for at in 0..CHECKED {
            let mut bytes = head().encode();
            bytes[at] ^= 0x20;
            assert!(Head::decode(&bytes).is_err(), "byte {at}");
        }
        assert_eq!(Head::decode(&[]), Err(HeadError::HalfBuilt));
        assert_eq!(Head::decode(&[0; 4096]), Err(HeadError::HalfBuilt));
        assert_eq!(Head::decode(&[1; 4096]), Err(HeadError::NotAnArena));
    }
}
