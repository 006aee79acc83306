// Weights to E2M1 with a scale in E4M3 for each 16 columns, and one in float for all.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

// Raises *amax, the bits of a float, to those of the largest magnitude.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    raise_amax(uint32_t* __restrict__ amax, const T* __restrict__ x, int64_t size) {
    uint32_t most = 0;
    int64_t step = int64_t(gridDim.x) * blockDim.x * GROUP;
    for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * GROUP; i < size; i += step) {
        float value[GROUP];
        load_group(value, x + i, size - i < GROUP ? int(size - i) : GROUP, WHOLE);
        most = max(most, largest_magnitude(value));
    }
    most = block_amax(most);
    if (threadIdx.x == 0) atomicMax(amax, most);
}

constexpr int SIDE = 16;

// A thread takes 16 columns, SIDE neighbours of it those to the right, and the block SIDE rows. SQUARE: the rows of
// a block share their scale.
template <typename T, bool WHOLE, bool SQUARE>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    nvfp4_quantize(uint8_t* __restrict__ codes,         // (rows, columns / 2)
                   uint8_t* __restrict__ scales,        // (rows, columns / 16)
                   float* __restrict__ tensor_scale,    // (1,)
                   const uint32_t* __restrict__ amax,   // (1,), bits of a float
                   const T* __restrict__ weight,        // (rows, columns)
                   int rows, int columns) {
    __shared__ uint32_t of_row[SIDE][SIDE + 1];
    int block = blockIdx.y * SIDE + threadIdx.x % SIDE, line = threadIdx.x / SIDE, blocks = columns / SIDE;
    int64_t row = int64_t(blockIdx.x) * SIDE + line;
    bool inside = row < rows && block < blocks;
    float x[2][GROUP] = {};
    if (inside)
        for (int half = 0; half < 2; ++half)
            load_group(x[half], weight + row * columns + block * SIDE + half * GROUP, GROUP, WHOLE);
    uint32_t most = max(largest_magnitude(x[0]), largest_magnitude(x[1]));
    if constexpr (SQUARE) {
        of_row[line][threadIdx.x % SIDE] = most;
        __syncthreads();
        for (int other = 0; other < SIDE; ++other) most = max(most, of_row[other][threadIdx.x % SIDE]);
    }
    float size = __uint_as_float(*amax);
    float encoding = size == 0.0f ? 1.0f : saturated(__fdiv_rn(2688.0f, size));
    float decoding = __fdiv_rn(1.0f, encoding);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *tensor_scale = decoding;
    if (!inside) return;
    float wanted = exact_mul(__uint_as_float(most), exact_mul(encoding, 1.0f / 6.0f));
    uint32_t scale = encode<E4M3>(wanted);
    float factor = saturated(__fdiv_rn(1.0f, exact_mul(decode<E4M3>(scale), decoding)));
    scales[row * blocks + block] = uint8_t(scale);
    Vec<uint32_t, 2> out;
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) x[half][j] = exact_mul(x[half][j], factor);
        out.data[half] = encode_nibbles(x[half]);
    }
    out.store(reinterpret_cast<uint32_t*>(codes + (row * blocks + block) * (SIDE / 2)));
}
