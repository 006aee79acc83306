// Weights to NF4, in blocks of the flattened matrix, and the scales of those blocks to 8 bits.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

constexpr int SPAN_THREADS = 512, SPAN = SPAN_THREADS * GROUP;  // elements of a block of threads: a largest block
constexpr int SPANS = 8;  // one after the other, of a block of threads

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
        if (threadIdx.x < COUNT) {
            uint32_t code = encode<NF4>((float(threadIdx.x) - 16.5f) / 16.0f);
            first[threadIdx.x] = {code < 15u ? nf4_middle(code) : INFINITY, code};
        }
        __syncthreads();
        for (int cell = threadIdx.x / 32; cell < COUNT; cell += SPAN_THREADS / 32)
            of_lane[cell][threadIdx.x % 32] = first[cell];
        __syncthreads();
    }
    // Of 2^15 + 16.5 + 16 x, the bits of the number of the cell are where an offset to it has them.
    __device__ __forceinline__ uint32_t encode_nf4(float x) const {
        static_assert(sizeof(of_lane[0]) == 256, "the bits of 1 in a float of 2^15");
        uint32_t offset = __float_as_uint(__fmaf_rn(x, 16.0f, 32768.0f + 16.5f)) & 0x3F00u;
        auto place = reinterpret_cast<const char*>(of_lane) + (offset | threadIdx.x % 32 * sizeof(Cell));
        auto cell = Vec<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(place));
        return cell.data[1] + (x > __uint_as_float(cell.data[0]));
    }
};

// Eight elements a thread, so that a block of weights is 4 to 512 threads.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(SPAN_THREADS)
    nf4_quantize(uint8_t* __restrict__ codes, float* __restrict__ absmax, const T* __restrict__ weight, int block,
                 int64_t size) {
    __shared__ uint32_t of_warp[SPAN_THREADS / 32];
    __shared__ __align__(8) Cells cells;
    cells.fill();
    int threads = block / GROUP, of_span = threadIdx.x / threads, spanned = SPAN / block;  // blocks of weights
    int64_t begin = int64_t(blockIdx.x) * SPANS * SPAN + threadIdx.x * GROUP;
    absmax += int64_t(blockIdx.x) * SPANS * spanned + of_span;
#pragma unroll 1
    for (int span = 0; span < SPANS; ++span, begin += SPAN, absmax += spanned) {
        int count = begin < size ? (WHOLE || begin + GROUP <= size ? GROUP : int(size - begin)) : 0;
        float x[GROUP] = {};
        if (count) load_group(x, weight + begin, count, WHOLE);
        uint32_t amax = largest_magnitude(x);
        for (int mask = min(threads, 32) / 2; mask > 0; mask /= 2) amax = max(amax, warp_shfl_xor(amax, mask));
        if (threads > 32) {
            __syncthreads();  // the previous span's readers are done
            if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = amax;
            __syncthreads();
            int first = of_span * (threads / 32);
            for (int warp = first; warp < first + threads / 32; ++warp) amax = max(amax, of_warp[warp]);
        }
        if (!count) continue;
        float scale = __uint_as_float(amax), factor = saturated(__fdiv_rn(1.0f, scale));
        if (threadIdx.x == of_span * threads) *absmax = scale;
        uint32_t word = 0x77777777u;  // zeros: what is left of a block that is not finite
        if (scale < INFINITY) {
            word = 0;
#pragma unroll
            for (int i = GROUP - 1; i >= 0; --i) word = word * 16 + cells.encode_nf4(exact_mul(x[i ^ 1], factor));
        }
        if (WHOLE) {
            *reinterpret_cast<uint32_t*>(codes + begin / 2) = word;
        } else {
            for (int j = 0; j < count; j += 2) codes[(begin + j) / 2] = uint8_t(word >> 4 * j);
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
