// Pieces of the attention kernels: tiles of rows in shared memory, the matrix products over them, and
// who may read whom.
//
// A tile holds rows of HEAD_DIM bf16. Its 16-byte chunks are permuted within a row (swizzled) so that the
// eight rows that ldmatrix reads together lie in different banks.
//
// Accumulators follow the mma m16n8 fragment: acc[m][n][e] of a lane is row 16 m + lane / 4 + 8 (e / 2),
// column 8 n + 2 (lane % 4) + e % 2 of what its warp computes.
#pragma once
#include "common.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// Where 16-byte chunk `chunk` of row `row` lies, in elements: permuted within groups of 8 (or, where rows are
// no whole number of those, 4) chunks.
template <int HEAD_DIM> constexpr int GROUP = HEAD_DIM % 64 == 0 ? 8 : 4;
template <int HEAD_DIM> __device__ __forceinline__ int turn(int row) {
    static_assert(HEAD_DIM % 64 == 0 || HEAD_DIM == 96, "a row must be whole groups of chunks");
    return GROUP<HEAD_DIM> == 8 ? row & 7 : (row >> 1) & 3;
}
template <int HEAD_DIM> __device__ __forceinline__ int at(int row, int chunk) {
    return row * HEAD_DIM + (chunk ^ turn<HEAD_DIM>(row)) * 8;
}
// The same for chunk 2 * step + half, with what a constant step adds kept apart from what depends on the lane.
template <int HEAD_DIM> __device__ __forceinline__ int at(int row, int half, int step) {
    constexpr int STEPS = GROUP<HEAD_DIM> / 2;
    int within = half ^ turn<HEAD_DIM>(row) ^ (step % STEPS * 2);
    return row * HEAD_DIM + within * 8 + step / STEPS * STEPS * 16;
}

// Starts copying rows [row, row + ROWS) of one head into a tile. Rows from `end` on become zeros.
template <int HEAD_DIM, int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(bf16* tile, const bf16* head, int64_t stride, int row, int end) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    constexpr int STEP = HEAD_DIM % 64 == 0 ? THREADS / CHUNKS : THREADS / 16;  // rows at a time
    static_assert(ROWS % STEP == 0, "threads must share a tile evenly");
    int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    if (STEP * CHUNKS < THREADS && first >= STEP) return;
    const bf16* source = head + (row + first) * stride + chunk * 8;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
        cp_async_16(tile + at<HEAD_DIM>(first + r, chunk), source, row + first + r < end);
        source += STEP * stride;
    }
}

// acc (16 M x 8 N) += rows of `a` from a_row times rows of `b` from b_row: inner products over HEAD_DIM.
template <int HEAD_DIM, int M, int N>
__device__ __forceinline__ void inner_products(float (&acc)[M][N][4], const bf16* a, int a_row, const bf16* b,
                                               int b_row) {
    int lane = threadIdx.x % 32;
    a_row += lane % 16;
    b_row += lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        uint32_t left[M][4], right[4];
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix_x4(left[m], a + at<HEAD_DIM>(a_row, lane / 16, step) + 16 * m * HEAD_DIM);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(right, b + at<HEAD_DIM>(b_row, lane / 8 % 2, step) + 8 * n * HEAD_DIM);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16(acc[m][n], left[m], right[0], right[1]);
                mma_m16n8k16(acc[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// acc (16 M x 8 N) += weights (16 M x 8 K, rounded to bf16) times the first 8 N columns of 8 K rows of `b`.
template <int HEAD_DIM, int M, int K, int N>
__device__ __forceinline__ void weighted_rows(float (&acc)[M][N][4], const float (&weights)[M][K][4], const bf16* b) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        uint32_t left[M][4], right[4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &weights[m][k + i / 2][i % 2 * 2];
                left[m][i] = pack_bf16(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4_trans(right, b + at<HEAD_DIM>(lane % 16, lane / 16, n / 2) + 8 * k * HEAD_DIM);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16(acc[m][n], left[m], right[0], right[1]);
                mma_m16n8k16(acc[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Writes acc as bf16 to rows [row, end) of `out`, 16 bytes an access, through rows of a tile that no other
// warp uses any more.
template <int HEAD_DIM, int M, int N>
__device__ __forceinline__ void store_rows(bf16* out, int64_t stride, int row, int end, const float (&acc)[M][N][4],
                                           bf16* tile, int tile_row) {
    int lane = threadIdx.x % 32;
    warp_sync();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int at_row = tile_row + 16 * m + 8 * half + lane / 4;
                uint32_t pair = pack_bf16(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
                *reinterpret_cast<uint32_t*>(tile + at<HEAD_DIM>(at_row, n) + lane % 4 * 2) = pair;
            }
    warp_sync();
    for (int i = lane; i < 16 * M * N; i += 32) {
        int r = i / N, chunk = i % N;
        if (row + r < end)
            Vec<bf16, 8>::load(tile + at<HEAD_DIM>(tile_row + r, chunk)).store(out + (row + r) * stride + chunk * 8);
    }
}

// The first key that a query reads: its document's first token or the window's edge. Never decreases with
// the row, and every row reads itself.
__device__ __forceinline__ int first_key(const int* start, int row, int window) {
    return max(start[row], row - window + 1);
}

// The warp's index, in a form that tells the compiler that its lanes agree.
__device__ __forceinline__ int warp_index() { return warp_shfl(int(threadIdx.x / 32), 0); }

// One past the last query that reads a key. Never decreases with the key.
__device__ __forceinline__ int end_query(const int* end, int key, int window) { return min(end[key], key + window); }

// The 16 M queries of a warp, from `row` on, and what they may read. Rows past the last token read what they
// like: nobody writes them out.
template <int M> struct Queries {
    int row, first_low, last_low;  // the first query; the first keys of the first and the last one

    __device__ __forceinline__ Queries(int row, int tokens, const int* start, int window) : row(row) {
        first_low = first_key(start, min(row, tokens - 1), window);
        last_low = first_key(start, min(row + 16 * M, tokens) - 1, window);
    }
    // Whether any query reads any, and whether every query reads every one of `keys` keys.
    __device__ __forceinline__ bool reads_any(int key, int keys) const {
        return key < row + 16 * M && key + keys > first_low;
    }
    __device__ __forceinline__ bool reads_all(int key, int keys) const {
        return key + keys - 1 <= row && key >= last_low;
    }
    // Replaces the scores, against keys from `key` on, of what the queries may not read.
    template <int N>
    __device__ __forceinline__ void mask(float (&scores)[M][N][4], int key, float value, const int* start, int tokens,
                                         int window) const {
        int lane = threadIdx.x % 32;
        key += lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int query = row + 16 * m + 8 * half + lane / 4;
                int low = max(start[min(query, tokens - 1)], query - window + 1);
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        int j = key + 8 * n + e;
                        if (j > query || j < low) scores[m][n][2 * half + e] = value;
                    }
            }
    }
};
