//! The searches that an arena does without.

use super::Plan;
use super::tree::SegmentMap;
use crate::random::Random;
use crate::shm::chunks::{Chunks, chunk_len, clock_ns};
use std::time::{Duration, Instant};

/// Bytes of a request.
const REQUEST: u64 = 4096;
/// Half of what a process can address: all segments have room with gaps between them.
pub(super) const MAX_ADDRESSES_MB: u64 = (1 << 46) >> 20;
const FIRST_ADDRESS: u64 = 1 << 32;
const LAST_ADDRESS: u64 = 1 << 47;
/// Where segments are in this process, and where the window of the arithmetic begins: nobody goes there.
const LOCAL: u64 = 0x2000_0000_0000;
const WINDOW: u64 = 0x1_0000_0000;

/// A pass is repeated until this is over, and made once at least.
const TIME: Duration = Duration::from_millis(200);
const MAX_PASSES: usize = 100;

/// Times of one strategy.
#[derive(Debug)]
pub(super) struct Search {
    /// The heading of its section.
    pub(super) heading: &'static str,
    /// Its key in the summary.
    pub(super) key: &'static str,
    pub(super) chunks: Chunks,
    pub(super) found: u64,
    pub(super) wrong: u64,
}

/// An address, and where it ought to lead.
#[derive(Clone, Copy, Debug)]
struct Request {
    address: u64,
    expected: u64,
}

/// The segments of a run, and what is looked for in them.
struct Scene {
    map: SegmentMap,
    by_map: Vec<Request>,
    by_arithmetic: Vec<Request>,
    window_len: u64,
}

impl Scene {
    fn new(plan: &Plan) -> Self {
        let len = u64::from(plan.segment_size_mb) << 20;
        let mut random = Random::seeded(plan.seed);
        let bases = bases(plan.num_segments as usize, len, &mut random);
        let mut segments = Vec::new();
        let mut local = LOCAL;
        for base in bases {
            segments.push((base, len, local));
            local += len;
        }
        let (mut by_map, mut by_arithmetic) = (Vec::new(), Vec::new());
        for _ in 0..plan.num_lookups {
            let (base, len, local) = segments[random.below(segments.len())];
            let offset = random.next_word() % (len - REQUEST + 1);
            let expected = local + offset;
            by_map.push(Request { address: base + offset, expected });
            by_arithmetic.push(Request { address: WINDOW + (local - LOCAL) + offset, expected });
        }
        let window_len = len * u64::from(plan.num_segments);
        Self { map: SegmentMap::new(&segments), by_map, by_arithmetic, window_len }
    }
}

/// Bases that do not overlap: every segment has a place of its own, somewhere in which it begins. In random order.
fn bases(count: usize, len: u64, random: &mut Random) -> Vec<u64> {
    let place = (LAST_ADDRESS - FIRST_ADDRESS) / count as u64;
    let mut bases: Vec<u64> =
        (0..count as u64).map(|index| FIRST_ADDRESS + index * place + random.next_word() % (place - len + 1)).collect();
    random.shuffle(&mut bases);
    bases
}

pub(super) fn measure(plan: &Plan) -> Vec<Search> {
    let scene = Scene::new(plan);
    let (len, clock) = (chunk_len(plan.num_lookups as usize), clock_ns());
    let (base, end) = (WINDOW, scene.window_len);
    vec![
        search("Linear Scan (Current Mooncake Implementation)", "linear", &scene.by_map, len, clock, |address| {
            scene.map.walk(address, REQUEST)
        }),
        search("Map Lower Bound (O(log n))", "tree", &scene.by_map, len, clock, |address| {
            scene.map.search(address, REQUEST)
        }),
        search(
            "Arithmetic Translation (O(1) - Flow-IPC Style)",
            "arithmetic",
            &scene.by_arithmetic,
            len,
            clock,
            |address| {
                let offset = address.wrapping_sub(base);
                (offset < end && offset + REQUEST <= end).then_some(LOCAL + offset)
            },
        ),
    ]
}

fn search(
    heading: &'static str,
    key: &'static str,
    requests: &[Request],
    len: usize,
    clock: f64,
    find: impl Fn(u64) -> Option<u64>,
) -> Search {
    let answers = requests.iter().map(|request| (find(request.address), request.expected));
    let (mut found, mut wrong) = (0, 0);
    for (answer, expected) in answers {
        found += u64::from(answer.is_some());
        wrong += u64::from(answer != Some(expected));
    }
    let mut chunks = Chunks::new(len, clock);
    let started = Instant::now();
    for _ in 0..MAX_PASSES {
        // Whole chunks only: a shorter one would count as a fast one.
        for chunk in requests.chunks_exact(len) {
            // The sum of all answers: right only if each is, as far as a sum can tell.
            let sum = chunks.time(|| sum(chunk.iter().map(|request| find(request.address).unwrap_or(0))));
            wrong += u64::from(sum != self::sum(chunk.iter().map(|request| request.expected)));
        }
        if started.elapsed() > TIME {
            break;
        }
    }
    Search { heading, key, chunks, found, wrong }
}

fn sum(answers: impl Iterator<Item = u64>) -> u64 {
    answers.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::HugePageKind;

    fn plan(num_segments: u32, seed: u64) -> Plan {
        Plan { num_segments, num_lookups: 700, segment_size_mb: 64, seed, hugepages: HugePageKind::Off }
    }

    #[test]
    fn every_strategy_finds_everything() {
        for segments in [1, 2, 37, 1000] {
            for search in measure(&plan(segments, 1)) {
                assert_eq!((search.found, search.wrong), (700, 0), "{} in {segments}", search.key);
                assert!(search.chunks.figure().is_some());
            }
        }
    }

    #[test]
    fn the_seed_decides() {
        let addresses = |seed| Scene::new(&plan(100, seed)).by_map.iter().map(|r| r.address).collect::<Vec<_>>();
        assert_eq!(addresses(3), addresses(3));
        assert_ne!(addresses(3), addresses(4));
    }

    #[test]
    fn segments_never_overlap() {
        let len = 64 << 20;
        let mut bases = bases(10_000, len, &mut Random::new());
        bases.sort_unstable();
        assert!(bases.windows(2).all(|pair| pair[0] + len <= pair[1]));
        assert!(bases[0] >= FIRST_ADDRESS && bases[9999] + len <= LAST_ADDRESS);
    }

    #[test]
    fn a_strategy_that_errs_is_noticed() {
        let requests = [Request { address: 1, expected: 11 }, Request { address: 2, expected: 12 }];
        let bad = search("bad", "bad", &requests, 2, 0.0, |address| (address == 1).then_some(11));
        assert_eq!(bad.found, 1);
        assert!(bad.wrong >= 2, "by itself and by the sum: {}", bad.wrong);
    }
}
