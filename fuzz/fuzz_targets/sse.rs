//! Streams of events, which any server may have written: no bytes panic, and however the network cuts a stream, its events
//! are those of the whole.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidekv_bench::load::sse::SseReader;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (stream, cuts) = input;
    let whole = events([&stream[..]]);
    let mut rest = &stream[..];
    let mut pieces = Vec::new();
    for cut in cuts {
        let (piece, behind) = rest.split_at(usize::from(cut).min(rest.len()));
        pieces.push(piece);
        rest = behind;
    }
    pieces.push(rest);
    assert_eq!(events(pieces), whole);
    assert!(whole.iter().map(Vec::len).sum::<usize>() <= stream.len(), "an event has more than the stream");
});

fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut reader = SseReader::new();
    for piece in pieces {
        reader.push(piece, |data| found.push(data.to_vec())).expect("a short stream has no event that is too long");
    }
    reader.finish(|data| found.push(data.to_vec()));
    found
}
