//! Values to bytes, into buffers that are used again.

use tidekv_core::units::{PageId, Step};

use super::{Channel, HEAD_BYTES, MAGIC, PAGE_ID_BYTES, REFUSALS, VERSION, at, flag, kind};
use crate::message::{Answer, Deed, Heading, PAGES_MAX, REASON_BYTES, RefusalKind, Verdict};

/// A list of pages that does not fit into a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{pages} pages do not fit into one frame, {PAGES_MAX} do")]
pub struct TooManyPages {
    /// How many.
    pub pages: usize,
}

/// Replaces `out` by the frame of an order. `channel` matters for a hello alone.
pub fn encode_order(
    out: &mut Vec<u8>,
    sequence: u64,
    heading: Heading,
    deed: &Deed,
    channel: Channel,
) -> Result<(), TooManyPages> {
    let mut head = Head::new(sequence, heading.epoch, heading.settled, heading.group.0);
    head.put(at::C, &heading.spare_pages.to_le_bytes()).put(at::D, &heading.evictable_pages.to_le_bytes());
    let pages: &[PageId] = match deed {
        Deed::Hello { stage, rank } => {
            let flags = if channel == Channel::Ring { flag::RING } else { 0 };
            head.kind(kind::HELLO, flags).put(at::A, &rank.to_le_bytes()).put(at::B, &stage.to_le_bytes());
            &[]
        }
        Deed::Map { pages, ahead } => {
            head.kind(kind::MAP, if *ahead { flag::AHEAD } else { 0 });
            pages
        }
        Deed::Unmap { pages, after } => {
            match after {
                Some(Step(step)) => head.kind(kind::UNMAP, flag::AFTER).put(at::A, &step.to_le_bytes()),
                None => head.kind(kind::UNMAP, 0),
            };
            pages
        }
        Deed::Abort => {
            head.kind(kind::ABORT, 0);
            &[]
        }
        Deed::Held => {
            head.kind(kind::HELD, 0);
            &[]
        }
        Deed::Ping => {
            head.kind(kind::PING, 0);
            &[]
        }
    };
    finish_with_pages(out, head, pages)
}

/// Replaces `out` by the frame of an answer. A reason that is too long is cut.
pub fn encode_answer(out: &mut Vec<u8>, answer: &Answer) -> Result<(), TooManyPages> {
    let balance = answer.balance;
    let mut head = Head::new(answer.sequence, answer.epoch, answer.instance, balance.owed_pages);
    head.put(at::C, &balance.firm_pages.to_le_bytes()).put(at::D, &balance.grantable_pages.to_le_bytes());
    match &answer.verdict {
        Verdict::Done => {
            head.kind(kind::DONE, 0);
            finish(out, head, 0);
        }
        Verdict::Held(pages) => {
            head.kind(kind::HOLDS, 0);
            finish_with_pages(out, head, pages)?;
        }
        Verdict::Refused(refusal) => {
            head.kind(kind::REFUSED, refusal_number(refusal.kind))
                .put(at::A, &refusal.wanted.0.to_le_bytes())
                .put(at::B, &refusal.grantable.0.to_le_bytes());
            let reason = cut(&refusal.reason);
            finish(out, head, reason.len());
            out.extend_from_slice(reason.as_bytes());
        }
    }
    Ok(())
}

struct Head([u8; HEAD_BYTES]);

impl Head {
    fn new(sequence: u64, epoch: u64, stamp: u64, word: u32) -> Self {
        let mut head = Self([0; HEAD_BYTES]);
        head.put(0, &MAGIC).put(at::VERSION, &VERSION.to_le_bytes()).put(at::WORD, &word.to_le_bytes());
        head.put(at::SEQUENCE, &sequence.to_le_bytes()).put(at::EPOCH, &epoch.to_le_bytes());
        head.put(at::STAMP, &stamp.to_le_bytes());
        head
    }

    fn kind(&mut self, kind: u8, flags: u8) -> &mut Self {
        self.put(at::KIND, &[kind]).put(at::FLAGS, &[flags])
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) -> &mut Self {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }
}

fn finish_with_pages(out: &mut Vec<u8>, head: Head, pages: &[PageId]) -> Result<(), TooManyPages> {
    if pages.len() > PAGES_MAX {
        return Err(TooManyPages { pages: pages.len() });
    }
    finish(out, head, pages.len() * PAGE_ID_BYTES);
    out.extend(pages.iter().flat_map(|page| page.0.to_le_bytes()));
    Ok(())
}

fn finish(out: &mut Vec<u8>, mut head: Head, body_bytes: usize) {
    let body_bytes = u32::try_from(body_bytes).expect("bodies are bounded far below 4 GiB");
    head.put(at::BODY, &body_bytes.to_le_bytes());
    out.clear();
    out.extend_from_slice(&head.0);
}

fn refusal_number(wanted: RefusalKind) -> u8 {
    let (number, _) = REFUSALS.iter().find(|(_, kind)| *kind == wanted).expect("the table has every kind");
    *number
}

/// As much of a reason as there is room for, whole characters.
fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}
