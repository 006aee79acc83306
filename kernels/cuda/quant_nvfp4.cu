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

constexpr int SIDE = 16, TILES = 4;  // of a thread block: one below the other

// A block's scale, what turns weights into units of it, and the sum of the squares of what rounding them changes.
struct Choice {
    uint32_t code;
    float factor, error;
};
template <bool ERRORS>
__device__ __forceinline__ Choice choice(const float (&x)[2][GROUP], float wanted, float decoding) {
    uint32_t code = encode<E4M3>(wanted);
    float scale = decode<E4M3>(code), factor = saturated(__fdiv_rn(1.0f, exact_mul(scale, decoding))), error = 0.0f;
    if (!ERRORS) return {code, factor, error};
#pragma unroll
    for (int j = 0; j < 2 * GROUP; ++j) {
        float a = exact_mul(fabsf(x[j / GROUP][j % GROUP]), factor);
        float change = exact_add(fminf(e2m1_nearest(a), 6.0f), -a);
        error = __fmaf_rn(change, change, error);
    }
    return {code, factor, exact_mul(exact_mul(scale, scale), error)};
}

// A thread takes 16 columns, SIDE neighbours of it those to the right, and the block SIDE rows. SQUARE: the rows of
// a block share their scale. FOUR: the better of the largest value on 6 and on 4, else on 6.
template <typename T, bool WHOLE, bool SQUARE, bool FOUR>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    nvfp4_quantize(uint8_t* __restrict__ codes,         // (rows, columns / 2)
                   uint8_t* __restrict__ scales,        // (rows, columns / 16)
                   float* __restrict__ tensor_scale,    // (1,)
                   const uint32_t* __restrict__ amax,   // (1,), bits of a float
                   const T* __restrict__ weight,        // (rows, columns)
                   int rows, int columns) {
    __shared__ uint32_t of_row[SIDE][SIDE + 1];
    __shared__ float errors[2][SIDE][SIDE + 1];
    int across = threadIdx.x % SIDE, line = threadIdx.x / SIDE, block = blockIdx.y * SIDE + across;
    int blocks = columns / SIDE;
    float size = __uint_as_float(*amax);
    float encoding = size == 0.0f ? 1.0f : saturated(__fdiv_rn(FOUR ? 1536.0f : 2688.0f, size));
    float decoding = __fdiv_rn(1.0f, encoding), per_block = exact_mul(encoding, 1.0f / 6.0f);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *tensor_scale = decoding;
    int begin = blockIdx.x * TILES * SIDE, end = min(begin + TILES * SIDE, rows);
#pragma unroll 1
    for (int first = begin; first < end; first += SIDE) {
        int row = first + line;
        bool inside = row < rows && block < blocks;
        int64_t place = (int64_t(row) * blocks + block) * SIDE;
        float x[2][GROUP] = {};
        if (inside)
            for (int half = 0; half < 2; ++half) load_group(x[half], weight + place + half * GROUP, GROUP, WHOLE);
        uint32_t most = max(largest_magnitude(x[0]), largest_magnitude(x[1]));
        if constexpr (SQUARE) {
            __syncthreads();  // the previous tile's readers are done
            of_row[line][across] = most;
            __syncthreads();
            for (int other = 0; other < SIDE; ++other) most = max(most, of_row[other][across]);
        }
        float wanted = exact_mul(__uint_as_float(most), per_block);
        Choice chosen = choice<FOUR>(x, wanted, decoding);
        if constexpr (FOUR) {
            Choice four = choice<true>(x, exact_mul(wanted, 1.5f), decoding);
            if constexpr (SQUARE) {
                errors[0][line][across] = chosen.error;
                errors[1][line][across] = four.error;
                __syncthreads();
                chosen.error = four.error = 0.0f;
                for (int other = 0; other < SIDE; ++other) {
                    chosen.error = exact_add(chosen.error, errors[0][other][across]);
                    four.error = exact_add(four.error, errors[1][other][across]);
                }
            }
            if (four.error < chosen.error || chosen.code == 0u) chosen = four;
        }
        if (!inside) continue;
        scales[place / SIDE] = uint8_t(chosen.code);
        Vec<uint32_t, 2> out;
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) x[half][j] = exact_mul(x[half][j], chosen.factor);
            out.data[half] = encode_nibbles(x[half]);
        }
        out.store(reinterpret_cast<uint32_t*>(codes + place / 2));
    }
}
