// One new token of each sequence against its cache of keys and values.
//
// One block a sequence and head. LANES lanes (a power of two) share a key, eight columns each; the workers
// of a block take keys in turn, each with an online softmax of its own, and are merged at the end in a
// fixed order.
#include "common.cuh"

constexpr int BLOCK = 256, COLUMNS = 8;

// Columns of a row in float; zeros past its end.
template <typename T> __device__ __forceinline__ void read(float (&x)[COLUMNS], const T* row, bool valid) {
    constexpr int N = WIDTH<T>;
    for (int i = 0; i < COLUMNS; i += N) {
        Vec<T, N> part = valid ? Vec<T, N>::load(row + i) : Vec<T, N>{};
        for (int j = 0; j < N; ++j) x[i + j] = valid ? to_float(part.data[j]) : 0.0f;
    }
}

template <typename T, int LANES>
__global__ void __launch_bounds__(BLOCK)
    attention_decode(T* __restrict__ o,              // (seqs, heads, head_dim)
                     const T* __restrict__ q,        // (seqs, heads, head_dim)
                     const T* __restrict__ k,        // (seqs, max_len, kv_heads, head_dim)
                     const T* __restrict__ v,        // (seqs, max_len, kv_heads, head_dim)
                     const int* __restrict__ lengths,  // (seqs,)
                     int max_len, int heads, int kv_heads, int head_dim, int window, float scale) {
    constexpr int WORKERS = BLOCK / LANES;
    __shared__ float sums[WORKERS][LANES * COLUMNS], tops[WORKERS], totals[WORKERS];
    int seq = blockIdx.x / heads, head = blockIdx.x % heads;
    int worker = threadIdx.x / LANES, lane = threadIdx.x % LANES, column = lane * COLUMNS;
    int end = min(lengths[seq], max_len), begin = max(end - window, 0);
    int64_t stride = int64_t(kv_heads) * head_dim;
    int64_t cache = (int64_t(seq) * max_len * kv_heads + head / (heads / kv_heads)) * head_dim + column;
    bool inside = column < head_dim;

    float query[COLUMNS], sum[COLUMNS] = {}, top = -INFINITY, total = 0.0f;
    read(query, q + int64_t(blockIdx.x) * head_dim + column, inside);
    for (int first = begin; first < end; first += WORKERS) {  // all lanes of a warp together
        int key = first + worker;
        float keys[COLUMNS], values[COLUMNS], score = 0.0f;
        read(keys, k + cache + key * stride, inside && key < end);
        read(values, v + cache + key * stride, inside && key < end);
        for (int i = 0; i < COLUMNS; ++i) score += query[i] * keys[i];
        for (int mask = LANES / 2; mask > 0; mask /= 2) score += warp_shfl_xor(score, mask);
        if (key < end) {
            score *= scale;
            float highest = fmaxf(top, score), decay = expf(top - highest), weight = expf(score - highest);
            for (int i = 0; i < COLUMNS; ++i) sum[i] = sum[i] * decay + weight * values[i];
            total = total * decay + weight;
            top = highest;
        }
    }

    for (int i = 0; i < COLUMNS; ++i) sums[worker][column + i] = sum[i];
    if (lane == 0) tops[worker] = top, totals[worker] = total;
    __syncthreads();
    for (int d = threadIdx.x; d < head_dim; d += BLOCK) {
        float highest = -INFINITY, out = 0.0f, all = 0.0f;
        for (int w = 0; w < WORKERS; ++w) highest = fmaxf(highest, tops[w]);
        for (int w = 0; w < WORKERS; ++w) {
            float decay = totals[w] > 0.0f ? expf(tops[w] - highest) : 0.0f;
            out += decay * sums[w][d], all += decay * totals[w];
        }
        o[int64_t(blockIdx.x) * head_dim + d] = from_float<T>(all > 0.0f ? out / all : 0.0f);
    }
}
