// Arithmetic that gives the bits of the host: products and sums that the compiler may not fuse, and
// stochastic rounding to bf16 by counters. kernels/rounding.py states the scheme and its source.
#pragma once
#include "pack.cuh"

// Elements that share one Philox call.
constexpr int ROUNDING_GROUP = 8;

__device__ __forceinline__ float exact_mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float exact_add(float a, float b) { return __fadd_rn(a, b); }

// sqrt(x), 1 / b and a / b rounded to nearest: the instructions that the compiler makes of them, without its branches
// for the ends of the range. x is from 2^-100 to 2^100; |a|, b and |a / b| are from 2^-110 to 2^120.
__device__ __forceinline__ float exact_sqrt(float x) {
    float y = fast_rsqrt(x), root = __fmul_rn(x, y);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(y, 0.5f), root);
}
__device__ __forceinline__ float exact_reciprocal(float b) {
    float y = fast_reciprocal(b);
    return __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
}
__device__ __forceinline__ float exact_div(float a, float b) {
    float y = exact_reciprocal(b), q = __fmul_rn(a, y);
    return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

// Each counter = Philox4x32-ROUNDS(counter, key). Calls that are made together share the keys of their rounds.
template <int ROUNDS, int CALLS>
__device__ __forceinline__ void philox_calls(uint32_t (&counter)[CALLS][4], uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int turn = 0; turn < ROUNDS; ++turn) {
#pragma unroll
        for (auto& c : counter) {
            uint64_t low = uint64_t(c[0]) * 0xD2511F53u, high = uint64_t(c[2]) * 0xCD9E8D57u;
            c[0] = uint32_t(high >> 32) ^ c[1] ^ key0;
            c[1] = uint32_t(high);
            c[2] = uint32_t(low >> 32) ^ c[3] ^ key1;
            c[3] = uint32_t(low);
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}
__device__ __forceinline__ void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
    philox_calls<10>(reinterpret_cast<uint32_t (&)[1][4]>(counter), key0, key1);
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

__device__ __forceinline__ void set_counter(uint32_t (&counter)[4], uint64_t group, uint32_t tensor, uint32_t role) {
    counter[0] = uint32_t(group), counter[1] = uint32_t(group >> 32), counter[2] = tensor, counter[3] = role;
}

// The random bits of eight consecutive elements, 16 each: element `first` of the whole tensor and on.
__device__ __forceinline__ void random_words(uint32_t (&words)[4], int64_t first, uint32_t tensor, uint32_t role,
                                             uint32_t seed, uint32_t step) {
    set_counter(words, uint64_t(first) / ROUNDING_GROUP, tensor, role);
    philox(words, seed, step);
}

// Each of x rounded by its half of a word. Where none is near the end of bf16's range, nor infinite or NaN,
// adding the bits and dropping the lower half is all there is to it.
__device__ __forceinline__ Pack<bf16, ROUNDING_GROUP> stochastic_round_group(const float (&x)[ROUNDING_GROUP],
                                                                             const uint32_t (&words)[4]) {
    constexpr float LARGEST = 3.38953139e38f;  // of bf16
    Pack<bf16, ROUNDING_GROUP> out;
    float size = 0.0f;  // at least each |x|, and NaN if one is
#pragma unroll
    for (int j = 0; j < ROUNDING_GROUP; ++j) size += fabsf(x[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out.word[i] = __byte_perm(__float_as_uint(x[2 * i]) + (words[i] & 0xFFFFu),
                                  __float_as_uint(x[2 * i + 1]) + (words[i] >> 16), 0x7632);
    if (!(size < LARGEST)) {
        float rounded[ROUNDING_GROUP];
#pragma unroll
        for (int j = 0; j < ROUNDING_GROUP; ++j)
            rounded[j] = stochastic_round(x[j], j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xFFFFu);
        out.set(rounded);
    }
    return out;
}
