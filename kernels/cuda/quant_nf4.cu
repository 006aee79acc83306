// Weights to NF4, in blocks of the flattened matrix, and the scales of those blocks to 8 bits.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

constexpr int SPAN_THREADS = 512, SPAN = SPAN_THREADS * GROUP;  // elements of a block of threads: a largest block

// Codes of [-1, 1] by table: cell i is what rounds to (i - 16) / 16, and holds at most one middle between values.
// `below` is the code of its lower end, `middle` where the next code begins.
struct Cells {
    float middle[64];
    uint32_t below[64];

    __device__ __forceinline__ void fill() {
        if (threadIdx.x >= 64) return;
        uint32_t code = encode<NF4>((float(threadIdx.x) - 16.5f) / 16.0f);
        below[threadIdx.x] = code;
        middle[threadIdx.x] = code < 15u ? nf4_middle(code) : INFINITY;
    }
    __device__ __forceinline__ uint32_t encode_nf4(float x) const {
        uint32_t cell = __float_as_uint(__fmaf_rn(x, 16.0f, 8388608.0f + 16.0f)) & 63u;
        return x != x ? 7u : below[cell] + (x > middle[cell]);
    }
};

// Eight elements a thread, so that a block of weights is 4 to 512 threads.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(SPAN_THREADS)
    nf4_quantize(uint8_t* __restrict__ codes, float* __restrict__ absmax, const T* __restrict__ weight, int block,
                 int64_t size) {
    __shared__ uint32_t of_warp[SPAN_THREADS / 32];
    __shared__ Cells cells;
    cells.fill();
    int64_t begin = int64_t(blockIdx.x) * SPAN + threadIdx.x * GROUP;
    int count = size - begin < GROUP ? (size > begin ? int(size - begin) : 0) : GROUP;
    float x[GROUP];
    load_group(x, weight + begin, count, WHOLE && count == GROUP);
    int threads = block / GROUP;
    uint32_t amax = largest_magnitude(x);
    for (int mask = min(threads, 32) / 2; mask > 0; mask /= 2) amax = max(amax, warp_shfl_xor(amax, mask));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threads > 32) {
        int first = threadIdx.x / threads * (threads / 32);
        for (int warp = first; warp < first + threads / 32; ++warp) amax = max(amax, of_warp[warp]);
    }
    if (!count) return;
    float scale = __uint_as_float(amax), factor = saturated(__fdiv_rn(1.0f, scale));
    if (threadIdx.x % threads == 0) absmax[int64_t(blockIdx.x) * (SPAN / block) + threadIdx.x / threads] = scale;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) word |= cells.encode_nf4(exact_mul(x[j], factor)) << nibble_shift<NF4>(j);
    if (WHOLE) {
        *reinterpret_cast<uint32_t*>(codes + begin / 2) = word;
    } else {
        for (int j = 0; j < count; j += 2) codes[(begin + j) / 2] = uint8_t(word >> 4 * j);
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
