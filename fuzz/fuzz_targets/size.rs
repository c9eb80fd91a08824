//! Sizes as people write them: no text panics, what is accepted reads the same after any number of round
//! trips, and what is printed lies within its printed precision, never above the true value.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidekv_core::size;
use tidekv_core::units::Bytes;

fuzz_target!(|text: &str| {
    let Ok(bytes) = text.parse::<Bytes>() else { return };
    assert_eq!(text.trim().parse(), Ok(bytes), "blanks around {text:?} change its value");
    assert_eq!(bytes.0.to_string().parse(), Ok(bytes), "a plain count does not read back");

    let printed = size::format(bytes);
    let back: Bytes = printed.parse().unwrap_or_else(|error| panic!("{printed:?} does not read back: {error}"));
    assert!(back <= bytes, "{printed:?} reads back as {}, above {}", back.0, bytes.0);
    // Two decimals of a figure of at least one unit: within one hundredth of the value, or one byte of rounding.
    assert!(bytes.0 - back.0 <= bytes.0 / 100 + 1, "{printed:?} lies too far from {}", bytes.0);
    assert_eq!(format!("{bytes}"), printed, "Display and format differ");
});
