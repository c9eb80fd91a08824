// Attention over the pool's pages: new tokens of a prompt and single tokens of a decode step alike.
//
//   tile     the query heads of one KV head, of one or more tokens of one row:     16 rows of a product on the tensor cores
//   chunk    16 keys and values of that row and KV head
//
//        query tokens                     keys          a block of 4 warps takes one tile; its warps, and `splits` blocks, take
//     t0  [h0 h1 h2 h3]            [ chunk | chunk | ... ]     the chunks in turn: warp w of split s has chunk s * 4 + w first
//     t1  [h0 h1 h2 h3]
//     ...  up to 16 rows           scores -> weights -> sums, with the largest score so far (online softmax);
//                                  then the warps' sums become the block's, and `merge` makes one of the splits'
//
// Keys and values go from memory to registers and from there into the products: nothing is kept in shared memory. Each thread reads 16
// bytes at a time, so its elements are not those that the product's layout gives it. That does not matter as long as both factors
// agree: a sum over dimensions has no order of its own, and a permutation of the outputs is undone when they are written.
//
//   scores   thread (r, c) reads dimensions 32 j + 8 c .. + 8 of key r and of query r: steps 2 j and 2 j + 1 of the product
//   sums     thread (r, c) reads dimensions 64 j + 8 r .. + 8 of values 2c, 2c + 1, 2c + 8, 2c + 9; column r of product (j, e)
//            is dimension 64 j + 8 r + e; halves of words are exchanged so that two values of one dimension lie in one word
//
// `plain` is the same for float, for other sizes of heads and for many heads on one KV head: a warp for each token and head.
//
// Results depend on lengths, `splits` and nothing else: not on where blocks are. No key behind a row's length is read: its page may not
// be there. Indices of elements have 64 bits.
//
// Compiled for compute_80 by scripts/kernels; attention.ptx beside this file is what ships.

#include "common.cuh"

enum : u32 {
    TILE_ROWS = 16,       // rows of a product; src/compute/cuda/attention.rs
    CHUNK = 16,           // keys of a product's step
    TILE_WARPS = 4,       // warps of a block of `attend`; src/compute/cuda/attention.rs
    MERGE_WARPS = 8,      // warps of a block of `merge`; src/compute/cuda/attention.rs
    MAX_SPLITS = 32,      // src/compute/cuda/attention.rs
    PLAIN_WARPS = 4,      // warps of a block of `plain`; src/compute/cuda/attention.rs
    PLAIN_LANES = 8,      // elements of a head that a lane of `plain` keeps: heads of up to 256
};

// src/compute/cuda/attention.rs has the same struct.
struct Attention {
    const void* queries;             // [tokens, query_stride]
    void* out;                       // [tokens, heads * head_size]
    const void* keys;                // the layer's: id * block_stride + place * token_stride elements from here
    const void* values;
    const int* table;                // [rows, table_stride]
    const int* context_lens;         // [rows]
    const int* query_start_loc;      // [rows + 1]
    const u32* tiles;                // [tiles, 2]: row and first of its query tokens; null where tile i is row i
    const u32* token_rows;           // [tokens]; null where token i is row i
    float* partial;                  // [tiles, kv_heads, splits, TILE_ROWS, head_size + 2]: sums, largest score, sum of weights
    u64 query_stride;
    u64 block_stride;
    u64 token_stride;
    u64 table_stride;
    u32 heads;
    u32 kv_heads;
    u32 head_size;
    u32 block_shift;                 // log2(tokens in a block)
    u32 splits;
    float scale;
};

__device__ __forceinline__ u64 element_of(const Attention& p, const int* blocks, u32 position)
{
    const u64 id = (u32)blocks[position >> p.block_shift], place = position & ((1u << p.block_shift) - 1);
    return id * p.block_stride + place * p.token_stride;
}

// The query tokens of a tile, and the keys that the last of them sees.
struct Tile {
    u32 row;
    u32 first;        // of the row's query tokens
    u32 tokens;       // 0 for a row without queries
    u32 begin;        // of the row's query tokens among all
    u32 context;
    u32 keys;

    __device__ __forceinline__ Tile(const Attention& p, u32 tile)
    {
        row = p.tiles ? p.tiles[2 * tile] : tile;
        first = p.tiles ? p.tiles[2 * tile + 1] : 0;
        begin = p.query_start_loc[row];
        const u32 queries = p.query_start_loc[row + 1] - begin;
        const u32 most = TILE_ROWS / (p.heads / p.kv_heads);
        tokens = first < queries ? min(most, queries - first) : 0;
        context = p.context_lens[row];
        keys = context + first + tokens;
    }

    __device__ __forceinline__ u32 chunks() const
    {
        return (keys + CHUNK - 1) / CHUNK;
    }
};

// ---- tensor cores -----------------------------------------------------------------------------------------------------------

// c += a * b: [16, 16] x [16, 8].
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float row_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

__device__ __forceinline__ float row_sum(float value)
{
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// What a lane holds of a chunk: two keys, four values.
template <u32 D>
struct Keys {
    uint4 of[2][D / 32];

    __device__ __forceinline__ void load(const Attention& p, const int* blocks, u32 first, u32 keys, u64 head, u32 r, u32 c)
    {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 position = first + 8 * half + r;
            const bool is_there = position < keys;
            const bf16* from = (const bf16*)p.keys + (is_there ? element_of(p, blocks, position) : 0) + head + 8 * c;
#pragma unroll
            for (u32 j = 0; j < D / 32; j++) of[half][j] = is_there ? __ldg((const uint4*)(from + 32 * j)) : uint4{0, 0, 0, 0};
        }
    }
};

template <u32 D>
struct Values {
    uint4 of[4][D / 64];

    __device__ __forceinline__ void load(const Attention& p, const int* blocks, u32 first, u32 keys, u64 head, u32 r, u32 c)
    {
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            const u32 position = first + 2 * c + (n & 1) + 8 * (n / 2);
            const bool is_there = position < keys;
            const bf16* from = (const bf16*)p.values + (is_there ? element_of(p, blocks, position) : 0) + head + 8 * r;
#pragma unroll
            for (u32 j = 0; j < D / 64; j++) of[n][j] = is_there ? __ldg((const uint4*)(from + 64 * j)) : uint4{0, 0, 0, 0};
        }
    }
};

__device__ __forceinline__ u32 word(const uint4& words, u32 index)
{
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

template <u32 D>
__device__ __forceinline__ void attend(const Attention& p)
{
    __shared__ float sums[TILE_WARPS][TILE_ROWS][D];
    __shared__ float largest[TILE_WARPS][TILE_ROWS];
    __shared__ float weight_sums[TILE_WARPS][TILE_ROWS];
    const Tile tile(p, blockIdx.x);
    const u32 kv_head = blockIdx.y, split = blockIdx.z, group = p.heads / p.kv_heads;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, r = lane / 4, c = lane % 4;
    const u32 chunks = tile.chunks(), stride = p.splits * TILE_WARPS;
    // The whole block or nobody: a row without queries, or a split without chunks.
    if (tile.tokens == 0 || split * TILE_WARPS >= chunks) return;

    // Rows r and r + 8 of the tile: their queries, and the last key that each sees.
    uint4 query[2][D / 32];
    u32 sees[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = r + 8 * half, token = row / group;
        const bool is_there = token < tile.tokens;
        sees[half] = tile.context + tile.first + token;
        const u64 at = (u64)(tile.begin + tile.first + token) * p.query_stride + (u64)(kv_head * group + row % group) * D + 8 * c;
#pragma unroll
        for (u32 j = 0; j < D / 32; j++)
            query[half][j] = is_there ? *(const uint4*)((const bf16*)p.queries + at + 32 * j) : uint4{0, 0, 0, 0};
    }

    const int* blocks = p.table + (u64)tile.row * p.table_stride;
    const u64 head = (u64)kv_head * D;
    // Scores in powers of two.
    const float scale = p.scale * 1.4426950408889634f;
    float best[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, weights[2] = {0.0f, 0.0f};
    float sum[D / 8][4] = {};
    u32 chunk = split * TILE_WARPS + warp;
    Keys<D> keys;
    if (chunk < chunks) keys.load(p, blocks, chunk * CHUNK, tile.keys, head, r, c);
    for (; chunk < chunks; chunk += stride) {
        const u32 first = chunk * CHUNK;
        Values<D> values;
        values.load(p, blocks, first, tile.keys, head, r, c);
        float scores[2][4] = {};
#pragma unroll
        for (u32 j = 0; j < D / 32; j++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const uint4 a = query[0][j], b = query[1][j], k = keys.of[half][j];
                multiply(scores[half], a.x, b.x, a.y, b.y, k.x, k.y);
                multiply(scores[half], a.z, b.z, a.w, b.w, k.z, k.w);
            }
        }
        if (chunk + stride < chunks) keys.load(p, blocks, (chunk + stride) * CHUNK, tile.keys, head, r, c);
        // Keys behind a query's own position are not seen; in the last chunk there may be such.
        const bool is_last = first + CHUNK > tile.context + tile.first + 1;
        float top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                const u32 position = first + 8 * half + 2 * c + (n & 1);
                const float score = is_last && position > sees[n / 2] ? NEGATIVE_INFINITY : scores[half][n] * scale;
                scores[half][n] = score;
                top[n / 2] = fmaxf(top[n / 2], score);
            }
        }
        float shrink[2];
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const float next = fmaxf(best[row], row_max(top[row]));
            // A row that has seen no key yet: every weight below is 0, and nothing is not a number.
            const float base = next == NEGATIVE_INFINITY ? 0.0f : next;
            shrink[row] = exp2f(best[row] - base);
            best[row] = next;
            float added = 0.0f;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
#pragma unroll
                for (u32 n = 2 * row; n < 2 * row + 2; n++) {
                    scores[half][n] = exp2f(scores[half][n] - base);
                    added += scores[half][n];
                }
            }
            weights[row] = weights[row] * shrink[row] + added;
        }
        const u32 a0 = pair_of(scores[0][0], scores[0][1]), a1 = pair_of(scores[0][2], scores[0][3]);
        const u32 a2 = pair_of(scores[1][0], scores[1][1]), a3 = pair_of(scores[1][2], scores[1][3]);
#pragma unroll
        for (u32 j = 0; j < D / 64; j++) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                const u32 choice = e & 1 ? 0x7632 : 0x5410;
                const u32 b0 = __byte_perm(word(values.of[0][j], e / 2), word(values.of[1][j], e / 2), choice);
                const u32 b1 = __byte_perm(word(values.of[2][j], e / 2), word(values.of[3][j], e / 2), choice);
                float(&to)[4] = sum[8 * j + e];
                to[0] *= shrink[0];
                to[1] *= shrink[0];
                to[2] *= shrink[1];
                to[3] *= shrink[1];
                multiply(to, a0, a1, a2, a3, b0, b1);
            }
        }
    }

    // The warps' sums become the block's.
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = r + 8 * half;
        const float all = row_sum(weights[half]);
        if (c == 0) {
            largest[warp][row] = best[half];
            weight_sums[warp][row] = all;
        }
#pragma unroll
        for (u32 j = 0; j < D / 64; j++) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) {
                sums[warp][row][64 * j + 16 * c + e] = sum[8 * j + e][2 * half];
                sums[warp][row][64 * j + 16 * c + 8 + e] = sum[8 * j + e][2 * half + 1];
            }
        }
    }
    __syncthreads();
    const u32 rows = tile.tokens * group;
    for (u32 at = threadIdx.x; at < rows * D; at += blockDim.x) {
        const u32 row = at / D, i = at % D;
        float top = NEGATIVE_INFINITY, total = 0.0f, value = 0.0f;
#pragma unroll
        for (u32 w = 0; w < TILE_WARPS; w++) top = fmaxf(top, largest[w][row]);
#pragma unroll
        for (u32 w = 0; w < TILE_WARPS; w++) {
            const float factor = largest[w][row] == NEGATIVE_INFINITY ? 0.0f : exp2f(largest[w][row] - top);
            total += weight_sums[w][row] * factor;
            value += sums[w][row][i] * factor;
        }
        if (p.splits > 1) {
            float* to = p.partial + ((((u64)blockIdx.x * p.kv_heads + kv_head) * p.splits + split) * TILE_ROWS + row) * (D + 2);
            to[i] = value;
            if (i == 0) {
                to[D] = top;
                to[D + 1] = total;
            }
        } else {
            const u64 token = tile.begin + tile.first + row / group, at_head = kv_head * group + row % group;
            ((bf16*)p.out)[(token * p.heads + at_head) * D + i] = from_float<bf16>(value / total);
        }
    }
}

// The splits' sums become the tile's. A block for each tile and KV head.
template <u32 D>
__device__ __forceinline__ void merge(const Attention& p)
{
    __shared__ float largest[MAX_SPLITS][TILE_ROWS];
    __shared__ float factors[MAX_SPLITS][TILE_ROWS];
    const Tile tile(p, blockIdx.x);
    if (tile.tokens == 0) return;
    const u32 kv_head = blockIdx.y, group = p.heads / p.kv_heads, rows = tile.tokens * group;
    const u32 splits = min(p.splits, (tile.chunks() + TILE_WARPS - 1) / TILE_WARPS);
    const u64 of_split = TILE_ROWS * (D + 2);
    const float* partial = p.partial + ((u64)blockIdx.x * p.kv_heads + kv_head) * p.splits * of_split;
    for (u32 at = threadIdx.x; at < splits * rows; at += blockDim.x) {
        const u32 split = at / rows, row = at % rows;
        const float* from = partial + split * of_split + (u64)row * (D + 2);
        largest[split][row] = from[D];
        factors[split][row] = from[D + 1];
    }
    __syncthreads();
    if (threadIdx.x < rows) {
        const u32 row = threadIdx.x;
        float top = NEGATIVE_INFINITY, total = 0.0f;
        for (u32 split = 0; split < splits; split++) top = fmaxf(top, largest[split][row]);
        for (u32 split = 0; split < splits; split++) {
            const float factor = largest[split][row] == NEGATIVE_INFINITY ? 0.0f : exp2f(largest[split][row] - top);
            total += factors[split][row] * factor;
            factors[split][row] = factor;
        }
        for (u32 split = 0; split < splits; split++) factors[split][row] /= total;
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < rows * D; at += blockDim.x) {
        const u32 row = at / D, i = at % D;
        const float* from = partial + (u64)row * (D + 2) + i;
        float value = 0.0f;
#pragma unroll 8
        for (u32 split = 0; split < splits; split++) value += from[split * of_split] * factors[split][row];
        const u64 token = tile.begin + tile.first + row / group, at_head = kv_head * group + row % group;
        ((bf16*)p.out)[(token * p.heads + at_head) * D + i] = from_float<bf16>(value);
    }
}

// ---- without tensor cores ---------------------------------------------------------------------------------------------------

// A warp for each token and head; 32 keys at a time, a lane each for the scores, then a lane for each dimension of the sums.
template <typename T>
__device__ __forceinline__ void plain(const Attention& p)
{
    const u32 lane = threadIdx.x % WARP, head = blockIdx.y * PLAIN_WARPS + threadIdx.x / WARP;
    const u64 token = blockIdx.x;
    const u32 row = p.token_rows ? p.token_rows[token] : (u32)token;
    const u32 begin = p.query_start_loc[row];
    // Padding has no row of its own: its place is behind its row's tokens.
    if (head >= p.heads || token >= p.query_start_loc[row + 1]) return;
    const u32 keys = p.context_lens[row] + (u32)token - begin + 1;
    const T* query = (const T*)p.queries + token * p.query_stride + (u64)head * p.head_size;
    const int* blocks = p.table + (u64)row * p.table_stride;
    const u64 kv_head = (u64)(head / (p.heads / p.kv_heads)) * p.head_size;
    float best = NEGATIVE_INFINITY, weights = 0.0f;
    float sum[PLAIN_LANES] = {};
    for (u32 first = 0; first < keys; first += WARP) {
        const u32 position = first + lane;
        float score = NEGATIVE_INFINITY;
        if (position < keys) {
            const T* key = (const T*)p.keys + element_of(p, blocks, position) + kv_head;
            score = 0.0f;
            for (u32 i = 0; i < p.head_size; i++) score += to_float(query[i]) * to_float(key[i]);
            score *= p.scale;
        }
        const float next = fmaxf(best, warp_max(score));
        const float shrink = expf(best - next), weight = expf(score - next);
        best = next;
        weights = weights * shrink + warp_sum(weight);
#pragma unroll
        for (u32 n = 0; n < PLAIN_LANES; n++) sum[n] *= shrink;
        for (u32 other = 0; other < WARP && first + other < keys; other++) {
            const float of_key = __shfl_sync(ALL_LANES, weight, other);
            const T* value = (const T*)p.values + element_of(p, blocks, first + other) + kv_head;
#pragma unroll
            for (u32 n = 0; n < PLAIN_LANES; n++) {
                const u32 i = lane + n * WARP;
                if (i < p.head_size) sum[n] += of_key * to_float(value[i]);
            }
        }
    }
    T* to = (T*)p.out + (token * p.heads + head) * p.head_size;
#pragma unroll
    for (u32 n = 0; n < PLAIN_LANES; n++) {
        const u32 i = lane + n * WARP;
        if (i < p.head_size) to[i] = from_float<T>(sum[n] / weights);
    }
}

// ---- entries ----------------------------------------------------------------------------------------------------------------

#define FOR_EACH_HEAD(D)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(TILE_WARPS* WARP) tidekv_attend_##D(const Attention p)                           \
    {                                                                                                                             \
        attend<D>(p);                                                                                                             \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(MERGE_WARPS* WARP) tidekv_merge_##D(const Attention p)                           \
    {                                                                                                                             \
        merge<D>(p);                                                                                                              \
    }

FOR_EACH_HEAD(64)
FOR_EACH_HEAD(128)

extern "C" __global__ void tidekv_attend_plain_bf16(const Attention p)
{
    plain<bf16>(p);
}

extern "C" __global__ void tidekv_attend_plain_float(const Attention p)
{
    plain<float>(p);
}
