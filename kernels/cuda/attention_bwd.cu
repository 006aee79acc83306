// Attention backward without atomics, so the same bits every time, in three steps (after FlashAttention-2,
// whose one kernel adds dQ atomically):
//
//   attention_bwd_stats   for each query: its lse and delta = sum(do * o), the two numbers that softmax needs
//   attention_bwd_dkdv    for each tile of keys: dV = sum of P^T dO and dK = scale * sum of dS^T Q
//   attention_bwd_dq      for each tile of queries: dQ = scale * sum of dS K
//
// with P = exp(scale * Q K^T - lse) computed again from Q and K, and dS = P * (dO V^T - delta).
#include "attention.cuh"

// stats[head][token] = (lse / ln 2, delta). Tokens from `tokens` to `padded` get (inf, 0), which makes their P
// and dS zero. LANES lanes share a row.
template <int HEAD_DIM, int LANES>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    attention_bwd_stats(float* __restrict__ stats,        // (heads, padded, 2)
                        const bf16* __restrict__ o,       // (tokens, heads, HEAD_DIM)
                        const bf16* __restrict__ d_o,     // (tokens, heads, HEAD_DIM), do_stride a token
                        const float* __restrict__ lse,    // (heads, tokens)
                        int tokens, int padded, int heads, int64_t do_stride) {
    int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
    int token = row / heads, head = row % heads, lane = threadIdx.x % LANES;
    float sum = 0.0f;
    if (token < tokens && lane < HEAD_DIM / 8) {
        auto x = Vec<bf16, 8>::load(o + row * HEAD_DIM + lane * 8);
        auto dx = Vec<bf16, 8>::load(d_o + token * do_stride + head * HEAD_DIM + lane * 8);
        for (int i = 0; i < 8; ++i) sum += to_float(x.data[i]) * to_float(dx.data[i]);
    }
    for (int mask = LANES / 2; mask > 0; mask /= 2) sum += warp_shfl_xor(sum, mask);
    if (lane == 0 && token < padded) {
        float base = token < tokens ? lse[int64_t(head) * tokens + token] * LOG2E : INFINITY;
        Vec<float, 2>{base, sum}.store(stats + (int64_t(head) * padded + token) * 2);
    }
}

// Adds what one tile of ROWS queries of one head gives to the dK and dV of a warp's 16 M keys. Everything is
// transposed: keys are rows. `query` and `key` are the first query of the tile and the first key of the warp.
template <int HEAD_DIM, int OUT_DIM, int M, int ROWS>
__device__ __forceinline__ void add_queries(float (&dk)[M][OUT_DIM / 8][4], float (&dv)[M][OUT_DIM / 8][4],
                                            const bf16* k_rows, const bf16* v_rows, const bf16* q_tile,
                                            const bf16* do_tile, const float* stat, float scale_log2, bool masked,
                                            int query, int key, const int* end, int tokens, int window, int column) {
    int lane = threadIdx.x % 32;
    stat += lane % 4 * 4;
    float p[M][ROWS / 8][4] = {}, ds[M][ROWS / 8][4] = {};
    inner_products<HEAD_DIM>(p, k_rows, 0, q_tile, 0);
    inner_products<HEAD_DIM>(ds, v_rows, 0, do_tile, 0);
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        auto two = Vec<float, 4>::load(stat + 16 * n);  // lse and delta of two queries
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[m][n][e] = fast_exp2(p[m][n][e] * scale_log2 - two.data[e % 2 * 2]);
    }
    if (masked)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int low = key + 16 * m + 8 * half + lane / 4;
                int high = low < tokens ? end_query(end, low, window) : 0;
#pragma unroll
                for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        int i = query + 8 * n + lane % 4 * 2 + e;
                        if (i < low || i >= high) p[m][n][2 * half + e] = 0.0f;
                    }
            }
    weighted_rows<HEAD_DIM>(dv, p, do_tile + column);
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        auto two = Vec<float, 4>::load(stat + 16 * n);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - two.data[e % 2 * 2 + 1]);
    }
    weighted_rows<HEAD_DIM>(dk, ds, q_tile + column);
}

// One block a tile of keys and a kv head; it walks the query heads of its group, and for each the tiles of
// queries from the diagonal to the end of the last key's document. A warp owns 16 KEY_TILES keys. Where a
// warp's registers cannot hold dK and dV of a whole row, blockIdx.y picks OUT_DIM of their columns.
template <int HEAD_DIM, int OUT_DIM, int KEY_TILES, int WARPS, int ROWS, int STAGES>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    __launch_bounds__(WARPS * 32)
    attention_bwd_dkdv(bf16* __restrict__ dk,           // (tokens, kv_heads, HEAD_DIM), d_stride elements a token
                       bf16* __restrict__ dv,           // (tokens, kv_heads, HEAD_DIM), d_stride
                       const bf16* __restrict__ q,      // (tokens, heads, HEAD_DIM), q_stride
                       const bf16* __restrict__ k,      // (tokens, kv_heads, HEAD_DIM), k_stride
                       const bf16* __restrict__ v,      // (tokens, kv_heads, HEAD_DIM), v_stride
                       const bf16* __restrict__ d_o,    // (tokens, heads, HEAD_DIM), do_stride
                       const float* __restrict__ stats, // (heads, padded, 2)
                       const int* __restrict__ end,     // (tokens,)
                       int tokens, int padded, int heads, int kv_heads, int64_t d_stride, int64_t q_stride,
                       int64_t k_stride, int64_t v_stride, int64_t do_stride, int window, float scale) {
    constexpr int WARP_KEYS = KEY_TILES * 16, KEYS = WARPS * WARP_KEYS, THREADS = WARPS * 32;
    static_assert(STAGES <= 2, "stages are taken in turns");
    constexpr int STAGE = 2 * ROWS * HEAD_DIM + 4 * ROWS;  // a tile of Q, one of dO, and their statistics
    DYNAMIC_SHARED(bf16, k_tile);
    bf16 *v_tile = k_tile + KEYS * HEAD_DIM, *stages = v_tile + KEYS * HEAD_DIM;

    int kv_head = blockIdx.x % kv_heads, group = heads / kv_heads;
    int key = blockIdx.x / kv_heads * KEYS, warp_key = warp_index() * WARP_KEYS, column = blockIdx.y * OUT_DIM;

    int first = key / ROWS * ROWS;
    auto load_stage = [&](int slot, int head, int row) {
        bf16* stage = stages + slot * STAGE;
        load_rows<HEAD_DIM, ROWS, THREADS>(stage, q + head * HEAD_DIM, q_stride, row, tokens);
        load_rows<HEAD_DIM, ROWS, THREADS>(stage + ROWS * HEAD_DIM, d_o + head * HEAD_DIM, do_stride, row, tokens);
        const float* source = stats + (int64_t(head) * padded + row) * 2 + threadIdx.x * 4;
        if (threadIdx.x < ROWS / 2) cp_async_16(stage + 2 * ROWS * HEAD_DIM + threadIdx.x * 8, source);
        cp_async_commit();
    };
    load_rows<HEAD_DIM, KEYS, THREADS>(k_tile, k + kv_head * HEAD_DIM, k_stride, key, tokens);
    load_rows<HEAD_DIM, KEYS, THREADS>(v_tile, v + kv_head * HEAD_DIM, v_stride, key, tokens);
    load_stage(0, kv_head * group, first);

    int low = key + warp_key, high = min(low + WARP_KEYS, tokens) - 1;
    int all_end = low < tokens ? end_query(end, low, window) : 0;   // the first query that not all keys are read by
    int any_end = low < tokens ? end_query(end, high, window) : 0;  // the first that none is read by
    float dk_rows[KEY_TILES][OUT_DIM / 8][4] = {}, dv_rows[KEY_TILES][OUT_DIM / 8][4] = {};

    int last = (end_query(end, min(key + KEYS, tokens) - 1, window) - 1) / ROWS * ROWS;
    int head = kv_head * group, row = first, slot = 0;
    while (head < kv_head * group + group) {
        int next_head = row < last ? head : head + 1, next_row = row < last ? row + ROWS : first;
        int next_slot = STAGES - 1 - slot;
        bool more = next_head < kv_head * group + group;
        cp_async_wait<0>();
        __syncthreads();  // this stage is here, and nobody reads the other any more
        if (STAGES > 1 && more) load_stage(next_slot, next_head, next_row);
        const bf16* stage = stages + slot * STAGE;
        if (row + ROWS > low && row < any_end)
            add_queries<HEAD_DIM, OUT_DIM, KEY_TILES, ROWS>(
                dk_rows, dv_rows, k_tile + warp_key * HEAD_DIM, v_tile + warp_key * HEAD_DIM, stage,
                stage + ROWS * HEAD_DIM, reinterpret_cast<const float*>(stage + 2 * ROWS * HEAD_DIM), scale * LOG2E,
                row < low + WARP_KEYS - 1 || row + ROWS > all_end, row, low, end, tokens, window, column);
        if (STAGES == 1) {
            __syncthreads();
            if (more) load_stage(next_slot, next_head, next_row);
        }
        head = next_head, row = next_row, slot = next_slot;
    }

    for (int m = 0; m < KEY_TILES; ++m)
        for (int n = 0; n < OUT_DIM / 8; ++n)
            for (int e = 0; e < 4; ++e) dk_rows[m][n][e] *= scale;
    int offset = kv_head * HEAD_DIM + column;
    store_rows<HEAD_DIM>(dk + offset, d_stride, low, tokens, dk_rows, k_tile, warp_key);
    store_rows<HEAD_DIM>(dv + offset, d_stride, low, tokens, dv_rows, v_tile, warp_key);
}

// One block a tile of queries and a head, tiles from the last down; it walks the keys that the tile reads.
template <int HEAD_DIM, int ROW_TILES, int WARPS, int KEYS, int STAGES>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    __launch_bounds__(WARPS * 32)
    attention_bwd_dq(bf16* __restrict__ dq,           // (tokens, heads, HEAD_DIM), d_stride elements a token
                     const bf16* __restrict__ q,      // (tokens, heads, HEAD_DIM), q_stride
                     const bf16* __restrict__ k,      // (tokens, kv_heads, HEAD_DIM), k_stride
                     const bf16* __restrict__ v,      // (tokens, kv_heads, HEAD_DIM), v_stride
                     const bf16* __restrict__ d_o,    // (tokens, heads, HEAD_DIM), do_stride
                     const float* __restrict__ stats, // (heads, padded, 2)
                     const int* __restrict__ start,   // (tokens,)
                     int tokens, int padded, int heads, int kv_heads, int64_t d_stride, int64_t q_stride,
                     int64_t k_stride, int64_t v_stride, int64_t do_stride, int window, float scale) {
    constexpr int WARP_ROWS = ROW_TILES * 16, ROWS = WARPS * WARP_ROWS, THREADS = WARPS * 32;
    constexpr int STAGE = 2 * KEYS * HEAD_DIM;
    DYNAMIC_SHARED(bf16, q_tile);
    bf16 *do_tile = q_tile + ROWS * HEAD_DIM, *stages = do_tile + ROWS * HEAD_DIM;

    int head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    int row = (gridDim.x / heads - 1 - blockIdx.x / heads) * ROWS, warp_row = warp_index() * WARP_ROWS;
    k += kv_head * HEAD_DIM, v += kv_head * HEAD_DIM;

    int first = first_key(start, row, window) / KEYS * KEYS;
    int tiles = (min(row + ROWS, tokens) - first + KEYS - 1) / KEYS;
    auto load_stage = [&](int i) {
        bf16* stage = stages + i % STAGES * STAGE;
        load_rows<HEAD_DIM, KEYS, THREADS>(stage, k, k_stride, first + i * KEYS, tokens);
        load_rows<HEAD_DIM, KEYS, THREADS>(stage + KEYS * HEAD_DIM, v, v_stride, first + i * KEYS, tokens);
        cp_async_commit();
    };
    load_rows<HEAD_DIM, ROWS, THREADS>(q_tile, q + head * HEAD_DIM, q_stride, row, tokens);
    load_rows<HEAD_DIM, ROWS, THREADS>(do_tile, d_o + head * HEAD_DIM, do_stride, row, tokens);
    load_stage(0);

    Queries<ROW_TILES> queries(row + warp_row, tokens, start, window);
    Vec<float, 2> stat[ROW_TILES][2];
    stats += (int64_t(head) * padded + row + warp_row + threadIdx.x % 32 / 4) * 2;
    for (int m = 0; m < ROW_TILES; ++m)
        for (int half = 0; half < 2; ++half) stat[m][half] = Vec<float, 2>::load(stats + (16 * m + 8 * half) * 2);
    float dq_rows[ROW_TILES][HEAD_DIM / 8][4] = {};

    for (int i = 0; i < tiles; ++i) {
        cp_async_wait<0>();
        __syncthreads();
        if (STAGES > 1 && i + 1 < tiles) load_stage(i + 1);
        const bf16 *k_tile = stages + i % STAGES * STAGE, *v_tile = k_tile + KEYS * HEAD_DIM;
        int key = first + i * KEYS;
        if (queries.reads_any(key, KEYS)) {
            float p[ROW_TILES][KEYS / 8][4] = {}, ds[ROW_TILES][KEYS / 8][4] = {};
            inner_products<HEAD_DIM>(p, q_tile, warp_row, k_tile, 0);
            if (!queries.reads_all(key, KEYS)) queries.mask(p, key, -INFINITY, start, tokens, window);
            inner_products<HEAD_DIM>(ds, do_tile, warp_row, v_tile, 0);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float lse = stat[m][e / 2].data[0], delta = stat[m][e / 2].data[1];
                        ds[m][n][e] = fast_exp2(p[m][n][e] * (scale * LOG2E) - lse) * (ds[m][n][e] - delta);
                    }
            weighted_rows<HEAD_DIM>(dq_rows, ds, k_tile);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (i + 1 < tiles) load_stage(i + 1);
        }
    }

    for (int m = 0; m < ROW_TILES; ++m)
        for (int n = 0; n < HEAD_DIM / 8; ++n)
            for (int e = 0; e < 4; ++e) dq_rows[m][n][e] *= scale;
    store_rows<HEAD_DIM>(dq + head * HEAD_DIM, d_stride, row + warp_row, tokens, dq_rows, q_tile, warp_row);
}

// d_sinks[head] = -sum over tokens of exp(sink - lse) * delta, added to what is there or not. One block a head.
template <typename T>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    attention_bwd_sinks(T* __restrict__ d_sinks,            // (heads,)
                        const float* __restrict__ sinks,    // (heads,)
                        const float* __restrict__ stats,    // (heads, padded, 2)
                        int tokens, int padded, bool accumulate) {
    int head = blockIdx.x;
    float sum = 0.0f, sink = sinks[head] * LOG2E;
    for (int token = threadIdx.x; token < tokens; token += blockDim.x) {
        auto stat = Vec<float, 2>::load(stats + (int64_t(head) * padded + token) * 2);
        sum -= fast_exp2(sink - stat.data[0]) * stat.data[1];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_sinks[head] = from_float<T>((accumulate ? to_float(d_sinks[head]) : 0.0f) + sum);
}
