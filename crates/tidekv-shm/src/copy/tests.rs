//! Every way to copy is `memcpy`: the same bytes at the same place, and not one beside it.

use proptest::prelude::*;

use super::*;

const GUARD: u8 = 0x5A;
const GUARD_BYTES: usize = 256;

/// Bytes that differ from their neighbours and from the guards' most of the time.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()[7]
    };
    (0..len).map(|_| next()).collect()
}

/// Runs `copy` from an address that is `from` past a multiple of 128 to one that is `to` past such, and checks every
/// byte of the destination and of the guards on both sides of it.
fn check(len: usize, from: usize, to: usize, copy: impl FnOnce(&mut [u8], &[u8])) {
    let aligned = |bytes: &[u8]| bytes.as_ptr().addr().wrapping_neg() % 128;
    let source = pattern(len + 512, len as u64);
    let source_at = aligned(&source) + from;
    let source = &source[source_at..source_at + len];
    let mut field = vec![GUARD; len + 2 * GUARD_BYTES + 256];
    let at = aligned(&field) + GUARD_BYTES + to;
    copy(&mut field[at..at + len], source);
    assert!(field[at..at + len] == *source, "{len} bytes, from {from} to {to}: the copy differs");
    let outside = field[..at].iter().chain(&field[at + len..]);
    assert!(outside.into_iter().all(|&byte| byte == GUARD), "{len} bytes, from {from} to {to}: a guard was written");
}

fn check_method(method: Method, len: usize, from: usize, to: usize) {
    check(len, from, to, |to, from| method.copy(to, from).unwrap());
}

/// The CRC-32C by its definition: one bit after the other.
fn crc_model(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

fn copier(method: Method, threads: usize, together: bool) -> Copier {
    let profile = Profile::of(|_, _| profile::Choice { alone: method, together: together.then_some(method) });
    let threads = NonZero::new(threads).unwrap();
    Copier::new(CopyOptions { threads, profile: ProfileSource::Given(profile) })
}

#[test]
fn every_length_to_a_page_and_beyond_vector_widths() {
    let lens = if cfg!(miri) { vec![0, 1, 63, 64, 65] } else { (0..=4096 + 64).collect() };
    for method in Method::available() {
        for &len in &lens {
            check_method(method, len, len % 7, len % 61);
        }
    }
}

#[test]
fn every_alignment_of_both_sides() {
    let alignments = if cfg!(miri) { 2 } else { 65 };
    for method in Method::available() {
        for from in 0..alignments {
            for to in 0..alignments {
                check_method(method, 1024 + 300, from, to);
            }
        }
    }
}

/// The narrow loops too, which a processor with wide registers would never choose.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[test]
fn every_width_of_this_processor() {
    let widths = [x86::Width::Sse2, x86::Width::Avx2, x86::Width::Avx512];
    for width in widths.into_iter().filter(|width| width.is_available()) {
        for len in (1000..1700).chain([4096, 65536, 65537]) {
            check(len, len % 3, len % 67, |to, from| {
                // SAFETY: two slices of one length, and the processor has this width.
                unsafe { x86::copy_with_width(width, to.as_mut_ptr(), from.as_ptr(), to.len()) };
            });
        }
    }
}

#[test]
fn lengths_that_differ_and_ranges_that_overlap_are_refused() {
    let copier = copier(Method::Plain, 1, false);
    let error = copier.copy(&mut [0; 3], &[0; 4], Destination::Cold).unwrap_err();
    assert_eq!(error, CopyError::LengthsDiffer { destination: 3, source_bytes: 4 });
    assert_eq!(
        Method::Plain.copy(&mut [0; 3], &[0; 2]).unwrap_err().to_string(),
        "the destination has 3 bytes and the source 2: they must have as many"
    );
    let mut bytes = pattern(100, 1);
    let before = bytes.clone();
    let base = bytes.as_mut_ptr();
    // SAFETY: both ranges are inside the vector; that they overlap is what is tested.
    let refused = unsafe { copier.copy_raw(base.wrapping_add(10), base, 50, Destination::Cold) };
    assert_eq!(refused, Err(CopyError::Overlap { len: 50 }));
    assert_eq!(bytes, before);
    let base = bytes.as_mut_ptr();
    // SAFETY: two halves.
    unsafe { copier.copy_raw(base.wrapping_add(50), base, 50, Destination::ReadSoon) }.unwrap();
    assert_eq!(bytes[50..], before[..50]);
}

#[test]
fn checksums_of_known_texts() {
    for (text, sum) in [(&b""[..], 0), (b"123456789", 0xE306_9283), (&[0; 32], 0x8A91_36AA), (&[0xFF; 32], 0x62A8_AB43)]
    {
        assert_eq!(crc32c(text), sum);
        assert_eq!(crc_model(text), sum);
    }
}

#[test]
fn teams_copy_and_sum_as_one_thread_does() {
    for method in Method::available() {
        let team = copier(method, 3, true);
        for len in [256 << 10, (1 << 20) + 77] {
            check(len, 5, 3, |to, from| team.copy(to, from, Destination::Cold).unwrap());
            check(len, 0, 9, |to, from| {
                let sum = team.copy_crc32c(to, from, Destination::Cold).unwrap();
                assert_eq!(sum, crc_model(from));
            });
        }
    }
}

#[test]
fn a_busy_team_is_not_waited_for() {
    let team = std::sync::Arc::new(copier(Method::Plain, 2, true));
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let team = team.clone();
            std::thread::spawn(move || {
                let source = pattern(300 << 10, seed);
                for _ in 0..20 {
                    let mut to = vec![0; source.len()];
                    team.copy(&mut to, &source, Destination::Cold).unwrap();
                    assert!(to == source);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Measures for real. How fast is no matter here: only that it ends, is kept and is found again.
#[cfg_attr(miri, ignore = "measures 128 MiB")]
#[test]
fn a_profile_is_measured_once_and_again_when_it_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tidekv/copy.profile");
    let new = || Copier::new(CopyOptions { profile: ProfileSource::KeptAt(path.clone()), ..CopyOptions::default() });
    let first = new();
    assert!(matches!(first.calibration(), Calibration::Measured { kept: Some(kept), .. } if *kept == path));
    let second = new();
    assert_eq!(second.calibration(), &Calibration::Loaded(path.clone()));
    assert_eq!(second.profile, first.profile);
    std::fs::write(&path, "tidekv copy profile 1\n").unwrap();
    assert!(matches!(new().calibration(), Calibration::Measured { kept: Some(_), .. }));
    assert_eq!(new().calibration(), &Calibration::Loaded(path));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 48 }, ..ProptestConfig::default() })]

    #[test]
    fn large_blocks_of_any_length_and_place(len in 0..3_000_000usize, from in 0..128usize, to in 0..128usize,
                                            method in 0..3usize, threads in 1..4usize) {
        let Some(method) = Method::available().nth(method) else { return Ok(()) };
        let copier = copier(method, threads, true);
        check(len, from, to, |to, from| copier.copy(to, from, Destination::Cold).unwrap());
    }

    #[test]
    fn the_sum_is_that_of_the_definition(len in 0..40_000usize, from in 0..64usize, method in 0..3usize) {
        let Some(method) = Method::available().nth(method) else { return Ok(()) };
        let copier = copier(method, 1, false);
        check(len, from, 0, |to, from| {
            assert_eq!(copier.copy_crc32c(to, from, Destination::ReadSoon).unwrap(), crc_model(from));
        });
    }
}
