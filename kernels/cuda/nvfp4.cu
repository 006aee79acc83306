// Casts to NVFP4, the largest magnitudes that they need, and the transpose of codes. kernels/nvfp4.py has the formulas.
// A warp works on a panel of 16 rows, of which it reads whole 128-byte lines.
#include "nvfp4.cuh"

constexpr int TOKEN_COLUMNS = 64;  // of a warp where blocks lie along tokens
constexpr int SPAN = 256;          // tokens of a thread block that writes codes along tokens
constexpr int PHILOX_ROUNDS = 7;   // the least that pass the tests of randomness
// Thread blocks of a multiprocessor, as kernels/nvfp4.py has them: 80 registers a thread for the few that need them,
// else 64.
template <bool MUCH> constexpr int RESIDENT = MUCH ? 3 : 4;
// And along tokens, where what takes long gains by registers: four over six at 4096 x 12288 on an H200 takes 55.6 us
// with two, 57.4 with three and 58.1 with four.
template <bool FOUR, bool STOCHASTIC> constexpr int TOKEN_RESIDENT = FOUR ? 2 : STOCHASTIC ? 3 : 4;

// 16 bytes of x, or in their place of what is written for them.
__device__ __forceinline__ void get_chunk(uint32_t* word, const uint32_t* chunk) {
    auto four = Vec<uint32_t, 4>::load(chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = four.data[i];
}
__device__ __forceinline__ void put_chunk(uint32_t* chunk, const uint32_t* word) {
    Vec<uint32_t, 4>{word[0], word[1], word[2], word[3]}.store(chunk);
}

// Codes of eight values in a row.
template <bool FOUR, bool STOCHASTIC>
__device__ __forceinline__ uint32_t encode_eight(const uint32_t* q, const uint32_t* x, Scales scale) {
    float out[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Two both = unscaled<FOUR, STOCHASTIC>(q[i], x[i], scale);
        out[2 * i] = both.low, out[2 * i + 1] = both.high;
    }
    return encode_nibbles(out);
}

// Blocks along the columns: 1x16, or 16x16 when TALL. Either `values` (q times scale, exact in bf16) or `codes`
// and `scales` are written. The random bits of an element are those of its index in the whole matrix.
// Warps walk over the panels of the matrix, with the next one on its way. A lane has whole blocks of two rows, whose
// values it puts back into the panel so that lines are written as they were read; the lanes of a TALL block have what
// they read.
template <bool TALL, bool FOUR, bool STOCHASTIC, bool VALUES>
__global__ void __launch_bounds__(LAUNCH_THREADS, RESIDENT<TALL && FOUR>)
    nvfp4_rows(bf16* __restrict__ values,     // (rows, columns)
               uint8_t* __restrict__ codes,   // (rows, columns / 2)
               uint8_t* __restrict__ scales,  // 128 x 4 tiles of (rows, columns / 16)
               const bf16* __restrict__ x,    // (rows, columns), stride apart
               int stride, const float* __restrict__ amax,
               const uint32_t* __restrict__ key,  // seed, step
               uint32_t tensor, uint32_t role, int64_t first, int rows, int columns, float range,
               float inverse_target) {
    constexpr int WARPS = LAUNCH_THREADS / 32, ACROSS = PANEL_COLUMNS / BLOCK;
    __shared__ __align__(16) uint32_t staged[WARPS][2 * Panels<!TALL>::SIZE];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = lane / ACROSS, right = lane % ACROSS;
    Panels<!TALL> panels(staged[warp]);
    // Where a lane has its blocks, from where it has copied.
    int chunk[2] = {panels.chunk(down, 2 * right), panels.chunk(down, 2 * right + 1)};
    for (int& place : chunk) place -= panels.chunk(lane / 8, lane % 8);
    Walk walk(gridDim.x * WARPS, columns);
    Walk::Place at = walk.start(blockIdx.x * WARPS + warp), ahead = at;
    auto load = [&] {
        if (ahead.row < rows) panels.load(x, stride, ahead.row, ahead.column, rows, columns);
        cp_async_commit();
    };
    load();
    TensorScale whole = tensor_scale(*amax, range, inverse_target);
#pragma unroll 1
    for (; at.row < rows; at = ahead) {
        walk.next(ahead);
        uint32_t* here = panels.to;
        panels.turn();
        load();
        cp_async_wait<1>();
        warp_sync();
        int row = at.row, column = at.column;
        if constexpr (TALL) {
            uint32_t q[4 * ROWS_OF_LANE], word[4 * ROWS_OF_LANE];
            row += lane / 8, column += lane % 8 * 8;
#pragma unroll
            for (int k = 0; k < ROWS_OF_LANE; ++k) get_chunk(&word[4 * k], here + 4 * k * panels.ROW);
            Scales scale = quantise<TILE, FOUR, false, !VALUES>(q, word, whole, NoNoise());
            if (column < columns) {
#pragma unroll
                for (int k = 0; k < ROWS_OF_LANE; ++k) {
                    int64_t place = int64_t(row + 4 * k) * columns + column;
                    if (VALUES) {
#pragma unroll
                        for (int i = 4 * k; i < 4 * k + 4; ++i) word[i] = scaled<FOUR>(q[i], word[i], scale);
                        put_chunk(reinterpret_cast<uint32_t*>(values + place), &word[4 * k]);
                    } else {
                        *reinterpret_cast<uint32_t*>(codes + place / 2) =
                            encode_eight<FOUR, false>(&q[4 * k], &word[4 * k], scale);
                        if (lane % 2 == 0)
                            scales[scale_offset(row + 4 * k, column / BLOCK, scale_tiles(columns))] =
                                uint8_t(encode<E4M3>(scale.low.scale));
                    }
                }
            }
        } else {
            int64_t place = int64_t(row + down) * columns + column + right * BLOCK;
            RowNoise noise[2];
            if (STOCHASTIC) {
                uint32_t counters[4][4];
                int64_t group = (first * columns + place) / ROUNDING_GROUP;
                for (int i = 0; i < 4; ++i) set_counter(counters[i], group + i / 2 * columns + i % 2, tensor, role);
                philox_calls<PHILOX_ROUNDS>(counters, key[0], key[1]);
                for (int i = 0; i < 16; ++i) noise[i / 8].word[i / 4 % 2][i % 4] = counters[i / 4][i % 4];
            }
#pragma unroll
            for (int r = 0; r < 2; ++r, place += 8 * int64_t(columns)) {
                uint32_t q[BLOCK / 2], word[BLOCK / 2];
#pragma unroll
                for (int i = 0; i < 2; ++i) get_chunk(&word[4 * i], here + chunk[i] + 8 * r * panels.ROW);
                Scales scale = quantise<WHOLE, FOUR, STOCHASTIC, !VALUES>(q, word, whole, noise[r]);
                if (VALUES) {
#pragma unroll
                    for (int i = 0; i < BLOCK / 2; ++i) word[i] = scaled<FOUR>(q[i], word[i], scale);
                    for (int i = 0; i < 2; ++i) put_chunk(here + chunk[i] + 8 * r * panels.ROW, &word[4 * i]);
                } else if (row + down + 8 * r < rows && column + right * BLOCK < columns) {
                    Vec<uint32_t, 2>{encode_eight<FOUR, STOCHASTIC>(q, word, scale),
                                     encode_eight<FOUR, STOCHASTIC>(q + 4, word + 4, scale)}
                        .store(reinterpret_cast<uint32_t*>(codes + place / 2));
                    scales[scale_offset(row + down + 8 * r, column / BLOCK + right, scale_tiles(columns))] =
                        uint8_t(encode<E4M3>(scale.low.scale));
                }
            }
            if (VALUES) {
                warp_sync();
                row += lane / 8, column += lane % 8 * 8;
                bf16* to = values + int64_t(row) * columns + column;
#pragma unroll
                for (int k = 0; k < ROWS_OF_LANE; ++k, to += 4 * int64_t(columns))
                    if (row + 4 * k < rows && column < columns)
                        Vec<uint32_t, 4>::load(here + 4 * k * panels.ROW)
                            .store(reinterpret_cast<uint32_t*>(to));
            }
        }
        warp_sync();  // what is staged here has been read
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

// The random bits of 16 tokens from `token` on in two columns.
__device__ __forceinline__ TokenNoise token_noise(const uint32_t* key, int64_t token, int column, int columns,
                                                  uint32_t tensor, uint32_t role) {
    TokenNoise noise;
    int64_t group = token / ROUNDING_GROUP * columns + column;
    for (int i = 0; i < 4; ++i) set_counter(noise.word[i], group + i / 2 * columns + i % 2, tensor, role);
    philox_calls<PHILOX_ROUNDS>(noise.word, key[0], key[1]);
    return noise;
}

// Blocks along the tokens, of x as it is or (HADAMARD) transformed, as values in the layout of x. Tokens up to `padded`,
// a multiple of 32, count as zero. Warps walk over panels, with the next one on its way.
template <bool HADAMARD, bool FOUR, bool STOCHASTIC>
__global__ void __launch_bounds__(LAUNCH_THREADS, TOKEN_RESIDENT<FOUR, STOCHASTIC>)
    nvfp4_tokens(bf16* __restrict__ values,   // (padded, columns)
                 const bf16* __restrict__ x,  // (tokens, columns), stride apart
                 int stride, const float* __restrict__ amax,
                 const uint32_t* __restrict__ key,  // seed, step
                 uint32_t tensor, uint32_t role, int64_t first, uint32_t signs, int tokens, int padded, int columns,
                 float range, float inverse_target) {
    constexpr int WARPS = LAUNCH_THREADS / 32;
    __shared__ __align__(16) uint32_t staged[WARPS][2 * Panels<false>::SIZE];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Panels<false> panels(staged[warp]);
    const uint32_t* words = &staged[warp][lane];  // of the lane's columns
    Walk walk(gridDim.x * WARPS, columns);
    Walk::Place at = walk.start(blockIdx.x * WARPS + warp), ahead = at;
    auto load = [&] {
        if (ahead.row < padded) panels.load(x, stride, ahead.row, ahead.column, tokens, columns);
        cp_async_commit();
    };
    load();
    Flips flips(HADAMARD ? signs : 0u);
    TensorScale whole = tensor_scale(HADAMARD ? exact_mul(4.0f, *amax) : *amax, range, inverse_target);
#pragma unroll 1
    for (; at.row < padded; at = ahead) {
        walk.next(ahead);
        panels.turn();
        load();
        cp_async_wait<1>();
        warp_sync();
        int token = at.row, column = at.column + 2 * lane;
        TokenBlock in;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) in.word[i] = words[i * panels.ROW];
        words -= panels.other;
        warp_sync();  // what is staged here has been read
        if (HADAMARD) in.transform(flips);
        TokenNoise noise;
        if (STOCHASTIC) noise = token_noise(key, first + token, column, columns, tensor, role);
        uint32_t q[BLOCK];
        Scales scale = quantise<APART, FOUR, STOCHASTIC, false>(q, in.word, whole, noise);
        if (column >= columns) continue;
        bf16* to = values + int64_t(token) * columns + column;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i)
            *reinterpret_cast<uint32_t*>(to + i * int64_t(columns)) = scaled<FOUR>(q[i], in.word[i], scale);
    }
}

// The same as codes and scales of the transpose, through shared memory.
template <bool HADAMARD, bool FOUR, bool STOCHASTIC>
__global__ void __launch_bounds__(LAUNCH_THREADS, RESIDENT<true>)
    nvfp4_token_codes(uint8_t* __restrict__ codes,   // (columns, padded / 2)
                      uint8_t* __restrict__ scales,  // 128 x 4 tiles of (columns, padded / 16)
                      const bf16* __restrict__ x,    // (tokens, columns), stride apart
                      int stride, const float* __restrict__ amax,
                      const uint32_t* __restrict__ key,  // seed, step
                      uint32_t tensor, uint32_t role, int64_t first, uint32_t signs, int tokens, int padded,
                      int columns, float range, float inverse_target) {
    // Row c * 32 + l has column 2 * l + c, so that the lanes of a warp write to many banks.
    __shared__ __align__(16) uint32_t code_tile[TOKEN_COLUMNS][SPAN / 8 + 4];
    __shared__ __align__(16) uint8_t scale_tile[TOKEN_COLUMNS][SPAN / BLOCK];
    Flips flips(HADAMARD ? signs : 0u);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * TOKEN_COLUMNS + 2 * lane;
    TensorScale whole = tensor_scale(HADAMARD ? exact_mul(4.0f, *amax) : *amax, range, inverse_target);
#pragma unroll 1
    for (int block = warp; block < SPAN / BLOCK; block += LAUNCH_THREADS / 32) {
        int token = blockIdx.y * SPAN + block * BLOCK;
        if (token >= padded) break;
        TokenBlock in;
        in.load(x, stride, token, column, tokens, columns);
        if (HADAMARD) in.transform(flips);
        TokenNoise noise;
        if (STOCHASTIC) noise = token_noise(key, first + token, column, columns, tensor, role);
        uint32_t q[BLOCK];
        Scales scale = quantise<APART, FOUR, STOCHASTIC, true>(q, in.word, whole, noise);
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
    __syncthreads();
    constexpr int PARTS = SPAN / 32;  // of 32 tokens: 16 bytes of codes, two scales
    for (int i = threadIdx.x; i < TOKEN_COLUMNS * PARTS; i += LAUNCH_THREADS) {
        int local = i / PARTS, part = i % PARTS, row = blockIdx.x * TOKEN_COLUMNS + local;
        int token = blockIdx.y * SPAN + part * 32, from = local % 2 * 32 + local / 2;
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
