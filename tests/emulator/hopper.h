// What kernels call for the instructions of Hopper (from emulated_hopper.cuh).
#pragma once

#include "runtime.h"

namespace emulator {

// A tensor [tokens, heads, columns] and the box that a copy takes of it, for a CUtensorMap. Written by the op.
struct TensorMap {
    uint64_t address;
    uint64_t sizes[3];    // columns, heads, tokens
    uint64_t strides[2];  // bytes from a head, a token, to the next
    uint64_t box[3];
    uint64_t item_size;
    uint64_t unused[6];
};
static_assert(sizeof(TensorMap) == 128, "as large as a CUtensorMap");

// One wgmma of a thread. `left` holds the thread's part of a when a_in_registers.
struct Product {
    float* d;
    int n;
    uint64_t a, b;
    uint32_t left[4];
    bool a_in_registers, a_columns, b_rows, add;
};

}  // namespace emulator

#pragma GCC visibility push(default)
extern "C" {
void emulator_mbarrier_init(void* barrier, int arrivals);
void emulator_mbarrier_arrive(void* barrier, int bytes);
void emulator_mbarrier_wait(void* barrier, uint32_t parity, emulator::Site site);
void emulator_named_barrier(int id, int threads, int wait, emulator::Site site);
void emulator_tma_load(void* panel, const emulator::TensorMap* map, void* barrier, int column, int head, int token);
void emulator_bulk_load(void* shared, const void* global, int bytes, void* barrier);
void emulator_wgmma_fence();
void emulator_wgmma(const emulator::Product* product);
void emulator_wgmma_commit();
void emulator_wgmma_wait(int newest_left, emulator::Site site);
}
#pragma GCC visibility pop
