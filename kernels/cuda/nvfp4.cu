// Casts to NVFP4, the largest magnitudes that they need, and the transpose of codes. kernels/nvfp4.py has the formulas.
// A warp works on a panel of 16 rows, of which it reads whole 128-byte lines.
#include "quant.cuh"
#include "rounding.cuh"

constexpr int BLOCK = 16;  // values that share a scale
constexpr int PANEL_ROWS = 16, PANEL_COLUMNS = 64;
constexpr int PANELS = 2;          // one below the other, that a warp casts along rows
constexpr int TOKEN_COLUMNS = 64;  // of a warp where blocks lie along tokens
constexpr int SPAN = 256;          // tokens of a thread block of the casts along tokens, twice that where it reads ahead
constexpr int ROWS_OF_LANE = 4;    // casts along rows: a lane has eight neighbouring columns of every fourth row
constexpr int RESIDENT = 4;        // thread blocks of a multiprocessor: 64 registers a thread
constexpr int PHILOX_ROUNDS = 7;   // the least that pass the tests of randomness

// Where the scale of (row, block of columns) lies in 128 x 4 tiles of 512 bytes, `tiles` of them side by side.
__device__ __forceinline__ int64_t scale_offset(int row, int block, int tiles) {
    int64_t tile = int64_t(row / 128) * tiles + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}
__device__ __forceinline__ int scale_tiles(int columns) { return (columns / BLOCK + 3) / 4; }

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

// The words of a lane hold two columns, a block each, or the values of one block alone: those of two neighbours (16
// columns of a row), or of eight (16 columns of 16 rows).
enum Spread { APART, PAIR, TILE };
// Of magnitudes whose signs mean nothing.
template <Spread SPREAD> __device__ __forceinline__ Two spread_max(Two value) {
    if (SPREAD == APART) return {fabsf(value.low), fabsf(value.high)};
    float most = fmaxf(fabsf(value.low), fabsf(value.high));
    most = fmaxf(most, warp_shfl_xor(most, 1));
    if (SPREAD == TILE)
        for (int mask = 8; mask <= 16; mask *= 2) most = fmaxf(most, warp_shfl_xor(most, mask));
    return {most, most};
}
template <Spread SPREAD> __device__ __forceinline__ Two spread_sum(Two value) {
    if (SPREAD == APART) return value;
    float sum = exact_add(value.low, value.high);
    sum = exact_add(sum, warp_shfl_xor(sum, 1));
    if (SPREAD == TILE)
        for (int mask = 8; mask <= 16; mask *= 2) sum = exact_add(sum, warp_shfl_xor(sum, mask));
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

// The random bits of words of two neighbours in a row, and of words of two columns.
struct NoNoise {
    __device__ __forceinline__ Two operator()(int) const { return {0.0f, 0.0f}; }
};
__device__ __forceinline__ float noise_of(uint32_t word, int half) {
    return __uint_as_float(__byte_perm(word, 0x4280u, half ? 0x5432 : 0x5410));
}
struct RowNoise {
    uint32_t word[4];
    __device__ __forceinline__ Two operator()(int i) const { return {noise_of(word[i], 0), noise_of(word[i], 1)}; }
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

// The same of two scales for each block, the first with the signs of x, and the sums of the squares of what rounding
// changed, in units of the scales. CLIP: nothing past 6.
template <bool CLIP, int N>
__device__ __forceinline__ void round_twice(uint32_t (&q)[2][N], Two (&error)[2], const uint32_t (&x)[N],
                                            const Scales (&scales)[2]) {
    error[0] = error[1] = {0.0f, 0.0f};
    auto rounded = [](float value, float up, float& error) {
        return e2m1_nearest<CLIP>(exact_mul(fabsf(value), up), error);
    };
#pragma unroll
    for (int i = 0; i < N; ++i) {
        Two value = values_of(x[i]);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            q[k][i] = word_of(rounded(value.low, scales[k].low.up, error[k].low),
                              rounded(value.high, scales[k].high.up, error[k].high));
        q[0][i] |= x[i] & SIGNS_OF_TWO;
    }
}

// With the signs of x: the better of the largest value on 6 and the largest on 4. `most` are the largest values, `ideal`
// the scales that put them on 6.
template <Spread SPREAD, int N>
__device__ __forceinline__ Scales four_over_six(uint32_t (&q)[N], const uint32_t (&x)[N], TensorScale tensor,
                                                Two most, Two ideal) {
    Scales scales[2];
    Two error[2];
    uint32_t both[2][N];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float wider = k ? 1.5f : 1.0f;
        scales[k] = {block_scale<false>(exact_mul(wider, fminf(ideal.low, 448.0f)), tensor),
                     block_scale<false>(exact_mul(wider, fminf(ideal.high, 448.0f)), tensor)};
    }
    // The largest value of 1.5 times the scale passes 6.5 where this one does, and in no other case.
    float top = fmaxf(exact_mul(most.low, scales[0].low.up), exact_mul(most.high, scales[0].high.up));
    if (top > 6.5f) round_twice<true>(both, error, x, scales);
    else round_twice<false>(both, error, x, scales);
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
    for (int i = 0; i < N; ++i) q[i] = (both[1][i] & mask) | (both[0][i] & ~mask);
    return {low ? scales[1].low : scales[0].low, high ? scales[1].high : scales[0].high};
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
    Scales scales = {block_scale<STOCHASTIC>(ideal.low, tensor), block_scale<STOCHASTIC>(ideal.high, tensor)};
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

// Blocks along the columns: 1x16, or 16x16 when TALL. Either `values` (q times scale, exact in bf16) or `codes`
// and `scales` are written. The random bits of an element are those of its index in the whole matrix.
template <bool TALL, bool FOUR, bool STOCHASTIC, bool VALUES>
__global__ void __launch_bounds__(LAUNCH_THREADS, RESIDENT)
    nvfp4_rows(bf16* __restrict__ values,     // (rows, columns)
               uint8_t* __restrict__ codes,   // (rows, columns / 2)
               uint8_t* __restrict__ scales,  // 128 x 4 tiles of (rows, columns / 16)
               const bf16* __restrict__ x,    // (rows, columns), stride apart
               int stride, const float* __restrict__ amax,
               const uint32_t* __restrict__ key,  // seed, step
               uint32_t tensor, uint32_t role, int64_t first, int rows, int columns, float range,
               float inverse_target) {
    constexpr int N = 8, TOGETHER = TALL ? ROWS_OF_LANE : 1;  // packs of a lane that share a scale
    constexpr int WORDS = TOGETHER * N / 2;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int column = (blockIdx.y * (blockDim.x / 32) + warp) * PANEL_COLUMNS + lane % 8 * N;
    if (column - lane % 8 * N >= columns) return;
    TensorScale whole = tensor_scale(*amax, range, inverse_target);
#pragma unroll 1
    for (int panel = blockIdx.x * PANELS; panel < (blockIdx.x + 1) * PANELS; ++panel) {
        if (panel * PANEL_ROWS >= rows) break;
        int row = panel * PANEL_ROWS + lane / 8;
        Pack<bf16, N> pack[ROWS_OF_LANE];
        const bf16* from = x + int64_t(row) * stride + column;
#pragma unroll
        for (int k = 0; k < ROWS_OF_LANE; ++k) {
            if (row + 4 * k < rows && column < columns) pack[k].load(from + 4 * k * int64_t(stride));
            else pack[k].clear();
        }
        RowNoise noise[ROWS_OF_LANE];
        if (STOCHASTIC) {
            uint32_t counters[ROWS_OF_LANE][4];
            for (int k = 0; k < ROWS_OF_LANE; ++k)
                set_counter(counters[k], ((first + row + 4 * k) * columns + column) / ROUNDING_GROUP, tensor, role);
            philox_calls<PHILOX_ROUNDS>(counters, key[0], key[1]);
            for (int i = 0; i < 4 * ROWS_OF_LANE; ++i) noise[i / 4].word[i % 4] = counters[i / 4][i % 4];
        }
        int64_t place = int64_t(row) * columns + column;
#pragma unroll
        for (int k = 0; k < ROWS_OF_LANE; k += TOGETHER) {
            uint32_t q[WORDS], word[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = pack[k + i / 4].word[i % 4];
            Scales scale = quantise<TALL ? TILE : PAIR, FOUR, STOCHASTIC, !VALUES>(q, word, whole, noise[k]);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i, place += 4 * int64_t(columns)) {
                int to = row + 4 * (k + i);
                if (to >= rows || column >= columns) continue;
                if (VALUES) {
#pragma unroll
                    for (int j = 0; j < N / 2; ++j)
                        pack[k + i].word[j] = scaled<FOUR>(q[4 * i + j], word[4 * i + j], scale);
                    pack[k + i].store(values + place);
                } else {
                    float out[N];
#pragma unroll
                    for (int j = 0; j < N / 2; ++j) {
                        Two both = unscaled<FOUR, STOCHASTIC>(q[4 * i + j], word[4 * i + j], scale);
                        out[2 * j] = both.low, out[2 * j + 1] = both.high;
                    }
                    *reinterpret_cast<uint32_t*>(codes + place / 2) = encode_nibbles(out);
                    if (lane % 2 == 0)
                        scales[scale_offset(to, column / BLOCK, scale_tiles(columns))] =
                            uint8_t(encode<E4M3>(scale.low.scale));
                }
            }
        }
    }
}

// What changes the signs of the tokens of 16 whose bit of `signs` is set. The mask of a word's upper half is no constant
// to the compiler: an instruction takes one constant or uniform register, and that is the sign. Every thread of the
// block must construct one.
struct Flips {
    const uint32_t* sign;
    uint32_t upper;
    __device__ __forceinline__ explicit Flips(uint32_t signs) : upper(0xFFFF0000u | signs >> BLOCK) {
        __shared__ __align__(16) uint32_t of_token[BLOCK];
        if (threadIdx.x < BLOCK) of_token[threadIdx.x] = signs << (31 - threadIdx.x) & 0x80000000u;
        __syncthreads();
        sign = of_token;
    }
};

// Two neighbouring columns of 16 tokens a lane; tokens past the end are zero.
struct TokenBlock {
    uint32_t word[BLOCK];
    __device__ __forceinline__ void load(const bf16* x, int stride, int token, int column, int tokens, int columns) {
        const bf16* from = x + int64_t(token) * stride + column;
        // 32-bit strides: an address is one instruction, and not of the busiest pipe.
        auto row = [&](int i) { return *reinterpret_cast<const uint32_t*>(from + i * int64_t(stride)); };
        if (token + BLOCK <= tokens && column < columns) {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) word[i] = row(i);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) word[i] = token + i < tokens && column < columns ? row(i) : 0u;
        }
    }
    // x = H x with Sylvester's Hadamard matrix, in four rounds of sums and differences, rounded to bf16. Tokens' signs
    // are changed before.
    __device__ __forceinline__ void transform(const Flips& flips) {
        float low[BLOCK], high[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i += 4) {
            auto flip = Vec<uint32_t, 4>::load(&flips.sign[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                low[i + j] = __uint_as_float((word[i + j] << 16) + flip.data[j]);
                high[i + j] = __uint_as_float((word[i + j] & flips.upper) ^ flip.data[j]);
            }
        }
        hadamard(low);
        hadamard(high);
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) word[i] = pack_bf16(low[i], high[i]);
    }
    static __device__ __forceinline__ void hadamard(float (&x)[BLOCK]) {
#pragma unroll
        for (int half = 1; half < BLOCK; half *= 2)
#pragma unroll
            for (int i = 0; i < BLOCK; ++i)
                if (!(i & half)) {
                    float a = x[i], b = x[i + half];
                    x[i] = exact_add(a, b);
                    x[i + half] = exact_add(a, -b);
                }
    }
};

// Blocks along the tokens, of x as it is or (HADAMARD) transformed. `values` keep the layout of x; codes and scales
// are those of the transpose, through shared memory, and take more registers. Tokens up to `padded`, a multiple of 32,
// count as zero. Where a block takes long to cast and registers are left, the next one is on its way.
template <bool HADAMARD, bool FOUR, bool STOCHASTIC, bool VALUES>
__global__ void __launch_bounds__(LAUNCH_THREADS, VALUES && !FOUR && !STOCHASTIC ? RESIDENT : RESIDENT - 1)
    nvfp4_tokens(bf16* __restrict__ values,     // (padded, columns)
                 uint8_t* __restrict__ codes,   // (columns, padded / 2)
                 uint8_t* __restrict__ scales,  // 128 x 4 tiles of (columns, padded / 16)
                 const bf16* __restrict__ x,    // (tokens, columns), stride apart
                 int stride, const float* __restrict__ amax,
                 const uint32_t* __restrict__ key,  // seed, step
                 uint32_t tensor, uint32_t role, int64_t first, uint32_t signs, int tokens, int padded, int columns,
                 float range, float inverse_target) {
    constexpr bool AHEAD = VALUES && (FOUR || STOCHASTIC);
    constexpr int OF_BLOCK = AHEAD ? 2 * SPAN : SPAN, STEP = LAUNCH_THREADS / 32;
    // Row c * 32 + l has column 2 * l + c, so that the lanes of a warp write to many banks.
    __shared__ __align__(16) uint32_t code_tile[TOKEN_COLUMNS][OF_BLOCK / 8 + 4];
    __shared__ __align__(16) uint8_t scale_tile[TOKEN_COLUMNS][OF_BLOCK / BLOCK];
    Flips flips(HADAMARD ? signs : 0u);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * TOKEN_COLUMNS + 2 * lane;
    TensorScale whole = tensor_scale(HADAMARD ? exact_mul(4.0f, *amax) : *amax, range, inverse_target);
    TokenBlock next;
    if (AHEAD) next.load(x, stride, blockIdx.y * OF_BLOCK + warp * BLOCK, column, tokens, columns);
#pragma unroll 1
    for (int block = warp; block < OF_BLOCK / BLOCK; block += STEP) {
        int token = blockIdx.y * OF_BLOCK + block * BLOCK;
        if (token >= padded) break;
        TokenBlock in = next;
        if (!AHEAD) in.load(x, stride, token, column, tokens, columns);
        else if (block + STEP < OF_BLOCK / BLOCK) next.load(x, stride, token + STEP * BLOCK, column, tokens, columns);
        if (HADAMARD) in.transform(flips);
        TokenNoise noise;
        if (STOCHASTIC) {
            int64_t group = (first + token) / ROUNDING_GROUP * columns + column;
            for (int i = 0; i < 4; ++i) set_counter(noise.word[i], group + i / 2 * columns + i % 2, tensor, role);
            philox_calls<PHILOX_ROUNDS>(noise.word, key[0], key[1]);
        }
        uint32_t q[BLOCK];
        Scales scale = quantise<APART, FOUR, STOCHASTIC, !VALUES>(q, in.word, whole, noise);
        if (VALUES) {
            if (column >= columns) continue;
            bf16* to = values + int64_t(token) * columns + column;
#pragma unroll
            for (int i = 0; i < BLOCK; ++i)
                *reinterpret_cast<uint32_t*>(to + i * int64_t(columns)) = scaled<FOUR>(q[i], in.word[i], scale);
            continue;
        }
        Vec<uint32_t, 2> low, high;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[2][8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int j = 8 * half + i;
                Two both = unscaled<FOUR, STOCHASTIC>(q[j], in.word[j], scale);
                x[0][i] = both.low, x[1][i] = both.high;
            }
            low.data[half] = encode_nibbles(x[0]), high.data[half] = encode_nibbles(x[1]);
        }
        low.store(&code_tile[lane][2 * block]);
        high.store(&code_tile[lane + 32][2 * block]);
        scale_tile[lane][block] = uint8_t(encode<E4M3>(scale.low.scale));
        scale_tile[lane + 32][block] = uint8_t(encode<E4M3>(scale.high.scale));
    }
    if (VALUES) return;
    __syncthreads();
    constexpr int PARTS = OF_BLOCK / 32;  // of 32 tokens: 16 bytes of codes, two scales
    for (int i = threadIdx.x; i < TOKEN_COLUMNS * PARTS; i += LAUNCH_THREADS) {
        int local = i / PARTS, part = i % PARTS, row = blockIdx.x * TOKEN_COLUMNS + local;
        int token = blockIdx.y * OF_BLOCK + part * 32, from = local % 2 * 32 + local / 2;
        if (row >= columns || token >= padded) continue;
        Vec<uint32_t, 4>::load(&code_tile[from][4 * part])
            .store(reinterpret_cast<uint32_t*>(codes + (int64_t(row) * padded + token) / 2));
        *reinterpret_cast<uint16_t*>(scales + scale_offset(row, token / BLOCK, scale_tiles(padded))) =
            *reinterpret_cast<const uint16_t*>(&scale_tile[from][2 * part]);
    }
}

// Bits of magnitudes order as integers, infinities and NaN above all numbers: so no NaN is lost, and the result does
// not depend on the order of the blocks. `most` holds floats whose bits start as zero.
__device__ __forceinline__ void merge_max(uint32_t mine, float* most) {
    __shared__ uint32_t of_block;
    for (int mask = 16; mask > 0; mask /= 2) mine = max(mine, warp_shfl_xor(mine, mask));
    __syncthreads();
    if (threadIdx.x == 0) of_block = 0u;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&of_block, mine);
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(most), of_block);
}

// most[0] = max |x|; HADAMARD: most[1] = max |x transformed along tokens, rounded to bf16|, NaN where x is not finite.
template <bool HADAMARD>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    nvfp4_amax(float* __restrict__ most,    // (1 + HADAMARD,)
               const bf16* __restrict__ x,  // (rows, columns), stride apart
               int stride, int rows, int columns, uint32_t signs) {
    constexpr int WIDE = HADAMARD ? TOKEN_COLUMNS : PANEL_COLUMNS;
    Flips flips(HADAMARD ? signs : 0u);
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32_t across = (columns + WIDE - 1) / WIDE, panels = (rows + PANEL_ROWS - 1) / PANEL_ROWS * across;
    uint32_t top = 0u, transformed = 0u;  // magnitudes of two bf16
    for (uint32_t panel = blockIdx.x * warps + threadIdx.x / 32; panel < panels; panel += gridDim.x * warps) {
        int row = int(panel / across) * PANEL_ROWS, column = int(panel % across) * WIDE;
        if (HADAMARD) {
            TokenBlock in;
            in.load(x, stride, row, column + 2 * lane, rows, columns);
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) top = max_magnitudes(top, in.word[i]);
            in.transform(flips);
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) transformed = max_magnitudes(transformed, in.word[i]);
        } else {
            Vec<uint32_t, 4> words[ROWS_OF_LANE] = {};
            const bf16* from = x + int64_t(row + lane / 8) * stride + column + lane % 8 * 8;
#pragma unroll
            for (int k = 0; k < ROWS_OF_LANE; ++k)
                if (row + lane / 8 + 4 * k < rows && column + lane % 8 * 8 < columns)
                    words[k] = Vec<uint32_t, 4>::load(reinterpret_cast<const uint32_t*>(from + 4 * k * int64_t(stride)));
#pragma unroll
            for (int i = 0; i < 4 * ROWS_OF_LANE; ++i) top = max_magnitudes(top, words[i / 4].data[i % 4]);
        }
    }
    merge_max(larger_magnitude(top), most);
    if (HADAMARD) {
        uint32_t bits = __float_as_uint(exact_mul(0.25f, __uint_as_float(larger_magnitude(transformed))));
        merge_max(larger_magnitude(top) >= 0x7F800000u ? 0x7FC00000u : bits, most + 1);
    }
}

// What a product of two casts is multiplied by.
__global__ void __launch_bounds__(32)
    nvfp4_alpha(float* __restrict__ alpha, const float* __restrict__ a_amax, const float* __restrict__ b_amax,
                float a_inverse, float b_inverse) {
    if (threadIdx.x == 0) *alpha = exact_mul(exact_mul(*a_amax, a_inverse), exact_mul(*b_amax, b_inverse));
}

// Codes and scales of the transpose of a matrix that was cast in 16x16 blocks; rows and columns are multiples of 32.
// A thread block turns 64 x 64 codes.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    nvfp4_transpose(uint8_t* __restrict__ codes,        // (columns, rows / 2)
                    uint8_t* __restrict__ scales,       // 128 x 4 tiles of (columns, rows / 16)
                    const uint8_t* __restrict__ from,   // (rows, columns / 2)
                    const uint8_t* __restrict__ by,     // 128 x 4 tiles of (rows, columns / 16)
                    int rows, int columns) {
    __shared__ uint8_t tile[64][68];
    int local = threadIdx.x / 4, part = threadIdx.x % 4 * BLOCK;
    int row = blockIdx.y * 64 + local, column = blockIdx.x * 64 + part;
    if (row < rows && column < columns) {
        auto eight = Vec<uint8_t, 8>::load(from + (int64_t(row) * columns + column) / 2);
        for (int i = 0; i < BLOCK; ++i) tile[local][part + i] = eight.data[i / 2] >> 4 * (i % 2) & 15;
    }
    __syncthreads();
    row = blockIdx.x * 64 + local, column = blockIdx.y * 64 + part;  // of the transpose
    if (row >= columns || column >= rows) return;
    Vec<uint8_t, 8> eight;
    for (int i = 0; i < 8; ++i) eight.data[i] = tile[part + 2 * i][local] | tile[part + 2 * i + 1][local] << 4;
    eight.store(codes + (int64_t(row) * rows + column) / 2);
    scales[scale_offset(row, column / BLOCK, scale_tiles(rows))] =
        by[scale_offset(column, row / BLOCK, scale_tiles(columns))];
}
