// Weights to E2M1 with a scale in E4M3 for each 16 columns, and one in float for all. kernels/quant/fp4.py has the
// formulas.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

constexpr int AHEAD = 4;  // loads of a thread at a time

// Raises *amax, the bits of a float, to those of the largest magnitude.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    raise_amax(uint32_t* __restrict__ amax, const T* __restrict__ x, int64_t size) {
    uint32_t most = 0;
    int64_t step = int64_t(gridDim.x) * blockDim.x * GROUP;
    for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * GROUP; i < size; i += AHEAD * step) {
        Pack<T, GROUP> pack[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            int64_t at = i + k * step, left = size - at;
            pack[k].template load_columns<WHOLE>(x + at, 0, left > GROUP ? GROUP : left > 0 ? int(left) : 0);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) most = max(most, largest_magnitude(pack[k]));
    }
    most = block_amax(most);
    if (threadIdx.x == 0) atomicMax(amax, most);
}

constexpr int SIDE = 16;                 // columns of a block, and rows of a square one
constexpr int ACROSS = 4;                // blocks of a panel of SIDE rows, on which a warp works at a time
constexpr int PANEL = ACROSS * SIDE;     // its columns
constexpr int PANELS = 8;                // of a warp, side by side
constexpr int WARPS = 4;                 // of a block of threads, side by side
constexpr int RESIDENT = 12;             // blocks of threads of a multiprocessor, over the bytes of a weight
constexpr int STAGES = 2;                // panels of a warp in shared memory: here, or on their way
constexpr int SCALES = PANELS * ACROSS;  // of a row of a warp's panels

// Panels of a warp. The places of a row's 16-byte chunks are exchanged by the row, so that lanes that read neighbours
// meet different banks.
template <typename T, bool WHOLE> struct Staged {
    static constexpr int CHUNK = WIDTH<T>, CHUNKS = PANEL / CHUNK, ROWS = 32 / CHUNKS;  // rows of an access
    uint32_t word[STAGES][SIDE][4 * CHUNKS];

    // A lane has chunk lane % CHUNKS of row lane / CHUNKS and of every ROWS-th from there: its first weight is at
    // `from`, and `rows` and `columns` of the matrix are left there. Past them are zeros.
    __device__ __forceinline__ void load(int stage, const T* from, int64_t stride, int rows, int columns) {
        int row = threadIdx.x % 32 / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
        for (int i = 0; i < SIDE; i += ROWS, from += ROWS * stride) {
            uint32_t* to = &word[stage][row + i][4 * (chunk ^ row ^ i % 8)];
            bool inside = i < rows && columns > 0;
            if (WHOLE) {
                cp_async_16(to, from, inside);
            } else {
                auto weights = reinterpret_cast<T*>(to);
                for (int j = 0; j < CHUNK; ++j) weights[j] = inside ? from[j] : from_float<T>(0.0f);
            }
        }
    }
    __device__ __forceinline__ void get(Pack<T, SIDE>& x, int stage, int row, int block) {
#pragma unroll
        for (int i = 0; i < SIDE / CHUNK; ++i) {
            int chunk = block * (SIDE / CHUNK) + i;
            auto part = Vec<uint32_t, 4>::load(&word[stage][row][4 * (chunk ^ row % 8)]);
#pragma unroll
            for (int k = 0; k < 4; ++k) x.word[4 * i + k] = part.data[k];
        }
    }
};

// Sums over the rows of square blocks, one row after the other: a lane for each of a panel's.
struct RowSums {
    float of_row[2 * ACROSS][SIDE + 4];

    // Of lane ACROSS * row + block: what rows `row` and `row + 8` have, then the sums of all rows.
    __device__ __forceinline__ void add(float (&sum)[2], const float (&part)[2][2]) {
        int lane = threadIdx.x % 32, row = lane / ACROSS, first = lane % ACROSS * 2;
        warp_sync();  // the previous call's readers are done
#pragma unroll
        for (int k = 0; k < 4; ++k) of_row[first + k / 2][row + k % 2 * 8] = part[k / 2][k % 2];
        warp_sync();
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < SIDE; i += 4) {
            auto four = Vec<float, 4>::load(&of_row[lane % (2 * ACROSS)][i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) total = exact_add(total, four.data[j]);
        }
        for (int k = 0; k < 2; ++k) sum[k] = warp_shfl(total, first + k);
    }
};

// The scale of a block of which `wanted` is the best, and what weights are multiplied by. `plain`: decoding is far from
// the ends of the range of floats.
struct Scale {
    float value, factor;
};
__device__ __forceinline__ Scale scale_of(float wanted, float decoding, bool plain) {
    float value = e4m3_nearest(wanted), step = exact_mul(value, decoding);
    if (plain) return {value, value > 0.0f ? exact_reciprocal(step) : 3.40282347e38f};
    return {value, saturated(__frcp_rn(step))};
}

// 16 weights in units of their scale: magnitudes on the grid, two in a word, and the squared error.
struct Rounded {
    uint32_t q[SIDE / 2];
    float error;
};
template <bool CLIP, typename T>
__device__ __forceinline__ Rounded rounded(const Pack<T, SIDE>& x, Scale scale) {
    Rounded out;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SIDE / 2; ++i) {
        float low = e2m1_nearest<CLIP>(exact_mul(fabsf(x.get(2 * i)), scale.factor), sum);
        float high = e2m1_nearest<CLIP>(exact_mul(fabsf(x.get(2 * i + 1)), scale.factor), sum);
        out.q[i] = word_of(low, high);
    }
    out.error = exact_mul(exact_mul(scale.value, scale.value), sum);
    return out;
}

template <typename T>
__device__ __forceinline__ Vec<uint32_t, 2> encode_row(const Rounded& row, const Pack<T, SIDE>& x) {
    Vec<uint32_t, 2> out;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t q[4], sign[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int word = 4 * i + j;
            q[j] = row.q[word];
            sign[j] = x.HALF ? x.word[word] : word_of(x.get(2 * word), x.get(2 * word + 1));
        }
        out.data[i] = encode_grid(q, sign);
    }
    return out;
}

// A warp takes PANELS panels, and a lane 16 columns of two rows of each. SQUARE: the rows of a block share their scale.
// FOUR: the better of the largest value on 6 and on 4, else on 6.
template <typename T, bool WHOLE, bool SQUARE, bool FOUR>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT / sizeof(T))
    nvfp4_quantize(uint8_t* __restrict__ codes,         // (rows, columns / 2)
                   uint8_t* __restrict__ scales,        // (rows, columns / 16)
                   float* __restrict__ tensor_scale,    // (1,)
                   const uint32_t* __restrict__ amax,   // (1,), bits of a float
                   const T* __restrict__ weight,        // (rows, columns)
                   int rows, int columns) {
    using Panels = Staged<T, WHOLE>;
    constexpr int FORMS = FOUR ? 2 : 1;
    __shared__ __align__(16) Panels staged[WARPS];
    __shared__ __align__(16) RowSums sums[WARPS];
    __shared__ __align__(8) uint8_t scale_tile[WARPS][SIDE][SCALES];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / ACROSS, block = lane % ACROSS;
    float size = __uint_as_float(*amax);
    float encoding = size == 0.0f ? 1.0f : saturated(__fdiv_rn(FOUR ? 1536.0f : 2688.0f, size));
    float decoding = __fdiv_rn(1.0f, encoding), per_block = exact_mul(encoding, 1.0f / 6.0f);
    bool plain = decoding > power_of_two(-100) && decoding < power_of_two(100), finite = decoding < INFINITY;
    if (blockIdx.x == 0 && threadIdx.x == 0) *tensor_scale = decoding;
    // From the last to the first: the end of the matrix was read last, and may be in the cache.
    int place = gridDim.x - 1 - blockIdx.x, across = (columns - 1) / (WARPS * PANELS * PANEL) + 1;
    int first_row = place / across * SIDE, first_column = (place % across * WARPS + warp) * PANELS * PANEL;
    int down = rows - first_row, right = columns - first_column, panels = min(PANELS, (right + PANEL - 1) / PANEL);
    if (right <= 0) return;
    int64_t first = int64_t(first_row) * columns + first_column;
    int load_row = lane / Panels::CHUNKS, load_column = lane % Panels::CHUNKS * Panels::CHUNK;
    const T* from = weight + first + int64_t(load_row) * columns + load_column;
    auto load = [&](int panel) {
        if (panel < panels)
            staged[warp].load(panel % STAGES, from, columns, down - load_row, right - panel * PANEL - load_column);
        cp_async_commit();
        from += PANEL;
    };
    for (int panel = 0; panel < STAGES - 1; ++panel) load(panel);
    uint8_t* to = codes + (first + int64_t(row) * columns + block * SIDE) / 2;
    uint8_t* scale_to = &scale_tile[warp][row][block];
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel, to += PANEL / 2, scale_to += ACROSS) {
        load(panel + STAGES - 1);
        cp_async_wait<STAGES - 1>();
        warp_sync();
        Pack<T, SIDE> x[2];
        float most[2];
        for (int r = 0; r < 2; ++r) {
            staged[warp].get(x[r], panel % STAGES, row + 8 * r, block);
            most[r] = __uint_as_float(largest_magnitude(x[r]));
        }
        warp_sync();  // what is staged here has been read
        if (SQUARE) {
            uint32_t both = max(__float_as_uint(most[0]), __float_as_uint(most[1]));
            for (int mask = ACROSS; mask < 32; mask *= 2) both = max(both, warp_shfl_xor(both, mask));
            most[0] = most[1] = __uint_as_float(both);
        }
        Scale scale[FORMS][2];
        Rounded out[FORMS][2];
        for (int r = 0; r < 2; ++r) {
            float wanted = exact_mul(most[r], per_block);
            for (int k = 0; k < FORMS; ++k) {
                if (SQUARE && r) scale[k][r] = scale[k][0];
                else scale[k][r] = scale_of(k ? exact_mul(wanted, 1.5f) : wanted, decoding, plain);
            }
        }
        // The scale of 4 is not less: with it, nothing more is past 6.
        if (fmaxf(exact_mul(most[0], scale[0][0].factor), exact_mul(most[1], scale[0][1].factor)) > 6.5f) {
            for (int i = 0; i < 2 * FORMS; ++i) out[i / 2][i % 2] = rounded<true>(x[i % 2], scale[i / 2][i % 2]);
        } else {
            for (int i = 0; i < 2 * FORMS; ++i) out[i / 2][i % 2] = rounded<false>(x[i % 2], scale[i / 2][i % 2]);
        }
        if constexpr (FOUR) {
            float error[2][2] = {{out[0][0].error, out[0][1].error}, {out[1][0].error, out[1][1].error}};
            if constexpr (SQUARE) {
                float sum[2];
                sums[warp].add(sum, error);
                for (int k = 0; k < 2; ++k) error[k][0] = error[k][1] = sum[k];
            }
            for (int r = 0; r < 2; ++r) {
                bool better = error[1][r] < error[0][r] || scale[0][r].value == 0.0f;
                if (better) out[0][r] = out[1][r], scale[0][r] = scale[1][r];
            }
        }
        for (int r = 0; r < 2; ++r) {
            Vec<uint32_t, 2> word = {0x77777777u, 0x77777777u};
            if (finite) word = encode_row(out[0][r], x[r]);
            if (row + 8 * r < down && panel * PANEL + block * SIDE < right)
                word.store(reinterpret_cast<uint32_t*>(to + int64_t(8 * r) * (columns / 2)));
            scale_to[8 * r * SCALES] = uint8_t(encode_bytes<E4M3>({scale[0][r].value, 0.0f, 0.0f, 0.0f}));
        }
    }
    warp_sync();
    int blocks = columns / SIDE, left = (right - 1) / SIDE + 1;
    for (int i = lane * 8; i < SIDE * SCALES; i += 32 * 8) {
        int line = i / SCALES, begin = i % SCALES;
        uint8_t* end = scales + int64_t(first_row + line) * blocks + first_column / SIDE + begin;
        auto eight = Vec<uint8_t, 8>::load(&scale_tile[warp][line][begin]);
        if (line >= down || begin >= left) continue;
        if (blocks % 8 == 0) eight.store(end);
        else for (int j = 0; j < 8 && begin + j < left; ++j) end[j] = eight.data[j];
    }
}
