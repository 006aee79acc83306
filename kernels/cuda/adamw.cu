// AdamW over all tensors of one combination of dtypes, one block a chunk of a tensor. Formulas:
// kernels/adamw.py.
#include "adamw.cuh"

// N elements of a tensor's arrays, whose moments are of type S.
template <typename Wide, typename G, typename S, int N> struct Group {
    Pack<Wide, N> p;
    Pack<G, N> g;
    Pack<S, N> m, v;
};

// What is rounded at random goes by the eight elements that share random bits, else an access of float has them
// all: its neighbours are then those of the next thread. Where a group is small, a thread loads the next one while
// it computes. Arguments: step_of in adamw.cuh.
template <typename P, typename G, typename S, bool MASTERED>
__global__ void __launch_bounds__(LAUNCH_THREADS, 3)
    adamw_step(const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor,
               const float* __restrict__ scalars, const float* __restrict__ norm, int chunk, float beta1, float grow1,
               float beta2, float grow2, float epsilon, float weight_decay, bool cautious, bool zero_grad) {
    Chunk work = chunk_of_block(table, chunk_tensor, ADAMW_COLUMNS, chunk);
    const int64_t* row = work.row;
    Param<P, MASTERED> param(row[PARAM], row[MASTER]);
    G* grads = reinterpret_cast<G*>(row[GRAD]);
    S *first = reinterpret_cast<S*>(row[M]), *second = reinterpret_cast<S*>(row[V]);
    using Wide = typename Param<P, MASTERED>::Wide;
    constexpr int N = sizeof(Wide) == 4 && sizeof(S) == 4 ? WIDTH<float> : GROUP;
    Group<Wide, G, S, N> group;
    constexpr bool AHEAD = sizeof(group) <= 80;
    bool decay = row[DECAY], apply = norm == nullptr || norm[2] != 0.0f;
    bool aligned = vector_aligned(row[PARAM] | row[GRAD] | row[M] | row[V] | row[MASTER]);
    Draw draw = draw_of(scalars, uint32_t(row[TENSOR]));
    int64_t first_element = row[FIRST_ELEMENT];
    Step s = step_of(scalars, norm, beta1, grow1, beta2, grow2, epsilon, weight_decay, cautious);

    auto count_at = [&](int64_t i) { return work.end - i < N ? int(work.end - i) : N; };
    int step = blockDim.x * N;
    int64_t i = work.begin + threadIdx.x * N;
    auto load_group_at = [&](int64_t at) {
        if (at >= work.end) return;
        int count = count_at(at);
        bool whole = aligned && count == N;
        load(group.g, grads + at, count, whole);
        load(group.m, first + at, count, whole);
        load(group.v, second + at, count, whole);
        load(group.p, param.wide + at, count, whole);
    };
    if (AHEAD && apply) load_group_at(i);
    for (; i < work.end; i += step) {
        int count = count_at(i);
        bool whole = aligned && count == N;
        if (apply) {
            if (!AHEAD) load_group_at(i);
            float p[N], g[N], m[N], v[N];
#pragma unroll
            for (int j = 0; j < N; ++j)
                p[j] = group.p.get(j), g[j] = group.g.get(j), m[j] = group.m.get(j), v[j] = group.v.get(j);
            if (AHEAD) load_group_at(i + step);
            adamw_group(p, m, v, g, decay, s);
            int64_t element = first_element + i;
            store(first + i, round_unbiased<S>(m, element, M_ROLE, draw), count, whole);
            store(second + i, round_unbiased<S>(v, element, V_ROLE, draw), count, whole);
            param.store_at(i, p, count, whole, element, draw);
        }
        if (zero_grad) clear<N>(grads + i, count, whole);
    }
}
