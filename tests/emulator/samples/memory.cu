// Memory and arithmetic: the same results on a card and emulated.
#include "common.cuh"

// Doubles rows of 128 threads * 16 bytes in a two-stage pipeline; rows from `valid` on are zeros.
__global__ void pipeline(float* y, const float* x, int rows, int valid) {  // (rows, 512)
    __shared__ __align__(16) float stages[2][512];
    int column = threadIdx.x * 4;
    auto issue = [&](int row) {
        cp_async_16(&stages[row % 2][column], x + (row < valid ? row : 0) * 512 + column, row < valid);
        cp_async_commit();
    };
    issue(0);
    for (int row = 0; row < rows; ++row) {
        if (row + 1 < rows) {
            issue(row + 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 512; i += 128) y[row * 512 + i] = 2.0f * stages[row % 2][511 - i];
        __syncthreads();
    }
}

// Dynamic shared memory is reversed by threads of other warps.
template <typename T> __global__ void reverse(T* y, const T* x) {  // (blocks, threads)
    DYNAMIC_SHARED(T, values);
    int64_t row = int64_t(blockIdx.x) * blockDim.x;
    values[threadIdx.x] = x[row + threadIdx.x];
    __syncthreads();
    y[row + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

// Adds one to the first element of each array of a table of addresses.
__global__ void through_table(const int64_t* table) {  // (threads,)
    float* array = reinterpret_cast<float*>(table[threadIdx.x]);
    array[0] += 1.0f;
}

// What a block's static and dynamic shared memory hold at its start, before it writes to them.
__global__ void unwritten(float* y) {  // (blocks, 2)
    __shared__ float fixed;
    DYNAMIC_SHARED(float, values);
    y[2 * blockIdx.x] = fixed;
    y[2 * blockIdx.x + 1] = values[0];
    fixed = values[0] = 1.0f;
}

// bf16(x), the pair of it and its rounding, and 2^x.
__global__ void rounded(bf16* narrow, uint32_t* pairs, float* powers, const float* x, int64_t size) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    narrow[i] = from_float<bf16>(x[i]);
    pairs[i] = pack_bf16(x[i], to_float(narrow[i]));
    powers[i] = fast_exp2(x[i]);
}

__global__ void atomics(int* counts, float* sum, unsigned* last, const int* x) {  // (4,), (1,), (1,), (threads,)
    int value = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&counts[0], value);
    atomicMax(&counts[1], value);
    atomicMin(&counts[2], value);
    atomicAdd(sum, float(value));
    __threadfence();
    unsigned before = atomicAdd(last, 1u);
    if (before == gridDim.x * blockDim.x - 1) counts[3] = counts[0];
}

__global__ void integers(uint32_t* high, int* clamped, const uint32_t* x, const int* y) {  // (threads,) each
    int i = threadIdx.x;
    high[i] = __umulhi(x[i], 0x9E3779B9u);
    clamped[i] = max(min(y[i], 100), -100);
}

template <typename T> __global__ void scalars(T* out, int a, int64_t b, float c, bool d) {  // (1,)
    out[0] = from_float<T>(float(a) + float(b) + c + (d ? 1000.0f : 0.0f));
}
