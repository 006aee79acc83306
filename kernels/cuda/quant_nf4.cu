// Weights to NF4, in blocks of the flattened matrix, and the scales of those blocks to 8 bits.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

constexpr int EACH = 16;      // neighbours that a thread has of a span
constexpr int WARPS = 8;      // of a block of threads: a span is a largest block of weights
constexpr int RESIDENT = 12;  // blocks of threads of a multiprocessor, over the bytes of a weight

// Codes of [-1, 1] by table: cell i is what rounds to (i - 16) / 16, and holds at most one middle between values, none
// within 2^-13 of its ends. `below` is the code of its lower end, `middle` where the next code begins. Each lane has a
// table of its own, so that no two read the same bank.
struct Cell {
    float middle;
    uint32_t below;
};
struct Cells {
    static constexpr int COUNT = 33;
    Cell first[COUNT], of_lane[COUNT][32];

    __device__ __forceinline__ void fill() {
        uint32_t thread = threadIdx.y * 32 + threadIdx.x;
        if (thread < COUNT) {
            uint32_t code = encode<NF4>((float(thread) - 16.5f) / 16.0f);
            first[thread] = {code < 15u ? nf4_middle(code) : INFINITY, code};
        }
        __syncthreads();
        for (uint32_t cell = threadIdx.y; cell < COUNT; cell += WARPS) of_lane[cell][threadIdx.x] = first[cell];
        __syncthreads();
    }
    // Of 2^15 + 16.5 + 16 x, the bits of the number of the cell are where an offset to it has them. The sign of the
    // distance to the middle is what is added to the code.
    __device__ __forceinline__ uint32_t append_nf4(uint32_t word, float x) const {
        static_assert(sizeof(of_lane[0]) == 256, "the bits of 1 in a float of 2^15");
        uint32_t offset = __float_as_uint(__fmaf_rn(x, 16.0f, 32768.0f + 16.5f)) & 0x3F00u;
        auto place = reinterpret_cast<const char*>(of_lane) + (offset | threadIdx.x * sizeof(Cell));
        auto cell = Vec<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(place));
        return word * 16 + cell.data[1] + (__float_as_uint(exact_add(__uint_as_float(cell.data[0]), -x)) >> 31);
    }
};

// A block of 2^log_block weights is 2 to 256 threads. The next span is on its way while one is encoded.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT / sizeof(T))
    nf4_quantize(uint8_t* __restrict__ codes, float* __restrict__ absmax, const T* __restrict__ weight, int log_block,
                 int64_t size) {
    __shared__ uint32_t of_warp[WARPS];
    __shared__ __align__(8) Cells cells;
    cells.fill();
    uint32_t thread = threadIdx.y * 32 + threadIdx.x, threads = (1u << log_block) / EACH, place = thread % threads;
    uint32_t parts = uint32_t((size + EACH - 1) / EACH), step = gridDim.x * 32 * WARPS;
    auto load = [&](uint32_t part) {  // past the end, the last: of a block that ends early, the largest stays
        Pack<T, EACH> pack;
        int64_t begin = int64_t(min(part, parts - 1)) * EACH;
        if (WHOLE) pack.load(weight + begin);
        else pack.template load_columns<false>(weight + begin, 0, size - begin < EACH ? int(size - begin) : EACH);
        return pack;
    };
    uint32_t part = blockIdx.x * 32 * WARPS + thread;
    Pack<T, EACH> next = load(part);
#pragma unroll 1
    for (; part - thread < parts; part += step) {
        Pack<T, EACH> pack = next;
        next = load(part + step);
        uint32_t amax = largest_magnitude(pack);
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) amax = max(amax, warp_shfl_xor(amax, mask & (threads - 1)));
        if (threads > 32) {
            __syncthreads();  // the previous span's readers are done
            if (threadIdx.x == 0) of_warp[threadIdx.y] = amax;
            __syncthreads();
#pragma unroll 1
            for (uint32_t i = 0; i < threads / 32; ++i) amax = max(amax, of_warp[(thread - place) / 32 + i]);
        }
        if (part >= parts) continue;
        float scale = __uint_as_float(amax), factor = saturated(__frcp_rn(scale));
        if (place == 0) absmax[int64_t(part) * EACH >> log_block] = scale;
        Vec<uint32_t, EACH / 8> out;
#pragma unroll
        for (int i = 0; i < EACH / 8; ++i) {
            out.data[i] = 0x77777777u;  // zeros: what is left of a block that is not finite
            if (scale < INFINITY) {
                uint32_t word = 0;
#pragma unroll
                for (int j = 7; j >= 0; --j) {
                    float x = exact_mul(pack.get(8 * i + (j ^ 1)), factor);
                    word = cells.append_nf4(word, x);
                }
                out.data[i] = word;
            }
        }
        uint8_t* to = codes + int64_t(part) * (EACH / 2);
        if (WHOLE) {
            out.store(reinterpret_cast<uint32_t*>(to));
        } else {
            int64_t left = size - int64_t(part) * EACH;
            for (int j = 0; j < EACH / 2 && 2 * j < left; ++j) to[j] = uint8_t(out.data[j / 4] >> j % 4 * 8);
        }
    }
}

constexpr int MEAN_THREADS = 1024;

// The mean of n floats, summed in double by one block: the same bits every time.
__global__ void __launch_bounds__(MEAN_THREADS)
    nf4_mean(float* __restrict__ mean, const float* __restrict__ x, int n) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < n; i += MEAN_THREADS) sum += double(x[i]);
    sum = block_sum_double(sum);
    if (threadIdx.x == 0) *mean = float(sum / n);
}

// What is left of the scales without their mean, as indices into an ascending table of 256, in blocks of
// LAUNCH_THREADS. The nearest entry; in the middle between two, that of even index.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    nf4_nest(uint8_t* __restrict__ codes, float* __restrict__ scales, const float* __restrict__ absmax,
             const float* __restrict__ mean, const float* __restrict__ table, int n) {
    int i = blockIdx.x * LAUNCH_THREADS + threadIdx.x;
    float x = i < n ? __fsub_rn(absmax[i], *mean) : 0.0f;
    float scale = __uint_as_float(block_amax(__float_as_uint(x) & 0x7FFFFFFFu));
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    if (i >= n) return;
    x = scale == 0.0f ? 0.0f : exact_mul(x, __fdiv_rn(1.0f, scale));
    int code = 0;  // entries whose middle to the next is less than x
    for (int step = 128; step > 0; step /= 2) {
        int next = code + step;
        if (x > exact_mul(exact_add(table[next - 1], table[next]), 0.5f)) code = next;
    }
    if (code % 2 && code < 255 && x == exact_mul(exact_add(table[code], table[code + 1]), 0.5f)) ++code;
    codes[i] = uint8_t(code);
}
