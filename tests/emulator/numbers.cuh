// bf16, and the arithmetic functions of CUDA, each in the best rounding that the host has.
#pragma once

struct alignas(2) bf16 {
    uint16_t bits;
};

template <typename To, typename From> __device__ __forceinline__ To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
__device__ __forceinline__ uint32_t __float_as_uint(float x) { return emulated_bits<uint32_t>(x); }
__device__ __forceinline__ int __float_as_int(float x) { return emulated_bits<int>(x); }
__device__ __forceinline__ float __uint_as_float(uint32_t x) { return emulated_bits<float>(x); }
__device__ __forceinline__ float __int_as_float(int x) { return emulated_bits<float>(x); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
// To nearest, ties to even: the carry of the added half runs up to infinity by itself. NaN is 0x7fff on the card.
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    uint32_t bits = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    return from_float<bf16>(lo).bits | uint32_t(from_float<bf16>(hi).bits) << 16;
}

template <typename F> __device__ __forceinline__ uint32_t emulated_bf16x2(uint32_t x, uint32_t y, F combine) {
    return pack_bf16(combine(__uint_as_float(x << 16), __uint_as_float(y << 16)),
                     combine(__uint_as_float(x & 0xffff0000u), __uint_as_float(y & 0xffff0000u)));
}
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t x, uint32_t y) {
    return emulated_bf16x2(x, y, [](float a, float b) { return a != a ? a : b != b ? b : fmaxf(fabsf(a), fabsf(b)); });
}
__device__ __forceinline__ uint32_t min_bf16x2(uint32_t x, uint32_t y) {
    return emulated_bf16x2(x, y, [](float a, float b) { return fminf(a, b); });
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t x, uint32_t y) {
    return emulated_bf16x2(x, y, [](float a, float b) { return a * b; });
}
// In double the product is exact, and so is the sum where no operand is 2^29 times another: all that is asked for here.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t x, uint32_t y, uint32_t z) {
    auto one = [](uint32_t a, uint32_t b, uint32_t c) {
        return float(double(__uint_as_float(a)) * double(__uint_as_float(b)) + double(__uint_as_float(c)));
    };
    return pack_bf16(one(x << 16, y << 16, z << 16), one(x & 0xffff0000u, y & 0xffff0000u, z & 0xffff0000u));
}

// ex2.approx.ftz: subnormal inputs and results are zero.
__device__ __forceinline__ float fast_exp2(float x) {
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

__device__ __forceinline__ float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
__device__ __forceinline__ float fast_rsqrt(float x) { return rsqrtf(x); }
__device__ __forceinline__ float fast_reciprocal(float x) { return 1.0f / x; }
__device__ __forceinline__ float __expf(float x) { return expf(x); }
__device__ __forceinline__ float __exp2f(float x) { return exp2f(x); }
__device__ __forceinline__ float __exp10f(float x) { return float(pow(10.0, double(x))); }
__device__ __forceinline__ float exp10f(float x) { return float(pow(10.0, double(x))); }
__device__ __forceinline__ float __logf(float x) { return logf(x); }
__device__ __forceinline__ float __log2f(float x) { return log2f(x); }
__device__ __forceinline__ float __sinf(float x) { return sinf(x); }
__device__ __forceinline__ float __cosf(float x) { return cosf(x); }
__device__ __forceinline__ float __tanf(float x) { return tanf(x); }
__device__ __forceinline__ float __powf(float x, float y) { return powf(x, y); }
__device__ __forceinline__ void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
__device__ __forceinline__ float __fdividef(float x, float y) { return x / y; }
__device__ __forceinline__ float __fdiv_rn(float x, float y) { return x / y; }
__device__ __forceinline__ float __fmul_rn(float x, float y) { return x * y; }
__device__ __forceinline__ float __fadd_rn(float x, float y) { return x + y; }
__device__ __forceinline__ float __fsub_rn(float x, float y) { return x - y; }
__device__ __forceinline__ float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ float __fsqrt_rn(float x) { return sqrtf(x); }
__device__ __forceinline__ float __frcp_rn(float x) { return 1.0f / x; }
__device__ __forceinline__ float __frsqrt_rn(float x) { return rsqrtf(x); }
__device__ __forceinline__ float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// Conversions to integers saturate and take NaN to zero.
__device__ __forceinline__ int emulated_to_int(float x) {
    if (x != x) return 0;
    return x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : int(x);
}
__device__ __forceinline__ unsigned emulated_to_unsigned(float x) {
    return !(x > 0.0f) ? 0 : x >= 4294967296.0f ? 4294967295u : unsigned(x);
}
__device__ __forceinline__ int __float2int_rn(float x) { return emulated_to_int(rintf(x)); }
__device__ __forceinline__ int __float2int_rz(float x) { return emulated_to_int(x); }
__device__ __forceinline__ int __float2int_rd(float x) { return emulated_to_int(floorf(x)); }
__device__ __forceinline__ unsigned __float2uint_rn(float x) { return emulated_to_unsigned(rintf(x)); }
__device__ __forceinline__ unsigned __float2uint_rz(float x) { return emulated_to_unsigned(x); }
__device__ __forceinline__ float __int2float_rn(int x) { return float(x); }
__device__ __forceinline__ float __uint2float_rn(unsigned x) { return float(x); }

__device__ __forceinline__ uint32_t __umulhi(uint32_t x, uint32_t y) { return uint32_t(uint64_t(x) * y >> 32); }
__device__ __forceinline__ int __mulhi(int x, int y) { return int(int64_t(x) * y >> 32); }
__device__ __forceinline__ uint64_t __umul64hi(uint64_t x, uint64_t y) {
    return uint64_t(static_cast<unsigned __int128>(x) * y >> 64);
}
__device__ __forceinline__ int __popc(uint32_t x) { return __builtin_popcount(x); }
__device__ __forceinline__ int __popcll(uint64_t x) { return __builtin_popcountll(x); }
__device__ __forceinline__ int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
__device__ __forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__device__ __forceinline__ uint32_t __brev(uint32_t x) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
// Byte i of the result is the one of (y, x) that the digit i of `choice` names.
__device__ __forceinline__ uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t choice) {
    uint64_t both = uint64_t(y) << 32 | x;
    uint32_t chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= uint32_t(both >> 8 * (choice >> 4 * i & 7) & 0xff) << 8 * i;
    return chosen;
}
template <typename T> __device__ __forceinline__ T __ldg(const T* p) { return *p; }
template <typename T> __device__ __forceinline__ T __ldcs(const T* p) { return *p; }
template <typename T> __device__ __forceinline__ void __stcs(T* p, T value) { *p = value; }

#define EMULATED_MINMAX(type)                                                          \
    __device__ __forceinline__ type min(type x, type y) { return y < x ? y : x; }      \
    __device__ __forceinline__ type max(type x, type y) { return x < y ? y : x; }
EMULATED_MINMAX(int)
EMULATED_MINMAX(unsigned)
EMULATED_MINMAX(long)
EMULATED_MINMAX(unsigned long)
EMULATED_MINMAX(long long)
EMULATED_MINMAX(unsigned long long)
#undef EMULATED_MINMAX
// fmin and fmax: the number where one is NaN.
__device__ __forceinline__ float min(float x, float y) { return fminf(x, y); }
__device__ __forceinline__ float max(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double min(double x, double y) { return fmin(x, y); }
__device__ __forceinline__ double max(double x, double y) { return fmax(x, y); }
__device__ __forceinline__ unsigned min(int x, unsigned y) { return min(unsigned(x), y); }
__device__ __forceinline__ unsigned min(unsigned x, int y) { return min(x, unsigned(y)); }
__device__ __forceinline__ unsigned max(int x, unsigned y) { return max(unsigned(x), y); }
__device__ __forceinline__ unsigned max(unsigned x, int y) { return max(x, unsigned(y)); }

#define EMULATED_VECTORS(type, name, wide)                                                                   \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                 \
    struct name##3 { type x, y, z; };                                                                        \
    struct alignas(wide) name##4 { type x, y, z, w; };                                                       \
    __device__ __forceinline__ name##2 make_##name##2(type x, type y) { return {x, y}; }                     \
    __device__ __forceinline__ name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }          \
    __device__ __forceinline__ name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTORS(float, float, 16)
EMULATED_VECTORS(int, int, 16)
EMULATED_VECTORS(unsigned, uint, 16)
#undef EMULATED_VECTORS
