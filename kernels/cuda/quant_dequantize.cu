// Quantised weights to bf16: code times the factor of its block, in float, rounded once.
//
// Memory bound, at 2.5 to 3 bytes an element, if it takes no more than a dozen instructions for one. A thread takes
// eight columns, which it writes as one 16-byte access next to its neighbour's, of ROWS rows, whose loads are all
// under way before the first is used. What is more than a multiplication (scales of scales) is done once for eight.
#include "quant.cuh"
#include "rounding.cuh"

constexpr int COLUMNS = 8, ROWS = 4;

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

// Eight neighbours' codes. `table` has the values of the codes of four bits.
template <typename F, int BITS = F::BITS> struct Codes;
template <typename F> struct Codes<F, 8> {
    Vec<uint32_t, 2> words;
    __device__ __forceinline__ void load(const uint8_t* codes, uint32_t element) {
        words = Vec<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(codes + element));
    }
    __device__ __forceinline__ void values(float (&x)[COLUMNS], const float*) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float part[4];
            decode_bytes(part, words.data[half]);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[4 * half + j] = part[j];
        }
    }
    static __device__ __forceinline__ float value(const uint8_t* codes, uint32_t element, const float*) {
        return decode<F>(codes[element]);
    }
};
template <typename F> struct Codes<F, 4> {
    uint32_t word;
    __device__ __forceinline__ void load(const uint8_t* codes, uint32_t element) {
        word = *reinterpret_cast<const uint32_t*>(codes + element / 2);
    }
    __device__ __forceinline__ void values(float (&x)[COLUMNS], const float* table) const {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) x[j] = table[word >> nibble_shift<F>(j) & 15u];
    }
    static __device__ __forceinline__ float value(const uint8_t* codes, uint32_t element, const float* table) {
        return table[codes[element / 2] >> nibble_shift<F>(element % 2) & 15u];
    }
};

// WHOLE: columns are a multiple of eight, and rows of `out` begin at multiples of 16 bytes.
template <typename S, bool WHOLE>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    dequantize(bf16* __restrict__ out,             // (rows, columns), stride apart
               const uint8_t* __restrict__ codes,  // (rows, columns), two elements a byte if they are of four bits
               const void* __restrict__ scales, const float* __restrict__ second, const float* __restrict__ table,
               const float* __restrict__ offset, int block_rows, int block_columns, int nested, int64_t stride,
               uint32_t rows, uint32_t columns) {
    using Code = typename S::Code;
    __shared__ float values[16];
    uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x;
    if constexpr (Code::BITS == 4) {
        if (thread < 16) values[thread] = decode<Code>(thread);
        __syncthreads();
    }
    int across = ((columns - 1) >> block_columns) + 1;
    Scales source = {scales, second, table, offset, block_rows, block_columns, nested, across};
    uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * COLUMNS;
    uint32_t row = (blockIdx.x * blockDim.y + threadIdx.y) * ROWS;
    if (column >= columns || row >= rows) return;
    uint32_t element = row * columns + column, count = min(rows - row, uint32_t(ROWS));
    out += row * stride + column;
    if constexpr (WHOLE) {
        Codes<Code> code[ROWS];
        float factor[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            uint32_t place = i < count ? element + i * columns : element;
            code[i].load(codes, place);
            factor[i] = S::factor(source, place, row + i, column);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float x[COLUMNS];
            code[i].values(x, values);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) x[j] = exact_mul(x[j], factor[i]);
            Pack<bf16, COLUMNS> result;
            result.set(x);
            if (i < count) result.store(out + i * stride);
        }
    } else {
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < COLUMNS && column + j < columns; ++j) {
                uint32_t place = element + i * columns + j;
                float factor = S::factor(source, place, row + i, column + j);
                out[i * stride + j] = from_float<bf16>(exact_mul(Codes<Code>::value(codes, place, values), factor));
            }
    }
}
