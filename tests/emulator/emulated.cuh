// CUDA C++ as kernels/cuda writes it, for a host compiler: what common.cuh defines for the card.
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
#define __shared__ static
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

#define EMULATOR_SITE emulator::Site{__FILE__, __LINE__}
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define __syncthreads() emulator_barrier(EMULATOR_SITE)
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emulator_dynamic_shared())

// 64-bit types are long long, as on the card.
typedef long long emulated_int64;
typedef unsigned long long emulated_uint64;
#define int64_t emulated_int64
#define uint64_t emulated_uint64

#include "numbers.cuh"
#include "warp.cuh"
#include "atomics.cuh"

__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true, EMULATOR_CALLER) {
    emulator_copy_async(shared, global, valid, {file, line});
}
__device__ __forceinline__ void cp_async_commit() { emulator_copy_commit(); }
template <int N> __device__ __forceinline__ void cp_async_wait() { emulator_copy_wait(N); }

#define __threadfence() emulator_fence()
#define __threadfence_block() emulator_fence()
#define __trap() emulator_fail("__trap")
#define assert(condition) ((condition) ? void(0) : emulator_fail("assert(%s), line %d", #condition, __LINE__))

namespace emulator {

// Reports a kernel's parameters and calls it from an array of pointers to its arguments.
template <typename... A> struct Entry {
    template <typename T> static constexpr char kind() {
        if (__is_same(T, bool)) return 'B';
        if (__is_same(T, bf16)) return 'b';
        if (__is_same(T, float) || __is_same(T, double)) return 'f';
        if (__is_enum(T) || std::is_integral<T>::value) return 'i';
        return 'o';
    }
    template <typename T> static constexpr Parameter describe(T**) { return {pointee<T>(), 1, !std::is_const<T>::value, kind<std::remove_const_t<T>>()}; }
    template <typename T> static constexpr Parameter describe(T*) { return {int(sizeof(T)), 0, 0, kind<std::remove_const_t<T>>()}; }
    template <typename T> static constexpr int pointee() {
        if constexpr (std::is_void<T>::value) return 0; else return int(sizeof(T));
    }
    static int describe_all(Parameter* out) {
        Parameter all[] = {describe(static_cast<A*>(nullptr))..., {}};
        for (size_t i = 0; i < sizeof...(A); ++i) out[i] = all[i];
        return int(sizeof...(A));
    }
    template <size_t... I> static void call(void (*kernel)(A...), void** a, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_const_t<A>*>(a[I])...);
    }
};
template <typename... A> void call(void (*kernel)(A...), void** a) {
    Entry<A...>::call(kernel, a, std::index_sequence_for<A...>());
}
template <typename... A> int describe(void (*)(A...), Parameter* out) { return Entry<A...>::describe_all(out); }

}  // namespace emulator
