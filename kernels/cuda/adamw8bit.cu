// AdamW with 8-bit moments over all tensors of one combination of dtypes. A warp takes a block of 256 elements, eight
// a lane, so that a block's scale is one warp_max. Formulas, map and rules: kernels/adamw8bit.py.
#include "adamw.cuh"

constexpr int BLOCK = 32 * GROUP;  // elements that share a scale
constexpr uint32_t M_ZERO = 127;   // the signed code of zero
constexpr float LEAST_SCALE = 1.17549435e-38f, LARGEST = 3.40282347e38f;  // 2^-126, and of all floats

// Columns after those of adamw.cuh.
enum { M_SCALES = ADAMW_COLUMNS, V_SCALES, COLUMNS };

// As kernels/adamw8bit.py lays it out. bound[i] lies halfway between magnitudes i and i + 1. A cell is a stretch of
// floats with equal leading bits; start is the number of bounds below it, and it holds one bound at most.
struct Codebook {
    float m_value[256], v_value[256], m_bound[128], v_bound[256];
    uint8_t m_start[1536], v_start[3072];
};
constexpr int M_SHIFT = 17, V_SHIFT = 16;            // bits that a cell leaves open
constexpr uint32_t FIRST_CELL = 0x34000000u;         // 2^-23: there is no bound below

// The nearest magnitude to x, from 0 to about 1; of two at one distance, the lower.
template <int SHIFT>
__device__ __forceinline__ uint32_t nearest(float x, const float* bound, const uint8_t* start) {
    uint32_t bits = max(__float_as_uint(x), FIRST_CELL);
    uint32_t below = start[(bits - FIRST_CELL) >> SHIFT];
    return below + (x > bound[below]);
}

// Eight codes.
struct Codes {
    uint32_t word[2];

    __device__ __forceinline__ uint32_t get(int j) const { return word[j / 4] >> 8 * (j % 4) & 0xffu; }
    __device__ __forceinline__ void add(int j, uint32_t code) { word[j / 4] |= code << 8 * (j % 4); }
    __device__ __forceinline__ void load(const uint8_t* p, int count, bool whole, uint32_t none) {
        if (whole) {
            auto both = Vec<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(p));
            word[0] = both.data[0], word[1] = both.data[1];
        } else {
            word[0] = word[1] = 0;
            for (int j = 0; j < GROUP; ++j) add(j, j < count ? p[j] : none);
        }
    }
    __device__ __forceinline__ void store(uint8_t* p, int count, bool whole) const {
        if (whole) {
            Vec<uint32_t, 2> both = {{word[0], word[1]}};
            both.store(reinterpret_cast<uint32_t*>(p));
        } else {
            for (int j = 0; j < GROUP; ++j)
                if (j < count) p[j] = uint8_t(get(j));
        }
    }
};

// A block's scale from one lane's part of it, and what it is divided by. Where it would be subnormal, both are 0.
struct Scale {
    float value, inverse;
};
__device__ __forceinline__ Scale scale_of(const float (&x)[GROUP]) {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) most = fmaxf(most, fabsf(x[j]));
    most = warp_max(most);
    if (most < LEAST_SCALE) return {0.0f, 0.0f};
    return {most, 1.0f / most};
}

__device__ __forceinline__ void encode(Codes& m_codes, Codes& v_codes, const float (&m)[GROUP],
                                       const float (&v)[GROUP], float m_inverse, float v_inverse,
                                       const Codebook& book) {
    m_codes = {}, v_codes = {};
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        uint32_t size = nearest<M_SHIFT>(exact_mul(fabsf(m[j]), m_inverse), book.m_bound, book.m_start);
        if (m[j] != 0.0f) size = max(size, 1u);
        m_codes.add(j, m[j] < 0.0f ? M_ZERO - min(size, M_ZERO) : M_ZERO + size);
        uint32_t code = nearest<V_SHIFT>(exact_mul(v[j], v_inverse), book.v_bound, book.v_start);
        if (m[j] != 0.0f || v[j] != 0.0f) code = max(code, 1u);
        v_codes.add(j, code);
    }
}

// Eight elements of a tensor's arrays, and the scales of their block.
template <typename Wide, typename G> struct Group {
    Pack<Wide, GROUP> p;
    Pack<G, GROUP> g;
    Codes m, v;
    float m_scale, v_scale;
};

// Arguments: step_of in adamw.cuh. A chunk is a multiple of a block. As in adamw.cu, a small group is loaded ahead.
template <typename P, typename G, bool MASTERED>
__global__ void __launch_bounds__(LAUNCH_THREADS, 3)
    adamw8bit_step(const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor,
                   const uint32_t* __restrict__ codebook, const float* __restrict__ scalars,
                   const float* __restrict__ norm, int chunk, float beta1, float grow1, float beta2, float grow2,
                   float epsilon, float weight_decay, bool cautious, bool zero_grad) {
    __shared__ __align__(16) Codebook book;
    for (int i = threadIdx.x; i < int(sizeof(Codebook) / 4); i += blockDim.x)
        reinterpret_cast<uint32_t*>(&book)[i] = codebook[i];
    __syncthreads();

    Chunk work = chunk_of_block(table, chunk_tensor, COLUMNS, chunk);
    const int64_t* row = work.row;
    Param<P, MASTERED> param(row[PARAM], row[MASTER]);
    G* grads = reinterpret_cast<G*>(row[GRAD]);
    uint8_t *m_codes = reinterpret_cast<uint8_t*>(row[M]), *v_codes = reinterpret_cast<uint8_t*>(row[V]);
    float *m_scales = reinterpret_cast<float*>(row[M_SCALES]), *v_scales = reinterpret_cast<float*>(row[V_SCALES]);
    Group<typename Param<P, MASTERED>::Wide, G> group;
    constexpr bool AHEAD = sizeof(group) <= 80;
    bool decay = row[DECAY], apply = norm == nullptr || norm[2] != 0.0f;
    bool aligned = vector_aligned(row[PARAM] | row[GRAD] | row[M] | row[V] | row[MASTER]);
    Draw draw = draw_of(scalars, uint32_t(row[TENSOR]));
    int64_t first_element = row[FIRST_ELEMENT];
    Step s = step_of(scalars, norm, beta1, grow1, beta2, grow2, epsilon, weight_decay, cautious);

    int lane = threadIdx.x % 32, step = blockDim.x * GROUP;
    auto count_at = [&](int64_t i) { return i >= work.end ? 0 : work.end - i < GROUP ? int(work.end - i) : GROUP; };
    auto load_at = [&](auto& into, int64_t i) {
        int count = count_at(i);
        bool whole = aligned && count == GROUP;
        load(into.g, grads + i, count, whole);
        load(into.p, param.wide + i, count, whole);
        into.m.load(m_codes + i, count, whole, M_ZERO);
        into.v.load(v_codes + i, count, whole, 0);
        into.m_scale = m_scales[i / BLOCK], into.v_scale = v_scales[i / BLOCK];
    };
    auto decode = [&](float(&m)[GROUP], float(&v)[GROUP], const auto& from) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            m[j] = exact_mul(book.m_value[from.m.get(j)], from.m_scale);
            v[j] = exact_mul(book.v_value[from.v.get(j)], from.v_scale);
        }
    };

    int64_t block = work.begin + threadIdx.x / 32 * BLOCK;  // the same for all lanes
    if (AHEAD && apply && block < work.end) load_at(group, block + lane * GROUP);
    for (; block < work.end; block += step) {
        int64_t i = block + lane * GROUP;
        int count = count_at(i);
        bool whole = aligned && count == GROUP;
        if (apply) {
            if (!AHEAD) load_at(group, i);
            float p[GROUP], g[GROUP], m[GROUP], v[GROUP], total = 0.0f;
#pragma unroll
            for (int j = 0; j < GROUP; ++j) p[j] = group.p.get(j), g[j] = group.g.get(j);
            decode(m, v, group);
            if (AHEAD && block + step < work.end) load_at(group, i + step);
            adamw_group(p, m, v, g, decay, s);
#pragma unroll
            for (int j = 0; j < GROUP; ++j) total += v[j];
            if (!(total <= LARGEST)) {  // some gradient is too large, infinite or NaN: those elements stay
                decltype(group) old;
                float old_m[GROUP], old_v[GROUP];
                load_at(old, i);
                decode(old_m, old_v, old);
                for (int j = 0; j < GROUP; ++j)
                    if (!(v[j] <= LARGEST)) p[j] = old.p.get(j), m[j] = old_m[j], v[j] = old_v[j];
            }
            param.store_at(i, p, count, whole, first_element + i, draw);
            Scale m_scale = scale_of(m), v_scale = scale_of(v);
            Codes new_m, new_v;
            encode(new_m, new_v, m, v, m_scale.inverse, v_scale.inverse, book);
            new_m.store(m_codes + i, count, whole);
            new_v.store(v_codes + i, count, whole);
            if (lane == 0) m_scales[block / BLOCK] = m_scale.value, v_scales[block / BLOCK] = v_scale.value;
        }
        if (zero_grad) clear(grads + i, count, whole);
    }
}
