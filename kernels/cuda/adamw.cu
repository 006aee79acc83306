// AdamW over all tensors of one combination of dtypes, one block a chunk of a tensor. Formulas:
// kernels/adamw.py.
#include "adamw.cuh"

// Eight elements of a tensor's arrays, whose moments are of type S.
template <typename Wide, typename G, typename S> struct Group {
    Pack<Wide, GROUP> p;
    Pack<G, GROUP> g;
    Pack<S, GROUP> m, v;
};

// Where a group is small, as with 16-bit moments, a thread loads the next one while it computes. Arguments:
// step_of in adamw.cuh.
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
    Group<typename Param<P, MASTERED>::Wide, G, S> group;
    constexpr bool AHEAD = sizeof(group) <= 80;
    bool decay = row[DECAY], apply = norm == nullptr || norm[2] != 0.0f;
    bool aligned = vector_aligned(row[PARAM] | row[GRAD] | row[M] | row[V] | row[MASTER]);
    Draw draw = draw_of(scalars, uint32_t(row[TENSOR]));
    int64_t first_element = row[FIRST_ELEMENT];
    Step s = step_of(scalars, norm, beta1, grow1, beta2, grow2, epsilon, weight_decay, cautious);

    auto count_at = [&](int64_t i) { return work.end - i < GROUP ? int(work.end - i) : GROUP; };
    int step = blockDim.x * GROUP;
    int64_t i = work.begin + threadIdx.x * GROUP;
    auto load_group_at = [&](int64_t at) {
        if (at >= work.end) return;
        int count = count_at(at);
        bool whole = aligned && count == GROUP;
        load(group.g, grads + at, count, whole);
        load(group.m, first + at, count, whole);
        load(group.v, second + at, count, whole);
        load(group.p, param.wide + at, count, whole);
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
            store(first + i, round_unbiased<S>(m, element, M_ROLE, draw), count, whole);
            store(second + i, round_unbiased<S>(v, element, V_ROLE, draw), count, whole);
            param.store_at(i, p, count, whole, element, draw);
        }
        if (zero_grad) clear(grads + i, count, whole);
    }
}
