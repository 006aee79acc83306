// Quantised weights to codes of E4M3 at one scale: decoded and rounded to bf16, as dequantize does, then cast as
// fp8_cast does, bit for bit, without the bf16 matrix between.
//
// At 1.5 to 2 bytes an element, memory leaves room for some ten instructions. Rows and columns are multiples of 16.
#include "fp8.cuh"
#include "stored.cuh"

// A factor below which no code's value (448 at most) leaves bf16's range.
constexpr float TAME = 0x1p118f;

// The E4M3 codes of N values times a factor.
template <int N>
__device__ __forceinline__ void recode(uint32_t (&code)[N / 4], float (&x)[N], float factor, float scale) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = exact_mul(x[j], factor);
    Pack<bf16, N> value;
    value.set(x);
    encode_all<E4M3, N>(code, value, scale, fabsf(factor) < TAME ? 0u : largest(value, 0u));
}

constexpr int WIDTH_OF_ROWS = 16, ROWS = 4;  // columns and rows that a thread takes

// The codes of the rows. All loads of a thread are under way before the first is used.
template <typename S>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    recode_rows(uint8_t* __restrict__ out,          // (rows, columns)
                const uint8_t* __restrict__ codes,  // (rows, columns), two elements a byte if they are of four bits
                const void* __restrict__ scales, const float* __restrict__ second, const float* __restrict__ table,
                const float* __restrict__ offset, const float* __restrict__ scale, int block_rows, int block_columns,
                int nested, uint32_t rows, uint32_t columns) {
    using Code = typename S::Code;
    constexpr int N = WIDTH_OF_ROWS, FACTORS = Code::BITS == 8 ? 2 : 1;  // blocks of 8-bit codes may be of 8 columns
    __shared__ float values[16];
    fill_table<Code>(values, threadIdx.y * blockDim.x + threadIdx.x);
    int across = ((columns - 1) >> block_columns) + 1;
    Scales source = {scales, second, table, offset, block_rows, block_columns, nested, across};
    uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    uint32_t row = (blockIdx.x * blockDim.y + threadIdx.y) * ROWS;
    if (column >= columns || row >= rows) return;
    uint32_t element = row * columns + column;
    float s = *scale;
    Codes<Code, N> code[ROWS];
    float factor[ROWS][FACTORS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        code[i].load(codes, element + i * columns);
#pragma unroll
        for (int k = 0; k < FACTORS; ++k) factor[i][k] = S::factor(source, element + i * columns + 8 * k, row + i, column + 8 * k);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float x[N];
        code[i].values(x, values);
        Vec<uint32_t, N / 4> result;
        if constexpr (FACTORS == 1) {
            recode<N>(result.data, x, factor[i][0], s);
        } else {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float half[8];
                uint32_t part[2];
#pragma unroll
                for (int j = 0; j < 8; ++j) half[j] = x[8 * k + j];
                recode<8>(part, half, factor[i][k], s);
                result.data[2 * k] = part[0], result.data[2 * k + 1] = part[1];
            }
        }
        result.store(reinterpret_cast<uint32_t*>(out + element + i * columns));
    }
}

constexpr int TILE = 128, PASSES = 2;  // rows and columns of a block; of four rows a thread

// Byte j of word i to byte i of word j.
__device__ __forceinline__ void turn(uint32_t (&w)[4]) {
    uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// The transposed codes. A thread takes eight columns of four rows, twice; words of four rows of a column wait in shared
// memory for those above and below. The word of rows 4 w and column 8 p + j lies at (16 j + p) * PITCH + place(w): the
// two rows and 16 columns of a warp in banks of their own.
template <typename S>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    recode_turned(uint8_t* __restrict__ out,          // (columns, rows), pitch apart
                  const uint8_t* __restrict__ codes,  // as recode_rows has them, and what follows
                  const void* __restrict__ scales, const float* __restrict__ second, const float* __restrict__ table,
                  const float* __restrict__ offset, const float* __restrict__ scale, int block_rows, int block_columns,
                  int nested, uint32_t rows, uint32_t columns, int64_t pitch) {
    using Code = typename S::Code;
    constexpr int PITCH = TILE / 4 + 1;
    __shared__ float values[16];
    __shared__ uint32_t tile[TILE * PITCH];
    fill_table<Code>(values, threadIdx.x);
    int across = ((columns - 1) >> block_columns) + 1;
    Scales source = {scales, second, table, offset, block_rows, block_columns, nested, across};
    uint32_t part = threadIdx.x % 16, group = threadIdx.x / 16;
    uint32_t first_row = blockIdx.x * TILE, first_column = blockIdx.y * TILE, column = first_column + part * 8;
    auto place = [](uint32_t word) { return word % 2 * 16 + word / 2; };
    float s = *scale;
    Codes<Code, 8> code[PASSES][4];
    float factor[PASSES][4];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t row = first_row + (pass * 16 + group) * 4 + i;
            if (row >= rows || column >= columns) continue;
            code[pass][i].load(codes, row * columns + column);
            factor[pass][i] = S::factor(source, row * columns + column, row, column);
        }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        uint32_t word = pass * 16 + group;
        if (first_row + word * 4 >= rows || column >= columns) continue;
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[8];
            uint32_t both[2];
            code[pass][i].values(x, values);
            recode<8>(both, x, factor[pass][i], s);
            low[i] = both[0], high[i] = both[1];
        }
        turn(low), turn(high);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            tile[(16 * j + part) * PITCH + place(word)] = low[j];
            tile[(16 * (j + 4) + part) * PITCH + place(word)] = high[j];
        }
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TILE / 32; ++turn) {
        uint32_t local = threadIdx.x / 8 + turn * 32, word = threadIdx.x % 8 * 4;
        uint32_t to = first_column + local, from = first_row + word * 4;
        if (to >= columns || from >= rows) continue;
        Vec<uint32_t, 4> result;
        for (int k = 0; k < 4; ++k) result.data[k] = tile[(local % 8 * 16 + local / 8) * PITCH + place(word + k)];
        result.store(reinterpret_cast<uint32_t*>(out + to * pitch + from));
    }
}
