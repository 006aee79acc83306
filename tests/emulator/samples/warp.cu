// What the lanes of a warp do together: the same results on a card and emulated.
#include "common.cuh"

template <typename T>
__global__ void shuffle(T* xored, T* from, const T* x, int mask, int lane) {  // (threads,) each
    T value = x[threadIdx.x];
    xored[threadIdx.x] = warp_shfl_xor(value, mask);
    from[threadIdx.x] = warp_shfl(value, lane);
}

__global__ void vote(uint32_t* votes, const int* x) {  // (warps,), (threads,)
    uint32_t vote = warp_ballot(x[threadIdx.x] > 0);
    if (threadIdx.x % 32 == 0) votes[threadIdx.x / 32] = vote;
}

// sum[t] and most[t] are the block's, for every thread: two warps of a block of three dimensions.
__global__ void reduce(float* sum, float* most, const float* x) {  // (blocks, threads) each
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int threads = blockDim.x * blockDim.y * blockDim.z;
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int i = block * threads + thread;
    float total = 0.0f;
    for (int lane = 0; lane < 32; ++lane) total += warp_shfl(x[i], lane);
    __shared__ float totals[32], maxima[32];
    float largest = warp_max(x[i]);
    if (thread % 32 == 0) totals[thread / 32] = total, maxima[thread / 32] = largest;
    __syncthreads();
    total = 0.0f, largest = -INFINITY;
    for (int warp = 0; warp < threads / 32; ++warp) {
        total += totals[warp];
        largest = fmaxf(largest, maxima[warp]);
    }
    sum[i] = total;
    most[i] = largest;
}

// The raw words of ldmatrix: lane l points at row l of the matrix.
template <bool TRANSPOSED>
__global__ void tiles(uint32_t* words, const uint16_t* matrix) {  // (lanes, 4), (32, 8)
    __shared__ __align__(16) uint16_t rows[32][8];
    for (int i = 0; i < 8; ++i) rows[threadIdx.x][i] = matrix[threadIdx.x * 8 + i];
    warp_sync();
    uint32_t r[4];
    if (TRANSPOSED) ldmatrix_x4_trans(r, rows[threadIdx.x]);
    else ldmatrix_x4(r, rows[threadIdx.x]);
    for (int i = 0; i < 4; ++i) words[threadIdx.x * 4 + i] = r[i];
}

// d += a * b, tiles of dynamic shared memory loaded by ldmatrix; b is stored row-major.
__global__ void multiply(float* d, const bf16* a, const bf16* b) {  // (16, 8), (16, 16), (16, 8)
    DYNAMIC_SHARED(bf16, a_rows);
    bf16* b_rows = a_rows + 16 * 16;  // with 8 unused columns
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) a_rows[i] = a[i], b_rows[i] = i % 16 < 8 ? b[i / 16 * 8 + i % 16] : b[0];
    warp_sync();
    uint32_t a_words[4], b_words[4];
    ldmatrix_x4(a_words, a_rows + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix_x4_trans(b_words, b_rows + lane % 16 * 16 + lane / 16 * 8);
    float sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
    mma_m16n8k16(sum, a_words, b_words[0], b_words[1]);
    for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}
