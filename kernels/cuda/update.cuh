// What every optimizer's kernel does with eight elements, or with N: loads and stores of any count, unbiased rounding, and
// parameters with and without a float32 master. kernels/rounding.py has the roles.
#pragma once
#include "multi_tensor.cuh"
#include "rounding.cuh"

static_assert(GROUP == ROUNDING_GROUP, "a thread's elements are the ones that share random bits");

enum { PARAM_ROLE, M_ROLE, V_ROLE };

// What decides the random bits of a tensor in one step.
struct Draw {
    uint32_t seed, step, tensor;
};
// scalars: adamw_scalars of kernels/adamw.py.
__device__ __forceinline__ Draw draw_of(const float* scalars, uint32_t tensor) {
    return {__float_as_uint(scalars[3]), __float_as_uint(scalars[4]), tensor};
}

template <typename T, int N>
__device__ __forceinline__ void load(Pack<T, N>& x, const T* p, int count, bool whole) {
    if (whole) x.load(p);
    else x.template load_columns<false>(p, 0, count);
}
template <typename T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& x, int count, bool whole) {
    if (whole) x.store(p);
    else x.template store_columns<false>(p, 0, count);
}
template <int N = GROUP, typename T> __device__ __forceinline__ void clear(T* p, int count, bool whole) {
    Pack<T, N> none;
    none.clear();
    store(p, none, count, whole);
}

// x rounded to T: bf16 at random (then N is GROUP), float as it is.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> round_unbiased(const float (&x)[N], int64_t element, uint32_t role,
                                                     const Draw& draw) {
    if constexpr (sizeof(T) == 2) {
        uint32_t words[4];
        random_words(words, element, draw.tensor, role, draw.seed, draw.step);
        return stochastic_round_group(x, words);
    } else {
        Pack<T, N> same;
        same.set(x);
        return same;
    }
}

// A parameter of type P and what it is updated in: a float32 master, or itself.
template <typename P, bool MASTERED> struct WideOf { using type = P; };
template <typename P> struct WideOf<P, true> { using type = float; };

template <typename P, bool MASTERED> struct Param {
    using Wide = typename WideOf<P, MASTERED>::type;
    P* narrow;
    Wide* wide;

    __device__ __forceinline__ Param(int64_t param, int64_t master)
        : narrow(reinterpret_cast<P*>(param)), wide(reinterpret_cast<Wide*>(MASTERED ? master : param)) {}

    // Elements i and on; `element` is the number of the first in the whole tensor.
    template <int N>
    __device__ __forceinline__ void store_at(int64_t i, const float (&p)[N], int count, bool whole, int64_t element,
                                             const Draw& draw) const {
        store(wide + i, round_unbiased<Wide>(p, element, PARAM_ROLE, draw), count, whole);
        if (MASTERED) {
            Pack<P, N> nearest;
            nearest.set(p);
            store(narrow + i, nearest, count, whole);
        }
    }
};
