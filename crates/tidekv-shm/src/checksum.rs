//! The checksum that seals every record of our files.

/// FNV-1a over words instead of bytes, with the high half folded in at the end. It guards against torn and stray
/// writes, not against malice: whoever can write the file can also compute it. Bytes after the last whole word do not
/// count; records have none.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let sum = bytes.chunks_exact(8).fold(0xcbf2_9ce4_8422_2325_u64, |sum, word| {
        let word = u64::from_le_bytes(word.try_into().expect("chunks of eight"));
        (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3)
    });
    sum ^ (sum >> 32)
}
