// Casts to 8-bit floats, and the scales that they use. kernels/fp8.py states the scheme.
#include "fp8.cuh"

// What |x| <= size is multiplied by to reach at most `limit`; 1 where nothing, or nothing finite, was seen.
__device__ __forceinline__ float scale_of(float size, float limit) {
    if (!(size > 0.0f && size < INFINITY)) return 1.0f;
    return fminf(limit / size, 3.40282347e38f);
}

constexpr int CAST_PACKS = 2;  // of 16 values, that a thread has in flight

// Rows alone: a thread takes 16 neighbours at a time, whose codes are one 16-byte store.
template <typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_cast(uint8_t* __restrict__ code,  // (rows, columns), code_stride apart
             float* amax,                 // raised to max |x|, or null
             const bf16* __restrict__ x,  // (rows, columns), stride apart; columns a multiple of 16
             const float* __restrict__ scale, int code_stride, int stride, int rows, int columns) {
    uint32_t packs = columns / 16, total = rows * packs, most = 0;
    uint32_t first = blockIdx.x * (LAUNCH_THREADS * CAST_PACKS) + threadIdx.x;
    Pack<bf16, 16> value[CAST_PACKS];
#pragma unroll
    for (int i = 0; i < CAST_PACKS; ++i) {
        uint32_t index = first + i * LAUNCH_THREADS;
        if (index < total) value[i].load(x + int64_t(index / packs) * stride + index % packs * 16);
        else value[i].clear();
        most = largest(value[i], most);
    }
    float s = *scale;
#pragma unroll
    for (int i = 0; i < CAST_PACKS; ++i) {
        uint32_t index = first + i * LAUNCH_THREADS;
        if (index >= total) break;
        Vec<uint32_t, 4> out;
        encode_all<F, 16>(out.data, value[i], s, most);
        out.store(reinterpret_cast<uint32_t*>(code + int64_t(index / packs) * code_stride + index % packs * 16));
    }
    if (amax) raise(amax, most);
}

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64;

// The transposed codes, and those of the rows unless `code` is null. A thread takes eight columns of four rows; the
// tile turns in shared memory as words of four rows. Its pitch of 33 words keeps the banks of a warp apart.
template <typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_cast_transposed(uint8_t* __restrict__ turned,  // (columns, rows)
                        uint8_t* __restrict__ code,    // (rows, columns), or null
                        float* amax,                // raised to max |x|, or null
                        const bf16* __restrict__ x,    // (rows, columns), stride apart; both multiples of 16
                        const float* __restrict__ scale, int stride, int rows, int columns) {
    constexpr int PITCH = TILE_ROWS / 4 + 1;
    __shared__ uint32_t tile[TILE_COLUMNS * PITCH];
    int group = threadIdx.x / 8, part = threadIdx.x % 8;
    int64_t row = int64_t(blockIdx.x) * TILE_ROWS + group * 4;
    int column = blockIdx.y * TILE_COLUMNS + part * 8;
    uint32_t most = 0, codes[4][2] = {};
    if (row < rows && column < columns) {
        Pack<bf16, 8> value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i].load(x + (row + i) * stride + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) most = largest(value[i], most);
        float s = *scale;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            encode_all<F, 8>(codes[i], value[i], s, most);
            if (code) {
                Vec<uint32_t, 2> out = {{codes[i][0], codes[i][1]}};
                out.store(reinterpret_cast<uint32_t*>(code + (row + i) * columns + column));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        int shift = j % 4 * 8;
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= (codes[i][j / 4] >> shift & 0xffu) << i * 8;
        tile[(part * 8 + j) * PITCH + group] = word;
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
        int local = threadIdx.x / 8 + turn * 32, word = threadIdx.x % 8 * 4;
        int64_t to = int64_t(blockIdx.y) * TILE_COLUMNS + local, from = int64_t(blockIdx.x) * TILE_ROWS + word * 4;
        if (to < columns && from < rows) {
            Vec<uint32_t, 4> out;
            for (int k = 0; k < 4; ++k) out.data[k] = tile[local * PITCH + word + k];
            out.store(reinterpret_cast<uint32_t*>(turned + to * rows + from));
        }
    }
    if (amax) raise(amax, most);
}

// A scale of its own for each row: one block a row, which it reads a second time from the cache.
template <typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_cast_rows(uint8_t* __restrict__ code,     // (rows, columns)
                  float* __restrict__ inverse,    // (rows,)
                  const bf16* __restrict__ x,     // (rows, columns), stride apart; columns a multiple of 16
                  float limit, int stride, int columns) {
    const bf16* row = x + int64_t(blockIdx.x) * stride;
    uint8_t* out = code + int64_t(blockIdx.x) * columns;
    uint32_t most = 0;
    for (int column = threadIdx.x * 16; column < columns; column += blockDim.x * 16) {
        Pack<bf16, 16> value;
        value.load(row + column);
        most = largest(value, most);
    }
    most = uint32_t(block_max(float(most)));  // integers below 2^15 are exact
    float size = __uint_as_float(most << 16), scale = scale_of(size, limit);
    if (threadIdx.x == 0) inverse[blockIdx.x] = 1.0f / scale;
    for (int column = threadIdx.x * 16; column < columns; column += blockDim.x * 16) {
        Pack<bf16, 16> value;
        value.load(row + column);
        Vec<uint32_t, 4> codes;
        encode_all<F, 16>(codes.data, value, scale, most);
        codes.store(reinterpret_cast<uint32_t*>(out + column));
    }
}

__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_amax(float* amax,              // raised to max |x|
             const bf16* __restrict__ x,  // (rows, columns), stride apart; columns a multiple of 16
             int stride, int rows, int columns) {
    int packs = columns / 16;
    int64_t total = int64_t(rows) * packs;
    uint32_t most = 0;
    for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < total;
         index += int64_t(gridDim.x) * blockDim.x) {
        Pack<bf16, 16> value;
        value.load(x + index / packs * stride + index % packs * 16);
        most = largest(value, most);
    }
    raise(amax, most);
}

// The scale of one tensor from its own maximum.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_scale(float* scale, float* inverse, float* amax, float limit, bool keep) {
    *scale = scale_of(*amax, limit);
    *inverse = 1.0f / *scale;
    if (!keep) *amax = 0.0f;
}

// Each tensor's scale for the next step, from the maxima of the last ones. A warp a tensor.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_update(float* scale, float* inverse,  // (tensors, 4), of which the first counts: addresses of 16 bytes
               float* amax,                // (tensors,), cleared
               float* history,                // (length, tensors)
               int* position,                 // (tensors,), of the oldest
               const float* limit,            // (tensors,)
               int tensors, int length, bool recent) {
    int tensor = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (tensor >= tensors) return;
    float last = amax[tensor];
    bool seen = last > 0.0f && last < INFINITY;
    int at = position[tensor];
    float most = 0.0f;
    for (int i = lane; i < length; i += 32)
        most = fmaxf(most, seen && i == at ? last : history[int64_t(i) * tensors + tensor]);
    most = warp_max(most);
    if (recent) most = seen ? last : 0.0f;
    warp_sync();
    if (lane) return;
    if (seen) {
        history[int64_t(at) * tensors + tensor] = last;
        position[tensor] = (at + 1) % length;
    }
    amax[tensor] = 0.0f;
    if (most > 0.0f) {
        scale[4 * tensor] = scale_of(most, limit[tensor]);
        inverse[4 * tensor] = 1.0f / scale[4 * tensor];
    }
}

// Codes as bf16, which holds each exactly.
template <typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_decode(bf16* __restrict__ out, const uint8_t* __restrict__ code, int64_t packs) {
    int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= packs) return;
    auto codes = Vec<uint8_t, 16>::load(code + index * 16);
    float value[16];
    for (int j = 0; j < 16; ++j) value[j] = (codes.data[j] & NAN_CODE) == NAN_CODE ? __uint_as_float(0x7fc00000u) : decode_finite<F>(codes.data[j]);
    Pack<bf16, 16> values;
    values.set(value);
    values.store(out + index * 16);
}
