// Blocks that move between adapters and widened weights.
#include "multi_tensor.cuh"

constexpr int TABLE_COLUMNS = 7;

// Copies matrices into blocks of wider ones, scaled where the table says so. The table holds after size and
// first chunk: source, destination, columns, elements between rows of the destination, whether to scale.
template <typename T>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    copy_blocks(const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor, int chunk,
                float scale) {
    Chunk part = chunk_of_block(table, chunk_tensor, TABLE_COLUMNS, chunk);
    const T* from = reinterpret_cast<const T*>(part.row[2]);
    T* to = reinterpret_cast<T*>(part.row[3]);
    uint32_t columns = uint32_t(part.row[4]);
    int64_t stride = part.row[5];
    float factor = part.row[6] ? scale : 1.0f;
    bool whole = columns % GROUP == 0 && stride % GROUP == 0 && vector_aligned(part.row[2]) &&
                 vector_aligned(part.row[3]);
    for (int64_t i = part.begin + threadIdx.x * GROUP; i < part.end; i += int64_t(blockDim.x) * GROUP) {
        int count = part.end - i < GROUP ? int(part.end - i) : GROUP;
        float x[GROUP];
        load_group(x, from + i, count, whole);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) x[j] *= factor;
        if (whole) {
            uint32_t row = uint32_t(i) / columns;
            store_group(to + row * stride + (uint32_t(i) - row * columns), x, count, true);
        } else {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                uint32_t row = uint32_t(i + j) / columns;
                if (j < count) to[row * stride + (uint32_t(i + j) - row * columns)] = from_float<T>(x[j]);
            }
        }
    }
}

// Row by row of the parts [start, stop) of product's rows, the columns that belong to the part: a thread an
// element. Unused parts are empty.
template <typename S>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    take_diagonal(S* __restrict__ out,                // (rows of all parts, rank)
                  const float* __restrict__ product,  // (outer, columns)
                  int columns, int rows, int rank, bool accumulate,
                  int start0, int stop0, int start1, int stop1, int start2, int stop2,
                  int start3, int stop3, int start4, int stop4, int start5, int stop5,
                  int start6, int stop6, int start7, int stop7) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64_t(rows) * rank) return;
    const int starts[8] = {start0, start1, start2, start3, start4, start5, start6, start7};
    const int stops[8] = {stop0, stop1, stop2, stop3, stop4, stop5, stop6, stop7};
    int row = i / rank, column = i % rank, part = 0;
#pragma unroll
    for (int p = 0; p < 7; ++p)
        if (part == p && row >= stops[p] - starts[p]) {
            row -= stops[p] - starts[p];
            part = p + 1;
        }
    int start = 0;
#pragma unroll
    for (int p = 0; p < 8; ++p)
        if (part == p) start = starts[p];
    float value = product[int64_t(start + row) * columns + part * rank + column];
    out[i] = from_float<S>(accumulate ? to_float(out[i]) + value : value);
}
