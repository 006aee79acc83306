// Rotation of pairs of columns of a head by angles of a table.
#pragma once

#include "pack.cuh"

// Where slot `slot` of a head keeps its two packs: a pair that is rotated (columns c and c + half), or two
// neighbours behind the rotary part. A head has head_dim / (2 * N) slots.
template <int N> struct Slot {
    int lo, hi;
    bool rotated;
    __device__ __forceinline__ Slot(int slot, int half) {
        rotated = slot * N < half;
        lo = rotated ? slot * N : 2 * slot * N;
        hi = rotated ? lo + half : lo + N;
    }
};

// (lo, hi) becomes (lo cos - hi sin, hi cos + lo sin), or its transpose for `sign` -1. Which product is fused
// with the sum is written out, so that all kernels give the same bits.
template <int N>
__device__ __forceinline__ void rotate(float (&lo)[N], float (&hi)[N], const Pack<float, N>& cos,
                                       const Pack<float, N>& sin, float sign) {
    for (int j = 0; j < N; ++j) {
        float s = sign * sin.get(j), c = cos.get(j), a = lo[j], b = hi[j];
        lo[j] = __fmaf_rn(a, c, -__fmul_rn(b, s));
        hi[j] = __fmaf_rn(b, c, __fmul_rn(a, s));
    }
}
