//! Proves that the fuzzer can find something: four comparisons in a row, then a panic. Blind mutation would
//! need some 2^32 tries; with coverage it is a matter of seconds. Without the instrumentation, scripts/fuzz stops here.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[a, b, c, d], _)) = data.split_first_chunk::<4>() else {
        return;
    };
    if a == b't' {
        if b == b'i' {
            if c == b'd' {
                assert_ne!(d, b'e', "the planted bug was found, as it should be");
            }
        }
    }
});
