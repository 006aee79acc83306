// What casts to NVFP4 share: scales of blocks, roundings to E2M1 with their errors, and how a warp walks over a matrix.
// kernels/nvfp4.py has the formulas.
#pragma once
#include "quant.cuh"
#include "rounding.cuh"

constexpr int BLOCK = 16;  // values that share a scale
constexpr int PANEL_ROWS = 16, PANEL_COLUMNS = 64;
constexpr int ROWS_OF_LANE = 4;  // of a panel: a lane reads eight neighbouring columns of every fourth row

// Where the scale of (row, block of columns) lies in 128 x 4 tiles of 512 bytes, `tiles` of them side by side.
__device__ __forceinline__ int64_t scale_offset(int row, int block, int tiles) {
    int64_t tile = int64_t(row / 128) * tiles + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}
__device__ __forceinline__ int scale_tiles(int columns) { return (columns / BLOCK + 3) / 4; }

// Panels of a matrix for a warp, in the order of rows: every `step`-th. Neighbours in a row are of neighbouring warps.
struct Walk {
    struct Place {
        int row, column;  // of the panel's first value
    };
    int row_step, column_step, across;  // in values
    __device__ __forceinline__ Walk(int step, int columns) {
        int panels = (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS, turn = step / panels;
        across = panels * PANEL_COLUMNS, row_step = turn * PANEL_ROWS;
        column_step = (step - turn * panels) * PANEL_COLUMNS;
    }
    __device__ __forceinline__ Place start(int first) const {
        int panels = across / PANEL_COLUMNS, turn = first / panels;
        return {turn * PANEL_ROWS, (first - turn * panels) * PANEL_COLUMNS};
    }
    __device__ __forceinline__ void next(Place& at) const {
        at.row += row_step, at.column += column_step;
        if (at.column >= across) at.column -= across, at.row += PANEL_ROWS;
    }
};

// A warp's panels of x, one here and one on its way, copied in whole 128-byte lines. Lane 8 * r + i has chunk i, of 16
// bytes, of rows r, r + 4, r + 8 and r + 12. SWIZZLED: the places of chunks are exchanged by the row, so that lanes that
// read two neighbouring chunks each, of two rows, meet different banks. Places of a lane are kept for all panels: the
// compiler would work them out anew for each.
template <bool SWIZZLED> struct Panels {
    static constexpr int ROW = PANEL_COLUMNS / 2, SIZE = PANEL_ROWS * ROW;  // in words
    uint32_t* to;
    int other = SIZE;  // from the panel that is copied to the one that is here

    __device__ __forceinline__ explicit Panels(uint32_t* panels) : to(panels + chunk(lane() / 8, lane() % 8)) {}
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int chunk(int row, int i) { return row * ROW + 4 * (SWIZZLED ? i ^ row % 2 : i); }
    // Of x from (row, column) on; past its ends are zeros.
    __device__ __forceinline__ void load(const bf16* x, int stride, int row, int column, int rows, int columns) {
        row += lane() / 8, column += lane() % 8 * 8;
        const bf16* from = x + int64_t(row) * stride + column;
#pragma unroll
        for (int k = 0; k < ROWS_OF_LANE; ++k, from += 4 * int64_t(stride))
            cp_async_16(to + 4 * k * ROW, from, row + 4 * k < rows && column < columns);
    }
    __device__ __forceinline__ void turn() { to += other, other = -other; }
};

struct TensorScale {
    float up, down, per_block;
};
// Above LEAST_AMAX, reciprocals of scales are far from the ends of the range of floats.
__device__ __forceinline__ TensorScale tensor_scale(float amax, float range, float inverse_target) {
    constexpr float LEAST_AMAX = 4.930380657631324e-32f;  // 2^-104
    float up = amax > LEAST_AMAX && amax < INFINITY ? __fdiv_rn(range, amax) : 1.0f;
    return {up, __frcp_rn(up), exact_mul(up, inverse_target)};
}

// Two bf16 numbers in a word, or what belongs to them.
struct Two {
    float low, high;
};
__device__ __forceinline__ Two values_of(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}

// The words of a lane hold two columns, a block each, or the values of one block alone: all of them (16 columns of a
// row), or an eighth (16 columns of 16 rows).
enum Spread { APART, WHOLE, TILE };
// Of magnitudes whose signs mean nothing.
template <Spread SPREAD> __device__ __forceinline__ Two spread_max(Two value) {
    if (SPREAD == APART) return {fabsf(value.low), fabsf(value.high)};
    float most = fmaxf(fabsf(value.low), fabsf(value.high));
    if (SPREAD == TILE) {
        most = fmaxf(most, warp_shfl_xor(most, 1));
        for (int mask = 8; mask <= 16; mask *= 2) most = fmaxf(most, warp_shfl_xor(most, mask));
    }
    return {most, most};
}
// Of the sums that a lane has of lower and upper halves; of a WHOLE block, of its first and its last words.
template <Spread SPREAD> constexpr int SUMS = SPREAD == WHOLE ? 2 : 1;
template <Spread SPREAD> __device__ __forceinline__ Two spread_sum(const Two (&part)[SUMS<SPREAD>]) {
    if constexpr (SPREAD == APART) return part[0];
    float sum = exact_add(part[0].low, part[0].high);
    if constexpr (SPREAD == WHOLE) {
        sum = exact_add(sum, exact_add(part[1].low, part[1].high));
    } else {
        sum = exact_add(sum, warp_shfl_xor(sum, 1));
        for (int mask = 8; mask <= 16; mask *= 2) sum = exact_add(sum, warp_shfl_xor(sum, mask));
    }
    return {sum, sum};
}

// Two magnitudes on the grid of E2M1 as bf16: up where bits16 units of 2^-16 of a step, added to one, which is rounded to
// such units, reach the next value. `noise` is 64 + bits16 / 2^17, and the power of two below a magnitude two steps, so
// that the sum has a bf16 for each value, to which it is cut off.
__device__ __forceinline__ uint32_t e2m1_stochastic(Two a, Two noise) {
    auto power_below = [](float a) { return fmaxf(__uint_as_float(__float_as_uint(a) & 0x7F800000u), 1.0f); };
    Two power = {power_below(a.low), power_below(a.high)};
    uint32_t moved = word_of(__fmaf_rn(noise.low, power.low, a.low), __fmaf_rn(noise.high, power.high, a.high));
    return fma_bf16x2(word_of(power.low, power.high), 0xC280C280u, moved);  // less 64 powers
}

// The random bits of words of two neighbours in a row, eight of them to a call, and of words of two columns.
struct NoNoise {
    __device__ __forceinline__ Two operator()(int) const { return {0.0f, 0.0f}; }
};
__device__ __forceinline__ float noise_of(uint32_t word, int half) {
    return __uint_as_float(__byte_perm(word, 0x4280u, half ? 0x5432 : 0x5410));
}
struct RowNoise {
    uint32_t word[2][4];
    __device__ __forceinline__ Two operator()(int i) const {
        return {noise_of(word[i / 4][i % 4], 0), noise_of(word[i / 4][i % 4], 1)};
    }
};
struct TokenNoise {
    uint32_t word[4][4];  // column + 2 * (eight tokens)
    __device__ __forceinline__ Two operator()(int i) const {
        return {noise_of(word[i / 8 * 2][i % 8 / 2], i % 2), noise_of(word[i / 8 * 2 + 1][i % 8 / 2], i % 2)};
    }
};

__device__ __forceinline__ float block_up(float scale, TensorScale tensor) {
    return scale > 0.0f ? exact_reciprocal(exact_mul(scale, tensor.down)) : 0.0f;
}

// The scale of a block whose largest value would be `ideal` units of it, and what x is multiplied by. Subnormal
// scales go up where nothing may be clipped.
struct BlockScale {
    float scale, up;
};
template <bool STOCHASTIC> __device__ __forceinline__ BlockScale block_scale(float ideal, TensorScale tensor) {
    ideal = fminf(ideal, 448.0f);
    float scale = e4m3_nearest(ideal);
    if (STOCHASTIC && ideal < 0.015625f && scale < ideal) scale += 0.001953125f;
    return {scale, block_up(scale, tensor)};
}

struct Scales {
    BlockScale low, high;
};
// Where words are of one block, the compiler would not see that its scale is needed once.
template <Spread SPREAD, bool STOCHASTIC>
__device__ __forceinline__ Scales block_scales(Two ideal, TensorScale tensor) {
    BlockScale low = block_scale<STOCHASTIC>(ideal.low, tensor);
    return {low, SPREAD == APART ? block_scale<STOCHASTIC>(ideal.high, tensor) : low};
}

// The magnitudes of x over their scales on the grid.
template <bool STOCHASTIC, int N, typename Noise>
__device__ __forceinline__ void round_words(uint32_t (&q)[N], const uint32_t (&x)[N], Scales scales,
                                            const Noise& noise) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        Two value = values_of(x[i]);
        Two a = {exact_mul(fabsf(value.low), scales.low.up), exact_mul(fabsf(value.high), scales.high.up)};
        q[i] = STOCHASTIC ? e2m1_stochastic(a, noise(i)) : word_of(e2m1_nearest(a.low), e2m1_nearest(a.high));
    }
}

// The same of two scales for each block, and the sums of the squares of what rounding changed, in units of the scales.
// CLIP: nothing past 6. SIGNED: the first has the signs of x.
template <bool CLIP, bool SIGNED, int N, int S>
__device__ __forceinline__ void round_twice(uint32_t (&q)[2][N], Two (&errors)[2][S], const uint32_t (&x)[N],
                                            const Scales (&scales)[2]) {
    for (int i = 0; i < 2 * S; ++i) errors[i / S][i % S] = {0.0f, 0.0f};
    auto rounded = [](float value, float up, float& error) {
        return e2m1_nearest<CLIP>(exact_mul(fabsf(value), up), error);
    };
#pragma unroll
    for (int i = 0; i < N; ++i) {
        Two value = values_of(x[i]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            Two& error = errors[k][i * S / N];
            q[k][i] = word_of(rounded(value.low, scales[k].low.up, error.low),
                              rounded(value.high, scales[k].high.up, error.high));
        }
        if (SIGNED) q[0][i] |= x[i] & SIGNS_OF_TWO;
    }
}

// The better of two for each block, with the signs of x, which the first of APART has.
template <Spread SPREAD, int N>
__device__ __forceinline__ Scales better_of(uint32_t (&q)[N], const uint32_t (&both)[2][N],
                                            const Two (&error)[2][SUMS<SPREAD>], const uint32_t (&x)[N],
                                            const Scales (&scales)[2]) {
    Two sum[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        sum[k] = spread_sum<SPREAD>(error[k]);
        float low = scales[k].low.scale, high = scales[k].high.scale;
        sum[k] = {exact_mul(exact_mul(low, low), sum[k].low), exact_mul(exact_mul(high, high), sum[k].high)};
    }
    // A scale of zero loses the block: the wider one is better, if that is not zero too.
    bool low = sum[1].low < sum[0].low || scales[0].low.scale == 0.0f;
    bool high = sum[1].high < sum[0].high || scales[0].high.scale == 0.0f;
    uint32_t mask = (low ? 0x7FFFu : 0u) | (high ? 0x7FFF0000u : 0u);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (SPREAD == APART) q[i] = (both[1][i] & mask) | (both[0][i] & ~mask);
        else q[i] = (low ? both[1][i] : both[0][i]) | (x[i] & SIGNS_OF_TWO);
    }
    return {low ? scales[1].low : scales[0].low, high ? scales[1].high : scales[0].high};
}

// With the signs of x: the better of the largest value on 6 and the largest on 4. `most` are the largest values, `ideal`
// the scales that put them on 6.
template <Spread SPREAD, int N>
__device__ __forceinline__ Scales four_over_six(uint32_t (&q)[N], const uint32_t (&x)[N], TensorScale tensor,
                                                Two most, Two ideal) {
    Scales scales[2];
    Two error[2][SUMS<SPREAD>];
    uint32_t both[2][N];
    constexpr bool SIGNED = SPREAD == APART;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float wider = k ? 1.5f : 1.0f;
        Two wanted = {exact_mul(wider, fminf(ideal.low, 448.0f)), exact_mul(wider, fminf(ideal.high, 448.0f))};
        scales[k] = block_scales<SPREAD, false>(wanted, tensor);
    }
    // The largest value of 1.5 times the scale passes 6.5 where this one does, and in no other case.
    float top = fmaxf(exact_mul(most.low, scales[0].low.up), exact_mul(most.high, scales[0].high.up));
    if (SPREAD != WHOLE) {
        if (top > 6.5f) round_twice<true, SIGNED>(both, error, x, scales);
        else round_twice<false, SIGNED>(both, error, x, scales);
        return better_of<SPREAD>(q, both, error, x, scales);
    }
    // Where a lane decides for all words, its choice and what it chooses from are one instruction in each branch.
    if (top > 6.5f) {
        round_twice<true, SIGNED>(both, error, x, scales);
        return better_of<SPREAD>(q, both, error, x, scales);
    }
    round_twice<false, SIGNED>(both, error, x, scales);
    return better_of<SPREAD>(q, both, error, x, scales);
}

// Scales of the blocks of x and, unless only CODES to nearest are wanted, x on the grid. Without FOUR, signs, and what is
// past 6 where a subnormal scale was rounded down or amax was not that of the tensor, are left to whoever writes it.
template <Spread SPREAD, bool FOUR, bool STOCHASTIC, bool CODES, int N, typename Noise>
__device__ __forceinline__ Scales quantise(uint32_t (&q)[N], const uint32_t (&x)[N], TensorScale tensor,
                                           const Noise& noise) {
    uint32_t top = 0u;
#pragma unroll
    for (int i = 0; i < N; ++i) top = max_magnitudes(top, x[i]);
    Two most = spread_max<SPREAD>(values_of(top));
    Two ideal = {exact_mul(most.low, tensor.per_block), exact_mul(most.high, tensor.per_block)};
    if constexpr (FOUR) return four_over_six<SPREAD>(q, x, tensor, most, ideal);
    Scales scales = block_scales<SPREAD, STOCHASTIC>(ideal, tensor);
    if (STOCHASTIC || !CODES) round_words<STOCHASTIC>(q, x, scales, noise);
    return scales;
}

// q times scale, exact in bf16, with the sign of x.
template <bool FOUR> __device__ __forceinline__ uint32_t scaled(uint32_t q, uint32_t x, Scales scales) {
    uint32_t both = word_of(scales.low.scale, scales.high.scale);
    if (FOUR) return mul_bf16x2(q, both);
    return mul_bf16x2(min_bf16x2(q, 0x40C040C0u), both) | (x & SIGNS_OF_TWO);
}
// What is encoded: q, or, where the encoder rounds, x over its scale.
template <bool FOUR, bool STOCHASTIC>
__device__ __forceinline__ Two unscaled(uint32_t q, uint32_t x, Scales scales) {
    if (FOUR) return values_of(q);
    if (STOCHASTIC) return values_of(q | (x & SIGNS_OF_TWO));
    Two value = values_of(x);
    return {exact_mul(value.low, scales.low.up), exact_mul(value.high, scales.high.up)};
}

