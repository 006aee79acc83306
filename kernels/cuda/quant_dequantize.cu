// Quantised weights to bf16: code times the factor of its block, in float, rounded once.
//
// Memory bound, at 2.5 to 3 bytes an element, if it takes no more than a dozen instructions for one. A thread takes
// eight columns, which it writes as one 16-byte access next to its neighbour's, of ROWS rows, whose loads are all
// under way before the first is used. What is more than a multiplication (scales of scales) is done once for eight.
#include "stored.cuh"

constexpr int COLUMNS = 8, ROWS = 4;

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
    fill_table<Code>(values, thread);
    int across = ((columns - 1) >> block_columns) + 1;
    Scales source = {scales, second, table, offset, block_rows, block_columns, nested, across};
    uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * COLUMNS;
    uint32_t row = (blockIdx.x * blockDim.y + threadIdx.y) * ROWS;
    if (column >= columns || row >= rows) return;
    uint32_t element = row * columns + column, count = min(rows - row, uint32_t(ROWS));
    out += row * stride + column;
    if constexpr (WHOLE) {
        Codes<Code, COLUMNS> code[ROWS];
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
                out[i * stride + j] = from_float<bf16>(exact_mul(Codes<Code, COLUMNS>::value(codes, place, values), factor));
            }
    }
}
