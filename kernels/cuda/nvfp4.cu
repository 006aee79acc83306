// Casts to NVFP4, the largest magnitudes that they need, and the transpose of codes. kernels/nvfp4.py has the formulas.
// A warp works on a panel of 16 rows by 64 columns, of which it reads whole 128-byte lines.
#include "quant.cuh"
#include "rounding.cuh"

constexpr int BLOCK = 16;         // values that share a scale
constexpr int PANEL_ROWS = 16, PANEL_COLUMNS = 64;
constexpr int SPAN = 128;         // tokens of a thread block of the casts along tokens: eight warps
constexpr int ROWS_OF_LANE = 4;   // casts along rows: a lane has eight neighbouring columns of every fourth row
constexpr float LARGEST_FLOAT = 3.402823466e38f;

// Where the scale of (row, block of columns) lies in 128 x 4 tiles of 512 bytes, `tiles` of them side by side.
__device__ __forceinline__ int64_t scale_offset(int row, int block, int tiles) {
    int64_t tile = int64_t(row / 128) * tiles + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}
__device__ __forceinline__ int scale_tiles(int columns) { return (columns / BLOCK + 3) / 4; }

struct TensorScale {
    float up, down, per_block;
};
__device__ __forceinline__ TensorScale tensor_scale(float amax, float range, float inverse_target) {
    bool usable = amax > 0.0f && amax < INFINITY;
    float up = usable ? fminf(__fdiv_rn(range, amax), LARGEST_FLOAT) : 1.0f;
    return {up, __frcp_rn(up), exact_mul(up, inverse_target)};
}

// A block's values lie in one lane, in two neighbours (16 columns of a row), or in eight (16 columns of 16 rows).
enum Spread { ALONE, PAIR, TILE };
template <Spread SPREAD> __device__ __forceinline__ float spread_max(float value) {
    if (SPREAD != ALONE) value = fmaxf(value, warp_shfl_xor(value, 1));
    if (SPREAD == TILE)
        for (int mask = 8; mask <= 16; mask *= 2) value = fmaxf(value, warp_shfl_xor(value, mask));
    return value;
}
template <Spread SPREAD> __device__ __forceinline__ float spread_sum(float value) {
    if (SPREAD != ALONE) value = exact_add(value, warp_shfl_xor(value, 1));
    if (SPREAD == TILE)
        for (int mask = 8; mask <= 16; mask *= 2) value = exact_add(value, warp_shfl_xor(value, mask));
    return value;
}

// x on the grid of E2M1, |x| < 7: adding a number whose last bit is the step there rounds to it. Steps are 0.5 up
// to 2, then half the power of two below |x|. `bits16` moves x first, by less than half a step either way. What
// rounds to zero loses its sign.
template <bool STOCHASTIC> __device__ __forceinline__ float to_grid(float x, uint32_t bits16) {
    float power = fmaxf(__uint_as_float(__float_as_uint(x) & 0x7F800000u), 1.0f), moved = x;
    if (STOCHASTIC) {
        float centred = __uint_as_float(0x3F800000u | bits16 << 7) - 1.49999237060546875f;  // odd multiples of 2^-17
        moved = __fmaf_rn(centred, 0.5f * power, x);
    }
    constexpr float SHIFT = 6291456.0f;  // 1.5 * 2^22; times a power of two it is exact
    return __fmaf_rn(-power, SHIFT, __fmaf_rn(power, SHIFT, moved));
}
__device__ __forceinline__ uint32_t half_of(const uint32_t* words, int j) {
    return j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xFFFFu;
}

// q = x over the block's scale, on the grid. Past 6 only where a subnormal scale was rounded down, or amax was not
// that of the tensor.
template <bool STOCHASTIC, bool ROUND, int N>
__device__ __forceinline__ void round_block(float (&q)[N], const float (&x)[N], float scale, float most,
                                            TensorScale tensor, const uint32_t* noise) {
    float up = scale > 0.0f ? fminf(__frcp_rn(exact_mul(scale, tensor.down)), LARGEST_FLOAT) : 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        q[j] = exact_mul(x[j], up);
        if (STOCHASTIC || ROUND) q[j] = to_grid<STOCHASTIC>(q[j], STOCHASTIC ? half_of(noise, j) : 0u);
    }
    if ((STOCHASTIC || ROUND) && exact_mul(most, up) > (STOCHASTIC ? 6.0f : 6.5f)) {
#pragma unroll
        for (int j = 0; j < N; ++j)
            q[j] = to_grid<STOCHASTIC>(fminf(fmaxf(exact_mul(x[j], up), -6.0f), 6.0f),
                                       STOCHASTIC ? half_of(noise, j) : 0u);
    }
}

template <int N>
__device__ __forceinline__ float squared_error(const float (&q)[N], const float (&x)[N], float scale, float up) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        float error = __fmaf_rn(q[j], scale, -exact_mul(x[j], up));  // q times scale is exact
        sum = exact_add(sum, exact_mul(error, error));
    }
    return sum;
}

// x on the grid of E4M3, from 0 to 448, in the same way.
__device__ __forceinline__ float e4m3_nearest(float x) {
    constexpr float SHIFT = 1572864.0f;  // 1.5 * 2^20
    float power = fmaxf(__uint_as_float(__float_as_uint(x) & 0x7F800000u), 0.015625f);
    return __fmaf_rn(-power, SHIFT, __fmaf_rn(power, SHIFT, x));
}

// Values of a block on the grid, and its scale. FOUR: the better of the largest on 6 and the largest on 4. Without
// ROUND, values that are to nearest are left to encode_nibbles.
template <Spread SPREAD, bool FOUR, bool STOCHASTIC, bool ROUND, int N>
__device__ __forceinline__ float quantise(float (&q)[N], const float (&x)[N], TensorScale tensor,
                                          const uint32_t* noise) {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) most = fmaxf(most, fabsf(x[j]));
    most = spread_max<SPREAD>(most);
    float ideal = fminf(exact_mul(most, tensor.per_block), 448.0f), scale = e4m3_nearest(ideal);
    if (STOCHASTIC && ideal < 0.015625f && scale < ideal) scale += 0.001953125f;  // subnormal scales go up
    round_block<STOCHASTIC, ROUND || FOUR>(q, x, scale, most, tensor, noise);
    if (FOUR) {
        float on_four[N], wide = e4m3_nearest(fminf(exact_mul(1.5f, ideal), 448.0f));
        round_block<STOCHASTIC, true>(on_four, x, wide, most, tensor, noise);
        float error = spread_sum<SPREAD>(squared_error(q, x, scale, tensor.up));
        if (spread_sum<SPREAD>(squared_error(on_four, x, wide, tensor.up)) < error) {
            scale = wide;
#pragma unroll
            for (int j = 0; j < N; ++j) q[j] = on_four[j];
        }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) q[j] = copysignf(q[j], x[j]);
    return scale;
}

// Blocks along the columns: 1x16, or 16x16 when TALL. Either `values` (q times scale, exact in bf16) or `codes`
// and `scales` are written. The random bits of an element are those of its index in the whole matrix.
template <bool TALL, bool FOUR, bool STOCHASTIC, bool VALUES>
__global__ void __launch_bounds__(LAUNCH_THREADS, TALL ? 2 : 4)
    nvfp4_rows(bf16* __restrict__ values,     // (rows, columns)
               uint8_t* __restrict__ codes,   // (rows, columns / 2)
               uint8_t* __restrict__ scales,  // 128 x 4 tiles of (rows, columns / 16)
               const bf16* __restrict__ x,    // (rows, columns), stride apart
               int64_t stride, const float* __restrict__ amax,
               const uint32_t* __restrict__ key,  // seed, step
               uint32_t tensor, uint32_t role, int64_t first, int rows, int columns, float range,
               float inverse_target) {
    constexpr int N = 8, TOGETHER = TALL ? ROWS_OF_LANE : 1;  // packs of a lane that share a scale
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = blockIdx.x * PANEL_ROWS + lane / 8;
    int column = (blockIdx.y * (blockDim.x / 32) + warp) * PANEL_COLUMNS + lane % 8 * N;
    if (column - lane % 8 * N >= columns) return;
    Pack<bf16, N> pack[ROWS_OF_LANE];
#pragma unroll
    for (int k = 0; k < ROWS_OF_LANE; ++k) {
        if (row + 4 * k < rows && column < columns) pack[k].load(x + (row + 4 * k) * stride + column);
        else pack[k].clear();
    }
    TensorScale whole = tensor_scale(*amax, range, inverse_target);
#pragma unroll
    for (int k = 0; k < ROWS_OF_LANE; k += TOGETHER) {
        float from[TOGETHER * N], q[TOGETHER * N];
        uint32_t noise[4];
#pragma unroll
        for (int j = 0; j < TOGETHER * N; ++j) from[j] = pack[k + j / N].get(j % N);
        if (STOCHASTIC)
            random_words(noise, (first + row + 4 * k) * columns + column, tensor, role, key[0], key[1]);
        float scale = quantise<TALL ? TILE : PAIR, FOUR, STOCHASTIC, VALUES>(q, from, whole, noise);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            int to = row + 4 * (k + i);
            float out[N];
#pragma unroll
            for (int j = 0; j < N; ++j) out[j] = VALUES ? exact_mul(q[i * N + j], scale) : q[i * N + j];
            if (to >= rows || column >= columns) continue;
            int64_t place = int64_t(to) * columns + column;
            if (VALUES) {
                pack[k + i].set(out);
                pack[k + i].store(values + place);
            } else {
                *reinterpret_cast<uint32_t*>(codes + place / 2) = encode_nibbles(out);
                if (lane % 2 == 0)
                    scales[scale_offset(to, column / BLOCK, scale_tiles(columns))] = uint8_t(encode<E4M3>(scale));
            }
        }
    }
}

// Two neighbouring columns of 16 tokens a lane, packed; tokens past the end are zero.
struct TokenBlock {
    uint32_t word[BLOCK];
    __device__ __forceinline__ void load(const bf16* x, int64_t stride, int token, int column, int tokens, int columns) {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            bool inside = token + i < tokens && column < columns;
            word[i] = inside ? *reinterpret_cast<const uint32_t*>(x + (token + i) * stride + column) : 0u;
        }
    }
    // Changes the sign of the tokens whose bit is set.
    __device__ __forceinline__ void flip(uint32_t mask) {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) word[i] ^= (mask >> i & 1u) * 0x80008000u;
    }
    __device__ __forceinline__ void column(float (&x)[BLOCK], int second) const {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            x[i] = __uint_as_float(second ? word[i] & 0xFFFF0000u : word[i] << 16);
    }
};

// x = x H / 4 with Sylvester's Hadamard matrix, in four rounds of sums and differences.
__device__ __forceinline__ void hadamard(float (&x)[BLOCK]) {
#pragma unroll
    for (int half = 1; half < BLOCK; half *= 2)
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            if (!(i & half)) {
                float a = x[i], b = x[i + half];
                x[i] = exact_add(a, b);
                x[i + half] = exact_add(a, -b);
            }
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) x[i] *= 0.25f;
}

// Blocks along the tokens, of x as it is or (HADAMARD) transformed. `values` keep the layout of x; codes and scales
// are those of the transpose, through shared memory. Tokens up to `padded`, a multiple of 32, count as zero.
template <bool HADAMARD, bool FOUR, bool STOCHASTIC, bool VALUES>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    nvfp4_tokens(bf16* __restrict__ values,     // (padded, columns)
                 uint8_t* __restrict__ codes,   // (columns, padded / 2)
                 uint8_t* __restrict__ scales,  // 128 x 4 tiles of (columns, padded / 16)
                 const bf16* __restrict__ x,    // (tokens, columns), stride apart
                 int64_t stride, const float* __restrict__ amax,
                 const uint32_t* __restrict__ key,  // seed, step
                 uint32_t tensor, uint32_t role, int64_t first, uint32_t signs, int tokens, int padded, int columns,
                 float range, float inverse_target) {
    __shared__ __align__(16) uint32_t code_tile[PANEL_COLUMNS][SPAN / 8 + 4];
    __shared__ __align__(4) uint8_t scale_tile[PANEL_COLUMNS][SPAN / BLOCK];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int column = blockIdx.x * PANEL_COLUMNS + 2 * lane, token = blockIdx.y * SPAN + warp * BLOCK;
    TokenBlock in;
    in.load(x, stride, token, column, tokens, columns);
    if (HADAMARD) in.flip(signs);
    TensorScale whole = tensor_scale(*amax, range, inverse_target);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float from[BLOCK], q[BLOCK];
        in.column(from, c);
        if (HADAMARD) {
            hadamard(from);
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) from[i] = to_float(from_float<bf16>(from[i]));
        }
        uint32_t noise[BLOCK / 2];
        if (STOCHASTIC)
            for (int group = 0; group < 2; ++group) {
                uint32_t words[4];
                int64_t eighth = (first + token) / ROUNDING_GROUP + group;
                random_words(words, (eighth * columns + column + c) * ROUNDING_GROUP, tensor, role, key[0], key[1]);
                for (int i = 0; i < 4; ++i) noise[4 * group + i] = words[i];
            }
        float scale = quantise<ALONE, FOUR, STOCHASTIC, VALUES>(q, from, whole, noise);
        if (VALUES) {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) {  // exact in bf16: the lower half of the float is zero
                uint32_t bits = __float_as_uint(exact_mul(q[i], scale));
                in.word[i] = c ? (in.word[i] & 0xFFFFu) | bits : (in.word[i] & 0xFFFF0000u) | bits >> 16;
            }
        } else {
            float low[8], high[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) low[i] = q[i], high[i] = q[8 + i];
            code_tile[2 * lane + c][2 * warp] = encode_nibbles(low);
            code_tile[2 * lane + c][2 * warp + 1] = encode_nibbles(high);
            scale_tile[2 * lane + c][warp] = uint8_t(encode<E4M3>(scale));
        }
    }
    if (VALUES) {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            if (token + i < padded && column < columns)
                *reinterpret_cast<uint32_t*>(values + int64_t(token + i) * columns + column) = in.word[i];
        return;
    }
    __syncthreads();
    int local = threadIdx.x / 4, part = threadIdx.x % 4, row = blockIdx.x * PANEL_COLUMNS + local;
    int from_token = blockIdx.y * SPAN + part * 32;
    if (row >= columns) return;
    if (from_token < padded)
        Vec<uint32_t, 4>::load(&code_tile[local][4 * part])
            .store(reinterpret_cast<uint32_t*>(codes + (int64_t(row) * padded + from_token) / 2));
    int block = blockIdx.y * (SPAN / BLOCK) + part * 4;
    if (part < 2 && block < padded / BLOCK)
        *reinterpret_cast<uint32_t*>(scales + scale_offset(row, block, scale_tiles(padded))) =
            *reinterpret_cast<const uint32_t*>(&scale_tile[local][4 * part]);
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
               int64_t stride, int rows, int columns, uint32_t signs) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32_t across = (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    uint32_t panels = (rows + PANEL_ROWS - 1) / PANEL_ROWS * across;
    uint32_t low = 0u, high = 0u;  // the larger bits of the first and of the second of each two values
    float transformed = 0.0f;
    for (uint32_t panel = blockIdx.x * warps + threadIdx.x / 32; panel < panels; panel += gridDim.x * warps) {
        int row = int(panel / across) * PANEL_ROWS, column = int(panel % across) * PANEL_COLUMNS;
        TokenBlock in;
        if (HADAMARD) {
            in.load(x, stride, row, column + 2 * lane, rows, columns);
        } else {
#pragma unroll
            for (int k = 0; k < ROWS_OF_LANE; ++k) {
                int from = row + lane / 8 + 4 * k, at = column + lane % 8 * 8;
                Vec<uint32_t, 4> words = {};
                if (from < rows && at < columns)
                    words = Vec<uint32_t, 4>::load(reinterpret_cast<const uint32_t*>(x + from * stride + at));
#pragma unroll
                for (int i = 0; i < 4; ++i) in.word[4 * k + i] = words.data[i];
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            high = max(high, in.word[i] & 0x7FFF0000u);
            low = max(low, in.word[i] & 0x7FFFu);
        }
        if (HADAMARD) {
            in.flip(signs);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float value[BLOCK];
                in.column(value, c);
                hadamard(value);
#pragma unroll
                for (int i = 0; i < BLOCK; ++i) transformed = fmaxf(transformed, fabsf(value[i]));
            }
        }
    }
    uint32_t plain = max(high, low << 16);
    merge_max(plain, most);
    if (HADAMARD) {
        uint32_t bits = __float_as_uint(to_float(from_float<bf16>(transformed)));  // rounding keeps the order
        merge_max(plain >= 0x7F800000u ? 0x7FC00000u : bits, most + 1);
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
