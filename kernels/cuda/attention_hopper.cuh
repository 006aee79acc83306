// What the attention kernels for Hopper share: who works on what, and the exponents and masks of accumulators.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

constexpr int CONSUMERS = 2, GROUP_THREADS = 128, GROUP_WARPS = 4;  // warpgroups that compute, and their sizes
constexpr int BLOCK_THREADS = (CONSUMERS + 1) * GROUP_THREADS;
// Registers a thread: 65536 of a multiprocessor for one producer and two consumers.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// Work items: tiles of rows times heads, the last tiles of `section` heads first. What those heads read should
// stay in the L2 cache.
struct Items {
    int tiles, heads, section;
    __device__ __forceinline__ int count() const { return tiles * heads; }
    __device__ __forceinline__ int tile(int item) const { return tiles - 1 - item % (tiles * section) / section; }
    __device__ __forceinline__ int head(int item) const {
        return item / (tiles * section) * section + item % section;
    }
};

// The next item that no block has taken, for all lanes of a warp.
__device__ __forceinline__ int take_item(int* next) {
    return warp_shfl(threadIdx.x % 32 == 0 ? atomicAdd(next, 1) : 0, 0);
}

// The warp's lanes are done with something, as one arrival.
__device__ __forceinline__ void warp_arrive(Barrier* barrier) {
    warp_sync();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Loads rows [row, row + ROWS) of a head into a tile; lane 0 of the warp.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void load_tile(bf16* tile, const TensorMap* map, Barrier* full, int head, int row) {
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += 64) tma_load(tile + column * ROWS, map, full, column, head, row);
}
// Stores a tile of 64 rows; one thread.
template <int HEAD_DIM>
__device__ __forceinline__ void store_tile(const TensorMap* map, const bf16* tile, int head, int row) {
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += 64) tma_store(map, tile + column * 64, column, head, row);
    tma_store_commit();
}
