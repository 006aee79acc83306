// Arithmetic that gives the bits of the host: products and sums that the compiler may not fuse, and
// stochastic rounding to bf16 by counters. kernels/rounding.py states the scheme and its source.
#pragma once
#include "common.cuh"

// Elements that share one Philox call.
constexpr int ROUNDING_GROUP = 8;

__device__ __forceinline__ float exact_mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float exact_add(float a, float b) { return __fadd_rn(a, b); }

// counter = Philox4x32-10(counter, key).
__device__ __forceinline__ void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int turn = 0; turn < 10; ++turn) {
        uint64_t low = uint64_t(counter[0]) * 0xD2511F53u, high = uint64_t(counter[2]) * 0xCD9E8D57u;
        counter[0] = uint32_t(high >> 32) ^ counter[1] ^ key0;
        counter[1] = uint32_t(high);
        counter[2] = uint32_t(low >> 32) ^ counter[3] ^ key1;
        counter[3] = uint32_t(low);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// x on the grid of bf16, up in magnitude with probability (low 16 bits of x) / 2^16. A finite value
// stays finite.
__device__ __forceinline__ float stochastic_round(float x, uint32_t bits16) {
    uint32_t word = __float_as_uint(x);
    if ((word & 0x7F800000u) == 0x7F800000u) return x;
    uint32_t moved = (word + bits16) & 0xFFFF0000u;
    if ((moved & 0x7F800000u) == 0x7F800000u) moved = word & 0xFFFF0000u;
    return __uint_as_float(moved);
}

// Rounds eight consecutive elements, the first of which has index `element` in its whole tensor.
__device__ __forceinline__ void stochastic_round_group(float (&x)[ROUNDING_GROUP], int64_t element,
                                                       uint32_t tensor, uint32_t role, uint32_t seed,
                                                       uint32_t step) {
    uint64_t group = uint64_t(element) / ROUNDING_GROUP;
    uint32_t words[4] = {uint32_t(group), uint32_t(group >> 32), tensor, role};
    philox(words, seed, step);
#pragma unroll
    for (int j = 0; j < ROUNDING_GROUP; ++j)
        x[j] = stochastic_round(x[j], j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xFFFFu);
}
