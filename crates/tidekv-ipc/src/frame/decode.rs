//! Bytes to values. Every field is looked at; what a kind does not use must be zero.

use tidekv_core::units::{Bytes, GroupId, PageId, Step};

use super::{Channel, FrameError, HEAD_BYTES, PAGE_ID_BYTES, REFUSALS, at, flag, frame_bytes, kind, u32_at, u64_at};
use crate::message::{Answer, Balance, Deed, Order, REASON_BYTES, Refusal, RefusalKind, Verdict};

/// Reads one whole frame as an order. `order` is overwritten, and its list of pages used again; after an error it is a
/// ping that nobody sent. Says what the connection's frames travel on, where the order is a hello.
pub fn decode_order(frame: &[u8], order: &mut Order) -> Result<Channel, FrameError> {
    let mut pages = take_pages(order);
    let frame = Frame::split(frame)?;
    let is_hello = frame.kind == kind::HELLO;
    let deed = match frame.kind {
        kind::HELLO => {
            frame.flags(flag::RING)?;
            frame.no_body()?;
            frame.zero_u32(at::A + 4)?;
            frame.zero_u32(at::B + 4)?;
            Deed::Hello { rank: u32_at(frame.head, at::A), stage: u32_at(frame.head, at::B) }
        }
        kind::MAP => {
            frame.flags(flag::AHEAD)?;
            frame.pages(&mut pages)?;
            Deed::Map { pages, ahead: frame.has(flag::AHEAD) }
        }
        kind::UNMAP => {
            frame.flags(flag::AFTER)?;
            frame.pages(&mut pages)?;
            let after = frame.has(flag::AFTER).then(|| Step(u64_at(frame.head, at::A)));
            if after.is_none() {
                frame.zero_u64(at::A)?;
            }
            Deed::Unmap { pages, after }
        }
        kind::ABORT => frame.bare(Deed::Abort)?,
        kind::HELD => frame.bare(Deed::Held)?,
        kind::PING => frame.bare(Deed::Ping)?,
        found => return Err(FrameError::Kind { found }),
    };
    if !matches!(deed, Deed::Hello { .. } | Deed::Unmap { .. }) {
        frame.zero_u64(at::A)?;
    }
    if !is_hello {
        frame.zero_u64(at::B)?;
    }
    let sequence = u64_at(frame.head, at::SEQUENCE);
    if sequence == 0 {
        return Err(FrameError::NoSequence);
    }
    *order = Order {
        sequence,
        epoch: u64_at(frame.head, at::EPOCH),
        settled: u64_at(frame.head, at::STAMP),
        group: GroupId(u32_at(frame.head, at::WORD)),
        spare_pages: u32_at(frame.head, at::C),
        evictable_pages: u32_at(frame.head, at::D),
        deed,
    };
    Ok(if frame.has(flag::RING) { Channel::Ring } else { Channel::Socket })
}

/// Reads one whole frame as an answer.
pub fn decode_answer(frame: &[u8]) -> Result<Answer, FrameError> {
    let frame = Frame::split(frame)?;
    frame.flags_of_answer()?;
    let verdict = match frame.kind {
        kind::DONE => {
            frame.no_body()?;
            Verdict::Done
        }
        kind::HOLDS => {
            let mut pages = Vec::new();
            frame.pages(&mut pages)?;
            if !pages.is_sorted_by(|a, b| a < b) {
                return Err(FrameError::Unsorted);
            }
            Verdict::Held(pages)
        }
        kind::REFUSED => Verdict::Refused(frame.refusal()?),
        found => return Err(FrameError::Kind { found }),
    };
    let is_refusal = matches!(verdict, Verdict::Refused(_));
    if !is_refusal {
        frame.zero_u64(at::A)?;
        frame.zero_u64(at::B)?;
    }
    let sequence = u64_at(frame.head, at::SEQUENCE);
    if sequence == 0 && !is_refusal {
        return Err(FrameError::NoSequence);
    }
    Ok(Answer {
        sequence,
        epoch: u64_at(frame.head, at::EPOCH),
        instance: u64_at(frame.head, at::STAMP),
        balance: Balance {
            owed_pages: u32_at(frame.head, at::WORD),
            firm_pages: u32_at(frame.head, at::C),
            grantable_pages: u32_at(frame.head, at::D),
        },
        verdict,
    })
}

/// A frame whose length is right.
struct Frame<'a> {
    head: &'a [u8; HEAD_BYTES],
    body: &'a [u8],
    kind: u8,
}

impl<'a> Frame<'a> {
    fn split(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let truncated = |wanted| FrameError::Truncated { bytes: bytes.len(), wanted };
        let wanted = frame_bytes(bytes)?.ok_or(truncated(HEAD_BYTES))?;
        if bytes.len() > wanted {
            return Err(FrameError::Trailing { extra: bytes.len() - wanted });
        }
        let (head, body) = bytes.split_first_chunk().ok_or(truncated(HEAD_BYTES))?;
        if bytes.len() < wanted {
            return Err(truncated(wanted));
        }
        Ok(Self { head, body, kind: head[at::KIND] })
    }

    fn has(&self, flag: u8) -> bool {
        self.head[at::FLAGS] & flag != 0
    }

    fn flags(&self, allowed: u8) -> Result<(), FrameError> {
        match self.head[at::FLAGS] {
            found if found & !allowed == 0 => Ok(()),
            found => Err(FrameError::Flags { kind: self.kind, found }),
        }
    }

    /// An unknown kind is named as such, whatever its flags are. Those of a refusal say what sort it is.
    fn flags_of_answer(&self) -> Result<(), FrameError> {
        match self.kind {
            kind::DONE | kind::HOLDS => self.flags(0),
            kind::REFUSED => Ok(()),
            found => Err(FrameError::Kind { found }),
        }
    }

    /// A deed without anything to it.
    fn bare(&self, deed: Deed) -> Result<Deed, FrameError> {
        self.flags(0)?;
        self.no_body()?;
        Ok(deed)
    }

    fn no_body(&self) -> Result<(), FrameError> {
        if self.body.is_empty() { Ok(()) } else { Err(self.bad_body()) }
    }

    fn bad_body(&self) -> FrameError {
        FrameError::Body { kind: self.kind, bytes: self.body.len() }
    }

    fn pages(&self, pages: &mut Vec<PageId>) -> Result<(), FrameError> {
        let (ids, []) = self.body.as_chunks::<PAGE_ID_BYTES>() else { return Err(self.bad_body()) };
        pages.clear();
        pages.extend(ids.iter().map(|id| PageId(u32::from_le_bytes(*id))));
        Ok(())
    }

    fn refusal(&self) -> Result<Refusal, FrameError> {
        if self.body.len() > REASON_BYTES {
            return Err(self.bad_body());
        }
        let reason = str::from_utf8(self.body).map_err(|_| FrameError::Reason)?;
        Ok(Refusal {
            kind: refusal_kind(self.head[at::FLAGS])?,
            wanted: Bytes(u64_at(self.head, at::A)),
            grantable: Bytes(u64_at(self.head, at::B)),
            reason: reason.to_owned(),
        })
    }

    fn zero_u32(&self, offset: usize) -> Result<(), FrameError> {
        self.zero(offset, u64::from(u32_at(self.head, offset)))
    }

    fn zero_u64(&self, offset: usize) -> Result<(), FrameError> {
        self.zero(offset, u64_at(self.head, offset))
    }

    fn zero(&self, offset: usize, value: u64) -> Result<(), FrameError> {
        if value == 0 { Ok(()) } else { Err(FrameError::Unused { kind: self.kind, offset }) }
    }
}

fn refusal_kind(found: u8) -> Result<RefusalKind, FrameError> {
    let row = REFUSALS.iter().find(|(number, _)| *number == found);
    row.map(|(_, kind)| *kind).ok_or(FrameError::RefusalKind { found })
}

/// The list of the last order that had one, for the next.
fn take_pages(order: &mut Order) -> Vec<PageId> {
    match std::mem::replace(&mut order.deed, Deed::Ping) {
        Deed::Map { pages, .. } | Deed::Unmap { pages, .. } => pages,
        Deed::Hello { .. } | Deed::Abort | Deed::Held | Deed::Ping => Vec::new(),
    }
}
