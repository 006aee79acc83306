// Quantised weights as a kernel reads them: codes of some neighbours, and the factor of each.
#pragma once
#include "quant.cuh"
#include "rounding.cuh"

// Where factors come from. Blocks are given by the binary logarithms of their sides; `nested` are those of scales.
struct Scales {
    const void* scales;
    const float* second;  // of the tensor; of blocks of scales
    const float* table;   // of codes of scales
    const float* offset;
    int block_rows, block_columns, nested, across;
};
template <typename T> __device__ __forceinline__ T scale(const Scales& s, uint32_t index) {
    return static_cast<const T*>(s.scales)[index];
}

// The factor of an element, which lies in `row` and `column`. Blocks of all but FP8 are of neighbouring elements.
struct FP8 {
    using Code = E4M3;
    static __device__ __forceinline__ float factor(const Scales& s, uint32_t, uint32_t row, uint32_t column) {
        return scale<float>(s, (row >> s.block_rows) * s.across + (column >> s.block_columns));
    }
};
struct NF4Plain {
    using Code = NF4;
    static __device__ __forceinline__ float factor(const Scales& s, uint32_t element, uint32_t, uint32_t) {
        return scale<float>(s, element >> s.block_columns);
    }
};
struct NF4Double {
    using Code = NF4;
    static __device__ __forceinline__ float factor(const Scales& s, uint32_t element, uint32_t, uint32_t) {
        uint32_t block = element >> s.block_columns;
        return exact_add(exact_mul(s.table[scale<uint8_t>(s, block)], s.second[block >> s.nested]), *s.offset);
    }
};
struct NVFP4 {
    using Code = E2M1;
    static __device__ __forceinline__ float factor(const Scales& s, uint32_t element, uint32_t, uint32_t) {
        return exact_mul(decode<E4M3>(scale<uint8_t>(s, element / 16)), *s.second);
    }
};
struct MXFP4 {
    using Code = E2M1;
    static __device__ __forceinline__ float factor(const Scales& s, uint32_t element, uint32_t, uint32_t) {
        return decode<E8M0>(scale<uint8_t>(s, element / 32));
    }
};

// The codes of N neighbours, a multiple of eight. `table` has the values of the codes of four bits.
template <typename F, int N, int BITS = F::BITS> struct Codes;
template <typename F, int N> struct Codes<F, N, 8> {
    Vec<uint32_t, N / 4> words;
    __device__ __forceinline__ void load(const uint8_t* codes, uint32_t element) {
        words = Vec<uint32_t, N / 4>::load(reinterpret_cast<const uint32_t*>(codes + element));
    }
    __device__ __forceinline__ void values(float (&x)[N], const float*) const {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            float part[4];
            decode_bytes(part, words.data[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[4 * i + j] = part[j];
        }
    }
    static __device__ __forceinline__ float value(const uint8_t* codes, uint32_t element, const float*) {
        return decode<F>(codes[element]);
    }
};
template <typename F, int N> struct Codes<F, N, 4> {
    Vec<uint32_t, N / 8> words;
    __device__ __forceinline__ void load(const uint8_t* codes, uint32_t element) {
        words = Vec<uint32_t, N / 8>::load(reinterpret_cast<const uint32_t*>(codes + element / 2));
    }
    __device__ __forceinline__ void values(float (&x)[N], const float* table) const {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = table[words.data[j / 8] >> nibble_shift<F>(j % 8) & 15u];
    }
    static __device__ __forceinline__ float value(const uint8_t* codes, uint32_t element, const float* table) {
        return table[codes[element / 2] >> nibble_shift<F>(element % 2) & 15u];
    }
};

// The values of the codes of four bits, in shared memory. Every thread of a block calls it.
template <typename F> __device__ __forceinline__ void fill_table(float (&values)[16], uint32_t thread) {
    if constexpr (F::BITS == 4) {
        if (thread < 16) values[thread] = decode<F>(thread);
        __syncthreads();
    }
}
