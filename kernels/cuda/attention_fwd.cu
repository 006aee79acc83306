// Attention forward: online softmax over tiles of keys, after FlashAttention-2 (Dao 2023, arXiv 2307.08691).
//
// One block a tile of queries and a head. A warp owns 16 ROW_TILES rows of the tile and keeps their output
// and softmax state in registers. Keys and values have one buffer each: values load while the scores are
// computed, the next keys while the softmax and the second product run. Keys are walked from the diagonal
// back. Scores are kept unscaled; exponents are base 2 with the scale folded in.
//
// Blocks with the most keys of a long document start first: heads vary fastest, tiles from the last down.
#include "attention.cuh"

// Takes in one tile of scores: updates the running maxima and sums, turns the scores into weights, and
// rescales the output to the new maxima.
template <int M, int N, int D>
__device__ __forceinline__ void softmax_step(float (&scores)[M][N][4], float (&out)[M][D][4], float (&top)[M][2],
                                             float (&sum)[M][2], float scale_log2) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = top[m][half];
#pragma unroll
            for (int n = 0; n < N; ++n)
                highest = fmaxf(highest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            highest = fmaxf(highest, warp_shfl_xor(highest, 1));
            highest = fmaxf(highest, warp_shfl_xor(highest, 2));
            float base = highest == -INFINITY ? 0.0f : highest * scale_log2;  // a row that has read nothing yet
            float decay = fast_exp2(top[m][half] * scale_log2 - base);
            float partial = 0.0f;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    scores[m][n][e] = fast_exp2(scores[m][n][e] * scale_log2 - base);
                    partial += scores[m][n][e];
                }
            top[m][half] = highest;
            sum[m][half] = sum[m][half] * decay + partial;
#pragma unroll
            for (int d = 0; d < D; ++d) out[m][d][2 * half] *= decay, out[m][d][2 * half + 1] *= decay;
        }
}

// Divides the output by its sums and writes the row's log-sum-exp.
template <int M, int D>
__device__ __forceinline__ void normalise(float (&out)[M][D][4], const float (&top)[M][2], float (&sum)[M][2],
                                          float* lse, int row, int tokens, float scale) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[m][half];
            total += warp_shfl_xor(total, 1);
            total += warp_shfl_xor(total, 2);
            float inverse = 1.0f / total;
#pragma unroll
            for (int d = 0; d < D; ++d) out[m][d][2 * half] *= inverse, out[m][d][2 * half + 1] *= inverse;
            int r = row + 16 * m + 8 * half + lane / 4;
            if (lane % 4 == 0 && r < tokens) lse[r] = top[m][half] * scale + logf(total);
        }
}

template <int HEAD_DIM, int ROW_TILES, int WARPS, int KEYS>
__global__ void __launch_bounds__(WARPS * 32)
    attention_fwd(bf16* __restrict__ o,           // (tokens, heads, HEAD_DIM)
                  float* __restrict__ lse,        // (heads, tokens), natural logarithm
                  const bf16* __restrict__ q,     // (tokens, heads, HEAD_DIM), q_stride elements a token
                  const bf16* __restrict__ k,     // (tokens, kv_heads, HEAD_DIM), k_stride
                  const bf16* __restrict__ v,     // (tokens, kv_heads, HEAD_DIM), v_stride
                  const float* __restrict__ sinks,  // (heads,) or null
                  const int* __restrict__ start,  // (tokens,)
                  int tokens, int heads, int kv_heads, int64_t q_stride, int64_t k_stride, int64_t v_stride, int window,
                  float scale) {
    constexpr int ROWS = WARPS * ROW_TILES * 16, THREADS = WARPS * 32;
    DYNAMIC_SHARED(bf16, q_tile);
    bf16 *k_tile = q_tile + ROWS * HEAD_DIM, *v_tile = k_tile + KEYS * HEAD_DIM;

    int head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    int row = (gridDim.x / heads - 1 - blockIdx.x / heads) * ROWS;
    int warp_row = warp_index() * (ROW_TILES * 16);  // in the tile
    q += head * HEAD_DIM, k += kv_head * HEAD_DIM, v += kv_head * HEAD_DIM;

    int first = first_key(start, row, window) / KEYS * KEYS;
    int key = (min(row + ROWS, tokens) - 1) / KEYS * KEYS;
    load_rows<HEAD_DIM, ROWS, THREADS>(q_tile, q, q_stride, row, tokens);
    load_rows<HEAD_DIM, KEYS, THREADS>(k_tile, k, k_stride, key, tokens);
    cp_async_commit();

    Queries<ROW_TILES> queries(row + warp_row, tokens, start, window);
    float out[ROW_TILES][HEAD_DIM / 8][4] = {}, top[ROW_TILES][2], sum[ROW_TILES][2];
    float scale_log2 = scale * LOG2E;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // A sink is a key without a value, read before all others.
            top[m][half] = sinks ? sinks[head] / scale : -INFINITY;
            sum[m][half] = sinks && threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
        }

    for (; key >= first; key -= KEYS) {
        bool any = queries.reads_any(key, KEYS);
        float scores[ROW_TILES][KEYS / 8][4] = {};
        cp_async_wait<0>();
        __syncthreads();  // the keys are here, and nobody reads the previous values any more
        load_rows<HEAD_DIM, KEYS, THREADS>(v_tile, v, v_stride, key, tokens);
        cp_async_commit();
        if (any) {
            inner_products<HEAD_DIM>(scores, q_tile, warp_row, k_tile, 0);
            if (!queries.reads_all(key, KEYS)) queries.mask(scores, key, -INFINITY, start, tokens, window);
        }
        cp_async_wait<0>();
        __syncthreads();
        if (key > first) load_rows<HEAD_DIM, KEYS, THREADS>(k_tile, k, k_stride, key - KEYS, tokens);
        cp_async_commit();
        if (any) {
            softmax_step(scores, out, top, sum, scale_log2);
            weighted_rows<HEAD_DIM>(out, scores, v_tile);
        }
    }

    normalise(out, top, sum, lse + int64_t(head) * tokens, row + warp_row, tokens, scale);
    store_rows<HEAD_DIM>(o + head * HEAD_DIM, int64_t(heads) * HEAD_DIM, row + warp_row, tokens, out, q_tile, warp_row);
}
