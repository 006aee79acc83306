// Quantised weights to codes of E4M3 at one scale: decoded and rounded to bf16, as dequantize does, then cast as
// fp8_cast does, bit for bit, without the bf16 matrix between.
//
// At 1.5 to 2 bytes an element, memory leaves room for some ten instructions. A block of 4-bit codes has few results:
// they are computed once, as a table of bytes in registers, from which a byte permutation takes four at a time. Rows
// and columns are multiples of 16.
#include "fp8.cuh"
#include "stored.cuh"

constexpr int EACH = 16, ROWS = 4;  // columns and rows of a thread
constexpr int TILE = 128;           // rows and columns of a block of threads
constexpr int PARTS = TILE / EACH;
constexpr int SHARING = 4;  // neighbouring lanes, of 64 columns, that share a table of NF4

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

using Result = Vec<uint32_t, EACH / 4>;
template <typename Code> using Words = Vec<uint32_t, EACH * Code::BITS / 32>;

// What each code of NF4 becomes, by its number.
__device__ __forceinline__ void table_of(uint32_t (&table)[4], float factor, float scale) {
    float x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) x[j] = NF4_VALUES[j];
    recode<16>(table, x, factor, scale);
}
// The first element is in the high half of a byte: halves change places. A byte of each half of the table is taken by
// the lower three bits of a code, and one of the two by the fourth.
__device__ __forceinline__ Result look_up(const Words<NF4>& words, const uint32_t (&table)[4]) {
    Result result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t word = (words.data[i] << 4 & 0xF0F0F0F0u) | (words.data[i] >> 4 & 0x0F0F0F0Fu);
        uint32_t lower = word & 0x77777777u, fourth = (word >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t small = __byte_perm(table[0], table[1], lower >> 16 * half);
            uint32_t large = __byte_perm(table[2], table[3], lower >> 16 * half);
            result.data[2 * i + half] = __byte_perm(small, large, fourth >> 16 * half);
        }
    }
    return result;
}

// Codes of E2M1 by what magnitudes become, to which signs are added. Not so of what is not finite: NaN has no sign.
__device__ __forceinline__ Result recode_e2m1(const Words<E2M1>& words, float factor, float scale) {
    Result result;
    if (fabsf(factor) < TAME) {
        float x[8];
        uint32_t table[2];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = decode<E2M1>(j);
        recode<8>(table, x, factor, scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t word = words.data[i], lower = word & 0x77777777u, low = word << 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t sign = __byte_perm(low, word, half ? 0x7362 : 0x5140) & 0x80808080u;
                result.data[2 * i + half] = __byte_perm(table[0], table[1], lower >> 16 * half) ^ sign;
            }
        }
        return result;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float x[8];
        uint32_t codes[2];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = decode<E2M1>(words.data[i] >> 4 * j & 15u);
        recode<8>(codes, x, factor, scale);
        result.data[2 * i] = codes[0], result.data[2 * i + 1] = codes[1];
    }
    return result;
}

// `factor` are those of both halves.
__device__ __forceinline__ Result recode_e4m3(const Words<E4M3>& words, const float (&factor)[2], float scale) {
    Result result;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float x[8];
        uint32_t codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float part[4];
            decode_bytes(part, words.data[2 * k + i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[4 * i + j] = part[j];
        }
        recode<8>(codes, x, factor[k], scale);
        result.data[2 * k] = codes[0], result.data[2 * k + 1] = codes[1];
    }
    return result;
}

// The codes of sixteen neighbours in each of a thread's rows, from `element` on, which lies in `row` and `column`. All
// loads are under way before the first is used. SHARE: 64 columns of a row lie in one block of NF4, and a lane has the
// table of one row of four.
template <typename S, bool SHARE>
__device__ __forceinline__ void recode_group(Result (&result)[ROWS], const Scales& source, const uint8_t* codes,
                                             uint32_t row, uint32_t column, uint32_t columns, float scale) {
    using Code = typename S::Code;
    uint32_t element = row * columns + column;
    Words<Code> words[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        words[i] = Words<Code>::load(
            reinterpret_cast<const uint32_t*>(codes + (element + i * columns) / (8 / Code::BITS)));
    if constexpr (SHARE) {
        uint32_t lane = threadIdx.x % 32, mine = lane % SHARING, own[4];
        table_of(own, S::factor(source, element + mine * columns, row + mine, column), scale);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            uint32_t table[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) table[k] = warp_shfl(own[k], int(lane - mine) + i);
            result[i] = look_up(words[i], table);
        }
    } else {
        float factor[ROWS][2];  // blocks of 8-bit codes may be of eight columns
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            factor[i][0] = factor[i][1] = S::factor(source, element + i * columns, row + i, column);
            if (Code::BITS == 8 && source.block_columns < 4)
                factor[i][1] = S::factor(source, element + i * columns + 8, row + i, column + 8);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if constexpr (Code::BITS == 8) {
                result[i] = recode_e4m3(words[i], factor[i], scale);
            } else if constexpr (HIGH_FIRST<Code>) {
                uint32_t table[4];
                table_of(table, factor[i][0], scale);
                result[i] = look_up(words[i], table);
            } else {
                result[i] = recode_e2m1(words[i], factor[i][0], scale);
            }
        }
    }
}

// Byte j of word i to byte i of word j.
__device__ __forceinline__ void turn(uint32_t (&w)[4]) {
    uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// TURNED: the transposed codes. Words of four rows of a column wait in shared memory for those above and below. A
// column has 32 of them, turned round by four for each sixteen columns: what a warp writes at a time lies in banks of
// its own, and so does what eight lanes read.
template <typename S, bool SHARE, bool TURNED>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    recode(uint8_t* __restrict__ out,          // (rows, columns) or (columns, rows), pitch apart
           const uint8_t* __restrict__ codes,  // (rows, columns), two elements a byte if they are of four bits
           const void* __restrict__ scales, const float* __restrict__ second, const float* __restrict__ table,
           const float* __restrict__ offset, const float* __restrict__ scale, int block_rows, int block_columns,
           int nested, uint32_t rows, uint32_t columns, int64_t pitch) {
    int across = ((columns - 1) >> block_columns) + 1;
    Scales source = {scales, second, table, offset, block_rows, block_columns, nested, across};
    uint32_t part = threadIdx.x % PARTS, group = threadIdx.x / PARTS;
    uint32_t first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    uint32_t row = first_row + group * ROWS, column = first_column + part * EACH;
    bool inside = row < rows && column < columns;  // others keep a lane's neighbours company
    Result result[ROWS];
    recode_group<S, SHARE>(result, source, codes, row < rows ? row : 0u,
                           column < columns ? column : SHARE ? part % SHARING * EACH : 0u, columns, *scale);
    if constexpr (!TURNED) {
        if (!inside) return;
        out += row * pitch + column;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) result[i].store(reinterpret_cast<uint32_t*>(out + i * pitch));
    } else {
        constexpr uint32_t WORDS = TILE / ROWS, TOGETHER = LAUNCH_THREADS / PARTS;  // columns written at a time
        __shared__ __align__(16) uint32_t tile[TILE * WORDS];
        uint32_t* mine = tile + part * EACH * WORDS + (group + part * 4) % WORDS;
#pragma unroll
        for (int k = 0; k < EACH / 4; ++k) {
            uint32_t square[4] = {result[0].data[k], result[1].data[k], result[2].data[k], result[3].data[k]};
            turn(square);
#pragma unroll
            for (int j = 0; j < 4; ++j) mine[(4 * k + j) * WORDS] = square[j];
        }
        __syncthreads();
        uint32_t local = threadIdx.x / PARTS, word = threadIdx.x % PARTS * 4, from = first_row + word * ROWS;
        if (from >= rows) return;
        out += (first_column + local) * pitch + from;
#pragma unroll
        for (uint32_t i = 0; i < TILE; i += TOGETHER) {
            if (first_column + local + i >= columns) return;
            uint32_t place = (local + i) * WORDS + (word + local / EACH * 4 + i / EACH * 4) % WORDS;
            Result::load(tile + place).store(reinterpret_cast<uint32_t*>(out + i * pitch));
        }
    }
}
