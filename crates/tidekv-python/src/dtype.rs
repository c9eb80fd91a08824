//! Element types by the names that torch and numpy share, and what DLPack calls them.
//!
//! ```text
//!   name              DLPack code, bits     numpy gets
//!   float16/32/64     2                     the same
//!   bfloat16          4, 16                 uint16: numpy has no bfloat16
//!   float8_*          8 to 14, 8            uint8
//!   int*, uint*       0, 1                  the same
//!   bool              6, 8                  the same
//! ```

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Dtype {
    pub(crate) name: &'static str,
    pub(crate) code: u8,
    pub(crate) bytes: u32,
}

const fn dtype(name: &'static str, code: u8, bytes: u32) -> Dtype {
    Dtype { name, code, bytes }
}

/// Every type there is, under DLPack's codes.
pub(crate) const DTYPES: [Dtype; 18] = [
    dtype("int8", 0, 1),
    dtype("int16", 0, 2),
    dtype("int32", 0, 4),
    dtype("int64", 0, 8),
    dtype("uint8", 1, 1),
    dtype("uint16", 1, 2),
    dtype("uint32", 1, 4),
    dtype("uint64", 1, 8),
    dtype("float16", 2, 2),
    dtype("float32", 2, 4),
    dtype("float64", 2, 8),
    dtype("bfloat16", 4, 2),
    dtype("bool", 6, 1),
    dtype("float8_e4m3fn", 10, 1),
    dtype("float8_e4m3fnuz", 11, 1),
    dtype("float8_e5m2", 12, 1),
    dtype("float8_e5m2fnuz", 13, 1),
    dtype("float8_e8m0fnu", 14, 1),
];

impl Dtype {
    /// Plain bytes.
    pub(crate) const BYTES: Self = dtype("uint8", 1, 1);

    /// The type of this name; `torch.` before it is allowed.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        DTYPES.into_iter().find(|dtype| dtype.name == name)
    }

    pub(crate) fn bits(self) -> u8 {
        u8::try_from(self.bytes * 8).expect("no type has more than eight bytes")
    }
}
