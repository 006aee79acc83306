// Codes of bf16 values at a scale that is known before them, and the largest magnitude among them: for the casts, and
// for kernels that make codes of what they write.
#pragma once
#include "pack.cuh"
#include "quant.cuh"

// Bits of |x| as a bf16; NaN is above infinity, so that a maximum of bits never loses one.
constexpr uint32_t MAGNITUDE = 0x7fffu;
constexpr uint32_t NOT_FINITE = 0x7f80u;
constexpr uint32_t NAN_CODE = 0x7fu;

template <int N> __device__ __forceinline__ uint32_t largest(const Pack<bf16, N>& x, uint32_t most) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        most = max(most, max(x.word[i] & MAGNITUDE, x.word[i] >> 16 & MAGNITUDE));
    return most;
}

// The codes of N scaled values, four a word. Infinity becomes NaN: a cast must not hide it.
template <typename F, int N>
__device__ __forceinline__ void encode_all(uint32_t (&code)[N / 4], const Pack<bf16, N>& x, float scale, uint32_t most) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
        float scaled[4];
        for (int j = 0; j < 4; ++j) scaled[j] = x.get(4 * i + j) * scale;
        code[i] = encode_bytes<F>(scaled);
    }
    if (most < NOT_FINITE) return;
    for (int j = 0; j < N; ++j)
        if (!(fabsf(x.get(j)) < INFINITY)) code[j / 4] |= NAN_CODE << j % 4 * 8;
}

// Raises *amax to the largest of the block's magnitudes: floats of one sign are ordered as their bits are, and a maximum
// does not depend on the order. Almost no block has a new one: the others leave it at a look, where an atomic each would
// wait for all before it. Every thread must call it.
__device__ __forceinline__ void raise(float* amax, uint32_t most) {
    float size = block_max(float(most));  // integers below 2^15 are exact
    uint32_t bits = uint32_t(size) << 16, *word = reinterpret_cast<uint32_t*>(amax);
    if (threadIdx.x == 0 && bits > relaxed_load(word)) atomicMax(word, bits);
}

// A cast by the kernel that makes the values, to E4M3 or E5M2; to void, nothing happens.
template <typename F> struct Cast {
    float scale;
    uint32_t most = 0;
    __device__ __forceinline__ explicit Cast(const float* __restrict__ code_scale) : scale(*code_scale) {}
    // Writes the codes of N values, at an address that is a multiple of N.
    template <int N> __device__ __forceinline__ void store(uint8_t* __restrict__ code, const Pack<bf16, N>& x) {
        Vec<uint32_t, N / 4> out;
        most = largest(x, most);
        encode_all<F, N>(out.data, x, scale, most);
        out.store(reinterpret_cast<uint32_t*>(code));
    }
    // Raises *amax, unless it is null, to the largest of all values. Every thread of the block must call it.
    __device__ __forceinline__ void finish(float* amax) const {
        if (amax) raise(amax, most);
    }
};
template <> struct Cast<void> {
    __device__ __forceinline__ explicit Cast(const float*) {}
    template <typename P> __device__ __forceinline__ void store(uint8_t*, const P&) {}
    __device__ __forceinline__ void finish(float*) const {}
};
