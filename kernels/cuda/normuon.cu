// NorMuon but for its products: momentum of all matrices in one launch, then what stands before and after the
// products of each. Formulas: kernels/normuon.py.
#include "update.cuh"

// Columns of the table, as kernels/normuon.py writes them.
enum { SIZE, FIRST_CHUNK, M, GRAD, TENSOR, COLUMNS };

__device__ __forceinline__ bool usable(const float* norm) { return norm == nullptr || norm[2] != 0.0f; }
__device__ __forceinline__ int count_at(int64_t i, int64_t end) { return end - i < GROUP ? int(end - i) : GROUP; }

// m = beta m + grow g, and each chunk's sum of the squares of what is stored. An unusable gradient counts as zero
// in the sums, so that what is made of them is finite.
template <typename G, typename S>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    normuon_momentum(double* __restrict__ partial,  // (chunks,)
                     const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor,
                     const float* __restrict__ scalars, const float* __restrict__ norm, int chunk, float beta,
                     float grow, bool zero_grad) {
    Chunk work = chunk_of_block(table, chunk_tensor, COLUMNS, chunk);
    S* momentum = reinterpret_cast<S*>(work.row[M]);
    G* grads = reinterpret_cast<G*>(work.row[GRAD]);
    bool aligned = vector_aligned(work.row[M] | work.row[GRAD]), apply = usable(norm);
    Draw draw = draw_of(scalars, uint32_t(work.row[TENSOR]));
    float scale = norm == nullptr ? 1.0f : norm[1], sum = 0.0f;
    for (int64_t i = work.begin + threadIdx.x * GROUP; i < work.end; i += int64_t(blockDim.x) * GROUP) {
        int count = count_at(i, work.end);
        bool whole = aligned && count == GROUP;
        if (apply) {
            float m[GROUP], g[GROUP];
            load_group(m, momentum + i, count, whole);
            load_group(g, grads + i, count, whole);
#pragma unroll
            for (int j = 0; j < GROUP; ++j)
                m[j] = exact_add(exact_mul(beta, m[j]), exact_mul(grow, exact_mul(g[j], scale)));
            auto stored = round_unbiased<S>(m, i, M_ROLE, draw);
            store(momentum + i, stored, count, whole);
#pragma unroll
            for (int j = 0; j < GROUP; ++j) sum += stored.get(j) * stored.get(j);
        }
        if (zero_grad) clear(grads + i, count, whole);
    }
    double total = block_sum_double(double(sum));
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One block a matrix: 1 / (safety |m|), or 0 where |m| is below `least`.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    normuon_inverse(float* __restrict__ inverse,  // (matrices,)
                    const double* __restrict__ partial, const int64_t* __restrict__ table, int chunk, float safety,
                    float least) {
    const int64_t* row = table + int64_t(blockIdx.x) * COLUMNS;
    int64_t chunks = (row[SIZE] + chunk - 1) / chunk;
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) sum += partial[row[FIRST_CHUNK] + i];
    float length = float(sqrt(block_sum_double(sum)));
    if (threadIdx.x == 0) inverse[blockIdx.x] = length >= least ? 1.0f / (safety * length) : 0.0f;
}

// x = m * inverse[matrix].
template <typename S>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    normuon_scale(bf16* __restrict__ x, const S* __restrict__ m, const float* __restrict__ inverse, int matrix,
                  int64_t size, bool aligned) {
    int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * GROUP;
    if (i >= size) return;
    int count = count_at(i, size);
    bool whole = aligned && count == GROUP;
    float value[GROUP];
    load_group(value, m + i, count, whole);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) value[j] *= inverse[matrix];
    store_group(x + i, value, count, whole);
}

// A warp a row: v = beta v + grow mean(o^2); gain = 1 / (sqrt(v) + epsilon); square = the sum of (gain o)^2.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    normuon_rows(float* __restrict__ gain, float* __restrict__ square, float* __restrict__ v,  // (rows,)
                 const bf16* __restrict__ o,                                                   // (rows, columns)
                 const float* __restrict__ norm, int rows, int columns, float beta, float grow, float epsilon,
                 bool aligned) {
    int row = blockIdx.x * (LAUNCH_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    o += int64_t(row) * columns;
    float sum = 0.0f;
    for (int i = lane * GROUP; i < columns; i += 32 * GROUP) {
        float value[GROUP];
        int count = count_at(i, columns);
        load_group(value, o + i, count, aligned && count == GROUP);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) sum += value[j] * value[j];
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    float mean = sum / float(columns), second = v[row];
    if (usable(norm)) v[row] = second = exact_add(exact_mul(beta, second), exact_mul(grow, mean));
    gain[row] = 1.0f / (sqrtf(second) + epsilon);
    square[row] = sum * gain[row] * gain[row];
}

// One block: factor = lr rms sqrt(size) / sqrt(sum of square), or 0 for a matrix of zeros.
__global__ void __launch_bounds__(1024)
    normuon_factor(float* __restrict__ factor, const float* __restrict__ square, const float* __restrict__ scalars,
                   int rows, int64_t size, float rms) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) sum += square[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *factor = sum > 0.0f ? scalars[0] * rms * sqrtf(float(size)) / sqrtf(sum) : 0.0f;
}

// p -= lr weight_decay p, unless cautious and the step disagrees; p -= factor gain[row] o.
template <typename P, bool MASTERED>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    normuon_apply(P* __restrict__ param, float* __restrict__ master, const bf16* __restrict__ o,
                  const float* __restrict__ gain, const float* __restrict__ factor, const float* __restrict__ scalars,
                  const float* __restrict__ norm, int64_t size, int columns, float weight_decay, bool cautious,
                  uint32_t tensor, bool aligned) {
    int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * GROUP;
    if (i >= size || !usable(norm)) return;
    Param<P, MASTERED> params(reinterpret_cast<int64_t>(param), reinterpret_cast<int64_t>(master));
    int count = count_at(i, size);
    bool whole = aligned && count == GROUP;
    float p[GROUP], step[GROUP], decay = exact_mul(scalars[0], weight_decay);
    load_group(p, params.wide + i, count, whole);
    load_group(step, o + i, count, whole);
    int64_t row = i / columns;
    int column = int(i - row * columns);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        step[j] = j < count ? exact_mul(exact_mul(step[j], gain[row]), *factor) : 0.0f;
        if (!cautious || exact_mul(step[j], p[j]) >= 0.0f) p[j] = exact_add(p[j], -exact_mul(decay, p[j]));
        p[j] = exact_add(p[j], -step[j]);
        if (++column == columns) column = 0, ++row;
    }
    params.store_at(i, p, count, whole, i, draw_of(scalars, tensor));
}
