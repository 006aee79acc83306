// Around the products of linear: the column sum of a matrix (a bias' gradient), and the spread of a
// LoRA factor over the rows that it adapts.
#include "common.cuh"

// Sums of columns over one slice of rows a block row: lanes take N neighbouring columns each, and the
// eight warps every eighth row. The order of each sum depends on the shape alone.
template <typename T, int N>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    column_sum_partial(float* __restrict__ partial,  // (slices, columns)
                       const T* __restrict__ x,      // (rows, columns), leading apart
                       int64_t leading, int rows, int columns, int rows_per_slice) {
    __shared__ float sums[8][32 * N];
    int lane = threadIdx.x, warp = threadIdx.y;
    int column = (blockIdx.x * 32 + lane) * N;
    int begin = blockIdx.y * rows_per_slice, end = min(rows, begin + rows_per_slice);
    float sum[N] = {};
    if (column < columns)
        for (int row = begin + warp; row < end; row += 8) {
            auto values = Vec<T, N>::load(x + row * leading + column);
            for (int i = 0; i < N; ++i) sum[i] += to_float(values.data[i]);
        }
    for (int i = 0; i < N; ++i) sums[warp][lane * N + i] = sum[i];
    __syncthreads();
    for (int i = warp * 32 + lane; i < 32 * N; i += 256) {
        int to = blockIdx.x * 32 * N + i;
        float total = 0.0f;
        for (int w = 0; w < 8; ++w) total += sums[w][i];
        if (to < columns) partial[int64_t(blockIdx.y) * columns + to] = total;
    }
}

// A thread a column.
template <typename S>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    column_sum(S* __restrict__ out,                // (columns,)
               const float* __restrict__ partial,  // (slices, columns)
               int slices, int columns, bool accumulate) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float total = 0.0f;
    for (int slice = 0; slice < slices; ++slice) total += partial[int64_t(slice) * columns + column];
    out[column] = from_float<S>(accumulate ? to_float(out[column]) + total : total);
}

// Row r of out holds, in the columns of the part that r lies in, that part's row of b; zeros elsewhere.
// Parts are [start, stop) of out's rows; unused ones are empty.
template <typename T>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    block_diagonal(T* __restrict__ out,      // (outer, parts * rank)
                   const T* __restrict__ b,  // (sum of the parts' sizes, rank)
                   int outer, int rank, int parts,
                   int start0, int stop0, int start1, int stop1, int start2, int stop2,
                   int start3, int stop3, int start4, int stop4, int start5, int stop5,
                   int start6, int stop6, int start7, int stop7) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    int columns = parts * rank;
    if (i >= int64_t(outer) * columns) return;
    int row = i / columns, column = i % columns, part = column / rank;
    const int starts[8] = {start0, start1, start2, start3, start4, start5, start6, start7};
    const int stops[8] = {stop0, stop1, stop2, stop3, stop4, stop5, stop6, stop7};
    int64_t from = row - starts[part];
    for (int p = 0; p < part; ++p) from += stops[p] - starts[p];
    bool inside = row >= starts[part] && row < stops[part];
    out[i] = inside ? b[from * rank + column % rank] : from_float<T>(0.0f);
}
