// A transformer's layers, all but products and attention. The host's half is src/compute/cuda/; src/compute/cpu/ computes the same.
//
//   embed    a token's id -> its state                            state: float, [tokens, hidden]
//   norm     states -> what the products read                     of all tokens, or of those whose logits are wanted
//   rope     queries and keys turn by their positions; keys and values go to the pool's pages, by the slot mapping
//   gate     silu(gate) * up
//   bias     where a model has one and nobody else adds it
//   best     logits -> the id of the largest, of equals the first
//   one      products of one row: every weight is read once, and that is what they cost
//   fill     weights from a seed; convert  weights from the host
//
// Each kernel exists for bf16 and for float. Indices of elements have 64 bits: views of the pool are larger than 2^31 elements.
//
// Compiled for compute_80 by scripts/kernels; layers.ptx beside this file is what ships.

#include "common.cuh"

enum : u32 {
    MAX_PAIRS = 4,       // pairs of a head that a lane turns: heads of up to 256 elements
    NORM_KEPT = 8,       // elements that a thread of `norm` keeps
    ONE_WARPS = 8,       // warps of a block of `one`, an output each; src/compute/cuda/kernels.rs
    BEST_PARTS = 64,     // parts of a row of logits that `best` looks at side by side; src/compute/cuda/kernels.rs
};

// Where a layer's heads go; src/compute/cuda/kernels.rs has the same struct.
struct Rope {
    void* qkv;                       // [tokens, query + 2 kv]; queries stay here, turned
    void* keys;                      // the layer's keys: slot * kv elements from here
    void* values;
    const float* frequencies;        // [head_size / 2]
    const float* bias;               // [query + 2 kv], or null
    const float* query_norm;         // [head_size], or null
    const float* key_norm;
    const i64* slot_mapping;         // [tokens], -1 for none
    const int* context_lens;         // [rows]
    const int* query_start_loc;      // [rows + 1]
    const u32* token_rows;           // [tokens], or null where token i is row i
    u32 heads;
    u32 kv_heads;
    u32 head_size;
    float epsilon;
};

// ---- embedding and norms ----------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void embed(float* state, const T* embedding, const u32* tokens, u32 hidden)
{
    const u64 token = blockIdx.x;
    const T* from = embedding + (u64)tokens[token] * hidden;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) state[token * hidden + i] = to_float(from[i]);
}

template <typename T>
__device__ __forceinline__ void norm(T* out, const float* state, const float* weight, const u32* rows, u32 hidden, float epsilon)
{
    __shared__ float sums[WARP];
    const u64 row = rows ? rows[blockIdx.x] : blockIdx.x;
    const float* from = state + row * hidden;
    T* to = out + (u64)blockIdx.x * hidden;
    float sum = 0.0f;
    // Kept for the second pass: one latency instead of two for all but the widest states.
    float kept[NORM_KEPT];
#pragma unroll
    for (u32 n = 0; n < NORM_KEPT; n++) {
        const u32 i = threadIdx.x + n * blockDim.x;
        kept[n] = i < hidden ? from[i] : 0.0f;
        sum += kept[n] * kept[n];
    }
    for (u32 i = threadIdx.x + NORM_KEPT * blockDim.x; i < hidden; i += blockDim.x) sum += from[i] * from[i];
    const float scale = 1.0f / sqrtf(block_sum(sum, sums) / (float)hidden + epsilon);
#pragma unroll
    for (u32 n = 0; n < NORM_KEPT; n++) {
        const u32 i = threadIdx.x + n * blockDim.x;
        if (i < hidden) to[i] = from_float<T>(weight[i] * (kept[n] * scale));
    }
    for (u32 i = threadIdx.x + NORM_KEPT * blockDim.x; i < hidden; i += blockDim.x) {
        to[i] = from_float<T>(weight[i] * (from[i] * scale));
    }
}

// ---- positions, and the pool ------------------------------------------------------------------------------------------------

// A warp for each head: those of the queries, of the keys, of the values.
template <typename T>
__device__ __forceinline__ void rope(const Rope& p)
{
    const u64 token = blockIdx.x;
    const u32 lane = threadIdx.x % WARP, half = p.head_size / 2;
    const u32 head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (head >= p.heads + 2 * p.kv_heads) return;
    const u64 kv_size = (u64)p.kv_heads * p.head_size;
    T* row = (T*)p.qkv + token * ((u64)p.heads * p.head_size + 2 * kv_size);
    const i64 slot = p.slot_mapping[token];
    const u32 batch_row = p.token_rows ? p.token_rows[token] : (u32)token;
    const int position = p.context_lens[batch_row] + (int)token - p.query_start_loc[batch_row];
    T* from = row + (u64)head * p.head_size;
    const float* bias = p.bias ? p.bias + (u64)head * p.head_size : nullptr;
    const bool is_query = head < p.heads, is_key = !is_query && head < p.heads + p.kv_heads;
    float first[MAX_PAIRS], second[MAX_PAIRS];
    float square = 0.0f;
#pragma unroll
    for (u32 n = 0; n < MAX_PAIRS; n++) {
        const u32 i = lane + n * WARP;
        first[n] = second[n] = 0.0f;
        if (i >= half) continue;
        first[n] = to_float(from[i]) + (bias ? bias[i] : 0.0f);
        second[n] = to_float(from[i + half]) + (bias ? bias[i + half] : 0.0f);
        square += first[n] * first[n] + second[n] * second[n];
    }
    const float* weight = is_query ? p.query_norm : is_key ? p.key_norm : nullptr;
    float scale = 1.0f;
    // The whole warp or nobody: `head` is the same for all its lanes.
    if (weight) scale = 1.0f / sqrtf(warp_sum(square) / (float)p.head_size + p.epsilon);
    T* to = from;
    if (!is_query) {
        if (slot < 0) return;
        const u32 kv_head = (head - p.heads) % p.kv_heads;
        to = (T*)(is_key ? p.keys : p.values) + (u64)slot * kv_size + (u64)kv_head * p.head_size;
    }
#pragma unroll
    for (u32 n = 0; n < MAX_PAIRS; n++) {
        const u32 i = lane + n * WARP;
        if (i >= half) continue;
        float a = first[n], b = second[n];
        if (weight) {
            a = weight[i] * (a * scale);
            b = weight[i + half] * (b * scale);
        }
        if (is_query || is_key) {
            float sine, cosine;
            sincosf((float)position * p.frequencies[i], &sine, &cosine);
            const float turned = a * cosine - b * sine;
            b = b * cosine + a * sine;
            a = turned;
        }
        to[i] = from_float<T>(a);
        to[i + half] = from_float<T>(b);
    }
}

// ---- the feed-forward part --------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void gate(T* out, const T* gate_up, const float* bias, u32 intermediate)
{
    const u64 token = blockIdx.y;
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= intermediate) return;
    const T* row = gate_up + token * 2 * intermediate;
    const float gate = to_float(row[i]) + (bias ? bias[i] : 0.0f);
    const float up = to_float(row[intermediate + i]) + (bias ? bias[intermediate + i] : 0.0f);
    out[token * intermediate + i] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
}

// ---- products of one row ----------------------------------------------------------------------------------------------------

// What a lane finds in `in . weight`: every 32nd piece of 8 elements; `inputs` is a multiple of 8.
__device__ __forceinline__ float dot(const bf16* in, const bf16* weight, u32 inputs, u32 lane)
{
    const uint4* from = (const uint4*)weight;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 at = lane; at < inputs / 8; at += WARP) {
        const uint4 w = __ldcs(from + at), x = __ldg((const uint4*)in + at);
        sum += low(w.x) * low(x.x) + high(w.x) * high(x.x) + low(w.y) * low(x.y) + high(w.y) * high(x.y);
        sum += low(w.z) * low(x.z) + high(w.z) * high(x.z) + low(w.w) * low(x.w) + high(w.w) * high(x.w);
    }
    return sum;
}

// out[output] (+)= in . weight[output]. A warp for each output.
template <typename Out>
__device__ __forceinline__ void one(Out* out, const bf16* in, const bf16* weight, u32 inputs, u32 outputs, u32 add)
{
    const u32 lane = threadIdx.x % WARP;
    const u64 output = (u64)blockIdx.x * ONE_WARPS + threadIdx.x / WARP;
    if (output >= outputs) return;
    const float sum = warp_sum(dot(in, weight + output * inputs, inputs, lane));
    if (lane == 0) out[output] = from_float<Out>(add ? to_float(out[output]) + sum : sum);
}

// ---- weights ----------------------------------------------------------------------------------------------------------------

// Element `index` of a sequence of numbers that is a function of its seed alone (SplitMix64): evenly from -1 to 1, in steps of
// 2^-23. Every operation is exact, so it is the number that src/model/synthetic.rs makes.
__device__ __forceinline__ float unit(u64 seed, u64 index)
{
    u64 mixed = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    mixed ^= mixed >> 31;
    return (float)(mixed >> 40) / 8388608.0f - 1.0f;
}

// A matrix [rows, columns] of random numbers; `turned` writes it column by column. Columns outside `loud` are `whisper` times as large.
template <typename T>
__device__ __forceinline__ void fill(
    T* out, u64 rows, u64 columns, u64 seed, float reach, float whisper, u32 loud_begin, u32 loud_end, u32 turned)
{
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < rows * columns; at += step) {
        const u64 row = turned ? at % rows : at / columns, column = turned ? at / rows : at % columns;
        float value = unit(seed, row * columns + column) * reach;
        if (column < loud_begin || column >= loud_end) value *= whisper;
        out[at] = from_float<T>(value);
    }
}

// Rows `first_row..` of a matrix [rows, columns] of floats, as far as they are in `in`.
template <typename T>
__device__ __forceinline__ void convert(T* out, const float* in, u64 rows, u64 columns, u64 first_row, u64 count, u32 turned)
{
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count * columns; at += step) {
        const u64 row = first_row + at / columns, column = at % columns;
        out[turned ? column * rows + row : row * columns + column] = from_float<T>(in[at]);
    }
}

// ---- entries ----------------------------------------------------------------------------------------------------------------

#define FOR_EACH_TYPE(T)                                                                                                          \
    extern "C" __global__ void tidekv_embed_##T(float* state, const T* embedding, const u32* tokens, u32 hidden)                  \
    {                                                                                                                             \
        embed(state, embedding, tokens, hidden);                                                                                  \
    }                                                                                                                             \
    extern "C" __global__ void tidekv_norm_##T(                                                                                   \
        T* out, const float* state, const float* weight, const u32* rows, u32 hidden, float epsilon)                              \
    {                                                                                                                             \
        norm(out, state, weight, rows, hidden, epsilon);                                                                          \
    }                                                                                                                             \
    extern "C" __global__ void tidekv_rope_##T(const Rope p)                                                                      \
    {                                                                                                                             \
        rope<T>(p);                                                                                                               \
    }                                                                                                                             \
    extern "C" __global__ void tidekv_gate_##T(T* out, const T* gate_up, const float* bias, u32 intermediate)                     \
    {                                                                                                                             \
        gate(out, gate_up, bias, intermediate);                                                                                   \
    }                                                                                                                             \
    extern "C" __global__ void tidekv_fill_##T(T* out, u64 rows, u64 columns, u64 seed, float reach, float whisper,               \
                                               u32 loud_begin, u32 loud_end, u32 turned)                                          \
    {                                                                                                                             \
        fill(out, rows, columns, seed, reach, whisper, loud_begin, loud_end, turned);                                             \
    }                                                                                                                             \
    extern "C" __global__ void tidekv_convert_##T(                                                                                \
        T* out, const float* in, u64 rows, u64 columns, u64 first_row, u64 count, u32 turned)                                     \
    {                                                                                                                             \
        convert(out, in, rows, columns, first_row, count, turned);                                                                \
    }

FOR_EACH_TYPE(bf16)
FOR_EACH_TYPE(float)

extern "C" __global__ void tidekv_one_bf16(bf16* out, const bf16* in, const bf16* weight, u32 inputs, u32 outputs, u32 add)
{
    one(out, in, weight, inputs, outputs, add);
}

extern "C" __global__ void tidekv_one_float(float* out, const bf16* in, const bf16* weight, u32 inputs, u32 outputs, u32 add)
{
    one(out, in, weight, inputs, outputs, add);
}

// Gate and up, and what `gate` makes of them, rounded where it would be.
extern "C" __global__ void tidekv_one_gate(
    bf16* out, const bf16* in, const bf16* weight, const float* bias, u32 inputs, u32 intermediate)
{
    const u32 lane = threadIdx.x % WARP;
    const u64 output = (u64)blockIdx.x * ONE_WARPS + threadIdx.x / WARP;
    if (output >= intermediate) return;
    const float gates = dot(in, weight + output * inputs, inputs, lane);
    const float ups = dot(in, weight + (intermediate + output) * inputs, inputs, lane);
    const float gate = to_float(from_float<bf16>(warp_sum(gates))) + (bias ? bias[output] : 0.0f);
    const float up = to_float(from_float<bf16>(warp_sum(ups))) + (bias ? bias[intermediate + output] : 0.0f);
    if (lane == 0) out[output] = from_float<bf16>(gate / (1.0f + expf(-gate)) * up);
}

extern "C" __global__ void tidekv_bias(float* out, const float* bias, u32 columns)
{
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < columns) out[(u64)blockIdx.y * columns + i] += bias[i];
}

// A logit and its id as one number that grows with the logit, and of equals with the smaller id; 0 is behind all of them.
__device__ __forceinline__ u64 ranked(float logit, u32 id)
{
    const u32 bits = __float_as_uint(logit);
    const u32 order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | (u32)~id;
}

__device__ __forceinline__ u64 warp_max(u64 value)
{
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// The largest logit of each part of a row. Numbers that are none, and minus infinity, are never the largest.
extern "C" __global__ void tidekv_best_of_parts(u64* parts, const float* logits, u32 vocab)
{
    __shared__ u64 best[WARP];
    const float* row = logits + (u64)blockIdx.y * vocab;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u64 value = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x) {
        // Zeros of both signs are equal.
        const float logit = row[i] == 0.0f ? 0.0f : row[i];
        if (logit > NEGATIVE_INFINITY) value = max(value, ranked(logit, i));
    }
    value = warp_max(value);
    if (lane == 0) best[warp] = value;
    __syncthreads();
    value = warp_max(lane < warps ? best[lane] : 0);
    if (threadIdx.x == 0) parts[(u64)blockIdx.y * gridDim.x + blockIdx.x] = value;
}

// The id of the largest of all parts; of nothing it is token 0. A warp for each row.
extern "C" __global__ void tidekv_best(u32* best, const u64* parts)
{
    u64 value = 0;
    for (u32 i = threadIdx.x; i < BEST_PARTS; i += WARP) value = max(value, parts[(u64)blockIdx.x * BEST_PARTS + i]);
    value = warp_max(value);
    if (threadIdx.x == 0) best[blockIdx.x] = value == 0 ? 0 : ~(u32)value;
}

// Reads `words` words of 16 bytes and keeps next to nothing: how fast memory can be read at all.
extern "C" __global__ void tidekv_read(u32* out, const uint4* in, u64 words)
{
    const u64 step = (u64)gridDim.x * blockDim.x;
    u32 sum = 0;
#pragma unroll 8
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < words; at += step) {
        const uint4 word = __ldcs(in + at);
        sum ^= word.x ^ word.y ^ word.z ^ word.w;
    }
    // Not one sum in four billion is this; but the reads cannot be left out.
    if (sum == 0x2545f491u) *out = sum;
}
