// Values of a row in registers, and the accesses that bring them there.
#pragma once

#include "common.cuh"

// N consecutive values of T (N is 1, or a multiple of two). A 16-bit value by itself would take a whole
// register, so they stay packed in 32-bit words until they are computed with.
template <typename T, int N> struct Pack {
    static constexpr bool HALF = sizeof(T) == 2;
    static constexpr int WORDS = HALF ? (N + 1) / 2 : N;
    static constexpr int ACCESS = WORDS < 4 ? WORDS : 4;  // words of an access
    uint32_t word[WORDS];

    __device__ __forceinline__ float get(int j) const {
        if (!HALF) return __uint_as_float(word[j]);
        return __uint_as_float(j % 2 ? word[j / 2] & 0xffff0000u : word[j / 2] << 16);
    }
    // Rounds all N values to T.
    __device__ __forceinline__ void set(const float (&value)[N]) {
        for (int i = 0; i < WORDS; ++i) {
            if (HALF) word[i] = pack_bf16(value[2 * i], 2 * i + 1 < N ? value[(2 * i + 1) % N] : 0.0f);
            else word[i] = __float_as_uint(value[i]);
        }
    }
    __device__ __forceinline__ void clear() {
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
    }

    // The address must be aligned to the pack, or to 16 bytes if that is less.
    __device__ __forceinline__ void load(const T* __restrict__ p) {
        if constexpr (N == 1) {
            float value[N] = {to_float(*p)};
            set(value);
        } else {
            for (int i = 0; i < WORDS / ACCESS; ++i) {
                auto part = Vec<uint32_t, ACCESS>::load(reinterpret_cast<const uint32_t*>(p) + i * ACCESS);
                for (int k = 0; k < ACCESS; ++k) word[i * ACCESS + k] = part.data[k];
            }
        }
    }
    __device__ __forceinline__ void store(T* __restrict__ p) const {
        if constexpr (N == 1) {
            *p = from_float<T>(get(0));
        } else {
            for (int i = 0; i < WORDS / ACCESS; ++i) {
                Vec<uint32_t, ACCESS> part;
                for (int k = 0; k < ACCESS; ++k) part.data[k] = word[i * ACCESS + k];
                part.store(reinterpret_cast<uint32_t*>(p) + i * ACCESS);
            }
        }
    }

    // Columns column to column + N of a row; those past its end are read as zeros and not written.
    // ALIGNED: a pack lies all inside the row or all outside, at an address fit for load and store.
    template <bool ALIGNED> __device__ __forceinline__ void load_columns(const T* __restrict__ row, int column, int columns) {
        if (ALIGNED) {
            if (column < columns) load(row + column);
            else clear();
        } else {
            float value[N];
            for (int j = 0; j < N; ++j) value[j] = column + j < columns ? to_float(row[column + j]) : 0.0f;
            set(value);
        }
    }
    template <bool ALIGNED> __device__ __forceinline__ void store_columns(T* __restrict__ row, int column, int columns) const {
        if (ALIGNED) {
            if (column < columns) store(row + column);
        } else {
            for (int j = 0; j < N; ++j)
                if (column + j < columns) row[column + j] = from_float<T>(get(j));
        }
    }
};
