//! What blocks are published under, and what is said about them.

use std::fmt;

/// 128 bits that name a block: a hash of its tokens, or of a name. Equal keys mean equal bytes to whoever publishes them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub u128);

impl Key {
    /// The key of a name: its FNV-1a hash of 128 bits.
    pub fn of_name(name: &str) -> Self {
        const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        Self(name.bytes().fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME)))
    }

    /// Spread over 64 bits, also for keys that are no hashes: counters, for instance.
    #[expect(clippy::cast_possible_truncation, reason = "both halves are meant")]
    pub(super) fn spread(self) -> u64 {
        let mixed = (self.0 as u64) ^ ((self.0 >> 64) as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// What a publisher says about a block. Only `bytes` is checked by the exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// How many bytes of the block are meant.
    pub bytes: u64,
    /// Tokens whose keys and values they are.
    pub tokens: u32,
    /// CRC-32C of the bytes, where the publisher computed one.
    pub crc32c: Option<u32>,
    /// Whatever publisher and consumers agree on: a layer, a layout, a model.
    pub extra: u64,
}

impl Meta {
    /// Of so many bytes, and nothing else.
    pub fn of_bytes(bytes: u64) -> Self {
        Self { bytes, tokens: 0, crc32c: None, extra: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_hash_of_the_page() {
        assert_eq!(Key::of_name("").to_string(), "6c62272e07bb014262b821756295c58d");
        assert_eq!(Key::of_name("a").to_string(), "d228cb696f1a8caf78912b704e4a8964");
        assert_ne!(Key::of_name("ab"), Key::of_name("ba"));
    }

    #[test]
    fn counters_are_spread() {
        let homes: std::collections::BTreeSet<u64> = (0..1024).map(|n| Key(n).spread() % 1024).collect();
        assert!(homes.len() > 500, "{}", homes.len());
        assert_ne!(Key(1 << 64).spread(), Key(1 << 32).spread());
    }
}
