// CUDA C++ as kernels/cuda writes it, for GCC: stands in for the first section of common.cuh.
#pragma once

#include "runtime.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static  // uninitialized statics are all that a library's .bss holds
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulator_thread_index())
#define blockIdx (emulator_block_index())
#define blockDim (emulator_block_dim())
#define gridDim (emulator_grid_dim())
#define warpSize 32

// Functions whose loads and stores are the emulator's own.
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

#define __syncthreads() emulator_barrier({__FILE__, __LINE__})
#define __threadfence() emulator_fence()
#define __threadfence_block() static_cast<void>(0)
#define __trap() emulator_fail("__trap (line %d)", __LINE__)
#define assert(condition) ((condition) ? void(0) : emulator_fail("assert(%s) (line %d)", #condition, __LINE__))
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emulator_dynamic_shared())

// 64-bit integers are long long, as on the card: overloads and template arguments depend on it.
typedef long long emulated_int64;
typedef unsigned long long emulated_uint64;
#define int64_t emulated_int64
#define uint64_t emulated_uint64

#include "numbers.cuh"
#include "warp.cuh"
#include "atomics.cuh"
#include "entry.cuh"
