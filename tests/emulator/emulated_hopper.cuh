// Stands in for the first section of hopper.cuh. What runs in the background on the card happens here as late as
// it may: a copy when somebody waits for its barrier, a product when its warpgroup waits for it. Until then the
// destination is NaN.
#pragma once

#include "hopper.h"

typedef emulator::TensorMap TensorMap;
typedef uint64_t Barrier;
#define GRID_CONSTANT
#define TILES_SHARED(type, name) DYNAMIC_SHARED(type, name)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return uint32_t(static_cast<const char*>(p) - static_cast<const char*>(emulator_dynamic_shared()));
}

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
    emulator_mbarrier_init(barrier, arrivals);
}
__device__ __forceinline__ void barrier_init_fence() {}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) { emulator_mbarrier_arrive(barrier, 0); }
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
    emulator_mbarrier_arrive(barrier, bytes);
}
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity, EMULATOR_CALLER) {
    emulator_mbarrier_wait(barrier, parity, {file, line});
}
__device__ __forceinline__ void named_sync(int id, int threads, EMULATOR_CALLER) {
    emulator_named_barrier(id, threads, true, {file, line});
}
__device__ __forceinline__ void named_arrive(int id, int threads, EMULATOR_CALLER) {
    emulator_named_barrier(id, threads, false, {file, line});
}

// Not looked at for races: the emulator's clock knows barriers of the whole block only.
EMULATOR_UNCHECKED inline void shared_put(int* p, int value) { *p = value; }
EMULATOR_UNCHECKED inline int shared_get(const int* p) { return *p; }

__device__ __forceinline__ void tma_load(void* panel, const TensorMap* map, Barrier* barrier, int column, int head,
                                         int token) {
    emulator_tma_load(panel, map, barrier, column, head, token);
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, Barrier* barrier) {
    emulator_bulk_load(shared, global, bytes, barrier);
}

template <int REGISTERS> __device__ __forceinline__ void registers_give() {}
template <int REGISTERS> __device__ __forceinline__ void registers_take() {}

__device__ __forceinline__ void wgmma_fence() { emulator_wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulator_wgmma_commit(); }
template <int N> __device__ __forceinline__ void wgmma_wait(EMULATOR_CALLER) { emulator_wgmma_wait(N, {file, line}); }
template <int N> __device__ __forceinline__ void hold(float (&)[N][4]) {}

template <bool A_COLUMNS, bool B_ROWS, bool ADD, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], uint64_t a, uint64_t b) {
    emulator::Product product = {&d[0][0], 8 * N, a, b, {}, false, A_COLUMNS, B_ROWS, ADD};
    emulator_wgmma(&product);
}
template <bool B_ROWS, bool ADD, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::Product product = {&d[0][0], 8 * N, 0, b, {a[0], a[1], a[2], a[3]}, true, false, B_ROWS, ADD};
    emulator_wgmma(&product);
}
