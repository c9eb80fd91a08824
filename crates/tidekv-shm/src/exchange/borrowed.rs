//! A published block in somebody's hands.

use super::key::{Key, Meta};
use super::{Exchange, ExchangeError};
use crate::arena::{Block, Handle, HandleError};

/// A block that was published, held by this process until this is dropped: its publisher may withdraw it, end or be
/// killed meanwhile.
#[derive(Debug)]
pub struct Borrowed {
    exchange: Exchange,
    handle: Handle,
    key: Key,
    meta: Meta,
}

/// How much is copied at a time to compute a checksum: it stays in the nearest cache.
const CHUNK: usize = 16 << 10;

impl Borrowed {
    /// `handle` is held, once, for what is made here.
    pub(super) fn new(exchange: Exchange, handle: Handle, key: Key, meta: Meta) -> Self {
        Self { exchange, handle, key, meta }
    }

    /// Somebody else wrote how many bytes there are.
    pub(super) fn check_length(&self) -> Result<(), ExchangeError> {
        match self.exchange.arena().block(self.handle)?.len() as u64 {
            block if self.meta.bytes <= block => Ok(()),
            _ => Err(ExchangeError::Damaged { what: "an entry has more bytes than its block" }),
        }
    }

    /// What it is published under.
    pub fn key(&self) -> Key {
        self.key
    }

    /// What its publisher said.
    pub fn meta(&self) -> Meta {
        self.meta
    }

    /// The block's handle.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The block, to read in place; of its bytes, the first `meta().bytes` are meant.
    pub fn block(&self) -> Result<Block<'_>, HandleError> {
        self.exchange.arena().block(self.handle)
    }

    /// Copies what was published to the beginning of `to`, and says how many bytes that are. `to` may be shorter.
    pub fn copy_out(&self, to: &mut [u8]) -> Result<usize, HandleError> {
        let bytes = to.len().min(self.meta.bytes as usize);
        self.block()?.copy_out(0, &mut to[..bytes])?;
        Ok(bytes)
    }

    /// Whether the bytes have the checksum that their publisher gave; `None` where it gave none.
    pub fn is_intact(&self) -> Result<Option<bool>, HandleError> {
        let Some(expected) = self.meta.crc32c else { return Ok(None) };
        let block = self.block()?;
        let (mut chunk, mut sum) = ([0; CHUNK], 0);
        for offset in (0..self.meta.bytes as usize).step_by(CHUNK) {
            let part = &mut chunk[..CHUNK.min(self.meta.bytes as usize - offset)];
            block.copy_out(offset, part)?;
            sum = crc32c::crc32c_append(sum, part);
        }
        Ok(Some(sum == expected))
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // It is held; in a forked child it is the parent's to give back, and the directory is not there.
        if self.exchange.arena().release(self.handle).is_ok()
            && let Ok(parts) = self.exchange.parts()
        {
            parts.front.room.ring();
        }
    }
}
