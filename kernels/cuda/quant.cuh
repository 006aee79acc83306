// Codes of the narrow number formats, to and from float: E4M3, E5M2, E2M1, E8M0 and NF4.
// kernels/quant/codes.py states the formats and is the host version: it gives the same codes.
#pragma once
#include "pack.cuh"

// An exponent field of bias BIAS over MANTISSA bits: what a code's value is, is as in IEEE 754, subnormals included.
// LARGEST holds the bits of the largest finite value as a float, SIGN the sign bit of a code, and NOT_A_NUMBER the
// code that NaN turns into.
struct E4M3 {
    static constexpr int BITS = 8, MANTISSA = 3, BIAS = 7;
    static constexpr uint32_t LARGEST = 0x43E00000u, SIGN = 0x80u, NOT_A_NUMBER = 0x7Fu;  // 448
};
struct E5M2 {
    static constexpr int BITS = 8, MANTISSA = 2, BIAS = 15;
    static constexpr uint32_t LARGEST = 0x47600000u, SIGN = 0x80u, NOT_A_NUMBER = 0x7Fu;  // 57344
};
// Has no NaN: one becomes 6. Whoever casts to it looks for NaN before.
struct E2M1 {
    static constexpr int BITS = 4, MANTISSA = 1, BIAS = 1;
    static constexpr uint32_t LARGEST = 0x40C00000u, SIGN = 0x8u, NOT_A_NUMBER = 0x7u;  // 6
};
struct E8M0 {
    static constexpr int BITS = 8;
};
// NormalFloat (Dettmers et al. 2023, arXiv 2305.14314).
struct NF4 {
    static constexpr int BITS = 4;
};
constexpr float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }
__device__ __forceinline__ float quiet_nan() { return __uint_as_float(0x7FC00000u); }

// To nearest, ties to even; past the largest value, infinities too, it is the largest. A sign of zero stays.
// `unit` is a power of two whose last bit, as a float, is the distance of codes where x is: the sum with it rounds.
template <typename F> __device__ __forceinline__ uint32_t encode(float x) {
    constexpr int DROPPED = 23 - F::MANTISSA;
    constexpr uint32_t NORMAL = uint32_t(128 - F::BIAS) << 23, LEAST_UNIT = NORMAL + (uint32_t(DROPPED) << 23);
    uint32_t word = __float_as_uint(x), size = min(word & 0x7FFFFFFFu, F::LARGEST), sign = word >> 31 ? F::SIGN : 0u;
    uint32_t unit = (max(size, NORMAL) & 0x7F800000u) + (uint32_t(DROPPED) << 23);
    uint32_t steps = __float_as_uint(__fadd_rn(__uint_as_float(size), __uint_as_float(unit))) - unit;
    return x != x ? F::NOT_A_NUMBER : (steps + ((unit - LEAST_UNIT) >> DROPPED)) | sign;
}
// The least power of two that is not less than x, but at most 2^127 (infinity too) and at least 2^-127 (zero too);
// NaN, and what is negative, is NaN.
template <> __device__ __forceinline__ uint32_t encode<E8M0>(float x) {
    uint32_t word = __float_as_uint(x), exponent = word >> 23, rest = word & 0x7FFFFFu;
    if (word == 0x80000000u) return 0u;
    if (word > 0x7F800000u) return 0xFFu;
    uint32_t up = exponent ? rest > 0u : rest > 0x400000u;
    return min(exponent + up, 0xFEu);
}
// The nearest value; in the middle between two, the lower. NaN is the code of zero.
__device__ __forceinline__ float nf4_middle(uint32_t code) { return (NF4_VALUES[code] + NF4_VALUES[code + 1]) * 0.5f; }
template <> __device__ __forceinline__ uint32_t encode<NF4>(float x) {
    if (x != x) return 7u;
    uint32_t code = 0;
#pragma unroll
    for (int i = 0; i < 15; ++i) code += x > nf4_middle(i);
    return code;
}

// a >= 0 on a grid of 23 - SHIFT bits after the leading one, and of one step below the power of two under `least`, in
// three instructions. A float of 2^SHIFT y has the step at y as its last bit: a less that number is rounded to the grid.
// 2^SHIFT y is even in units of it wherever a lies in the middle between two values, so that ties go to the even one.
template <int SHIFT> __device__ __forceinline__ float nearest_on_grid(float a, float least) {
    float y = fmaxf(a, least);
    return __fmaf_rn(y, float(1 << SHIFT), __fmaf_rn(y, -float(1 << SHIFT), a));
}
__device__ __forceinline__ float e2m1_nearest(float a) { return nearest_on_grid<22>(a, 1.5f); }
// The same, not past 6 if CLIP (else a is below 7), with the square of the change, which is exact, added to `error`.
template <bool CLIP> __device__ __forceinline__ float e2m1_nearest(float a, float& error) {
    float q = e2m1_nearest(CLIP ? fminf(a, 6.0f) : a);
    float change = __fadd_rn(q, -a);
    error = __fmaf_rn(change, change, error);
    return q;
}
__device__ __forceinline__ float e4m3_nearest(float a) { return nearest_on_grid<20>(a, 0.0234375f); }

// The upper halves of two floats. Values on the grid, and scales, are exact in bf16.
constexpr uint32_t SIGNS_OF_TWO = 0x80008000u;
__device__ __forceinline__ uint32_t word_of(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// Up in magnitude when bits16 / 2^16 is less than the distance to the lower neighbour, in units of their distance:
// unbiased to 2^-16 for |x| up to the largest value. Past that, and NaN: as to nearest.
template <typename F> __device__ __forceinline__ uint32_t encode_stochastic(float x, uint32_t bits16) {
    constexpr int DROPPED = 23 - F::MANTISSA;
    constexpr uint32_t NORMAL = uint32_t(128 - F::BIAS) << 23, OFFSET = uint32_t(127 - F::BIAS) << F::MANTISSA;
    uint32_t word = __float_as_uint(x), size = word & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return F::NOT_A_NUMBER;
    uint32_t sign = word >> 31 ? F::SIGN : 0u;
    size = min(size, F::LARGEST);
    if (size >= NORMAL) {
        uint32_t up = (bits16 << (DROPPED - 16)) < (size & ((1u << DROPPED) - 1u));
        return ((size >> DROPPED) - OFFSET + up) | sign;
    }
    float units = __fmul_rn(__uint_as_float(size), power_of_two(F::BIAS - 1 + F::MANTISSA));  // exact
    uint32_t below = uint32_t(units);
    uint32_t up = float(bits16) * power_of_two(-16) < units - float(below);
    return (below + up) | sign;
}

// The fields moved to where a float has them are the value but for the difference of the biases.
template <typename F> __device__ __forceinline__ float decode_finite(uint32_t code) {
    uint32_t size = (code & (F::SIGN - 1u)) << (23 - F::MANTISSA);
    float value = __fmul_rn(__uint_as_float(size), power_of_two(127 - F::BIAS));
    return code & F::SIGN ? -value : value;
}
template <typename F> __device__ __forceinline__ float decode(uint32_t code) { return decode_finite<F>(code); }
template <> __device__ __forceinline__ float decode<E4M3>(uint32_t code) {
    return (code & 0x7Fu) == 0x7Fu ? quiet_nan() : decode_finite<E4M3>(code);
}
template <> __device__ __forceinline__ float decode<E5M2>(uint32_t code) {
    uint32_t size = code & 0x7Fu;
    if (size > 0x7Cu) return quiet_nan();
    if (size == 0x7Cu) return code & 0x80u ? -INFINITY : INFINITY;
    return decode_finite<E5M2>(code);
}
template <> __device__ __forceinline__ float decode<E8M0>(uint32_t code) {
    if (code == 0xFFu) return quiet_nan();
    return __uint_as_float(code ? code << 23 : 0x00400000u);
}
template <> __device__ __forceinline__ float decode<NF4>(uint32_t code) { return NF4_VALUES[code]; }

// Where the code of the element with index j lies in its word: an element of a pair in the low half of a byte, or in
// the high half.
template <typename F> constexpr bool HIGH_FIRST = false;
template <> constexpr bool HIGH_FIRST<NF4> = true;
template <typename F> __device__ __forceinline__ int nibble_shift(int j) { return 4 * (HIGH_FIRST<F> ? j ^ 1 : j); }

// Four codes in the order of their bytes. Cards since sm_89 convert two at a time, to the same codes.
template <typename F> __device__ __forceinline__ uint32_t encode_bytes(const float (&x)[4]) {
#ifdef HARDWARE_FP8
    if constexpr (F::MANTISSA == 3) return cvt_e4m3x2(x[0], x[1]) | cvt_e4m3x2(x[2], x[3]) << 16;
    else return cvt_e5m2x2(x[0], x[1]) | cvt_e5m2x2(x[2], x[3]) << 16;
#else
    return encode<F>(x[0]) | encode<F>(x[1]) << 8 | encode<F>(x[2]) << 16 | encode<F>(x[3]) << 24;
#endif
}
// Eight codes of E2M1, the first in the lowest bits: of numbers, and of magnitudes on the grid whose signs are those of
// `sign`, two bf16 numbers in a word. Without instructions for it, a magnitude times 2^-126 is a bf16 whose bits from 6
// on are the code, by the exponents of subnormal numbers.
#ifdef HARDWARE_FP4
__device__ __forceinline__ uint32_t encode_nibbles(const float (&x)[8]) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= cvt_e2m1x2(x[2 * j], x[2 * j + 1]) << 8 * j;
    return word;
}
__device__ __forceinline__ uint32_t encode_grid(const uint32_t (&q)[4], const uint32_t (&sign)[4]) {
    float x[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t both = q[j] | (sign[j] & SIGNS_OF_TWO);
        x[2 * j] = __uint_as_float(both << 16), x[2 * j + 1] = __uint_as_float(both & 0xFFFF0000u);
    }
    return encode_nibbles(x);
}
#else
__device__ __forceinline__ uint32_t encode_grid(const uint32_t (&q)[4], const uint32_t (&sign)[4]) {
    uint32_t code[4];  // in the upper four bits of either half
#pragma unroll
    for (int j = 0; j < 4; ++j) code[j] = mul_bf16x2(q[j], 0x00800080u) << 6 | (sign[j] & SIGNS_OF_TWO);
    uint32_t low = __byte_perm(code[0], code[1], 0x7351), high = __byte_perm(code[2], code[3], 0x7351);
    return (__byte_perm(low, high, 0x5410) >> 4) + __byte_perm(low, high, 0x7632);
}
__device__ __forceinline__ uint32_t encode_nibbles(const float (&x)[8]) {
    uint32_t q[4], sign[4];
    float number[8], nearest[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        number[j] = fmaxf(fminf(x[j], 6.0f), -6.0f);  // NaN is 6
        nearest[j] = e2m1_nearest(fabsf(number[j]));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        q[j] = word_of(nearest[2 * j], nearest[2 * j + 1]);
        sign[j] = word_of(number[2 * j], number[2 * j + 1]);
    }
    return encode_grid(q, sign);
}
#endif

// The same, of words that have number j of eight beside j + PARTNER, and signs of words of two neighbours: what takes the
// fewest instructions.
#ifdef HARDWARE_FP4
constexpr int PARTNER = 1;
__device__ __forceinline__ uint32_t encode_partners(const uint32_t (&q)[4], const uint32_t (&sign)[4]) {
    return encode_grid(q, sign);
}
#else
constexpr int PARTNER = 4;
__device__ __forceinline__ uint32_t encode_partners(const uint32_t (&q)[4], const uint32_t (&sign)[4]) {
    uint32_t code[4];  // from bit 6 of either half on
#pragma unroll
    for (int j = 0; j < 4; ++j) code[j] = mul_bf16x2(q[j], 0x00800080u);
    uint32_t sizes = ((code[1] * 16 + code[0]) >> 6) + (code[3] * 16 + code[2]) * 4;
    uint32_t low = __byte_perm(sign[0], sign[1], 0x7351), high = __byte_perm(sign[2], sign[3], 0x7351);
    uint32_t even = __byte_perm(low, high, 0x5410) >> 4, odd = __byte_perm(low, high, 0x7632);
    return sizes | (even & 0x08080808u) | (odd & 0x80808080u);
}
#endif

// The values of four codes of E4M3. Without instructions for it, NaN is seen by a carry out of a byte's seven bits.
__device__ __forceinline__ void decode_bytes(float (&x)[4], uint32_t word) {
#ifdef HARDWARE_FP8
    from_e4m3x2(x[0], x[1], word);
    from_e4m3x2(x[2], x[3], word >> 16);
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        int code = int(word << (24 - 8 * j)) >> 4;  // copies of the sign above the exponent
        x[j] = __fmul_rn(__uint_as_float(uint32_t(code) & 0x87F00000u), power_of_two(120));
    }
    if (((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = decode<E4M3>(word >> 8 * j & 0xFFu);
    }
#endif
}

// Magnitudes are compared as the bits of floats, where NaN is the largest: a maximum never loses one.
template <int N> __device__ __forceinline__ uint32_t largest_magnitude(const float (&x)[N]) {
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) most = max(most, __float_as_uint(x[j]) & 0x7FFFFFFFu);
    return most;
}
// Of two bf16 numbers in a word, and of a pack: of bf16, two at a time.
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t word) {
    return max(word & 0x7FFF0000u, word << 16 & 0x7FFF0000u);
}
template <typename T, int N> __device__ __forceinline__ uint32_t largest_magnitude(const Pack<T, N>& x) {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t word : x.word) most = x.HALF ? max_magnitudes(most, word) : max(most, word & 0x7FFFFFFFu);
    return x.HALF ? larger_magnitude(most) : most;
}
// The largest of a block of up to 1024 threads (a multiple of 32), known to all of them. Every thread must call it.
__device__ __forceinline__ uint32_t block_amax(uint32_t most) {
    __shared__ uint32_t of_warp[32];
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int mask = 16; mask > 0; mask /= 2) most = max(most, warp_shfl_xor(most, mask));
    __syncthreads();  // the previous call's readers are done
    if (lane == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    most = lane < warps ? of_warp[lane] : 0u;
    for (int mask = 16; mask > 0; mask /= 2) most = max(most, warp_shfl_xor(most, mask));
    return most;
}
// A scale that overflowed, or divided by zero, as the largest float. NaN stays.
__device__ __forceinline__ float saturated(float x) { return x > 3.40282347e38f ? 3.40282347e38f : x; }
