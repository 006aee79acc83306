// Weights to E4M3 with a scale for each block of rows and columns: a block of threads for one of them.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

// block_columns is a power of two, 8 to 2048. WHOLE: columns are a multiple of eight. HELD: groups that a thread has of
// a block at most, which it keeps; with 0 the block is read twice, for its largest magnitude and for its codes, the
// second time from the cache.
template <typename T, bool WHOLE, int HELD>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    fp8_quantize(uint8_t* __restrict__ codes,   // (rows, columns)
                 float* __restrict__ scales,    // (blocks down, blocks across)
                 const T* __restrict__ weight,  // (rows, columns)
                 int block_rows, int block_columns, int rows, int columns) {
    int across = (columns - 1) / block_columns + 1, packs = block_columns / GROUP;
    int down = blockIdx.x / across, begin = down * block_rows, end = min(begin + block_rows, rows);
    int column = (blockIdx.x - down * across) * block_columns + threadIdx.x % packs * GROUP;
    int first = begin + threadIdx.x / packs, step = LAUNCH_THREADS / packs;
    auto write = [&](int row, float (&x)[GROUP], float factor) {
        int64_t place = int64_t(row) * columns + column;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) x[j] = exact_mul(x[j], factor);
        if constexpr (WHOLE) {
            Vec<uint32_t, 2> out;
            out.data[0] = encode_bytes<E4M3>({x[0], x[1], x[2], x[3]});
            out.data[1] = encode_bytes<E4M3>({x[4], x[5], x[6], x[7]});
            out.store(reinterpret_cast<uint32_t*>(codes + place));
        } else {
            for (int j = 0; j < GROUP && column + j < columns; ++j) codes[place + j] = uint8_t(encode<E4M3>(x[j]));
        }
    };
    auto factor_of = [&](uint32_t most) {
        float amax = __uint_as_float(block_amax(most));
        if (threadIdx.x == 0) scales[blockIdx.x] = amax == 0.0f ? 1.0f : __fdiv_rn(amax, 448.0f);
        return amax == 0.0f ? 1.0f : saturated(__fdiv_rn(448.0f, amax));
    };
    uint32_t most = 0;
    if constexpr (HELD > 0) {
        Pack<T, GROUP> held[HELD];
        float x[GROUP];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            int row = first + i * step;
            held[i].template load_columns<WHOLE>(weight + int64_t(row) * columns, column, row < end ? columns : 0);
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) x[j] = held[i].get(j);
            most = max(most, largest_magnitude(x));
        }
        float factor = factor_of(most);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            int row = first + i * step;
#pragma unroll
            for (int j = 0; j < GROUP; ++j) x[j] = held[i].get(j);
            if (row < end && column < columns) write(row, x, factor);
        }
    } else {
        auto each_group = [&](auto use) {
            if (column >= columns) return;
#pragma unroll 4
            for (int row = first; row < end; row += step) {
                float x[GROUP];
                load_group(x, weight + int64_t(row) * columns + column, columns - column, WHOLE);
                use(row, x);
            }
        };
        each_group([&](int, float (&x)[GROUP]) { most = max(most, largest_magnitude(x)); });
        float factor = factor_of(most);
        each_group([&](int row, float (&x)[GROUP]) { write(row, x, factor); });
    }
}
