// Weights to E2M1 with a scale in E4M3 for each 16 columns, and one in float for all. kernels/quant/fp4.py has the
// formulas.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

constexpr int AHEAD = 4;  // loads of a thread at a time

constexpr int AMAX_THREADS = 512;  // of a block that looks for the largest: four a multiprocessor make few of them

// The bits of the largest magnitude that each block finds.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(AMAX_THREADS)
    largest_of_blocks(uint32_t* __restrict__ most_of_block, const T* __restrict__ x, int64_t size) {
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
    if (threadIdx.x == 0) most_of_block[blockIdx.x] = most;
}

constexpr int SIDE = 16;                 // columns of a block, and rows of a square one
constexpr int ACROSS = 4;                // blocks of a panel of SIDE rows, on which a warp works at a time
constexpr int PANEL = ACROSS * SIDE;     // its columns
constexpr int PANELS = 8;                // of a warp, side by side
constexpr int WARPS = 4;                 // of a block of threads, side by side
// Blocks of threads of a multiprocessor, over the bytes of a weight.
template <bool MUCH> constexpr int RESIDENT = MUCH ? 10 : 12;
constexpr int STAGES = 2;                // panels of a warp in shared memory: here, or on their way
constexpr int SCALES = PANELS * ACROSS;  // of a row of a warp's panels

// Panels of a warp. The places of a row's 16-byte chunks are exchanged by the row, so that lanes that read neighbours
// meet different banks. A lane's places change sides with every panel: the compiler would work them out anew each time.
template <typename T, bool WHOLE> struct Staged {
    static constexpr int CHUNK = WIDTH<T>, CHUNKS = PANEL / CHUNK, ROWS = 32 / CHUNKS;  // rows of an access
    static constexpr int SIZE = SIDE * 4 * CHUNKS, ROW = 4 * CHUNKS;                    // words of a panel and of a row
    uint32_t *copy[8 / ROWS], *read[SIDE / CHUNK];
    int other = SIZE;  // from the panel that is copied next to the other

    __device__ __forceinline__ explicit Staged(uint32_t* panels) {
        int lane = threadIdx.x % 32, row = lane / CHUNKS, chunk = lane % CHUNKS;
        for (int i = 0; i < 8; i += ROWS) copy[i / ROWS] = panels + row * ROW + 4 * (chunk ^ row ^ i);
        row = lane / ACROSS, chunk = lane % ACROSS * (SIDE / CHUNK);
        for (int i = 0; i < SIDE / CHUNK; ++i) read[i] = panels + row * ROW + 4 * ((chunk + i) ^ row);
    }
    // A lane has chunk lane % CHUNKS of row lane / CHUNKS and of every ROWS-th from there: its first weight is at
    // `from`, and `rows` and `columns` of the matrix are left there. Past them are zeros.
    __device__ __forceinline__ void load(const T* from, int64_t stride, int rows, int columns) {
#pragma unroll
        for (int i = 0; i < SIDE; i += ROWS, from += ROWS * stride) {
            uint32_t* to = copy[i % 8 / ROWS] + i * ROW;
            bool inside = i < rows && columns > 0;
            if (WHOLE) {
                cp_async_16(to, from, inside);
            } else {
                auto weights = reinterpret_cast<T*>(to);
                for (int j = 0; j < CHUNK; ++j) weights[j] = inside ? from[j] : from_float<T>(0.0f);
            }
        }
    }
    // The next one is copied to the other side, and read from there.
    __device__ __forceinline__ void turn_copy() {
        for (auto& place : copy) place += other;
        other = -other;
    }
    __device__ __forceinline__ void turn_read() {
        for (auto& place : read) place += other;
    }
    // Row lane / ACROSS + `row` of block lane % ACROSS.
    __device__ __forceinline__ void get(Pack<T, SIDE>& x, int row) {
#pragma unroll
        for (int i = 0; i < SIDE / CHUNK; ++i) {
            auto part = Vec<uint32_t, 4>::load(read[i] + row * ROW);
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

// The scale of a block of which `wanted` is the best, and what weights are multiplied by. PLAIN: decoding is far from
// the ends of the range of floats.
struct Scale {
    float value, factor;
};
template <bool PLAIN> __device__ __forceinline__ Scale scale_of(float wanted, float decoding) {
    float value = e4m3_nearest(wanted), step = exact_mul(value, decoding);
    if (PLAIN) return {value, value > 0.0f ? exact_reciprocal(step) : 3.40282347e38f};
    return {value, saturated(__frcp_rn(step))};
}
// Of FORMS: for the largest value on 6, and on 4.
template <bool PLAIN, int FORMS>
__device__ __forceinline__ void scales_of(Scale (&scale)[FORMS], float wanted, float decoding) {
    scale[0] = scale_of<PLAIN>(wanted, decoding);
    if constexpr (FORMS == 2) scale[1] = scale_of<PLAIN>(exact_mul(wanted, 1.5f), decoding);
}

// 16 weights in units of their scale: magnitudes on the grid, number j of each eight in a word with j + 4, and the
// squared error.
struct Rounded {
    uint32_t q[SIDE / 2];
    float error;
    // With the largest magnitude.
    __device__ __forceinline__ void fill() {
        for (uint32_t& two : q) two = 0x40C040C0u;
    }
};
template <bool CLIP> struct Clip {
    static constexpr bool YES = CLIP;
};
template <bool CLIP, typename T>
__device__ __forceinline__ Rounded rounded(const Pack<T, SIDE>& x, Scale scale) {
    float q[SIDE], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SIDE; ++i) q[i] = e2m1_nearest<CLIP>(exact_mul(fabsf(x.get(i)), scale.factor), sum);
    Rounded out;
#pragma unroll
    for (int i = 0; i < SIDE / 2; ++i) {
        int low = i / 4 * 8 + i % 4;
        out.q[i] = word_of(q[low], q[low + 4]);
    }
    out.error = exact_mul(exact_mul(scale.value, scale.value), sum);
    return out;
}

// Codes of weights whose magnitudes are `row`.
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
        out.data[i] = encode_partners(q, sign);
    }
    return out;
}

// A warp takes PANELS panels, and a lane 16 columns of two rows of each. SQUARE: the rows of a block share their scale.
// FOUR: the better of the largest value on 6 and on 4, else on 6.
template <typename T, bool WHOLE, bool SQUARE, bool FOUR>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT<SQUARE && FOUR> / sizeof(T))
    nvfp4_quantize(uint8_t* __restrict__ codes,         // (rows, columns / 2)
                   uint8_t* __restrict__ scales,        // (rows, columns / 16)
                   float* __restrict__ tensor_scale,    // (1,)
                   const uint32_t* __restrict__ most_of_block,  // (parts,), bits of floats
                   int parts,
                   const T* __restrict__ weight,        // (rows, columns)
                   int rows, int columns) {
    using Panels = Staged<T, WHOLE>;
    constexpr int FORMS = FOUR ? 2 : 1, TOGETHER = SQUARE ? 2 : 1;  // rows of a lane that share a scale
    __shared__ __align__(16) uint32_t staged[WARPS][STAGES * Panels::SIZE];
    __shared__ __align__(16) RowSums sums[SQUARE && FOUR ? WARPS : 1];
    __shared__ __align__(8) uint8_t scale_tile[WARPS][SIDE][SCALES];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / ACROSS, block = lane % ACROSS;
    // From the last to the first: the end of the matrix was read last, and may be in the cache.
    int place = gridDim.x - 1 - blockIdx.x, across = (columns - 1) / (WARPS * PANELS * PANEL) + 1;
    int first_row = place / across * SIDE, first_column = (place % across * WARPS + warp) * PANELS * PANEL;
    int down = rows - first_row, right = columns - first_column, panels = min(PANELS, (right + PANEL - 1) / PANEL);
    int64_t first = int64_t(first_row) * columns + first_column;
    int load_row = lane / Panels::CHUNKS, load_column = lane % Panels::CHUNKS * Panels::CHUNK;
    const T* from = weight + first + int64_t(load_row) * columns + load_column;
    Panels here(staged[warp]);
    auto load = [&](int panel) {
        if (panel < panels) here.load(from, columns, down - load_row, right - panel * PANEL - load_column);
        cp_async_commit();
        here.turn_copy();
        from += PANEL;
    };
    load(0);
    uint32_t largest = 0u;
    for (int i = threadIdx.x; i < parts; i += 32 * WARPS) largest = max(largest, most_of_block[i]);
    float size = __uint_as_float(block_amax(largest));
    float encoding = size == 0.0f ? 1.0f : saturated(__fdiv_rn(FOUR ? 1536.0f : 2688.0f, size));
    float decoding = __fdiv_rn(1.0f, encoding), per_block = exact_mul(encoding, 1.0f / 6.0f);
    bool plain = decoding > power_of_two(-100) && decoding < power_of_two(100), finite = decoding < INFINITY;
    if (blockIdx.x == 0 && threadIdx.x == 0) *tensor_scale = decoding;
    if (right <= 0) return;
    uint8_t* to = codes + (first + int64_t(row) * columns + block * SIDE) / 2;
    uint8_t* scale_to = &scale_tile[warp][row][block];
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel, to += PANEL / 2, scale_to += ACROSS) {
        load(panel + 1);
        cp_async_wait<1>();
        warp_sync();
#pragma unroll
        for (int turn = 0; turn < 2; turn += TOGETHER) {
            Pack<T, SIDE> x[TOGETHER];
            uint32_t bits[TOGETHER];
            for (int r = 0; r < TOGETHER; ++r) {
                here.get(x[r], 8 * (turn + r));
                bits[r] = largest_magnitude(x[r]);
            }
            if (SQUARE) {
                bits[0] = max(bits[0], bits[TOGETHER - 1]);
                for (int mask = ACROSS; mask < 32; mask *= 2) bits[0] = max(bits[0], warp_shfl_xor(bits[0], mask));
            }
            float most = __uint_as_float(bits[0]), wanted = exact_mul(most, per_block);
            Scale scale[FORMS];
            scales_of<true>(scale, wanted, decoding);
            Rounded out[FORMS][TOGETHER];
            auto choose = [&] {
                float error[2] = {out[0][0].error, out[FORMS - 1][0].error};
                if constexpr (SQUARE)
                    sums[warp].add(error, {{error[0], out[0][1].error}, {error[1], out[FORMS - 1][1].error}});
                bool better = error[1] < error[0] || scale[0].value == 0.0f;
                if (better) scale[0] = scale[FORMS - 1];
                for (int r = 0; r < TOGETHER; ++r)
                    if (better) out[0][r] = out[FORMS - 1][r];
            };
            auto round = [&](auto clip) {
                for (int i = 0; i < FORMS * TOGETHER; ++i)
                    out[i / TOGETHER][i % TOGETHER] = rounded<decltype(clip)::YES>(x[i % TOGETHER], scale[i / TOGETHER]);
                if (FOUR && !SQUARE) choose();  // here, where it is two instructions in one
            };
            // The scale of 4 is not less: with it, nothing more is past 6.
            if (plain && !(exact_mul(most, scale[0].factor) > 6.5f)) {
                round(Clip<false>());
            } else {
                if (!plain) scales_of<false>(scale, wanted, decoding);
                round(Clip<true>());
                if (!finite)
                    for (int i = 0; i < FORMS * TOGETHER; ++i) out[i / TOGETHER][i % TOGETHER].fill(), x[i % TOGETHER].clear();
            }
            if (FOUR && SQUARE) choose();
            for (int r = 0; r < TOGETHER; ++r) {
                int apart = 8 * (turn + r);
                Vec<uint32_t, 2> word = encode_row(out[0][r], x[r]);
                if (row + apart < down && panel * PANEL + block * SIDE < right)
                    word.store(reinterpret_cast<uint32_t*>(to + int64_t(apart) * (columns / 2)));
                scale_to[apart * SCALES] = uint8_t(encode_bytes<E4M3>({scale[0].value, 0.0f, 0.0f, 0.0f}));
            }
        }
        warp_sync();  // what is staged here has been read
        here.turn_read();
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
