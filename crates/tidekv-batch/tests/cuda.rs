//! Steps on a GPU: each bit equal to the CPU's, eagerly, as graphs and inside other people's graphs. Needs a GPU.

// Miri cannot load a driver.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use support::{Random, Twin, open, rounds, run};
use tidekv_batch::cuda::{CudaBatch, CudaBatchError, DataType};
use tidekv_batch::{BatchConfig, BatchError, Metadata, Padding, SeqId, Work};
use tidekv_core::units::{KernelId, Step};
use tidekv_mem::MemError;

const SMALL: BatchConfig =
    BatchConfig { block_tokens: 4, max_rows: 8, max_row_tokens: 64, max_step_tokens: 64, max_ids: 64 };

#[test]
fn a_machine_without_a_driver_gets_a_value() {
    match CudaBatch::open(0, SMALL) {
        Ok(batch) => assert_eq!(batch.step_number(), Step(0)),
        Err(CudaBatchError::Device(error @ (MemError::Unavailable { .. } | MemError::NoSuchDevice { .. }))) => {
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn more_rows_than_one_block_of_threads_plans_are_refused() {
    let refused = CudaBatch::open(0, BatchConfig { max_rows: 8193, max_step_tokens: 8193, ..SMALL }).unwrap_err();
    assert!(matches!(refused, CudaBatchError::TooManyRows { max_rows: 8193, most: 8192 }), "{refused}");
    let refused = CudaBatch::open(0, BatchConfig { block_tokens: 3, ..SMALL }).unwrap_err();
    assert!(matches!(refused, CudaBatchError::Config(_)), "{refused}");
}

/// The published vectors: one query token each, then with the prompt computed.
#[test]
fn the_vectors_of_the_specification() {
    let config = BatchConfig { max_ids: 10, ..SMALL };
    let Some(mut twin) = Twin::open("the_vectors_of_the_specification", config) else { return };
    let start = |twin: &mut Twin| {
        twin.lend(&[run(0, 10)]);
        twin.admit(1, 8, &[]).unwrap();
        twin.admit(2, 5, &[]).unwrap();
    };
    start(&mut twin);
    twin.admit(0, 6, &[]).unwrap();
    // The vector lists the new sequence first.
    for (a, b) in [(1, 0), (1, 2)] {
        twin.cpu.swap(SeqId(a), SeqId(b)).unwrap();
        twin.gpu.swap(SeqId(a), SeqId(b)).unwrap();
    }
    assert!(twin.step(Work::Decode, Padding::NONE));
    twin.compare();
    let mut found = Metadata::new(twin.cpu.shape()).unwrap();
    twin.gpu.read_back(&mut found).unwrap();
    assert_eq!(found.slot_mapping, [22, 24, 13]);
    assert_eq!((&found.seq_lens[..], &found.context_lens[..]), (&[7, 9, 6][..], &[6, 8, 5][..]));
    assert_eq!((&found.seq_start_loc[..], &found.query_start_loc[..]), (&[0, 7, 16, 22][..], &[0, 1, 2, 3][..]));
    assert_eq!(twin.cpu.free_blocks(), 3);
    twin.release(1);
    twin.admit(3, 16, &[]).unwrap();
    let ids: Vec<_> = twin.gpu.tables().blocks_of(SeqId(3)).unwrap().map(|id| id.0).collect();
    assert_eq!(ids, [7, 8, 9, 0]);

    let mut twin = Twin::open("the_vectors_of_the_specification", config).unwrap();
    start(&mut twin);
    twin.admit(0, 0, &[]).unwrap();
    for (a, b) in [(1, 0), (1, 2)] {
        twin.cpu.swap(SeqId(a), SeqId(b)).unwrap();
        twin.gpu.swap(SeqId(a), SeqId(b)).unwrap();
    }
    assert!(twin.step(Work::Rows(&[6, 1, 1]), Padding::NONE));
    twin.compare();
    twin.gpu.read_back(&mut found).unwrap();
    assert_eq!(found.slot_mapping, [16, 17, 18, 19, 20, 21, 24, 13]);
    assert_eq!((&found.query_start_loc[..], &found.seq_start_loc[..]), (&[0, 6, 7, 8][..], &[0, 6, 15, 21][..]));
}

/// Whatever an engine does, in whatever order: both sides answer the same and hold the same.
struct Engine {
    twin: Twin,
    random: Random,
    alive: Vec<u64>,
    next_seq: u64,
    /// Prefixes that may be shared: full blocks at the start of living sequences.
    prefixes: Vec<(u64, Vec<KernelId>)>,
    /// Pages of ids that can be lent, and those that are.
    pages: Vec<bool>,
    page_ids: u32,
    first_id: u32,
    longest_admission: u32,
}

impl Engine {
    fn open(test: &str, seed: u64, config: BatchConfig, pages: usize, first_id: u32) -> Option<Self> {
        let page_ids = config.max_ids / u32::try_from(pages).unwrap();
        let mut engine = Self {
            twin: Twin::open(test, config)?,
            random: Random::new(seed),
            alive: Vec::new(),
            next_seq: 0,
            prefixes: Vec::new(),
            pages: vec![false; pages],
            page_ids,
            first_id,
            longest_admission: config.max_row_tokens / 4,
        };
        engine.lend();
        Some(engine)
    }

    /// A page's ids are consecutive; pages lie apart, as in the slab layout.
    fn page(&self, page: usize) -> tidekv_batch::IdRun {
        run(self.first_id + u32::try_from(page).unwrap() * (self.page_ids + 7), self.page_ids)
    }

    fn lend(&mut self) {
        for page in 0..self.pages.len() {
            if !self.pages[page] && self.random.below(2) == 0 {
                let runs = [self.page(page)];
                let answer = self.twin.cpu.lend(&runs);
                assert_eq!(self.twin.gpu.lend(&runs), answer);
                self.pages[page] = answer.is_ok();
            }
        }
    }

    fn withdraw(&mut self) {
        let page = self.random.below(u32::try_from(self.pages.len()).unwrap()) as usize;
        let runs = [self.page(page)];
        let answer = self.twin.cpu.withdraw(&runs);
        assert_eq!(self.twin.gpu.withdraw(&runs), answer);
        if answer.is_ok() {
            self.pages[page] = false;
        }
    }

    fn admit(&mut self) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let mut tokens = self.random.below(self.longest_admission);
        let mut shared = Vec::new();
        if !self.prefixes.is_empty() && self.random.below(3) == 0 {
            let pick = self.random.below(u32::try_from(self.prefixes.len()).unwrap()) as usize;
            shared.clone_from(&self.prefixes[pick].1);
            tokens = tokens.max(u32::try_from(shared.len()).unwrap() * self.twin.cpu.shape().config().block_tokens);
        }
        if self.random.below(4) == 0 && shared.is_empty() {
            tokens = 0;
        }
        if self.twin.admit(seq, tokens, &shared).is_ok() {
            self.alive.push(seq);
        }
    }

    fn pick(&mut self) -> Option<u64> {
        let count = u32::try_from(self.alive.len()).unwrap();
        (count > 0).then(|| self.alive[self.random.below(count) as usize])
    }

    fn forget(&mut self, seq: u64) {
        self.alive.retain(|&alive| alive != seq);
        self.prefixes.retain(|&(owner, _)| owner != seq);
    }

    fn leave(&mut self) {
        let Some(seq) = self.pick() else { return };
        if self.random.below(3) > 0 {
            self.twin.release(seq);
        } else {
            let (mut cpu, mut gpu) = (Vec::new(), Vec::new());
            let left = self.twin.cpu.preempt(SeqId(seq), &mut cpu);
            assert_eq!(self.twin.gpu.preempt(SeqId(seq), &mut gpu), left);
            assert_eq!(gpu, cpu);
            // The pool lends them again, one by one.
            let runs: Vec<_> = cpu.iter().map(|id| run(id.0, 1)).collect();
            self.twin.lend(&runs);
        }
        self.forget(seq);
    }

    fn share(&mut self) {
        let Some(seq) = self.pick() else { return };
        let blocks = self.random.below(4);
        let (mut cpu, mut gpu) = (Vec::new(), Vec::new());
        let answer = self.twin.cpu.share(SeqId(seq), blocks, &mut cpu);
        assert_eq!(self.twin.gpu.share(SeqId(seq), blocks, &mut gpu), answer);
        assert_eq!(gpu, cpu);
        if answer.is_ok() && !cpu.is_empty() {
            self.prefixes.push((seq, cpu));
        }
    }

    fn rearrange(&mut self) {
        let (Some(a), Some(b)) = (self.pick(), self.pick()) else { return };
        match self.random.below(2) {
            0 => {
                self.twin.cpu.swap(SeqId(a), SeqId(b)).unwrap();
                self.twin.gpu.swap(SeqId(a), SeqId(b)).unwrap();
            }
            _ => {
                let tokens = self.random.below(self.longest_admission);
                let answer = self.twin.cpu.truncate(SeqId(a), tokens);
                assert_eq!(self.twin.gpu.truncate(SeqId(a), tokens), answer);
            }
        }
    }

    fn step(&mut self) {
        let config = *self.twin.cpu.shape().config();
        let padding = match self.random.below(3) {
            0 => Padding::NONE,
            1 => Padding::decode(self.random.below(config.max_rows + 1)),
            _ => Padding {
                rows: self.random.below(config.max_rows + 1),
                tokens: self.random.below(config.max_step_tokens + 1),
            },
        };
        let mut query = Vec::new();
        let work = match self.random.below(3) {
            0 => {
                let batch = self.twin.cpu.batch();
                let each = [2, 40, 300][self.random.below(3) as usize].min(config.max_step_tokens / batch.max(1));
                query.extend((0..batch).map(|_| self.random.below(each + 1)));
                Work::Rows(&query)
            }
            _ => Work::Decode,
        };
        if !self.twin.step(work, padding) {
            self.leave();
        } else if self.random.below(4) == 0 {
            self.twin.compare_metadata();
        }
    }

    fn run(&mut self, operations: usize) {
        for _ in 0..operations {
            match self.random.below(20) {
                0..4 => {
                    // Now and then many at once, so that batches become large.
                    let many = self.random.below(self.twin.cpu.shape().config().max_rows / 4 + 2);
                    (0..many).for_each(|_| self.admit());
                }
                4..6 => self.leave(),
                6 => self.share(),
                7 => self.rearrange(),
                8 => self.lend(),
                9 => self.withdraw(),
                10 => {
                    let count = self.random.below(3);
                    let (mut cpu, mut gpu) = (Vec::new(), Vec::new());
                    self.twin.cpu.take_back(count, &mut cpu);
                    self.twin.gpu.take_back(count, &mut gpu);
                    assert_eq!(gpu, cpu);
                    self.twin.lend(&cpu.iter().map(|id| run(id.0, 1)).collect::<Vec<_>>());
                }
                _ => self.step(),
            }
        }
        if self.twin.step(Work::Decode, Padding::NONE) {
            self.twin.compare_metadata();
        }
        // A step that was refused sent nothing.
        self.twin.gpu.flush().unwrap();
        self.twin.compare_tables();
    }
}

#[test]
fn any_sequence_of_operations_gives_the_cpus_bits() {
    let test = "any_sequence_of_operations_gives_the_cpus_bits";
    let cases =
        [13, 61, 300, 2100].into_iter().flat_map(|max_rows| [1, 16, 64].map(|block_tokens| (max_rows, block_tokens)));
    for (seed, (max_rows, block_tokens)) in (1..).zip(cases) {
        // Ids for half of what the rows would like to hold: shortages happen.
        let max_ids = max_rows * 250 / block_tokens;
        let config =
            BatchConfig { block_tokens, max_rows, max_row_tokens: 1500, max_step_tokens: 3 * max_rows + 1000, max_ids };
        let Some(mut engine) = Engine::open(test, seed, config, 20, 5) else { return };
        engine.run(rounds(400));
    }
}

/// More rows than a block has threads, and the most there may be.
#[test]
fn large_batches_give_the_cpus_bits() {
    let test = "large_batches_give_the_cpus_bits";
    for (seed, max_rows) in [(100, 1023), (101, 1024), (102, 2100), (103, 8192)] {
        let config = BatchConfig {
            block_tokens: 16,
            max_rows,
            max_row_tokens: 2048,
            max_step_tokens: 20_000,
            max_ids: max_rows * 16,
        };
        let Some(mut twin) = Twin::open(test, config) else { return };
        twin.lend(&[run(0, config.max_ids)]);
        let mut random = Random::new(seed);
        for seq in 0..u64::from(max_rows) {
            twin.admit(seq, random.below(80), &[]).unwrap();
        }
        for _ in 0..rounds(40) {
            twin.step(Work::Decode, Padding::NONE);
            twin.compare_metadata();
            let query: Vec<_> = (0..max_rows).map(|_| random.below(3)).collect();
            twin.step(Work::Rows(&query), Padding { rows: 0, tokens: 19_999 });
            twin.compare_metadata();
        }
        twin.compare_tables();
    }
}

/// Ids times tokens in a block go beyond 32 bits long before ids do.
#[test]
fn slots_have_64_bits() {
    let config = BatchConfig { block_tokens: 64, max_ids: 32, ..SMALL };
    let Some(mut twin) = Twin::open("slots_have_64_bits", config) else { return };
    twin.lend(&[run((1 << 31) - 32, 32)]);
    twin.admit(0, 60, &[]).unwrap();
    twin.admit(1, 0, &[]).unwrap();
    assert!(twin.step(Work::Rows(&[1, 40]), Padding::NONE));
    twin.compare();
    assert!(twin.step(Work::Decode, Padding::NONE));
    twin.compare();
    let mut found = Metadata::new(twin.cpu.shape()).unwrap();
    twin.gpu.read_back(&mut found).unwrap();
    assert!(found.slot_mapping.iter().all(|&slot| slot > 1 << 36), "{:?}", found.slot_mapping);
}

#[test]
fn an_empty_batch_is_a_step_too() {
    let Some(mut twin) = Twin::open("an_empty_batch_is_a_step_too", SMALL) else { return };
    for padding in [Padding::NONE, Padding::decode(8), Padding { rows: 3, tokens: 64 }] {
        for work in [Work::Decode, Work::Rows(&[])] {
            assert!(twin.step(work, padding));
            twin.compare();
        }
    }
}

#[test]
fn a_shortage_launches_nothing_and_leaves_everything() {
    let config = BatchConfig { max_ids: 8, ..SMALL };
    let Some(mut twin) = Twin::open("a_shortage_launches_nothing_and_leaves_everything", config) else { return };
    twin.lend(&[run(0, 4)]);
    for seq in 0..4 {
        twin.admit(seq, 4, &[]).unwrap();
    }
    let before = twin.gpu.step_number();
    assert!(!twin.step(Work::Decode, Padding::NONE));
    assert!(!twin.step(Work::Rows(&[0, 0, 0, 9]), Padding::NONE));
    let refused = twin.gpu.step(Work::Decode, Padding::NONE).unwrap_err();
    assert!(refused.is_transient(), "{refused}");
    assert!(matches!(refused, CudaBatchError::Batch(BatchError::Shortage { needed: 4, free: 0 })), "{refused}");
    let mut graph = twin.gpu.capture_decode(Padding::NONE, 1).unwrap();
    assert!(twin.gpu.launch(&mut graph).unwrap_err().is_transient());
    assert_eq!(twin.gpu.step_number(), before);
    twin.lend(&[run(4, 4)]);
    assert!(twin.step(Work::Decode, Padding::NONE));
    twin.compare();
}

/// 1,000 steps as graph launches beside the same steps launched one by one, and beside the CPU; sequences come and go, and the pool
/// grows and shrinks, without a new capture.
#[test]
fn a_thousand_replays_are_a_thousand_steps() {
    let test = "a_thousand_replays_are_a_thousand_steps";
    let config =
        BatchConfig { block_tokens: 16, max_rows: 300, max_row_tokens: 4096, max_step_tokens: 300, max_ids: 60_000 };
    let Some(mut eager) = Twin::open(test, config) else { return };
    let mut replayed = Twin::open(test, config).unwrap();
    let padding = Padding::decode(256);
    let mut graph = replayed.gpu.capture_decode(padding, 1).unwrap();
    let mut random = Random::new(7);
    for twin in [&mut eager, &mut replayed] {
        twin.lend(&[run(0, 40_000)]);
    }
    for seq in 0..200 {
        let tokens = random.below(700);
        eager.admit(seq, tokens, &[]).unwrap();
        replayed.admit(seq, tokens, &[]).unwrap();
    }
    let steps = rounds(1000);
    for step in 0..steps {
        assert!(eager.step(Work::Decode, padding));
        replayed.gpu.launch(&mut graph).unwrap();
        replayed.mirror_decode(padding);
        let round = u64::try_from(step).unwrap();
        for twin in [&mut eager, &mut replayed] {
            match step % 40 {
                9 => drop(twin.release(round / 40)),
                19 => drop(twin.admit(1000 + round, 33, &[]).unwrap()),
                29 => twin.lend(&[run(100_000 + u32::try_from(step).unwrap() * 100, 100)]),
                39 => {
                    let page = [run(100_000 + u32::try_from(step - 10).unwrap() * 100, 100)];
                    let answer = twin.cpu.withdraw(&page);
                    assert_eq!(twin.gpu.withdraw(&page), answer);
                }
                _ => {}
            }
        }
        if step % 100 == 50 {
            eager.compare_metadata();
            replayed.compare_metadata();
        }
    }
    assert!(eager.step(Work::Decode, padding));
    replayed.gpu.launch(&mut graph).unwrap();
    replayed.mirror_decode(padding);
    eager.compare();
    replayed.compare();
    assert_eq!(eager.gpu.read_back_table().unwrap().len(), replayed.gpu.read_back_table().unwrap().len());
    assert_eq!(replayed.gpu.step_number(), Step(u64::try_from(steps).unwrap() + 1));
}

#[test]
fn a_graph_of_many_steps_is_many_steps() {
    let config =
        BatchConfig { block_tokens: 16, max_rows: 100, max_row_tokens: 400, max_step_tokens: 100, max_ids: 2000 };
    let Some(mut twin) = Twin::open("a_graph_of_many_steps_is_many_steps", config) else { return };
    twin.lend(&[run(0, 1500)]);
    for seq in 0..100 {
        twin.admit(seq, u32::try_from(seq).unwrap(), &[]).unwrap();
    }
    let mut graph = twin.gpu.capture_decode(Padding::NONE, 101).unwrap();
    let free = twin.cpu.free_blocks();
    twin.gpu.launch(&mut graph).unwrap();
    (0..101).for_each(|_| twin.mirror_decode(Padding::NONE));
    twin.compare();
    // 700 more in the worst case; there may be fewer, and then nothing is launched.
    let refused = twin.gpu.launch(&mut graph);
    match twin.cpu.free_blocks() {
        700.. => refused.unwrap(),
        _ => assert!(refused.unwrap_err().is_transient(), "{free} free before"),
    }
    twin.gpu.check().unwrap();
}

/// Launches far ahead of the device, each with changes to send: pinned slots are written again only when the device is done with them.
#[test]
fn slots_are_not_overwritten_under_a_slow_device() {
    let test = "slots_are_not_overwritten_under_a_slow_device";
    let config = BatchConfig {
        block_tokens: 16,
        max_rows: 64,
        max_row_tokens: 20_000,
        max_step_tokens: 16_384,
        max_ids: 60_000,
    };
    let Some(mut twin) = Twin::open(test, config) else { return };
    twin.lend(&[run(0, 60_000)]);
    let mut random = Random::new(3);
    for round in 0..u64::try_from(rounds(500)).unwrap() {
        if round >= 48 {
            twin.release(round - 48);
        }
        twin.admit(round, 0, &[]).unwrap();
        let query: Vec<_> =
            twin.cpu.lens().iter().map(|&len| if len == 0 { 8000 + random.below(8000) } else { 1 }).collect();
        assert!(twin.step(Work::Rows(&query), Padding::NONE));
        assert!(twin.step(Work::Decode, Padding::NONE));
    }
    twin.compare();
}

/// One change larger than a slot: through several.
#[test]
fn changes_of_any_size_arrive() {
    let config =
        BatchConfig { block_tokens: 1, max_rows: 16, max_row_tokens: 20_000, max_step_tokens: 64, max_ids: 200_000 };
    let Some(mut twin) = Twin::open("changes_of_any_size_arrive", config) else { return };
    // Every second id: no two are consecutive, so each is a run.
    let scattered: Vec<_> = (0..60_000).map(|id| run(2 * id, 1)).collect();
    twin.lend(&scattered);
    twin.lend(&[run(1_000_000, 100_000)]);
    for seq in 0..8 {
        twin.admit(seq, 15_000, &[]).unwrap();
    }
    assert!(twin.step(Work::Decode, Padding::NONE));
    twin.compare();
    twin.release(3);
    twin.admit(9, 20_000 - 1, &[]).unwrap();
    assert!(twin.step(Work::Decode, Padding::NONE));
    twin.compare();
}

#[test]
fn an_update_and_a_pack_are_a_step() {
    let Some(mut twin) = Twin::open("an_update_and_a_pack_are_a_step", SMALL) else { return };
    twin.lend(&[run(10, 40)]);
    for seq in 0..5 {
        twin.admit(seq, 2 * u32::try_from(seq).unwrap(), &[]).unwrap();
    }
    assert!(matches!(twin.gpu.pack_decode(Padding::NONE), Err(CudaBatchError::Batch(BatchError::NothingToPack))));
    for padding in [Padding::NONE, Padding::decode(8), Padding { rows: 6, tokens: 20 }].repeat(3) {
        twin.gpu.update_decode().unwrap();
        twin.gpu.pack_decode(padding).unwrap();
        twin.mirror_decode(padding);
        twin.compare();
    }
    twin.admit(9, 3, &[]).unwrap();
    assert!(twin.gpu.pack_decode(Padding::NONE).is_err());
}

#[test]
fn outputs_are_tensors_at_addresses_that_stay() {
    let Some(mut batch) = open("outputs_are_tensors_at_addresses_that_stay", SMALL) else { return };
    batch.lend(&[run(0, 64)]).unwrap();
    batch.admit(SeqId(1), 9, &[]).unwrap();
    batch.step(Work::Decode, Padding { rows: 4, tokens: 6 }).unwrap();
    let first = batch.outputs();
    assert_eq!((first.slot_mapping.shape[0], first.slot_mapping.data_type), (6, DataType::I64));
    assert_eq!((first.seq_lens.shape[0], first.seq_start_loc.shape[0]), (4, 5));
    assert_eq!((first.block_tables.shape, first.block_tables.dimensions), ([4, 3], 2));
    assert_eq!(first.block_tables.strides, [i64::from(batch.tables().shape().stride()), 1]);
    batch.lend(&[]).unwrap();
    batch.admit(SeqId(2), 1, &[]).unwrap();
    batch.step(Work::Rows(&[1, 5]), Padding::NONE).unwrap();
    let second = batch.outputs();
    assert_eq!(
        (first.slot_mapping.address, first.block_tables.address),
        (second.slot_mapping.address, second.block_tables.address)
    );
    assert_eq!(second.slot_mapping.shape[0], 6);
}

#[test]
fn a_fence_is_over_when_its_steps_are() {
    let Some(mut batch) = open("a_fence_is_over_when_its_steps_are", SMALL) else { return };
    batch.lend(&[run(0, 64)]).unwrap();
    batch.admit(SeqId(1), 1, &[]).unwrap();
    batch.step(Work::Decode, Padding::NONE).unwrap();
    let fence = batch.fence().unwrap();
    assert_eq!(fence.step(), Step(1));
    fence.wait().unwrap();
    assert!(fence.is_over().unwrap());
}

#[test]
fn a_graph_of_another_batch_is_refused() {
    let test = "a_graph_of_another_batch_is_refused";
    let Some(mut batch) = open(test, SMALL) else { return };
    let mut graph = open(test, SMALL).unwrap().capture_decode(Padding::decode(8), 1).unwrap();
    assert!(matches!(batch.launch(&mut graph), Err(CudaBatchError::ForeignGraph)));
    assert!(matches!(
        batch.capture_decode(Padding::decode(9), 1),
        Err(CudaBatchError::Batch(BatchError::PaddingTooLarge { .. }))
    ));
}

/// A step that nobody announced: the mirror does not know of it, and says so.
#[test]
fn a_device_that_went_its_own_way_is_found_out() {
    let Some(mut batch) = open("a_device_that_went_its_own_way_is_found_out", SMALL) else { return };
    batch.lend(&[run(0, 64)]).unwrap();
    batch.admit(SeqId(1), 1, &[]).unwrap();
    batch.step(Work::Decode, Padding::NONE).unwrap();
    // SAFETY: the batch's own stream; not announcing it is what is being tested, and leaves memory in order.
    unsafe { batch.enqueue_decode(batch.stream(), Padding::NONE) }.unwrap();
    let refused = batch.check().unwrap_err();
    assert!(matches!(refused, CudaBatchError::Apart { device_step: 2, host_step: 1, .. }), "{refused}");
}
