// Kernels that are wrong, each in one way that the emulator must find. x and y have blockDim.x elements.
#include "common.cuh"

// The one that is right.
__global__ void fine(float* y) {
    __shared__ float values[64];
    values[threadIdx.x] = float(threadIdx.x);
    __syncthreads();
    y[threadIdx.x] = values[63 - threadIdx.x];
}

__global__ void write_past_end(float* y) { y[threadIdx.x + 1] = 1.0f; }
__global__ void read_before_start(float* y, const float* x) { y[threadIdx.x] = x[int(threadIdx.x) - 1]; }
__global__ void write_const(const float* x) { const_cast<float*>(x)[threadIdx.x] = 1.0f; }
__global__ void read_null(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x]; }

__global__ void misaligned_vector(float* y) { Vec<float, 4>::load(y + threadIdx.x).store(y + threadIdx.x); }
__global__ void misaligned_copy(const float* x) {
    __shared__ __align__(16) float values[8];
    cp_async_16(values + 1, x);
}
__global__ void misaligned_source(const float* x) {
    __shared__ __align__(16) float values[8];
    cp_async_16(values, x + 1);
}
__global__ void misaligned_rows() {
    __shared__ __align__(16) uint16_t rows[32 * 9];
    uint32_t r[4];
    ldmatrix_x4(r, rows + threadIdx.x * 9);
}
__global__ void rows_in_global(const float* x) {
    uint32_t r[4];
    ldmatrix_x4(r, x);
}

__global__ void past_static_array(float* y) {
    __shared__ float values[16];
    values[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = values[0];
}
__global__ void past_dynamic_shared() {
    DYNAMIC_SHARED(float, values);
    values[threadIdx.x] = 1.0f;
}

__global__ void no_barrier_before_read(float* y) {
    __shared__ float values[64];
    values[threadIdx.x] = 1.0f;
    y[threadIdx.x] = values[63 - threadIdx.x];
}
__global__ void no_barrier_before_reuse(float* y) {
    __shared__ float values[64];
    values[threadIdx.x] = 1.0f;
    __syncthreads();
    float other = values[63 - threadIdx.x];
    values[threadIdx.x] = 2.0f;
    y[threadIdx.x] = other;
}
__global__ void no_warp_sync(float* y) {
    __shared__ float values[64];
    values[threadIdx.x] = 1.0f;
    y[threadIdx.x] = values[threadIdx.x ^ 1];
}
__global__ void warp_sync_alone(float* y) {
    __shared__ float values[64];
    values[threadIdx.x] = 1.0f;
    warp_sync();
    y[threadIdx.x] = values[threadIdx.x ^ 32];
}
__global__ void all_write_one(float* y) { y[0] = float(threadIdx.x); }
__global__ void blocks_write_one(float* y) { y[threadIdx.x] = 1.0f; }
__global__ void blocks_read_others(float* y) {
    float other = blockIdx.x ? y[0] : 1.0f;
    if (threadIdx.x == 0) y[blockIdx.x] = other;
}

__global__ void read_in_flight(float* y, const float* x) {
    __shared__ __align__(16) float values[256];
    cp_async_16(values + threadIdx.x * 4, x);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    y[threadIdx.x] = values[threadIdx.x];
}
__global__ void copy_not_seen(float* y, const float* x) {
    __shared__ __align__(16) float values[256];
    cp_async_16(values + threadIdx.x * 4, x);
    cp_async_commit();
    cp_async_wait<0>();
    y[threadIdx.x] = values[threadIdx.x * 4 ^ 4];
}
__global__ void wait_without_commit(float* y, const float* x) {
    __shared__ __align__(16) float values[256];
    cp_async_16(values + threadIdx.x * 4, x);
    cp_async_wait<0>();
    y[threadIdx.x] = values[threadIdx.x * 4];
}

__global__ void divergent_barrier() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void barrier_and_shuffle(float* y) {
    if (threadIdx.x % 2) __syncthreads();
    else y[threadIdx.x] = warp_shfl_xor(1.0f, 2);
}
__global__ void shuffle_and_ballot(float* y) {
    if (threadIdx.x % 2) y[threadIdx.x] = warp_shfl_xor(1.0f, 2);
    else y[threadIdx.x] = float(warp_ballot(true));
}
__global__ void shuffle_with_exited(float* y) {
    if (threadIdx.x % 2) return;
    y[threadIdx.x] = warp_shfl_xor(1.0f, 1);
}
__global__ void mma_with_exited() {
    if (threadIdx.x % 2) return;
    float d[4] = {};
    uint32_t a[4] = {};
    mma_m16n8k16(d, a, 0u, 0u);
}

__global__ void endless(int* flag) {
    while (*static_cast<volatile int*>(flag) == 0) {}
}
__global__ void overflow(int* y, int x) { y[threadIdx.x] = x + int(threadIdx.x); }
__global__ void divide(int* y, int x) { y[threadIdx.x] = int(threadIdx.x) / x; }
__device__ __noinline__ float deep(float* above, int depth) {
    float local[4096];
    for (int i = 0; i < 4096; ++i) local[i] = above[i % 2] + 1.0f;
    return depth < 100 ? deep(local, depth + 1) : local[depth];
}
__global__ void recurse(float* y) {
    float start[2] = {};
    y[0] = deep(start, 0);
}
__global__ void trap() { __trap(); }
__global__ void other_threads_local(float* y) {
    __shared__ float* address;
    float local[2] = {1.0f, 2.0f};
    if (threadIdx.x == 0) address = local;
    __syncthreads();
    y[threadIdx.x] = address[threadIdx.x % 2];
    __syncthreads();
}
