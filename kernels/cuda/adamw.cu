// AdamW over all tensors of one combination of dtypes, one block a chunk of a tensor.
//
// Every product and sum is rounded on its own and no thread adds to another's, so the result is the
// host version's to the bit. Formulas: kernels/adamw.py.
#include "multi_tensor.cuh"
#include "rounding.cuh"

static_assert(GROUP == ROUNDING_GROUP, "a thread's elements are the ones that share random bits");

// Columns of the table, as kernels/adamw.py writes them.
enum { SIZE, FIRST_CHUNK, PARAM, GRAD, M, V, MASTER, DECAY, TENSOR, FIRST_ELEMENT, COLUMNS };
enum { PARAM_ROLE, M_ROLE, V_ROLE };

// What one step knows before it sees an element.
struct Step {
    float grad_scale, lr_decay, step_size, inverse_root2;
    float beta1, grow1, beta2, grow2, epsilon;
    uint32_t seed, step;
    bool usual;  // epsilon and inverse_root2 are where adamw_group's shortcut is exact
};

template <typename T>
__device__ __forceinline__ void load(Pack<T, GROUP>& x, const T* p, int count, bool whole) {
    if (whole) x.load(p);
    else x.template load_columns<false>(p, 0, count);
}
template <typename T>
__device__ __forceinline__ void store(T* p, const Pack<T, GROUP>& x, int count, bool whole) {
    if (whole) x.store(p);
    else x.template store_columns<false>(p, 0, count);
}

// x rounded to T: bf16 at random, float as it is.
template <typename T>
__device__ __forceinline__ Pack<T, GROUP> round_unbiased(const float (&x)[GROUP], int64_t element, uint32_t tensor,
                                                         uint32_t role, const Step& s) {
    if constexpr (sizeof(T) == 2) {
        uint32_t words[4];
        random_words(words, element, tensor, role, s.seed, s.step);
        return stochastic_round_group(x, words);
    } else {
        Pack<T, GROUP> same;
        same.set(x);
        return same;
    }
}

// The type that a parameter of type P is updated in.
template <typename P, bool MASTERED> struct WideOf { using type = P; };
template <typename P> struct WideOf<P, true> { using type = float; };

// Where one tensor's arrays are.
template <typename P, typename G, typename S, bool MASTERED> struct Tensors {
    using Wide = typename WideOf<P, MASTERED>::type;
    P* param;
    Wide* wide;  // the master, or param
    G* grad;
    S *m, *v;
};

// Eight elements of a tensor's arrays.
template <typename P, typename G, typename S, bool MASTERED> struct Group {
    using All = Tensors<P, G, S, MASTERED>;
    Pack<typename All::Wide, GROUP> p;
    Pack<G, GROUP> g;
    Pack<S, GROUP> m, v;

    __device__ __forceinline__ void load_at(const All& from, int64_t i, int count, bool whole) {
        load(g, from.grad + i, count, whole);
        load(m, from.m + i, count, whole);
        load(v, from.v + i, count, whole);
        load(p, from.wide + i, count, whole);
    }
};

// Where all eight moments are well inside the range of float, divisions and roots need no branches; where all
// first moments are zero, as in rows of an embedding that no token has met, the quotients are those zeros.
__device__ __forceinline__ void adamw_group(float (&p)[GROUP], float (&m)[GROUP], float (&v)[GROUP],
                                            const float (&g)[GROUP], bool decay, const Step& s) {
    constexpr float LEAST_M = 5.42101086e-20f, LEAST_V = 7.88860905e-31f, MOST = 1.84467441e19f;  // 2^-64, 2^-100, 2^64
    float low_m = INFINITY, low_v = INFINITY, size_m = 0.0f, size_v = 0.0f, direction[GROUP];
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        float grad = exact_mul(g[j], s.grad_scale);
        m[j] = exact_add(exact_mul(s.beta1, m[j]), exact_mul(s.grow1, grad));
        v[j] = exact_add(exact_mul(s.beta2, v[j]), exact_mul(s.grow2, exact_mul(grad, grad)));
        low_m = fminf(low_m, fabsf(m[j])), low_v = fminf(low_v, v[j]);
        size_m += fabsf(m[j]), size_v += fabsf(v[j]);
    }
    if (s.usual && low_m >= LEAST_M && low_v >= LEAST_V && size_m <= MOST && size_v <= MOST) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            direction[j] = exact_div(m[j], exact_add(exact_mul(exact_sqrt(v[j]), s.inverse_root2), s.epsilon));
    } else {
        bool none = s.usual && s.epsilon > 0.0f && size_m == 0.0f && size_v <= MOST && low_v >= 0.0f;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            direction[j] = m[j];
            if (!none) direction[j] /= exact_add(exact_mul(sqrtf(v[j]), s.inverse_root2), s.epsilon);
        }
    }
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        if (decay) p[j] = exact_add(p[j], -exact_mul(s.lr_decay, p[j]));
        p[j] = exact_add(p[j], -exact_mul(s.step_size, direction[j]));
    }
}

// scalars: lr, 1 - beta1^t, 1 - beta2^t, then seed and t as integers' bits. norm: see grad_norm.cu; null
// stands for a scale of 1. grow1 and grow2 are 1 - beta, rounded once. Where a group is small, as with 16-bit
// moments, a thread loads the next one while it computes.
template <typename P, typename G, typename S, bool MASTERED>
__global__ void __launch_bounds__(LAUNCH_THREADS, 3)
    adamw_step(const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor,
               const float* __restrict__ scalars, const float* __restrict__ norm, int chunk, float beta1, float grow1,
               float beta2, float grow2, float epsilon, float weight_decay, bool zero_grad) {
    using Eight = Group<P, G, S, MASTERED>;
    using Wide = typename Eight::All::Wide;
    constexpr bool AHEAD = sizeof(Eight) <= 80;
    Chunk work = chunk_of_block(table, chunk_tensor, COLUMNS, chunk);
    const int64_t* row = work.row;
    typename Eight::All all = {reinterpret_cast<P*>(row[PARAM]),
                               reinterpret_cast<Wide*>(row[MASTERED ? MASTER : PARAM]),
                               reinterpret_cast<G*>(row[GRAD]), reinterpret_cast<S*>(row[M]),
                               reinterpret_cast<S*>(row[V])};
    bool decay = row[DECAY], apply = norm == nullptr || norm[2] != 0.0f;
    bool aligned = vector_aligned(row[PARAM] | row[GRAD] | row[M] | row[V] | row[MASTER]);
    uint32_t tensor = uint32_t(row[TENSOR]);
    int64_t first_element = row[FIRST_ELEMENT];

    Step s = {norm == nullptr ? 1.0f : norm[1], exact_mul(scalars[0], weight_decay), scalars[0] / scalars[1],
              1.0f / sqrtf(scalars[2]), beta1, grow1, beta2, grow2, epsilon, __float_as_uint(scalars[3]),
              __float_as_uint(scalars[4])};
    s.usual = epsilon <= 1.0f && s.inverse_root2 >= 1.0f && s.inverse_root2 <= 4096.0f;

    auto count_at = [&](int64_t i) { return work.end - i < GROUP ? int(work.end - i) : GROUP; };
    int step = blockDim.x * GROUP;
    int64_t i = work.begin + threadIdx.x * GROUP;
    Eight group;
    auto load_group_at = [&](int64_t at) {
        if (at < work.end) group.load_at(all, at, count_at(at), aligned && count_at(at) == GROUP);
    };
    if (AHEAD && apply) load_group_at(i);
    for (; i < work.end; i += step) {
        int count = count_at(i);
        bool whole = aligned && count == GROUP;
        if (apply) {
            if (!AHEAD) load_group_at(i);
            float p[GROUP], g[GROUP], m[GROUP], v[GROUP];
#pragma unroll
            for (int j = 0; j < GROUP; ++j)
                p[j] = group.p.get(j), g[j] = group.g.get(j), m[j] = group.m.get(j), v[j] = group.v.get(j);
            if (AHEAD) load_group_at(i + step);
            adamw_group(p, m, v, g, decay, s);
            int64_t element = first_element + i;
            store(all.m + i, round_unbiased<S>(m, element, tensor, M_ROLE, s), count, whole);
            store(all.v + i, round_unbiased<S>(v, element, tensor, V_ROLE, s), count, whole);
            store(all.wide + i, round_unbiased<Wide>(p, element, tensor, PARAM_ROLE, s), count, whole);
            if (MASTERED) {
                Pack<P, GROUP> nearest;
                nearest.set(p);
                store(all.param + i, nearest, count, whole);
            }
        }
        if (zero_grad) {
            Pack<G, GROUP> none;
            none.clear();
            store(all.grad + i, none, count, whole);
        }
    }
}
