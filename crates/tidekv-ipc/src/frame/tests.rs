//! Round trips of everything, and every way in which bytes can be wrong.

use proptest::prelude::*;
use tidekv_core::units::{Bytes, GroupId, PageId, Step};

use super::*;
use crate::message::{Answer, Balance, Deed, Heading, Order, Refusal, Verdict};

fn page_lists(longest: usize) -> impl proptest::strategy::Strategy<Value = Vec<PageId>> {
    proptest::collection::vec(any::<u32>().prop_map(PageId), 0..longest)
}

fn deeds() -> impl proptest::strategy::Strategy<Value = Deed> {
    prop_oneof![
        any::<(u32, u32)>().prop_map(|(stage, rank)| Deed::Hello { stage, rank }),
        (page_lists(40), any::<bool>()).prop_map(|(pages, ahead)| Deed::Map { pages, ahead }),
        (page_lists(40), any::<Option<u64>>()).prop_map(|(pages, after)| Deed::Unmap { pages, after: after.map(Step) }),
        Just(Deed::Abort),
        Just(Deed::Held),
        Just(Deed::Ping),
    ]
}

fn verdicts() -> impl proptest::strategy::Strategy<Value = Verdict> {
    let refusal = (0..REFUSALS.len(), any::<(u64, u64)>(), ".{0,60}");
    prop_oneof![
        Just(Verdict::Done),
        proptest::collection::btree_set(any::<u32>(), 0..40)
            .prop_map(|pages| Verdict::Held(pages.into_iter().map(PageId).collect())),
        refusal.prop_map(|(kind, (wanted, grantable), reason)| Verdict::Refused(Refusal {
            kind: REFUSALS[kind].1,
            wanted: Bytes(wanted),
            grantable: Bytes(grantable),
            reason,
        })),
    ]
}

fn blank_order() -> Order {
    Order { sequence: 0, epoch: 0, settled: 0, group: GroupId(0), spare_pages: 0, evictable_pages: 0, deed: Deed::Ping }
}

fn order_frame(deed: &Deed, channel: Channel) -> Vec<u8> {
    let mut bytes = Vec::new();
    let heading = Heading { epoch: 8, settled: 6, group: GroupId(5), spare_pages: 4, evictable_pages: 3 };
    encode_order(&mut bytes, 7, heading, deed, channel).unwrap();
    bytes
}

fn answer_frame(verdict: Verdict) -> Vec<u8> {
    let mut bytes = Vec::new();
    let balance = Balance { owed_pages: 3, firm_pages: 1, grantable_pages: 2 };
    let answer = Answer { sequence: 7, epoch: 8, instance: 9, balance, verdict };
    encode_answer(&mut bytes, &answer).unwrap();
    bytes
}

fn order_error(bytes: &[u8]) -> FrameError {
    decode_order(bytes, &mut blank_order()).unwrap_err()
}

fn refusal(reason: String) -> Verdict {
    Verdict::Refused(Refusal { kind: RefusalKind::Device, wanted: Bytes(10), grantable: Bytes(4), reason })
}

proptest! {
    #[test]
    fn orders_come_back(words in any::<(u64, u64, u32, u32, u32)>(), sequence in 1_u64.., deed in deeds(), ring in any::<bool>()) {
        let (epoch, settled, group, spare_pages, evictable_pages) = words;
        let group = GroupId(group);
        let heading = Heading { epoch, settled, group, spare_pages, evictable_pages };
        let channel = if ring { Channel::Ring } else { Channel::Socket };
        let mut bytes = vec![0xaa; 3];
        encode_order(&mut bytes, sequence, heading, &deed, channel).unwrap();
        prop_assert_eq!(frame_bytes(&bytes), Ok(Some(bytes.len())));
        // Whatever was decoded into it before.
        let mut order = Order { deed: Deed::Map { pages: vec![PageId(1); 5], ahead: true }, ..blank_order() };
        let found = decode_order(&bytes, &mut order).unwrap();
        let is_hello = matches!(deed, Deed::Hello { .. });
        prop_assert_eq!(found, if is_hello { channel } else { Channel::Socket });
        prop_assert_eq!(order, Order { sequence, epoch, settled, group, spare_pages, evictable_pages, deed });
        prop_assert!(decode_answer(&bytes).is_err(), "an order is no answer");
    }

    #[test]
    fn answers_come_back(words in any::<(u64, u64, u32, u32, u32)>(), sequence in 1_u64.., verdict in verdicts()) {
        let (epoch, instance, owed_pages, firm_pages, grantable_pages) = words;
        let balance = Balance { owed_pages, firm_pages, grantable_pages };
        let answer = Answer { sequence, epoch, instance, balance, verdict };
        let mut bytes = Vec::new();
        encode_answer(&mut bytes, &answer).unwrap();
        prop_assert_eq!(decode_answer(&bytes), Ok(answer));
        prop_assert!(decode_order(&bytes, &mut blank_order()).is_err(), "an answer is no order");
    }

    #[test]
    fn any_bytes_give_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200), as_frame in any::<bool>()) {
        let mut bytes = bytes;
        if as_frame && bytes.len() >= 8 {
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        }
        let mut order = blank_order();
        if decode_order(&bytes, &mut order).is_err() {
            prop_assert_eq!(order.deed, Deed::Ping);
        }
        let _ = decode_answer(&bytes);
    }

    /// There is one way to write a frame: what can be read is what would be written.
    #[test]
    fn no_byte_is_without_meaning(deed in deeds(), at in 0..HEAD_BYTES, bit in 0..8) {
        let mut bytes = order_frame(&deed, Channel::Socket);
        bytes[at] ^= 1_u8 << bit;
        let mut order = blank_order();
        if let Ok(channel) = decode_order(&bytes, &mut order) {
            let Order { sequence, epoch, settled, group, spare_pages, evictable_pages, deed } = order;
            let heading = Heading { epoch, settled, group, spare_pages, evictable_pages };
            let mut again = Vec::new();
            encode_order(&mut again, sequence, heading, &deed, channel).unwrap();
            prop_assert_eq!(again, bytes);
        }
    }
}

#[test]
fn the_bytes_are_those_of_the_format_page() {
    let deed = Deed::Unmap { pages: vec![PageId(0x0102_0304)], after: Some(Step(0x1112)) };
    let bytes = order_frame(&deed, Channel::Socket);
    let mut expected = Vec::new();
    expected.extend(b"TIDC\x01\x00\x03\x01\x04\x00\x00\x00");
    expected.extend(5_u32.to_le_bytes());
    for word in [7_u64, 8, 6, 0x1112, 0, 3 << 32 | 4] {
        expected.extend(word.to_le_bytes());
    }
    expected.extend([4, 3, 2, 1]);
    assert_eq!(bytes, expected);

    let bytes = order_frame(&Deed::Hello { stage: 2, rank: 3 }, Channel::Ring);
    assert_eq!((bytes[6], bytes[7], bytes[40], bytes[48]), (1, 2, 3, 2));
    let bytes = order_frame(&Deed::Map { pages: vec![], ahead: true }, Channel::Socket);
    assert_eq!((bytes[6], bytes[7]), (2, 4));

    let bytes = answer_frame(refusal("no".to_owned()));
    let mut expected = Vec::new();
    expected.extend(b"TIDC\x01\x00\x83\x02\x02\x00\x00\x00\x03\x00\x00\x00");
    for word in [7_u64, 8, 9, 10, 4] {
        expected.extend(word.to_le_bytes());
    }
    expected.extend(b"\x01\x00\x00\x00\x02\x00\x00\x00no");
    assert_eq!(bytes, expected);
}

#[test]
fn half_a_frame_waits_and_a_wrong_head_does_not() {
    let frame = order_frame(&Deed::Map { pages: vec![PageId(1); 3], ahead: false }, Channel::Socket);
    for length in 0..HEAD_BYTES {
        assert_eq!(frame_bytes(&frame[..length]), Ok(None));
        assert_eq!(order_error(&frame[..length]), FrameError::Truncated { bytes: length, wanted: HEAD_BYTES });
    }
    for length in HEAD_BYTES..frame.len() {
        assert_eq!(frame_bytes(&frame[..length]), Ok(Some(frame.len())));
        assert_eq!(order_error(&frame[..length]), FrameError::Truncated { bytes: length, wanted: frame.len() });
    }
    assert_eq!(frame_bytes(b"GET / HTTP/1.1"), Err(FrameError::Magic));
    assert_eq!(frame_bytes(b"TI"), Ok(None));
    assert_eq!(frame_bytes(b"TX"), Err(FrameError::Magic), "one byte is enough to know");
}

#[test]
fn every_wrong_field_has_its_error() {
    let map = order_frame(&Deed::Map { pages: vec![PageId(1)], ahead: false }, Channel::Socket);
    let change = |frame: &[u8], at: usize, byte: u8| {
        let mut frame = frame.to_vec();
        frame[at] = byte;
        frame
    };
    assert_eq!(order_error(&change(&map, 4, 2)), FrameError::Version { found: 2 });
    assert_eq!(order_error(&change(&map, 6, 99)), FrameError::Kind { found: 99 });
    assert_eq!(order_error(&change(&map, 6, 0x81)), FrameError::Kind { found: 0x81 });
    assert_eq!(order_error(&change(&map, 7, 1)), FrameError::Flags { kind: 2, found: 1 });
    assert_eq!(order_error(&change(&map, 16, 0)), FrameError::NoSequence);
    for unused in [40, 48] {
        assert_eq!(order_error(&change(&map, unused, 1)), FrameError::Unused { kind: 2, offset: unused });
    }
    let mut longer = map.clone();
    longer.push(0);
    assert_eq!(order_error(&longer), FrameError::Trailing { extra: 1 });
    let odd = change(&longer, 8, 5);
    assert_eq!(order_error(&odd), FrameError::Body { kind: 2, bytes: 5 });
    assert_eq!(order_error(&change(&map, 6, 6)), FrameError::Body { kind: 6, bytes: 4 }, "a ping has no pages");
    assert_eq!(order_error(&change(&map, 11, 0xff)), FrameError::TooLong { bytes: 64 + 0xff00_0004 });

    let hello = order_frame(&Deed::Hello { stage: 0, rank: 0 }, Channel::Socket);
    assert_eq!(order_error(&change(&hello, 44, 1)), FrameError::Unused { kind: 1, offset: 44 });
    assert_eq!(order_error(&change(&hello, 52, 1)), FrameError::Unused { kind: 1, offset: 52 });
    let unmap = order_frame(&Deed::Unmap { pages: vec![], after: None }, Channel::Socket);
    assert_eq!(order_error(&change(&unmap, 40, 1)), FrameError::Unused { kind: 3, offset: 40 });

    let held = answer_frame(Verdict::Held(vec![PageId(4), PageId(5)]));
    assert_eq!(decode_answer(&change(&held, 64, 5)), Err(FrameError::Unsorted), "twice the same page");
    let refused = answer_frame(refusal("no".to_owned()));
    assert_eq!(decode_answer(&change(&refused, 7, 0)), Err(FrameError::RefusalKind { found: 0 }));
    assert_eq!(decode_answer(&change(&refused, 64, 0xff)), Err(FrameError::Reason));
    assert!(decode_answer(&change(&refused, 16, 0)).is_ok(), "a refusal of the connection answers no order");
    let done = answer_frame(Verdict::Done);
    assert_eq!(decode_answer(&change(&done, 16, 0)), Err(FrameError::NoSequence));
    assert_eq!(decode_answer(&change(&done, 7, 4)), Err(FrameError::Flags { kind: 0x81, found: 4 }));
    assert_eq!(decode_answer(&change(&done, 48, 1)), Err(FrameError::Unused { kind: 0x81, offset: 48 }));
}

#[test]
fn the_longest_frame_fits_and_one_page_more_does_not() {
    let mut pages: Vec<PageId> = (0..16_000).map(PageId).collect();
    assert_eq!(order_frame(&Deed::Map { pages: pages.clone(), ahead: false }, Channel::Socket).len(), FRAME_BYTES_MAX);
    assert_eq!(answer_frame(Verdict::Held(pages.clone())).len(), FRAME_BYTES_MAX);
    pages.push(PageId(16_000));
    let mut out = Vec::new();
    let deed = Deed::Map { pages, ahead: false };
    let error = encode_order(&mut out, 1, Heading::default(), &deed, Channel::Socket).unwrap_err();
    assert_eq!(error, TooManyPages { pages: 16_001 });
}

#[test]
fn a_long_reason_is_cut_between_characters() {
    let bytes = answer_frame(refusal("é".repeat(300) + "x"));
    let Verdict::Refused(found) = decode_answer(&bytes).unwrap().verdict else { panic!("a refusal") };
    assert_eq!(found.reason, "é".repeat(200));
    let bytes = answer_frame(refusal("x".to_owned() + &"é".repeat(300)));
    let Verdict::Refused(found) = decode_answer(&bytes).unwrap().verdict else { panic!("a refusal") };
    assert_eq!(found.reason.len(), REASON_BYTES - 1);
}

#[test]
fn every_refusal_has_a_number_of_its_own() {
    for (at, (number, kind)) in (1..).zip(REFUSALS) {
        assert_eq!(number, at);
        assert_eq!(REFUSALS.iter().filter(|(_, other)| *other == kind).count(), 1);
    }
}
