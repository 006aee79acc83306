// One launch over many tensors: a block works on one chunk of one tensor. kernels/multi_tensor.py builds
// the table.
#pragma once
#include "common.cuh"

// Elements that a thread holds at a time: one 16-byte access of bf16, two of float.
constexpr int GROUP = 8;

struct Chunk {
    const int64_t* row;  // of the table: size, first chunk, then the op's own columns
    int64_t begin, end;  // elements of the tensor
};

__device__ __forceinline__ Chunk chunk_of_block(const int64_t* table, const int* chunk_tensor, int columns,
                                                int chunk) {
    const int64_t* row = table + int64_t(chunk_tensor[blockIdx.x]) * columns;
    int64_t begin = (int64_t(blockIdx.x) - row[1]) * chunk;
    return {row, begin, begin + chunk < row[0] ? begin + chunk : row[0]};
}

__device__ __forceinline__ bool vector_aligned(int64_t address) { return address % 16 == 0; }

// x = p[0..count), zeros after. `whole` promises eight elements at a 16-byte boundary.
template <typename T>
__device__ __forceinline__ void load_group(float (&x)[GROUP], const T* p, int count, bool whole) {
    constexpr int N = WIDTH<T>;
    if (whole) {
#pragma unroll
        for (int i = 0; i < GROUP; i += N) {
            auto vector = Vec<T, N>::load(p + i);
#pragma unroll
            for (int j = 0; j < N; ++j) x[i + j] = to_float(vector.data[j]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) x[j] = j < count ? to_float(p[j]) : 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void store_group(T* p, const float (&x)[GROUP], int count, bool whole) {
    constexpr int N = WIDTH<T>;
    if (whole) {
#pragma unroll
        for (int i = 0; i < GROUP; i += N) {
            Vec<T, N> vector;
#pragma unroll
            for (int j = 0; j < N; ++j) vector.data[j] = from_float<T>(x[i + j]);
            vector.store(p + i);
        }
    } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            if (j < count) p[j] = from_float<T>(x[j]);
    }
}

// Sum over a block of double values, known to all threads; block_sum of common.cuh in double.
__device__ __forceinline__ double block_sum_double(double value) {
    __shared__ double partial[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int mask = 16; mask > 0; mask /= 2) value += warp_shfl_xor(value, mask);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < warps ? partial[lane] : 0.0;
    for (int mask = 16; mask > 0; mask /= 2) value += warp_shfl_xor(value, mask);
    return value;
}
