// Block tables and attention metadata on the device. The host's half is src/cuda/; the CPU path in src/ computes the same,
// bit for bit, ids included.
//
//   apply     what admissions, frees, swaps, growth and shrinkage changed since the last step: cells and rows as they are now
//   decode    every row gets one token: one CTA, so that ranks are a scan and nothing waits for another CTA
//   mixed     rows get any number of tokens: every CTA repeats the scan over all rows and writes its own tile of tokens
//
// A decode step is bound by latency, not by bytes (some 50 for each row): its dependent chain is
//
//   control, len, next_slot  ->  ring window  ->  slot
//        one latency             one latency,     stores, nobody waits
//                                behind the scan
//
// No atomics on the way, no order between CTAs: the same state gives the same ids. Sums of 32 bits hold because the host refuses
// configurations where they would not (src/config.rs). The host checks capacity before it launches; what the kernels check again
// is reported in Control::status, and keeps them inside their arrays when the host is wrong.
//
// Compiled for compute_80 by scripts/kernels; batch.ptx beside this file is what ships. No headers: NVRTC has none.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- what the host passes; src/cuda/replica.rs has the same structs ---------------------------------------------------------

// The words that change with every step, behind one pointer so that a captured kernel finds them.
struct __align__(16) Control {
    u32 batch;   // rows in use
    u32 head;    // ring cell of the next id
    u32 free;    // ids in the ring
    u32 status;  // STATUS_* bits, never cleared here
    u64 step;    // steps done
    u64 unused;
};

// Addresses and shapes: constant for the life of the state.
struct Replica {
    int* table;               // [max_rows, table_stride], row = batch slot
    int* len;                 // [max_rows] tokens held
    i64* next_slot;           // [max_rows] slot of the next token, where it falls into the last block
    int* ring;                // [ring_cells] free ids, FIFO
    Control* control;
    i64* slot_mapping;        // outputs
    int* seq_lens;
    int* context_lens;
    int* query_start_loc;
    int* seq_start_loc;
    u64 table_stride;
    u32 row_blocks;           // blocks that a row has room for
    u32 ring_cells;
    u32 max_rows;
    u32 block_shift;          // log2(tokens in a block)
};

struct Padding {
    u32 rows;
    u32 tokens;
};

// Cells `cell..cell + count` hold `first`, `first + 1`, and so on.
struct __align__(16) Run {
    u32 array;  // TABLE or RING
    u32 cell;
    int first;
    u32 count;
};

struct __align__(16) RowState {
    i64 next_slot;
    u32 row;
    int len;
};

struct __align__(8) RowWork {
    int context;
    int query;
};

// Enumerators and not constants: those would become global variables of the module.
enum : u32 {
    TABLE = 0,             // Run::array
    RING = 1,

    STATUS_SHORT = 1,      // more blocks were needed than ids were in the ring
    STATUS_ROW_FULL = 2,   // a sequence outgrew its row
    STATUS_APART = 4,      // the host's idea of batch and ring is not the device's

    WARP = 32,
    ALL_LANES = 0xffffffffu,
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / WARP,
    TILE_TOKENS = 2048,    // tokens of one CTA of `mixed`; src/cuda/kernels.rs
    WARP_RUNS = 8,         // runs that a warp of `apply` reads at a time; src/cuda/kernels.rs
};

// ---- scans ------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 warp_inclusive(u32 value, u32 lane)
{
#pragma unroll
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        const u32 below = __shfl_up_sync(ALL_LANES, value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}

// Sums of whole warps, kept twice: a chunk writes one half while slow warps still read the other. So a chunk needs one barrier.
struct WarpSums {
    u32 sum[2][MAX_WARPS];

    // Of this chunk's sums: all (returned) and those of the warps before this one.
    __device__ __forceinline__ u32 total(u32 half, u32 warps, u32 warp, u32 lane, u32* before) const
    {
        const u32 value = lane < warps ? sum[half][lane] : 0;
        *before = __reduce_add_sync(ALL_LANES, lane < warp ? value : 0);
        return __reduce_add_sync(ALL_LANES, value);
    }
};

__device__ __forceinline__ u32 ring_cell(const Replica& replica, u32 head, u32 rank)
{
    const u32 cell = head + rank;
    return cell < replica.ring_cells ? cell : cell - replica.ring_cells;
}

__device__ __forceinline__ void report(const Replica& replica, u32 status)
{
    atomicOr(&replica.control->status, status);
}

// ---- decode -----------------------------------------------------------------------------------------------------------------

// UPDATE appends a token to every row; PACK writes the metadata of that token. A step does both; alone, PACK describes the
// token that the update before it appended.
template <bool UPDATE, bool PACK>
__device__ __forceinline__ void decode(const Replica& replica, const Padding& padding)
{
    __shared__ WarpSums crossings;
    __shared__ WarpSums tokens;
    __shared__ int window[2][MAX_THREADS];  // the next ids of the ring, fetched while the ranks are still being counted

    const u32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, warps = blockDim.x / WARP;
    const Control control = *replica.control;
    const u32 batch = control.batch;
    const u32 rows_out = max(batch, padding.rows), tokens_out = max(batch, padding.tokens);
    const u32 block_mask = (1u << replica.block_shift) - 1;
    u32 first = 0, taken = 0, tokens_before = 0, half = 0;

    // The first chunk asks for its lengths before the batch size is here.
    do {
        const u32 row = first + thread;
        int len = 0;
        i64 slot = 0;
        if (row < replica.max_rows) {
            len = replica.len[row];
            slot = replica.next_slot[row];
        }
        const bool live = row < batch;
        const u32 seq_len = live ? u32(len) + (UPDATE ? 1 : 0) : 0;
        const bool crosses = UPDATE && live && (u32(len) & block_mask) == 0;

        u32 rank = 0, seq_start = 0;
        if (UPDATE) {
            if (taken + thread < control.free) window[half][thread] = replica.ring[ring_cell(replica, control.head, taken + thread)];
            const u32 votes = __ballot_sync(ALL_LANES, crosses);
            rank = __popc(votes & ((1u << lane) - 1));
            if (lane == 0) crossings.sum[half][warp] = __popc(votes);
        }
        if (PACK) {
            const u32 inclusive = warp_inclusive(seq_len, lane);
            seq_start = inclusive - seq_len;
            if (lane == WARP - 1) tokens.sum[half][warp] = inclusive;
        }
        __syncthreads();

        if (UPDATE) {
            u32 before;
            const u32 all = crossings.total(half, warps, warp, lane, &before);
            rank += before;
            if (crosses) {
                const u32 block = u32(len) >> replica.block_shift;
                const bool has_id = taken + rank < control.free, has_room = block < replica.row_blocks;
                slot = -1;
                if (has_id && has_room) {
                    const int id = window[half][rank];
                    slot = i64(id) << replica.block_shift;
                    replica.table[row * replica.table_stride + block] = id;
                } else {
                    report(replica, has_id ? STATUS_ROW_FULL : STATUS_SHORT);
                }
            }
            if (live) {
                replica.len[row] = len + 1;
                replica.next_slot[row] = slot + 1;
            }
            taken += all;
        }
        if (PACK) {
            u32 before;
            const u32 all = tokens.total(half, warps, warp, lane, &before);
            if (row < rows_out) {
                replica.seq_lens[row] = int(seq_len);
                replica.context_lens[row] = live ? int(seq_len) - 1 : 0;
                replica.query_start_loc[row] = int(min(row, batch));
                replica.seq_start_loc[row] = int(tokens_before + before + seq_start);
            }
            if (row < tokens_out) replica.slot_mapping[row] = live ? slot - (UPDATE ? 0 : 1) : -1;
            tokens_before += all;
        }
        first += blockDim.x;
        half ^= 1;
    } while (first < max(rows_out, tokens_out));

    // Prefix sums end in their total. By a thread of its own, and not as one more row: 1,024 rows are one chunk.
    if (PACK && thread == blockDim.x - 1) {
        replica.query_start_loc[rows_out] = int(batch);
        replica.seq_start_loc[rows_out] = int(tokens_before);
    }
    // Every thread read the control words before the first barrier.
    if (UPDATE && thread == 0) {
        taken = min(taken, control.free);
        replica.control->head = taken == 0 ? control.head : ring_cell(replica, control.head, taken);
        replica.control->free = control.free - taken;
        replica.control->step = control.step + 1;
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) tidekv_decode(const Replica replica, const Padding padding)
{
    decode<true, true>(replica, padding);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) tidekv_decode_update(const Replica replica, const Padding padding)
{
    decode<true, false>(replica, padding);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) tidekv_decode_pack(const Replica replica, const Padding padding)
{
    decode<false, true>(replica, padding);
}

// ---- mixed ------------------------------------------------------------------------------------------------------------------

// What a CTA keeps of every row while it goes through its tokens.
struct RowPlan {
    u32* query_start;  // [batch + 1]
    u32* rank;         // [batch] of the row's first new block
    int* context;      // [batch]
};

// The row that token `token` belongs to: the last one that starts at or before it. Rows without tokens are passed over.
__device__ __forceinline__ u32 row_of_token(const u32* query_start, u32 batch, u32 token)
{
    u32 low = 0, high = batch;  // query_start[low] <= token < query_start[high]
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (query_start[middle] <= token) low = middle; else high = middle;
    }
    return low;
}

// `rows` is not part of the state: the lengths before this step, so that no CTA reads what another one writes.
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
tidekv_mixed(const Replica replica, const Padding padding, const RowWork* __restrict__ rows, const u32 batch, const u32 head, const u32 free)
{
    extern __shared__ u32 plan_words[];
    __shared__ WarpSums queries;
    __shared__ WarpSums blocks;
    __shared__ WarpSums tokens;
    const RowPlan plan = {plan_words, plan_words + batch + 1, reinterpret_cast<int*>(plan_words + 2 * batch + 1)};

    const u32 thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, warps = blockDim.x / WARP;
    const u32 rows_out = max(batch, padding.rows), shift = replica.block_shift, block_mask = (1u << shift) - 1;
    u32 query_total = 0, block_total = 0, token_total = 0, half = 0;

    for (u32 first = 0, chunk = 0; first < rows_out; first += blockDim.x, ++chunk, half ^= 1) {
        const u32 row = first + thread;
        RowWork work = {0, 0};
        if (row < batch) work = rows[row];
        const u32 query = u32(work.query), seq_len = u32(work.context) + query;
        const u32 new_blocks = ((seq_len + block_mask) >> shift) - ((u32(work.context) + block_mask) >> shift);

        const u32 query_inclusive = warp_inclusive(query, lane);
        const u32 block_inclusive = warp_inclusive(new_blocks, lane);
        const u32 token_inclusive = warp_inclusive(seq_len, lane);
        if (lane == WARP - 1) {
            queries.sum[half][warp] = query_inclusive;
            blocks.sum[half][warp] = block_inclusive;
            tokens.sum[half][warp] = token_inclusive;
        }
        __syncthreads();

        u32 queries_before, blocks_before, tokens_before;
        const u32 queries_here = queries.total(half, warps, warp, lane, &queries_before);
        const u32 blocks_here = blocks.total(half, warps, warp, lane, &blocks_before);
        const u32 tokens_here = tokens.total(half, warps, warp, lane, &tokens_before);
        const u32 query_start = query_total + queries_before + query_inclusive - query;
        if (row < batch) {
            plan.query_start[row] = query_start;
            plan.rank[row] = block_total + blocks_before + block_inclusive - new_blocks;
            plan.context[row] = work.context;
        }
        // Each chunk of rows has one CTA that writes it.
        if (chunk % gridDim.x == blockIdx.x) {
            if (row < batch) replica.len[row] = int(seq_len);
            if (row < rows_out) {
                replica.seq_lens[row] = int(seq_len);
                replica.context_lens[row] = work.context;
                replica.query_start_loc[row] = int(query_start);
                replica.seq_start_loc[row] = int(token_total + tokens_before + token_inclusive - seq_len);
            }
        }
        query_total += queries_here;
        block_total += blocks_here;
        token_total += tokens_here;
    }
    if (thread == 0) plan.query_start[batch] = query_total;
    __syncthreads();

    const u32 tokens_out = max(query_total, padding.tokens);
    const u32 tile = blockIdx.x * TILE_TOKENS;
    for (u32 token = tile + thread; token < min(tile + TILE_TOKENS, tokens_out); token += blockDim.x) {
        i64 slot = -1;
        if (token < query_total) {
            const u32 row = row_of_token(plan.query_start, batch, token);
            const u32 context = u32(plan.context[row]), position = context + token - plan.query_start[row];
            const u32 block = position >> shift, blocks_held = (context + block_mask) >> shift;
            int* const cell = replica.table + row * replica.table_stride + block;
            if (block >= replica.row_blocks) {
                report(replica, STATUS_ROW_FULL);
            } else if (block < blocks_held) {
                slot = (i64(*cell) << shift) + (position & block_mask);
            } else {
                const u32 rank = plan.rank[row] + block - blocks_held;
                if (rank < free) {
                    const int id = replica.ring[ring_cell(replica, head, rank)];
                    slot = (i64(id) << shift) + (position & block_mask);
                    // A new block's first token is in this step: it enters the block into the table.
                    if ((position & block_mask) == 0) *cell = id;
                } else {
                    report(replica, STATUS_SHORT);
                }
            }
            if (token + 1 == plan.query_start[row + 1]) replica.next_slot[row] = slot + 1;
        }
        replica.slot_mapping[token] = slot;
    }

    if (blockIdx.x == 0 && thread == 0) {
        replica.query_start_loc[rows_out] = int(query_total);
        replica.seq_start_loc[rows_out] = int(token_total);
        Control* const control = replica.control;
        if (control->batch != batch || control->head != head || control->free != free) report(replica, STATUS_APART);
        const u32 taken = min(block_total, free);
        control->head = taken == 0 ? head : ring_cell(replica, head, taken);
        control->free = free - taken;
        control->step += 1;
    }
}

// ---- apply ------------------------------------------------------------------------------------------------------------------

// Runs and rows lie in memory of the host: each is read once, a few runs by a warp at a time (128 bytes, one read over the bus),
// and expanded by all its lanes. They name every cell at most once, so their order does not matter.
extern "C" __global__ void tidekv_apply(const Replica replica, const Run* __restrict__ runs, const u32 run_count,
                                        const RowState* __restrict__ rows, const u32 row_count, const u32 batch, const u32 head, const u32 free)
{
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x, lane = thread % WARP;
    for (u32 first = thread / WARP * WARP_RUNS; first < run_count; first += threads / WARP * WARP_RUNS) {
        Run mine = {0, 0, 0, 0};
        if (lane < WARP_RUNS && first + lane < run_count) mine = runs[first + lane];
        for (u32 from = 0; from < min(u32(WARP_RUNS), run_count - first); ++from) {
            const u32 array = __shfl_sync(ALL_LANES, mine.array, from), cell = __shfl_sync(ALL_LANES, mine.cell, from);
            const u32 count = __shfl_sync(ALL_LANES, mine.count, from);
            const int id = __shfl_sync(ALL_LANES, mine.first, from);
            int* const cells = (array == RING ? replica.ring : replica.table) + cell;
            for (u32 i = lane; i < count; i += WARP) cells[i] = id + int(i);
        }
    }
    for (u32 i = thread; i < row_count; i += threads) {
        const RowState state = rows[i];
        replica.len[state.row] = state.len;
        replica.next_slot[state.row] = state.next_slot;
    }
    if (thread == 0) {
        replica.control->batch = batch;
        replica.control->head = head;
        replica.control->free = free;
    }
}

// ---- nothing ----------------------------------------------------------------------------------------------------------------

// What a launch costs when the kernel does nothing: benchmarks measure it in the same run.
extern "C" __global__ void tidekv_nothing() {}
