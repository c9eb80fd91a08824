//! The copying loops of x86-64.
//!
//! ```text
//!   destination   |  head  |        body, non-temporal         |  tail  |
//!                          ^ multiple of the register width             fewer bytes than one turn of the loop
//!                 head and tail are plain copies
//! ```
//!
//! The loops are assembly because non-temporal stores have no meaning in the language: the compiler may neither move
//! nor merge them, and the fence behind them must stay behind them. It also keeps them the same at every optimisation
//! level. A turn asks for the lines 2 KiB ahead, which the processor's own prefetching begins too late for short
//! blocks; asking for an address outside the source is not an access and never faults.

use std::arch::asm;
use std::sync::OnceLock;

/// Below this, what is gained in the body is lost at its ends.
const MIN_NON_TEMPORAL_BYTES: usize = 1024;

/// Registers that non-temporal stores are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// SSE2, which every x86-64 processor has.
    Sse2,
    /// AVX2.
    Avx2,
    /// AVX-512.
    Avx512,
}

impl Width {
    /// Bytes of one store, and the alignment that it needs.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Sse2 => 16,
            Self::Avx2 => 32,
            Self::Avx512 => 64,
        }
    }

    pub(super) fn is_available(self) -> bool {
        match self {
            Self::Sse2 => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
        }
    }
}

/// The widest of this processor.
pub(super) fn width() -> Width {
    static WIDTH: OnceLock<Width> = OnceLock::new();
    let widest = || [Width::Avx512, Width::Avx2].into_iter().find(|width| width.is_available());
    *WIDTH.get_or_init(|| widest().unwrap_or(Width::Sse2))
}

/// Copies with `rep movsb`.
///
/// # Safety
///
/// That of [`Method::copy_unchecked`](super::Method::copy_unchecked).
pub(super) unsafe fn copy_movsb(destination: *mut u8, source: *const u8, len: usize) {
    // SAFETY: it reads `len` bytes at `source` and writes as many at `destination`, which the caller vouches for. The
    // direction flag is clear on entry to any assembly.
    unsafe {
        asm!(
            "rep movsb",
            inout("rdi") destination => _,
            inout("rsi") source => _,
            inout("rcx") len => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies with stores that pass the caches by. They are in order with everything that follows.
///
/// # Safety
///
/// That of [`Method::copy_unchecked`](super::Method::copy_unchecked).
pub(super) unsafe fn copy_non_temporal(destination: *mut u8, source: *const u8, len: usize) {
    // SAFETY: the caller's promise, and `width` is a width of this processor.
    unsafe { copy_with_width(width(), destination, source, len) };
}

/// # Safety
///
/// That of [`Method::copy_unchecked`](super::Method::copy_unchecked), and the processor has this width.
pub(super) unsafe fn copy_with_width(width: Width, destination: *mut u8, source: *const u8, len: usize) {
    // One turn of a loop is four registers.
    let (alignment, turn) = (width.bytes(), 4 * width.bytes());
    let head = destination.addr().wrapping_neg() % alignment;
    if len < MIN_NON_TEMPORAL_BYTES {
        // SAFETY: the caller's promise.
        unsafe { destination.copy_from_nonoverlapping(source, len) };
        return;
    }
    let body = (len - head) / turn * turn;
    let tail = len - head - body;
    let after = head + body;
    // Head, body and tail are the whole in three pieces, so each is within what the caller vouches for.
    // SAFETY: the first piece.
    unsafe { destination.copy_from_nonoverlapping(source, head) };
    let (to, from) = (destination.wrapping_add(head), source.wrapping_add(head));
    // The body starts aligned, and is at least one turn: `len` is more than an alignment and a turn together.
    match width {
        // SAFETY: the second piece, and the processor has this width.
        Width::Avx512 => unsafe { body_avx512(to, from, body) },
        // SAFETY: the same.
        Width::Avx2 => unsafe { body_avx2(to, from, body) },
        // SAFETY: the same.
        Width::Sse2 => unsafe { body_sse2(to, from, body) },
    }
    let (to, from) = (destination.wrapping_add(after), source.wrapping_add(after));
    // SAFETY: the third piece.
    unsafe { to.copy_from_nonoverlapping(from, tail) };
}

/// Defines the loop of one width: four loads from anywhere, four aligned non-temporal stores, a fence at the end.
macro_rules! body {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $load:literal, $store:literal, $register:literal, $prefetch:expr, $end:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// As above; `len` is a multiple of four registers and not 0, and `to` is a multiple of one.
        unsafe fn $name(to: *mut u8, from: *const u8, len: usize) {
            // SAFETY: every turn reads and writes the next four registers of the two ranges, and `len` is the sum of
            // all turns. Every register that a call may change counts as changed: `vzeroupper` touches them all.
            unsafe {
                asm!(
                    "2:",
                    $prefetch,
                    concat!($load, " ", $register, "0, [rsi]"),
                    concat!($load, " ", $register, "1, [rsi + ", $bytes, "]"),
                    concat!($load, " ", $register, "2, [rsi + 2 * ", $bytes, "]"),
                    concat!($load, " ", $register, "3, [rsi + 3 * ", $bytes, "]"),
                    concat!($store, " [rdi], ", $register, "0"),
                    concat!($store, " [rdi + ", $bytes, "], ", $register, "1"),
                    concat!($store, " [rdi + 2 * ", $bytes, "], ", $register, "2"),
                    concat!($store, " [rdi + 3 * ", $bytes, "], ", $register, "3"),
                    concat!("add rsi, 4 * ", $bytes),
                    concat!("add rdi, 4 * ", $bytes),
                    concat!("sub rcx, 4 * ", $bytes),
                    "jnz 2b",
                    "sfence",
                    $end,
                    inout("rdi") to => _,
                    inout("rsi") from => _,
                    inout("rcx") len => _,
                    clobber_abi("sysv64"),
                    options(nostack)
                );
            }
        }
    };
}

body!(
    /// The loop with AVX-512: 256 bytes a turn.
    body_avx512, "64", "vmovdqu64", "vmovntdq", "zmm",
    concat!("prefetcht0 [rsi + 2048]\n", "prefetcht0 [rsi + 2112]\n", "prefetcht0 [rsi + 2176]\n", "prefetcht0 [rsi + 2240]"),
    "vzeroupper"
);
body!(
    /// The loop with AVX2: 128 bytes a turn.
    body_avx2, "32", "vmovdqu", "vmovntdq", "ymm",
    concat!("prefetcht0 [rsi + 2048]\n", "prefetcht0 [rsi + 2112]"),
    "vzeroupper"
);
body!(
    /// The loop with SSE2: 64 bytes a turn.
    body_sse2, "16", "movdqu", "movntdq", "xmm", "prefetcht0 [rsi + 2048]", ""
);
