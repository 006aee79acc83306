// Arrays of codes of one format, to and from float: eight elements a thread. Codes of four bits lie two in a byte.
#include "multi_tensor.cuh"
#include "quant.cuh"
#include "rounding.cuh"

template <typename F, typename T, bool STOCHASTIC>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    encode_codes(uint8_t* __restrict__ codes, const T* __restrict__ x, int64_t size, uint32_t seed, uint32_t step,
                 uint32_t tensor, uint32_t role, int64_t first) {
    int64_t begin = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * GROUP;
    if (begin >= size) return;
    int count = size - begin < GROUP ? int(size - begin) : GROUP;
    float value[GROUP];
    load_group(value, x + begin, count, false);
    uint32_t words[4];
    if (STOCHASTIC) random_words(words, first + begin, tensor, role, seed, step);
    uint32_t byte = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        uint32_t code;
        if constexpr (STOCHASTIC) code = encode_stochastic<F>(value[j], j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xFFFFu);
        else code = encode<F>(value[j]);
        if (j >= count) break;
        if constexpr (F::BITS == 8) {
            codes[begin + j] = uint8_t(code);
        } else {
            byte = (j % 2 ? byte : 0u) | code << nibble_shift<F>(j % 2);
            if (j % 2) codes[(begin + j) / 2] = uint8_t(byte);
        }
    }
}

template <typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    decode_codes(float* __restrict__ x, const uint8_t* __restrict__ codes, int64_t size) {
    int64_t begin = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * GROUP;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        int64_t i = begin + j;
        if (i >= size) break;
        uint32_t code = F::BITS == 8 ? codes[i] : codes[i / 2] >> nibble_shift<F>(j % 2) & 15u;
        x[i] = decode<F>(code);
    }
}
