//! A short number for what is asked: the same for the same prompts, on every machine and build.

use super::data::{Item, Prompt};

/// FNV-1a: of no cryptographic worth, and the same everywhere.
pub(super) struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Digest {
    pub(super) fn of(bytes: &[u8]) -> u64 {
        let mut digest = Self::default();
        digest.add(bytes);
        digest.0
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }

    /// What an item asks; how long its answer may be is the schedule's to say.
    pub(super) fn add_prompt(&mut self, item: &Item) {
        match &item.prompt {
            Prompt::Text(text) => self.add(text.as_bytes()),
            Prompt::Tokens(tokens) => tokens.iter().for_each(|token| self.add(&token.to_le_bytes())),
            Prompt::Made(made) => {
                for segment in &made.segments {
                    self.add(&segment.seed.to_le_bytes());
                    self.add(&segment.tokens.to_le_bytes());
                }
            }
        }
    }

    pub(super) fn to_hex(&self) -> String {
        format!("{:016x}", self.0)
    }
}
