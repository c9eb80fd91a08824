//! The blocks that an engine holds, as memory.
//!
//! ```text
//!   pool (private) ── alloc ──> held: one bit per kernel id ── free ──> pool
//!                                  │
//!     processor: layer(l).keys(id), .values(id): [block_tokens][kv_heads][head_size] of f32
//!     GPU:       on_device(): where each layer's keys and values begin, for kernels
//! ```
//!
//! A block's page stays mapped while the block is leased, so "held here" proves that its bytes can be touched. That
//! holds because nobody else can end a lease: the pool's handle never leaves this file ([`KvGauge`] only looks), frees
//! need `&mut`, and every access asks the bit first.

use std::ptr::NonNull;
use std::time::Duration;

use tidekv_core::pages::Fence;
use tidekv_core::units::{BlockIndex, Buffer, Bytes, KernelId, LayerIndex, PageId, Step};
use tidekv_pool::{KvPool, PoolConfig, PoolError, PoolSnapshot, ReclaimRequest};

/// Bytes of an element on the processor.
const ELEMENT: u64 = size_of::<f32>() as u64;

/// Why the memory for K and V cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvStoreError {
    /// The pool could not be opened, or a setting of it is wrong.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Memory that the processor cannot touch, or blocks that are not packed 32-bit floats.
    #[error("the processor cannot compute in this pool: it needs host memory, the slab layout and 4-byte elements")]
    NotForTheProcessor,
    /// Memory that kernels cannot touch, or blocks that are not packed.
    #[error("the GPU cannot compute in this pool: it needs memory of the GPU and the slab layout")]
    NotForTheGpu,
}

/// Where the pool's memory is.
#[derive(Clone, Copy, Debug)]
enum Home {
    Host(NonNull<u8>),
    /// Its address on the device.
    Device(u64),
}

/// One layer's keys and values as kernels find them: token `slot` begins `slot * token_elements` elements behind each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLayer {
    /// Address of the keys of slot 0.
    pub keys: u64,
    /// Address of the values of slot 0.
    pub values: u64,
}

/// Blocks of a pool that belong to one engine, and the bytes of each.
#[derive(Debug)]
pub struct KvStore {
    pool: KvPool,
    home: Home,
    /// Bit `id % 64` of word `id / 64`: the block is leased, by us.
    held: Box<[u64]>,
    held_blocks: u32,
    /// Byte offsets of each layer's keys and values.
    layers: Box<[(u64, u64)]>,
    /// Elements of one token's keys, and of its values.
    token_elements: usize,
    block_tokens: usize,
    step: u64,
}

// SAFETY: `home` is the address of the pool's reservation, which is memory of the whole process and lives as long as
// `pool`; nothing about it belongs to a thread.
unsafe impl Send for KvStore {}
// SAFETY: through `&KvStore` the memory is only read, and every write needs `&mut KvStore`.
unsafe impl Sync for KvStore {}

/// One layer's keys and values.
#[derive(Clone, Copy, Debug)]
pub struct LayerKv<'a> {
    store: &'a KvStore,
    keys: u64,
    values: u64,
}

/// Looks at a pool and cannot change its blocks.
#[derive(Clone, Debug)]
pub struct KvGauge {
    pool: KvPool,
}

impl KvGauge {
    /// Everything there is to know, at one moment.
    pub fn snapshot(&self) -> PoolSnapshot {
        self.pool.snapshot()
    }
}

/// Opening and looking.
impl KvStore {
    /// Opens a pool for the processor to compute in.
    ///
    /// # Errors
    /// As [`KvPool::open`], and [`KvStoreError::NotForTheProcessor`].
    pub fn open(config: PoolConfig) -> Result<Self, KvStoreError> {
        Self::open_with(config, KvStoreError::NotForTheProcessor, |address, is_host, element_bytes| {
            // The region exposed its address when it said it as a number.
            let base = usize::try_from(address).ok().map(std::ptr::with_exposed_provenance_mut::<u8>);
            base.and_then(NonNull::new).filter(|_| is_host && element_bytes == ELEMENT).map(Home::Host)
        })
    }

    /// Opens a pool for a GPU to compute in.
    ///
    /// # Errors
    /// As [`KvPool::open`], and [`KvStoreError::NotForTheGpu`].
    pub fn open_on_device(config: PoolConfig) -> Result<Self, KvStoreError> {
        Self::open_with(config, KvStoreError::NotForTheGpu, |address, is_host, _| {
            (!is_host).then_some(Home::Device(address))
        })
    }

    /// `home` decides by the address, whether the processor can touch it, and the bytes of an element.
    fn open_with(
        config: PoolConfig,
        unfit: KvStoreError,
        home: impl FnOnce(u64, bool, u64) -> Option<Home>,
    ) -> Result<Self, KvStoreError> {
        let pool = KvPool::open(config)?;
        let geometry = *pool.geometry();
        let block_bytes = geometry.shape().block_bytes(Buffer::Key).map_err(PoolError::from)?;
        let block_tokens = geometry.shape().block_tokens as usize;
        let element = u64::from(geometry.shape().element_bytes).max(1);
        let mut layers = Vec::new();
        for layer in 0..geometry.shape().layers {
            let view = |buffer| geometry.layer_view(LayerIndex(layer), buffer).map_err(PoolError::from);
            let (keys, values) = (view(Buffer::Key)?, view(Buffer::Value)?);
            // Slots are ids times tokens only where blocks follow each other without gaps.
            let is_packed = keys.id_stride == block_bytes && keys.block_bytes == values.block_bytes;
            if !is_packed || keys.offset.0 % element != 0 || values.offset.0 % element != 0 {
                return Err(unfit);
            }
            layers.push((keys.offset.0, values.offset.0));
        }
        let at = pool
            .reservation()
            .map(|reservation| (reservation.base_address(), reservation.backend().capabilities().host_accessible));
        let home = at.and_then(|(address, is_host)| home(address, is_host, element)).ok_or(unfit)?;
        let token_elements = usize::try_from(block_bytes.0 / element).unwrap_or(usize::MAX) / block_tokens;
        let held = vec![0; geometry.id_count().div_ceil(64) as usize].into_boxed_slice();
        let layers = layers.into_boxed_slice();
        Ok(Self { pool, home, held, held_blocks: 0, layers, token_elements, block_tokens, step: 0 })
    }

    /// Where each layer is on the device; `None` for memory of the host.
    pub fn on_device(&self) -> Option<impl ExactSizeIterator<Item = DeviceLayer>> {
        let Home::Device(base) = self.home else { return None };
        let at = move |&(keys, values): &(u64, u64)| DeviceLayer { keys: base + keys, values: base + values };
        Some(self.layers.iter().map(at))
    }

    /// Elements of one token's keys in a layer, and of its values.
    pub fn token_elements(&self) -> usize {
        self.token_elements
    }

    /// Bytes of one element of K and V.
    pub fn element_bytes(&self) -> u32 {
        self.pool.geometry().shape().element_bytes
    }

    /// For whoever only looks.
    pub fn gauge(&self) -> KvGauge {
        KvGauge { pool: self.pool.clone() }
    }

    /// Blocks that are held.
    pub fn held_blocks(&self) -> u32 {
        self.held_blocks
    }

    /// All blocks of the reservation.
    pub fn block_count(&self) -> u32 {
        self.pool.geometry().block_count()
    }

    /// Blocks of one page.
    pub fn blocks_per_page(&self) -> u32 {
        self.pool.geometry().blocks_per_page()
    }

    /// What one page costs.
    pub fn page_bytes(&self) -> Bytes {
        self.pool.geometry().page_bytes()
    }

    /// Tokens of one block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Whether a block is held.
    pub fn holds(&self, id: KernelId) -> bool {
        self.held.get(id.0 as usize / 64).is_some_and(|word| word >> (id.0 % 64) & 1 == 1)
    }

    /// The page of a block.
    pub fn page_of(&self, id: KernelId) -> Option<PageId> {
        let block = self.pool.geometry().block_of(id)?;
        self.pool.geometry().page_of(block).ok()
    }

    /// Blocks in use on each of these pages.
    pub fn occupancy(&self, pages: &[PageId]) -> Vec<u32> {
        self.pool.occupancy(pages)
    }

    /// Blocks that an allocation may hope for.
    pub fn available(&self) -> u32 {
        self.pool.available()
    }

    /// Blocks that fit under the limit in force.
    pub fn limit_blocks(&self) -> u32 {
        let snapshot = self.pool.snapshot();
        snapshot.shrink_target_blocks.min(snapshot.total_blocks)
    }

    /// Says how many blocks are only kept in case they are asked for again.
    pub fn set_evictable(&self, blocks: u32) {
        self.pool.set_evictable(blocks);
    }

    /// What the pool asks to be freed.
    pub fn reclaim_requested(&self) -> ReclaimRequest {
        self.pool.reclaim_requested()
    }

    /// Calls `callback` on another thread whenever that changes.
    pub fn on_reclaim(&self, callback: impl Fn() + Send + 'static) {
        self.pool.on_reclaim(move |_| callback());
    }
}

/// Blocks.
impl KvStore {
    /// Leases `count` blocks and appends their ids to `out`, all or none; waits so long for neighbours.
    ///
    /// # Errors
    /// As [`KvPool::alloc_within`].
    pub fn alloc(&mut self, count: u32, wait: Duration, out: &mut Vec<KernelId>) -> Result<(), PoolError> {
        let mut leases = Vec::with_capacity(count as usize);
        self.pool.alloc_within(count, wait, &mut leases)?;
        for lease in leases {
            let id = self.pool.kernel_id(lease)?;
            self.held[id.0 as usize / 64] |= 1 << (id.0 % 64);
            out.push(id);
        }
        self.held_blocks += count;
        Ok(())
    }

    /// Lets neighbours know that so many blocks will be allocated soon.
    ///
    /// # Errors
    /// As [`KvPool::ask`].
    pub fn ask(&self, count: u32) -> Result<(), PoolError> {
        self.pool.ask(count)
    }

    /// Takes back what was asked for, if others wait too.
    ///
    /// # Errors
    /// As [`KvPool::give_way`].
    pub fn give_way(&self) -> Result<bool, PoolError> {
        self.pool.give_way()
    }

    /// Ends the leases of `ids`, all of which are held.
    ///
    /// # Errors
    /// As [`KvPool::free`]; then nothing was freed.
    pub fn free(&mut self, ids: &[KernelId]) -> Result<(), PoolError> {
        let block = |&id: &KernelId| self.pool.geometry().block_of(id).filter(|_| self.holds(id));
        let blocks: Vec<BlockIndex> = ids.iter().map(|id| block(id).expect("only what is held is freed")).collect();
        // The bits first: should the pool refuse, the blocks are lost rather than touched.
        for id in ids {
            self.held[id.0 as usize / 64] &= !(1 << (id.0 % 64));
        }
        self.held_blocks -= u32::try_from(ids.len()).expect("not more than blocks");
        self.pool.free_blocks(&blocks, Fence::Step(Step(self.step)))
    }

    /// A step begins: what is freed from now on may be read until it has [ended](Self::end_step).
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// The step is over.
    pub fn end_step(&mut self) {
        self.pool.step_completed(Step(self.step));
    }

    /// Sets what is kept for the pool whatever neighbours want; says what it was.
    ///
    /// # Errors
    /// As [`KvPool::set_floor`].
    pub fn set_floor(&self, bytes: Bytes) -> Result<Bytes, PoolError> {
        self.pool.set_floor(bytes)
    }

    /// Gives every idle page back now.
    ///
    /// # Errors
    /// As [`KvPool::trim`].
    pub fn trim(&self) -> Result<Bytes, PoolError> {
        self.pool.trim()
    }
}

/// Bytes.
impl KvStore {
    /// One layer's keys and values, to read.
    ///
    /// # Panics
    /// For a layer that the pool does not have.
    pub fn layer(&self, layer: usize) -> LayerKv<'_> {
        let (keys, values) = self.layers[layer];
        LayerKv { store: self, keys, values }
    }

    /// Writes one token's keys and values of a layer.
    ///
    /// # Panics
    /// For a slot whose block is not held, a layer that is not there, and rows of another size.
    pub fn write(&mut self, layer: usize, slot: i64, key: &[f32], value: &[f32]) {
        let (keys, values) = self.layers[layer];
        let slot = usize::try_from(slot).expect("padding is not written");
        let (id, place) = (slot / self.block_tokens, slot % self.block_tokens);
        let id = KernelId(u32::try_from(id).expect("ids have 31 bits"));
        for (buffer, row) in [(keys, key), (values, value)] {
            assert_eq!(row.len(), self.token_elements, "a token has one size");
            let block = self.block(buffer, id);
            // SAFETY: `block` is the start of `block_tokens * token_elements` elements of memory that is mapped and ours
            // (see `block`), and `place < block_tokens`.
            let to = unsafe { block.add(place * self.token_elements) };
            // SAFETY: `to` is good for `token_elements` elements by the same count, and `&mut self` means that no slice
            // of this memory exists, so `row`, a live borrow, does not overlap it.
            unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to.as_ptr(), row.len()) };
        }
    }

    /// Where a held block begins in the buffer at `offset`, one of `layers`: `block_tokens * token_elements` elements of
    /// mapped memory.
    fn block(&self, offset: u64, id: KernelId) -> NonNull<f32> {
        assert!(self.holds(id), "block {id} is touched without being held");
        let block_bytes = (self.block_tokens * self.token_elements) as u64 * ELEMENT;
        let offset = usize::try_from(offset + u64::from(id.0) * block_bytes).expect("within the reservation");
        let Home::Host(base) = self.home else { panic!("the processor cannot touch a GPU's memory") };
        // SAFETY: a held id is leased from the pool, so by the geometry its block of this buffer lies inside the
        // reservation, which is one mapping.
        unsafe { base.add(offset) }.cast()
    }
}

impl<'a> LayerKv<'a> {
    /// The keys of a block: `[block_tokens][kv_heads][head_size]`.
    ///
    /// # Panics
    /// For a block that is not held.
    pub fn keys(&self, id: KernelId) -> &'a [f32] {
        self.slice(self.keys, id)
    }

    /// The values of a block, in the same order.
    ///
    /// # Panics
    /// For a block that is not held.
    pub fn values(&self, id: KernelId) -> &'a [f32] {
        self.slice(self.values, id)
    }

    fn slice(&self, buffer: u64, id: KernelId) -> &'a [f32] {
        let start = self.store.block(buffer, id);
        // SAFETY: `start` begins a held block: mapped while leased, and only `KvStore::free` (which needs `&mut`, and so
        // the end of `'a`) ends leases. Aligned: pages are, and offsets and block sizes are multiples of an element.
        // Fresh memory is zero and every bit pattern is a float; writes need `&mut KvStore` too.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.store.block_tokens * self.store.token_elements) }
    }
}
