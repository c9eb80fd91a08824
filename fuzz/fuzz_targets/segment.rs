//! Pool segments, which anybody may have written: any bytes are a segment or are not, by kvcached's rule and no other,
//! and what is one comes back byte for byte. The same through a file, as tools read it.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tidekv_shm::segment::{self, SegmentView};

static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| PathBuf::from(format!("/dev/shm/kvcached-fuzz-segment-{}", std::process::id())));

fuzz_target!(|data: &[u8]| {
    let view = SegmentView::parse(data);
    let limit = data.first_chunk().map(|word| i64::from_ne_bytes(*word));
    assert_eq!(view.is_some(), data.len() == 24 && limit > Some(0), "{data:?}");
    if let Some(view) = view {
        assert_eq!(view.to_bytes(), data);
        assert_eq!(Some(view.limit), limit);
    }
    // A system call costs more than all of the above: once in a while is enough.
    if data.len() % 4 == 0 {
        std::fs::write(&*FILE, data).expect("a file");
        let read = segment::read(&FILE).expect("a file that can be read");
        std::fs::remove_file(&*FILE).expect("our own file");
        assert_eq!(read, view);
    }
});
