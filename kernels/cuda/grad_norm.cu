// Sum of squares of many tensors, and from it the scale that clips their mean: a partial sum a chunk,
// then one block over the partial sums. Both are fixed trees, so the same tensors give the same bits on
// any card.
#include "multi_tensor.cuh"

// Columns of the table, as kernels/grad_norm.py writes them.
enum { SIZE, FIRST_CHUNK, GRAD, COLUMNS };

// Eight running sums a thread in float32, over at most chunk / blockDim.x elements.
template <typename G>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    grad_norm_partial(double* __restrict__ partial,  // (chunks,)
                      const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor,
                      int chunk) {
    Chunk work = chunk_of_block(table, chunk_tensor, COLUMNS, chunk);
    const G* grad = reinterpret_cast<const G*>(work.row[GRAD]);
    bool aligned = vector_aligned(work.row[GRAD]);
    float sum[GROUP] = {};
    for (int64_t i = work.begin + threadIdx.x * GROUP; i < work.end; i += int64_t(blockDim.x) * GROUP) {
        int count = work.end - i < GROUP ? int(work.end - i) : GROUP;
        float g[GROUP];
        load_group(g, grad + i, count, aligned && count == GROUP);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) sum[j] += g[j] * g[j];
    }
    double total = block_sum_double(double((sum[0] + sum[1]) + (sum[2] + sum[3])) +
                                    double((sum[4] + sum[5]) + (sum[6] + sum[7])));
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One block. Either output may be null, and so may loss: it must be finite for the gradient to be usable.
template <typename C>
__global__ void __launch_bounds__(1024)
    grad_norm_finish(float* __restrict__ out,     // (3,) norm of the mean, scale, usable
                     double* __restrict__ total,  // (1,) sum of squares
                     const double* __restrict__ partial, const C* __restrict__ count,
                     const float* __restrict__ loss, int size, float max_norm) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < size; i += blockDim.x) sum += partial[i];
    sum = block_sum_double(sum);
    if (threadIdx.x != 0) return;
    if (total != nullptr) *total = sum;
    if (out == nullptr) return;
    double tokens = double(*count);
    bool usable = sum < INFINITY && tokens > 0.0;  // false for NaN
    if (loss != nullptr) usable = usable && fabsf(*loss) < INFINITY;
    double norm = sqrt(sum) / (tokens > 0.0 ? tokens : 1.0);
    double clip = double(max_norm) / (norm + 1e-6);
    out[0] = float(norm);
    out[1] = usable ? float((clip < 1.0 ? clip : 1.0) / tokens) : 0.0f;
    out[2] = usable ? 1.0f : 0.0f;
}
