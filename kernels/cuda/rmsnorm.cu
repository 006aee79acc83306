// RMSNorm of rows, with an addition before it (forward) or after it (backward) in the same pass.
//
// A row belongs to `threads` threads (whole warps; the host picks them so that PACKS packs of 16 bytes of T
// a thread cover it) and stays in their registers, at most REGISTERS of a thread, between its one read and its
// one write. A block holds blockDim.x / threads rows. Rows of the arrays that have a `_stride` lie that many
// elements apart, others end to end.
#include "fp8.cuh"

// Threads of a block at most (those of the longest row, 16384 columns, where a thread has four packs), and how
// many such blocks the 65536 registers of a multiprocessor are for.
template <typename T, int PACKS> constexpr int MOST = PACKS == 4 ? 16384 / (PACKS * WIDTH<T>) : 512;
template <int MOST, int REGISTERS> constexpr int RESIDENT = MOST * REGISTERS > 65536 ? 1 : 65536 / (MOST * REGISTERS);

// Sum over the `warps` warps of a row. All threads of the block call it together; a scratch may be used
// again after one call with another.
__device__ __forceinline__ float row_sum(float value, float* scratch, int warps) {
    value = warp_sum(value);
    if (warps == 1) return value;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[warp / warps * warps + lane] : 0.0f);
}

// y and, unless F is void, its codes, which take T to be bf16 and ALIGNED.
template <typename T, typename W, bool ALIGNED, int PACKS, int REGISTERS, typename F>
__global__ void __launch_bounds__(MOST<T, PACKS>, RESIDENT<MOST<T, PACKS>, REGISTERS>)
    rmsnorm_fwd(T* __restrict__ y,                     // (tokens, hidden), y_stride apart
                T* __restrict__ h,                     // (tokens, hidden): x + residual
                float* __restrict__ rstd,              // (tokens,)
                uint8_t* __restrict__ code,            // (tokens, hidden), or null
                float* amax,                           // raised to max |y|, or null
                const T* __restrict__ x,               // (tokens, hidden)
                const T* __restrict__ residual,        // (tokens, hidden), or null: h is x
                const W* __restrict__ weight,          // (hidden,)
                const float* __restrict__ code_scale,  // of the codes, or null
                int y_stride, int tokens, int hidden, int threads, float eps, float offset, bool round_first) {
    constexpr int N = WIDTH<T>;
    __shared__ float scratch[32];
    int lane = threadIdx.x % threads;
    int64_t row = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    int columns = row < tokens ? hidden : 0;
    int64_t begin = row * hidden;

    Pack<T, N> value[PACKS], addend[PACKS];
    Pack<W, N> scale[PACKS];
    for (int i = 0; i < PACKS; ++i)
        value[i].template load_columns<ALIGNED>(x + begin, (i * threads + lane) * N, columns);
    if (residual)
        for (int i = 0; i < PACKS; ++i)
            addend[i].template load_columns<ALIGNED>(residual + begin, (i * threads + lane) * N, columns);
    if (residual)
        for (int i = 0; i < PACKS; ++i) {
            float sum[N];
            for (int j = 0; j < N; ++j) sum[j] = value[i].get(j) + addend[i].get(j);
            value[i].set(sum);
            value[i].template store_columns<ALIGNED>(h + begin, (i * threads + lane) * N, columns);
        }

    float sum = 0.0f;
    for (int i = 0; i < PACKS; ++i)
        for (int j = 0; j < N; ++j) sum += value[i].get(j) * value[i].get(j);
    float total = row_sum(sum, scratch, threads / 32);
    for (int i = 0; i < PACKS; ++i) scale[i].template load_columns<ALIGNED>(weight, (i * threads + lane) * N, hidden);
    float r = 1.0f / sqrtf(total / hidden + eps);
    if (lane == 0 && columns) rstd[row] = r;
    Cast<F> cast(code_scale);
    for (int i = 0; i < PACKS; ++i) {
        float out[N];
        for (int j = 0; j < N; ++j) out[j] = value[i].get(j) * r;
        if (round_first) {
            value[i].set(out);
            for (int j = 0; j < N; ++j) out[j] = value[i].get(j);
        }
        for (int j = 0; j < N; ++j) out[j] *= scale[i].get(j) + offset;
        value[i].set(out);
        int column = (i * threads + lane) * N;
        value[i].template store_columns<ALIGNED>(y + row * y_stride, column, columns);
        if (column < columns) cast.store(code + begin + column, value[i]);
    }
    cast.finish(amax);
}

// dx of a pack of values: the norm's part of it and `addend`.
template <typename T, typename W, int N>
__device__ __forceinline__ void norm_gradient(float (&out)[N], const Pack<T, N>& value, const Pack<T, N>& grad,
                                              const Pack<T, N>& addend, const Pack<W, N>& scale, float offset, float r,
                                              float mean) {
    for (int j = 0; j < N; ++j) {
        float g = grad.get(j) * (scale.get(j) + offset);
        out[j] = addend.get(j) + r * (g - value.get(j) * r * mean);
    }
}

// The backward of a norm whose weight is frozen.
template <typename T, typename W, bool ALIGNED, int PACKS, int REGISTERS>
__global__ void __launch_bounds__(MOST<T, PACKS>, RESIDENT<MOST<T, PACKS>, REGISTERS>)
    rmsnorm_dx(T* __restrict__ dx,               // (tokens, hidden), dx_stride apart
               const T* __restrict__ dy,         // (tokens, hidden), dy_stride apart
               const T* __restrict__ dresidual,  // (tokens, hidden), dresidual_stride apart, or null; added to dx
               const T* __restrict__ x,          // (tokens, hidden)
               const W* __restrict__ weight,     // (hidden,)
               const float* __restrict__ rstd,   // (tokens,)
               int dx_stride, int dy_stride, int dresidual_stride, int tokens, int hidden, int threads, float offset) {
    constexpr int N = WIDTH<T>;
    __shared__ float scratch[32];
    int lane = threadIdx.x % threads;
    int64_t row = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
    int columns = row < tokens ? hidden : 0;
    auto column_of = [&](int i) { return (i * threads + lane) * N; };

    Pack<T, N> value[PACKS], grad[PACKS], addend[PACKS];
    Pack<W, N> scale[PACKS];
    for (int i = 0; i < PACKS; ++i) {
        value[i].template load_columns<ALIGNED>(x + row * hidden, column_of(i), columns);
        grad[i].template load_columns<ALIGNED>(dy + row * dy_stride, column_of(i), columns);
    }
    for (int i = 0; i < PACKS; ++i) {
        addend[i].clear();
        if (dresidual)
            addend[i].template load_columns<ALIGNED>(dresidual + row * dresidual_stride, column_of(i), columns);
    }
    float r = row < tokens ? rstd[row] : 0.0f, dot = 0.0f;
    for (int i = 0; i < PACKS; ++i) scale[i].template load_columns<ALIGNED>(weight, column_of(i), hidden);
    for (int i = 0; i < PACKS; ++i)
        for (int j = 0; j < N; ++j) dot += grad[i].get(j) * ((scale[i].get(j) + offset) * value[i].get(j));
    float mean = r * row_sum(dot, scratch, threads / 32) / hidden;
    for (int i = 0; i < PACKS; ++i) {
        float out[N];
        norm_gradient(out, value[i], grad[i], addend[i], scale[i], offset, r, mean);
        value[i].set(out);
        value[i].template store_columns<ALIGNED>(dx + row * dx_stride, column_of(i), columns);
    }
}

// A block walks over rows and keeps its share of dweight in registers; the blocks' shares are added by
// sum_partials. Blocks wait for memory at different times: what one has on its way fills the wait of another. A row's
// rstd is read a row ahead, for it would be the last to come.
template <typename T, typename W, bool ALIGNED, int PACKS, int REGISTERS>
__global__ void __launch_bounds__(MOST<T, PACKS>, RESIDENT<MOST<T, PACKS>, REGISTERS>)
    rmsnorm_bwd(T* __restrict__ dx,               // (tokens, hidden), dx_stride apart
                float* __restrict__ partial,      // (blocks, hidden)
                const T* __restrict__ dy,         // (tokens, hidden), dy_stride apart
                const T* __restrict__ dresidual,  // (tokens, hidden), dresidual_stride apart, or null; added to dx
                const T* __restrict__ x,          // (tokens, hidden)
                const W* __restrict__ weight,     // (hidden,)
                const float* __restrict__ rstd,   // (tokens,)
                int dx_stride, int dy_stride, int dresidual_stride, int tokens, int hidden, int threads, float offset) {
    constexpr int N = WIDTH<T>;
    __shared__ float scratch[2][32];
    DYNAMIC_SHARED(float, shares);  // (rows of the block, slots of a row, 4), when the block holds several rows
    int lane = threadIdx.x % threads, group = threadIdx.x / threads, groups = blockDim.x / threads;
    auto column_of = [&](int i) { return (i * threads + lane) * N; };
    auto rstd_of = [&](int64_t row) { return row < tokens ? rstd[row] : 0.0f; };
    float share[PACKS][N] = {};
    int64_t row = int64_t(blockIdx.x) * groups + group, stride = int64_t(gridDim.x) * groups;
    float next_r = rstd_of(row);
    int turn = 0;
    for (int64_t first = row - group; first < tokens; first += stride, row += stride) {
        int columns = row < tokens ? hidden : 0;
        float r = next_r, dot = 0.0f;
        next_r = rstd_of(row + stride);
        Pack<T, N> value[PACKS], grad[PACKS];
        Pack<W, N> scale[PACKS];
        for (int i = 0; i < PACKS; ++i) {
            value[i].template load_columns<ALIGNED>(x + row * hidden, column_of(i), columns);
            grad[i].template load_columns<ALIGNED>(dy + row * dy_stride, column_of(i), columns);
        }
        for (int i = 0; i < PACKS; ++i) {
            scale[i].template load_columns<ALIGNED>(weight, column_of(i), hidden);
            for (int j = 0; j < N; ++j) dot += grad[i].get(j) * ((scale[i].get(j) + offset) * value[i].get(j));
        }
        float mean = r * row_sum(dot, scratch[turn], threads / 32) / hidden;
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            Pack<T, N> addend = {};
            if (dresidual)
                addend.template load_columns<ALIGNED>(dresidual + row * dresidual_stride, column_of(i), columns);
            float out[N];
            norm_gradient(out, value[i], grad[i], addend, scale[i], offset, r, mean);
            for (int j = 0; j < N; ++j) share[i][j] += grad[i].get(j) * (value[i].get(j) * r);
            value[i].set(out);
            value[i].template store_columns<ALIGNED>(dx + row * dx_stride, column_of(i), columns);
        }
    }

    // Slot (i * QUARTERS + q) * threads + lane has four columns of the lane's pack i: neighbouring lanes have
    // neighbouring slots, and so no bank conflicts.
    constexpr int QUARTERS = N / 4;
    int slots = PACKS * QUARTERS * threads;
    partial += int64_t(blockIdx.x) * hidden;
    auto finish = [&](const Vec<float, 4>& sum, int column) {
        if (ALIGNED && column < hidden) sum.store(partial + column);
        for (int k = 0; k < 4; ++k)
            if (!ALIGNED && column + k < hidden) partial[column + k] = sum.data[k];
    };
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            Vec<float, 4> part;
            for (int k = 0; k < 4; ++k) part.data[k] = share[i][4 * q + k];
            if (groups == 1) finish(part, (i * threads + lane) * N + 4 * q);
            else part.store(shares + (group * slots + (i * QUARTERS + q) * threads + lane) * 4);
        }
    if (groups == 1) return;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        auto sum = Vec<float, 4>::load(shares + slot * 4);
        for (int i = 1; i < groups; ++i) {
            auto part = Vec<float, 4>::load(shares + (i * slots + slot) * 4);
            for (int k = 0; k < 4; ++k) sum.data[k] += part.data[k];
        }
        int quarter = slot / threads, own = slot - quarter * threads;
        finish(sum, (quarter / QUARTERS * threads + own) * N + quarter % QUARTERS * 4);
    }
}

// Column sums of the blocks' shares, COLUMNS (8, 16 or 32) columns a block of 1024 threads, always in the same
// order: fewer columns leave fewer rows to a thread, which are read at once. The rows of a second sum, where
// there is one (gridDim.y is 2), follow those of the first.
template <typename S, int COLUMNS>
__global__ void __launch_bounds__(1024)
    sum_partials(S* __restrict__ out,                // (columns,)
                 S* __restrict__ second,             // (columns,), or null
                 const float* __restrict__ partial,  // (rows + second_rows, columns)
                 int rows, int second_rows, int columns, bool accumulate, bool accumulate_second) {
    __shared__ float tile[32][COLUMNS + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = threadIdx.x % COLUMNS;
    if (blockIdx.y) {
        partial += int64_t(rows) * columns;
        out = second, rows = second_rows, accumulate = accumulate_second;
    }
    int column = blockIdx.x * COLUMNS + own;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = threadIdx.x / COLUMNS; row < rows; row += 1024 / COLUMNS)
            sum += partial[int64_t(row) * columns + column];
    }
#pragma unroll
    for (int mask = COLUMNS; mask < 32; mask *= 2) sum += warp_shfl_xor(sum, mask);
    if (lane < COLUMNS) tile[warp][own] = sum;
    __syncthreads();
    if (warp >= COLUMNS) return;
    sum = warp_sum(tile[lane][warp]);
    column = blockIdx.x * COLUMNS + warp;
    if (lane == 0 && column < columns) out[column] = from_float<S>(accumulate ? to_float(out[column]) + sum : sum);
}
