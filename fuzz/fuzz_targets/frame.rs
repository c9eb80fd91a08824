//! Control frames, which come from another process. Any bytes give a value or an error, the length that a head promises
//! is the length that is read, and there is one way to write a frame: what can be read is what would be written.
//!
//! The first byte of an input chooses what the rest is: a frame's bytes; a frame whose magic, version and length are
//! put right first, so that the fuzzer gets past them; or a stream of both.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidekv_core::units::GroupId;
use tidekv_ipc::FrameError;
use tidekv_ipc::frame::{
    FRAME_BYTES_MAX, HEAD_BYTES, decode_answer, decode_order, encode_answer, encode_order, frame_bytes,
};
use tidekv_ipc::message::{Deed, Heading, Order, PAGES_MAX, REASON_BYTES, Verdict};

fuzz_target!(|data: &[u8]| {
    match data {
        [0, bytes @ ..] => look(bytes),
        [1, bytes @ ..] => look(&mended(bytes)),
        [2, bytes @ ..] => stream(bytes),
        _ => {}
    }
});

/// With the magic, the version and the body's length as they should be.
fn mended(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= HEAD_BYTES {
        let body = u32::try_from(bytes.len() - HEAD_BYTES).expect("inputs are short");
        bytes[..6].copy_from_slice(b"TIDC\x01\x00");
        bytes[8..12].copy_from_slice(&body.to_le_bytes());
    }
    bytes
}

/// Frame after frame, as a connection takes them.
fn stream(mut bytes: &[u8]) {
    while let Ok(Some(length)) = frame_bytes(bytes) {
        assert!((HEAD_BYTES..=FRAME_BYTES_MAX).contains(&length));
        if length > bytes.len() {
            return;
        }
        let (frame, rest) = bytes.split_at(length);
        look(frame);
        bytes = rest;
    }
}

fn look(bytes: &[u8]) {
    let mut order = Order {
        sequence: 0,
        epoch: 0,
        settled: 0,
        group: GroupId(0),
        spare_pages: 0,
        evictable_pages: 0,
        deed: Deed::Ping,
    };
    let mut again = Vec::new();
    let as_order = decode_order(bytes, &mut order);
    match as_order {
        Ok(channel) => {
            let Order { sequence, epoch, settled, group, spare_pages, evictable_pages, ref deed } = order;
            assert!(sequence > 0);
            if let Deed::Map { pages, .. } | Deed::Unmap { pages, .. } = deed {
                assert!(pages.len() <= PAGES_MAX);
            }
            let heading = Heading { epoch, settled, group, spare_pages, evictable_pages };
            encode_order(&mut again, sequence, heading, deed, channel).expect("it was read");
            assert_eq!(again, bytes);
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(order.deed, Deed::Ping, "nothing is left of what was read by halves");
        }
    }
    let as_answer = decode_answer(bytes);
    match &as_answer {
        Ok(answer) => {
            match &answer.verdict {
                Verdict::Held(pages) => assert!(pages.len() <= PAGES_MAX && pages.is_sorted()),
                Verdict::Refused(refusal) => assert!(refusal.reason.len() <= REASON_BYTES),
                Verdict::Done => {}
            }
            assert!(as_order.is_err(), "a frame is an order or an answer");
            encode_answer(&mut again, answer).expect("it was read");
            assert_eq!(again, bytes);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let is_whole = frame_bytes(bytes) == Ok(Some(bytes.len()));
    assert!(is_whole || (as_order.is_err() && as_answer.is_err()));
    if bytes.len() < HEAD_BYTES {
        let is_short = |error: &FrameError| matches!(error, FrameError::Magic | FrameError::Truncated { .. });
        assert!(as_order.as_ref().is_err_and(is_short));
    }
}
