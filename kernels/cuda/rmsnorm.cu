// RMSNorm of rows, with an addition before it (forward) or after it (backward) in the same pass.
//
// A row belongs to `threads` threads (whole warps; the host picks them so that PACKS packs of 16 bytes of T
// a thread cover it) and stays in their registers, at most REGISTERS of a thread, between its one read and its
// one write. A block holds blockDim.x / threads rows. Rows of the arrays that have a `_stride` lie that many
// elements apart, others end to end.
#include "pack.cuh"

// Threads of a block at most (those of the longest row, 16384 columns, where a thread has four packs), and how
// many such blocks the 65536 registers of a multiprocessor are for.
template <typename T, int PACKS> constexpr int MOST = PACKS == 4 ? 16384 / (PACKS * WIDTH<T>) : 256;
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

template <typename T, typename W, bool ALIGNED, int PACKS, int REGISTERS>
__global__ void __launch_bounds__(MOST<T, PACKS>, RESIDENT<MOST<T, PACKS>, REGISTERS>)
    rmsnorm_fwd(T* __restrict__ y,               // (tokens, hidden), y_stride apart
                            T* __restrict__ h,               // (tokens, hidden): x + residual
                            float* __restrict__ rstd,        // (tokens,)
                            const T* __restrict__ x,         // (tokens, hidden)
                            const T* __restrict__ residual,  // (tokens, hidden), or null: h is x
                            const W* __restrict__ weight,    // (hidden,)
                            int y_stride, int tokens, int hidden, int threads, float eps, float offset,
                            bool round_first) {
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
    for (int i = 0; i < PACKS; ++i) {
        float out[N];
        for (int j = 0; j < N; ++j) out[j] = value[i].get(j) * r;
        if (round_first) {
            value[i].set(out);
            for (int j = 0; j < N; ++j) out[j] = value[i].get(j);
        }
        for (int j = 0; j < N; ++j) out[j] *= scale[i].get(j) + offset;
        value[i].set(out);
        value[i].template store_columns<ALIGNED>(y + row * y_stride, (i * threads + lane) * N, columns);
    }
}

// A block walks over rows and keeps its share of dweight in registers; the blocks' shares are added by
// sum_partials. With four packs, 128 registers hold three rows in flight and the share. AHEAD: the next row's packs
// are loaded as soon as a pack of dx is out. Its rstd is, too, where a register is free for it: where none is, the
// compiler puts the value into local memory, so that every row waits for a read of DRAM.
template <typename T, typename W, bool ALIGNED, int PACKS, int REGISTERS>
__global__ void __launch_bounds__(MOST<T, PACKS>, RESIDENT<MOST<T, PACKS>, REGISTERS>)
    rmsnorm_bwd(T* __restrict__ dx,               // (tokens, hidden), dx_stride apart
                float* __restrict__ partial,      // (blocks, hidden), or null: dweight is not wanted
                const T* __restrict__ dy,         // (tokens, hidden), dy_stride apart
                const T* __restrict__ dresidual,  // (tokens, hidden), dresidual_stride apart, or null; added to dx
                const T* __restrict__ x,          // (tokens, hidden)
                const W* __restrict__ weight,     // (hidden,)
                const float* __restrict__ rstd,   // (tokens,)
                int dx_stride, int dy_stride, int dresidual_stride, int tokens, int hidden, int threads, float offset) {
    constexpr int N = WIDTH<T>;
    constexpr bool AHEAD = sizeof(T) == 2 && sizeof(W) == 2 && ALIGNED;  // or registers are too few
    constexpr bool RSTD_AHEAD = PACKS == 1;
    __shared__ float scratch[2][32];
    DYNAMIC_SHARED(float, shares);  // (rows of the block, slots of a row, 4), when the block holds several rows
    int lane = threadIdx.x % threads, group = threadIdx.x / threads, groups = blockDim.x / threads;
    float share[PACKS][N] = {};

    Pack<T, N> value[PACKS], grad[PACKS], addend[PACKS] = {};
    auto rstd_of = [&](int64_t row) { return row < tokens ? rstd[row] : 0.0f; };
    auto load = [&](int i, int64_t row) {
        int column = (i * threads + lane) * N, columns = row < tokens ? hidden : 0;
        value[i].template load_columns<ALIGNED>(x + row * hidden, column, columns);
        grad[i].template load_columns<ALIGNED>(dy + row * dy_stride, column, columns);
        if (dresidual) addend[i].template load_columns<ALIGNED>(dresidual + row * dresidual_stride, column, columns);
    };
    int64_t row = int64_t(blockIdx.x) * groups + group, stride = int64_t(gridDim.x) * groups;
    float next_r = RSTD_AHEAD ? rstd_of(row) : 0.0f;
    if (AHEAD)
        for (int i = 0; i < PACKS; ++i) load(i, row);
    int turn = 0;
    for (int64_t first = row - group; first < tokens; first += stride, row += stride) {
        int columns = row < tokens ? hidden : 0;
        if (!AHEAD)
            for (int i = 0; i < PACKS; ++i) load(i, row);
        float r = RSTD_AHEAD ? next_r : rstd_of(row), dot = 0.0f;
        if (RSTD_AHEAD) next_r = rstd_of(row + stride);
        Pack<W, N> scale[PACKS];
        for (int i = 0; i < PACKS; ++i)
            scale[i].template load_columns<ALIGNED>(weight, (i * threads + lane) * N, hidden);
        for (int i = 0; i < PACKS; ++i)
            for (int j = 0; j < N; ++j)
                dot += grad[i].get(j) * ((scale[i].get(j) + offset) * value[i].get(j));
        float mean = r * row_sum(dot, scratch[turn], threads / 32) / hidden;
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            float out[N];
            for (int j = 0; j < N; ++j) {
                float n = value[i].get(j) * r, g = grad[i].get(j) * (scale[i].get(j) + offset);
                share[i][j] += grad[i].get(j) * n;
                out[j] = addend[i].get(j) + r * (g - n * mean);
            }
            value[i].set(out);
            value[i].template store_columns<ALIGNED>(dx + row * dx_stride, (i * threads + lane) * N, columns);
            if (AHEAD) load(i, row + stride);
        }
    }

    if (!partial) return;
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

// Column sums of the blocks' shares, 32 columns a block of 32 warps, always in the same order. The rows of a
// second sum, where there is one (gridDim.y is 2), follow those of the first.
template <typename S>
__global__ void __launch_bounds__(1024)
    sum_partials(S* __restrict__ out,                // (columns,)
                 S* __restrict__ second,             // (columns,), or null
                 const float* __restrict__ partial,  // (rows + second_rows, columns)
                 int rows, int second_rows, int columns, bool accumulate, bool accumulate_second) {
    __shared__ float tile[32][33];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.y) {
        partial += int64_t(rows) * columns;
        out = second, rows = second_rows, accumulate = accumulate_second;
    }
    int column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = warp; row < rows; row += 32) sum += partial[int64_t(row) * columns + column];
    }
    tile[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(tile[lane][warp]);
    column = blockIdx.x * 32 + warp;
    if (lane == 0 && column < columns) out[column] = from_float<S>(accumulate ? to_float(out[column]) + sum : sum);
}
