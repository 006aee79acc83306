// What every kernel shares: number types, vector accesses, reductions, and the few instructions that C++
// does not name. Kernels use these functions only, so that the same sources also run on the host under
// test (tests/emulator replaces the section below).
#pragma once

#ifdef SUROGATE_EMULATED
#include "emulated.cuh"
#else

#include <cuda_bf16.h>

#define INFINITY __int_as_float(0x7f800000)

typedef __nv_bfloat16 bf16;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;

// Declares `type* name`: the dynamic shared memory of the launch, aligned to 128 bytes.
#define DYNAMIC_SHARED(type, name)                                    \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// Two floats rounded to bf16 in one register, lo in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    __nv_bfloat162 both = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&both);
}

// Of two bf16 numbers in a word each: the larger magnitudes, where NaN is the largest and the sign of a result means
// nothing; the smaller numbers, of NaN and a number the number; products, and products with a sum, rounded once.
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __nv_bfloat162 bf16x2_of(uint32_t x) { return *reinterpret_cast<__nv_bfloat162*>(&x); }
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t x, uint32_t y) {
#if __CUDA_ARCH__ >= 860
    uint32_t most;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(x), "r"(y));
    return most;
#else
    return bits_of(__hmax2_nan(__habs2(bf16x2_of(x)), __habs2(bf16x2_of(y))));
#endif
}
__device__ __forceinline__ uint32_t min_bf16x2(uint32_t x, uint32_t y) {
    return bits_of(__hmin2(bf16x2_of(x), bf16x2_of(y)));
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t x, uint32_t y) {
    return bits_of(__hmul2(bf16x2_of(x), bf16x2_of(y)));
}
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t x, uint32_t y, uint32_t z) {
    return bits_of(__hfma2(bf16x2_of(x), bf16x2_of(y), bf16x2_of(z)));
}

template <typename T> __device__ __forceinline__ T warp_shfl_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename T> __device__ __forceinline__ T warp_shfl(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
__device__ __forceinline__ uint32_t warp_ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// Loads four 8x8 tiles of 16-bit values; lane l gives the address of row l%8 of tile l/8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// d (16x8, fp32) += a (16x16, bf16, row-major) * b (16x8, bf16, column-major), PTX fragment layouts.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copies 16 bytes from global to shared memory in the background; zeros when valid is false.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(address), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// A word that other blocks may be writing by atomics.
__device__ __forceinline__ uint32_t relaxed_load(uint32_t* address) {
    uint32_t word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    return word;
}

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x and 1 / sqrt(x) to about one unit in the last place; subnormal numbers count as zero.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float fast_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 890
#define HARDWARE_FP8
// Two codes, that of lo in the low byte: to nearest, ties to even; what is too large, infinity too, is the largest.
__device__ __forceinline__ uint32_t cvt_e4m3x2(float lo, float hi) {
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(hi), "f"(lo));
    return both;
}
__device__ __forceinline__ uint32_t cvt_e5m2x2(float lo, float hi) {
    uint16_t both;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(hi), "f"(lo));
    return both;
}
// The values of two codes of E4M3, that of lo from the low byte.
__device__ __forceinline__ void from_e4m3x2(float& lo, float& hi, uint32_t both) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        ".reg .b32 halves;\n"
        "cvt.rn.f16x2.e4m3x2 halves, %2;\n"
        "mov.b32 {low, high}, halves;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}" : "=f"(lo), "=f"(hi) : "h"(uint16_t(both)));
}
#endif

#if __CUDA_ARCH__ >= 1000
#define HARDWARE_FP4
// Two codes of E2M1 in a byte, that of lo in its low half: to nearest, ties to even, what is too large is the largest.
__device__ __forceinline__ uint32_t cvt_e2m1x2(float lo, float hi) {
    uint16_t both;
    asm("{ .reg .b8 codes; cvt.rn.satfinite.e2m1x2.f32 codes, %1, %2; mov.b16 %0, {codes, 0}; }"
        : "=h"(both) : "f"(hi), "f"(lo));
    return both;
}
#endif

#endif  // SUROGATE_EMULATED

// N values moved in one access. The address must be aligned to the vector's size (at most 16 bytes).
template <typename T, int N> struct alignas(sizeof(T) * N) Vec {
    T data[N];
    static __device__ __forceinline__ Vec load(const T* p) { return *reinterpret_cast<const Vec*>(p); }
    __device__ __forceinline__ void store(T* p) const { *reinterpret_cast<Vec*>(p) = *this; }
};

// Threads of a block where nothing asks for another number: THREADS of kernels/nvrtc.py. Every kernel bounds its
// threads by __launch_bounds__, or the compiler may give each more registers than a block can have.
constexpr int LAUNCH_THREADS = 256;

// Values of T in a 16-byte access.
template <typename T> constexpr int WIDTH = 16 / sizeof(T);

__device__ __forceinline__ float warp_sum(float value) {
    for (int mask = 16; mask > 0; mask /= 2) value += warp_shfl_xor(value, mask);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, warp_shfl_xor(value, mask));
    return value;
}

// Sum over a block of up to 1024 threads (a multiple of 32), the same bits every time, known to all
// threads. Every thread of the block must call it.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float partial[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    __syncthreads();  // the previous call's readers are done
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}
__device__ __forceinline__ float block_max(float value) {
    __shared__ float partial[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_max(value);
    __syncthreads();
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : -INFINITY);
}

// Waits until no more than `left` of the thread's last groups of copies are on their way; left is at most MOST.
template <int MOST> __device__ __forceinline__ void cp_async_wait_all_but(int left) {
    if (MOST == 0 || left == MOST) cp_async_wait<MOST>();
    else if constexpr (MOST > 0) cp_async_wait_all_but<MOST - 1>(left);
}
