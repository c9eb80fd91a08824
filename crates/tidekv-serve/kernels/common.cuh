// What the kernels of this folder share. scripts/kernels hands it to the compiler by name; there are no other headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Enumerators and not constants: those would become global variables of the module.
enum : u32 {
    WARP = 32,
    ALL_LANES = 0xffffffffu,
};

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// ---- elements: bf16 for speed, float to compare with the processor ----------------------------------------------------------

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(bf16 element)
{
    return __uint_as_float((u32)element.bits << 16);
}

__device__ __forceinline__ float to_float(float element)
{
    return element;
}

template <typename T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value)
{
    return value;
}

// To the nearest, ties to even.
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value)
{
    bf16 element;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
    return element;
}

// The two elements of a word, the first in the lower half.
__device__ __forceinline__ float low(u32 pair)
{
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high(u32 pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ u32 pair_of(float first, float second)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// ---- reductions: in a fixed order, so that the same step gives the same bits -------------------------------------------------

__device__ __forceinline__ float warp_sum(float value)
{
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

__device__ __forceinline__ float warp_max(float value)
{
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// The sum over all threads of a block of at most 32 warps, for all of them. `sums` is one word for each warp.
__device__ __forceinline__ float block_sum(float value, float* sums)
{
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0.0f);
}
