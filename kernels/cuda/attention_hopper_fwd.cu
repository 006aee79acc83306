// Attention forward on Hopper: online softmax over tiles of keys, with warpgroups in roles as in FlashAttention-3
// (Shah et al. 2024, arXiv 2407.08608).
//
// A block stays on its multiprocessor and takes items (a tile of ROWS queries of a head) until none is left. One
// warp fetches: it takes the next item, finds the first key of each query, and keeps STAGES tiles of keys and of
// values on their way through TMA. Two warpgroups own 64 queries each. Step i of a warpgroup, with S the scores
// and O the output in registers:
//
//     issue S' = Q K_i^T;  issue O += P V_(i-1);  wait for S';  softmax of S' while O is computed;
//     wait for O;  scale O to the new maxima;  P = S' in bf16
//
// The two take turns to issue, so that one's softmax runs under the other's products. Keys are walked from the
// diagonal back, in tiles that end with the item's last query; only tiles that a query's range cuts are masked.
// Scores are kept unscaled; exponents are base 2 with the scale folded in.
//
// 4 KEYS ROWS HEAD_DIM operations move 4 KEYS HEAD_DIM bytes from the L2 cache: 128 operations a byte at 128 rows.
#include "attention_hopper.cuh"

template <int HEAD_DIM, int KEYS, int STAGES> struct ForwardShared {
    static constexpr int ROWS = CONSUMERS * 64;
    bf16 q[ROWS * HEAD_DIM], k[STAGES][KEYS * HEAD_DIM], v[STAGES][KEYS * HEAD_DIM];
    bf16 o[CONSUMERS][64 * HEAD_DIM];
    int low[2][ROWS], item[2];  // of the next items: the first key of each query
    Barrier item_full[2], item_empty[2], q_full, q_empty;
    Barrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];

    __device__ __forceinline__ void init() {
        constexpr int WARPS = CONSUMERS * GROUP_WARPS;
        for (int i = 0; i < 2; ++i) barrier_init(&item_full[i], 32), barrier_init(&item_empty[i], WARPS);
        barrier_init(&q_full, 1), barrier_init(&q_empty, WARPS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&k_full[i], 1), barrier_init(&k_empty[i], WARPS);
            barrier_init(&v_full[i], 1), barrier_init(&v_empty[i], WARPS);
        }
        barrier_init_fence();
    }
};

// Tiles of keys from the first that a query reads to the last query.
__device__ __forceinline__ int key_tiles(int end, int low, int keys) { return (end - low + keys - 1) / keys; }

template <int HEAD_DIM, int KEYS, int STAGES>
__device__ __forceinline__ void fetch(ForwardShared<HEAD_DIM, KEYS, STAGES>* s, Items items, int* next,
                                      const TensorMap* q, const TensorMap* k, const TensorMap* v, const int* start,
                                      int tokens, int group, int window) {
    constexpr int ROWS = ForwardShared<HEAD_DIM, KEYS, STAGES>::ROWS;
    int lane = threadIdx.x % 32;
    Turn<2> place;
    Turn<1> queries;
    Turn<STAGES> keys;
    while (true) {
        int item = take_item(next);
        bool any = item < items.count();
        int row = items.tile(item) * ROWS, head = items.head(item);
        int first = any ? first_key(start, row, window) : 0;
        barrier_wait(&s->item_empty[place.stage], place.parity ^ 1);
        if (any)
            for (int r = lane; r < ROWS; r += 32)
                shared_put(&s->low[place.stage][r], first_key(start, min(row + r, tokens - 1), window));
        shared_put(&s->item[place.stage], item);
        barrier_arrive(&s->item_full[place.stage]);
        place.next();
        if (!any) return;

        barrier_wait(&s->q_empty, queries.parity ^ 1);
        if (lane == 0) {
            barrier_arrive_expect(&s->q_full, sizeof s->q);
            load_tile<HEAD_DIM, ROWS>(s->q, q, &s->q_full, head, row);
        }
        queries.next();
        int key = row + ROWS - KEYS;
        for (int i = key_tiles(row + ROWS, first, KEYS); i > 0; --i, key -= KEYS, keys.next()) {
            barrier_wait(&s->k_empty[keys.stage], keys.parity ^ 1);
            if (lane == 0) {
                barrier_arrive_expect(&s->k_full[keys.stage], sizeof s->k[0]);
                load_tile<HEAD_DIM, KEYS>(s->k[keys.stage], k, &s->k_full[keys.stage], head / group, key);
            }
            barrier_wait(&s->v_empty[keys.stage], keys.parity ^ 1);
            if (lane == 0) {
                barrier_arrive_expect(&s->v_full[keys.stage], sizeof s->v[0]);
                load_tile<HEAD_DIM, KEYS>(s->v[keys.stage], v, &s->v_full[keys.stage], head / group, key);
            }
        }
    }
}

// The softmax state of a lane's two rows, `half` of 0 and 1.
struct Softmax {
    float top[2], sum[2];

    // Turns scores into weights, and says by what to multiply what was summed before.
    template <int N> __device__ __forceinline__ void step(float (&scores)[N][4], float (&decay)[2], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float highest = top[half];
#pragma unroll
            for (int n = 0; n < N; ++n)
                highest = fmaxf(highest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            highest = fmaxf(highest, warp_shfl_xor(highest, 1));
            highest = fmaxf(highest, warp_shfl_xor(highest, 2));
            float base = highest * scale_log2, partial = 0.0f;
            decay[half] = fast_exp2(top[half] * scale_log2 - base);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    scores[n][e] = fast_exp2(scores[n][e] * scale_log2 - base);
                    partial += scores[n][e];
                }
            top[half] = highest;
            sum[half] = sum[half] * decay[half] + partial;
        }
    }
};

// Hides the scores, against keys from `key` on, of what a lane's two queries do not read.
template <int N>
__device__ __forceinline__ void mask(float (&scores)[N][4], int key, int query, const int (&low)[2]) {
    key += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int j = key + 8 * n + e % 2;
            if (j > query + e / 2 * 8 || j < low[e / 2]) scores[n][e] = -INFINITY;
        }
}

template <int D> __device__ __forceinline__ void rescale(float (&out)[D][4], const float (&factor)[2]) {
#pragma unroll
    for (int d = 0; d < D; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[d][e] *= factor[e / 2];
}

// The turns of two warpgroups to issue products.
template <bool TURNS> struct Issue {
    int self;
    __device__ __forceinline__ void open() const {
        if (TURNS && self == 1) named_arrive(1, CONSUMERS * GROUP_THREADS);
    }
    __device__ __forceinline__ void wait() const {
        if (TURNS) named_sync(1 + self, CONSUMERS * GROUP_THREADS);
    }
    __device__ __forceinline__ void pass() const {
        if (TURNS) named_arrive(2 - self, CONSUMERS * GROUP_THREADS);
    }
};

template <int HEAD_DIM, int KEYS, int STAGES, bool TURNS>
__device__ __forceinline__ void compute(ForwardShared<HEAD_DIM, KEYS, STAGES>* s, Items items, float* lse,
                                        const TensorMap* o, const float* sinks, int tokens, float scale) {
    constexpr int ROWS = ForwardShared<HEAD_DIM, KEYS, STAGES>::ROWS;
    static_assert(KEYS >= ROWS, "the first tile of keys must hold a key that each query reads");
    int self = warp_index() / GROUP_WARPS - 1, lane = threadIdx.x % 32;
    int warp_row = warp_index() % GROUP_WARPS * 16 + lane / 4;  // in the warpgroup's 64
    Issue<TURNS> issue{self};
    Turn<2> place;
    Turn<1> queries;
    Turn<STAGES> keys, values;
    uint64_t q_tile = descriptor<ROWS>(s->q + self * 64 * 64);
    uint64_t k_tile = descriptor<KEYS>(s->k), v_tile = descriptor<KEYS>(s->v);
    constexpr int STAGE = KEYS * HEAD_DIM * 2 / 16;
    float scale_log2 = scale * LOG2E;
    issue.open();

    while (true) {
        barrier_wait(&s->item_full[place.stage], place.parity);
        int item = shared_get(&s->item[place.stage]);
        if (item >= items.count()) break;
        int end = (items.tile(item) + 1) * ROWS, head = items.head(item), row = end - ROWS + self * 64;
        const int* lows = s->low[place.stage];
        int low[2] = {shared_get(lows + self * 64 + warp_row), shared_get(lows + self * 64 + warp_row + 8)};
        int all = key_tiles(end, shared_get(lows), KEYS);  // tiles that the block reads; `mine`, that this warpgroup does
        int mine = key_tiles(end, shared_get(lows + self * 64), KEYS), last_low = shared_get(lows + self * 64 + 63);
        warp_arrive(&s->item_empty[place.stage]);
        place.next();

        float scores[KEYS / 8][4], out[HEAD_DIM / 8][4], decay[2];
        uint32_t weights[KEYS / 16][4];
        Softmax softmax;
        // A sink is a key without a value, read before all others.
        softmax.top[0] = softmax.top[1] = sinks ? sinks[head] / scale : -INFINITY;
        softmax.sum[0] = softmax.sum[1] = sinks && lane % 4 == 0 ? 1.0f : 0.0f;

        int key = end - KEYS;
        barrier_wait(&s->q_full, queries.parity);
        barrier_wait(&s->k_full[keys.stage], keys.parity);
        wgmma_fence();
        multiply_rows<HEAD_DIM, ROWS, KEYS>(scores, q_tile, k_tile + keys.stage * STAGE);
        wgmma_commit();
        wgmma_wait<0>();
        hold(scores);
        warp_arrive(&s->k_empty[keys.stage]);
        keys.next();
        mask(scores, key, row + warp_row, low);
        softmax.step(scores, decay, scale_log2);
        pack_left(weights, scores);
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[d][e] = 0.0f;

        for (int i = 1; i < mine; ++i) {
            key -= KEYS;
            barrier_wait(&s->k_full[keys.stage], keys.parity);
            issue.wait();
            wgmma_fence();
            multiply_rows<HEAD_DIM, ROWS, KEYS>(scores, q_tile, k_tile + keys.stage * STAGE);
            wgmma_commit();
            barrier_wait(&s->v_full[values.stage], values.parity);
            multiply_left<true>(out, weights, v_tile + values.stage * STAGE);
            wgmma_commit();
            issue.pass();
            wgmma_wait<1>();
            hold(scores);
            warp_arrive(&s->k_empty[keys.stage]);
            keys.next();
            if (key < last_low || key + KEYS - 1 > row) mask(scores, key, row + warp_row, low);
            softmax.step(scores, decay, scale_log2);
            wgmma_wait<0>();
            hold(out);
            warp_arrive(&s->v_empty[values.stage]);
            values.next();
            pack_left(weights, scores);
            rescale(out, decay);
        }
        warp_arrive(&s->q_empty);
        queries.next();
        barrier_wait(&s->v_full[values.stage], values.parity);
        wgmma_fence();
        multiply_left<true>(out, weights, v_tile + values.stage * STAGE);
        wgmma_commit();
        // Tiles that only the other warpgroup reads.
        for (int i = mine; i < all; ++i, keys.next()) {
            barrier_wait(&s->k_full[keys.stage], keys.parity);
            issue.wait();
            issue.pass();
            warp_arrive(&s->k_empty[keys.stage]);
        }
        wgmma_wait<0>();
        hold(out);
        warp_arrive(&s->v_empty[values.stage]);
        values.next();
        for (int i = mine; i < all; ++i, values.next()) {
            barrier_wait(&s->v_full[values.stage], values.parity);
            warp_arrive(&s->v_empty[values.stage]);
        }

        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = softmax.sum[half];
            total += warp_shfl_xor(total, 1);
            total += warp_shfl_xor(total, 2);
            inverse[half] = 1.0f / total;
            int query = row + warp_row + 8 * half;
            if (lane % 4 == 0 && query < tokens)
                lse[int64_t(head) * tokens + query] = softmax.top[half] * scale + logf(total);
        }
        rescale(out, inverse);
        bool leader = threadIdx.x % GROUP_THREADS == 0;
        if (leader) tma_store_wait();
        named_sync(3 + self, GROUP_THREADS);  // the previous output has left
        put_tile(s->o[self], out);
        async_fence();
        named_sync(3 + self, GROUP_THREADS);
        if (leader) store_tile<HEAD_DIM>(o, s->o[self], head, row);
    }
    if (threadIdx.x % GROUP_THREADS == 0) tma_store_wait();
}

template <int HEAD_DIM, int KEYS, int STAGES, bool TURNS>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    attention_hopper_fwd(float* __restrict__ lse,            // (heads, tokens), natural logarithm
                         int* __restrict__ next,             // zero: the first item that no block has taken
                         const GRID_CONSTANT TensorMap o,    // (tokens, heads, HEAD_DIM) in boxes of 64 rows
                         const GRID_CONSTANT TensorMap q,    // the same of ROWS
                         const GRID_CONSTANT TensorMap k,    // (tokens, kv_heads, HEAD_DIM) of KEYS
                         const GRID_CONSTANT TensorMap v,    // the same
                         const float* __restrict__ sinks,    // (heads,) or null
                         const int* __restrict__ start,      // (tokens,)
                         int tokens, int heads, int group, int section, int window, float scale) {
    typedef ForwardShared<HEAD_DIM, KEYS, STAGES> Shared;
    TILES_SHARED(Shared, s);
    if (threadIdx.x == 0) s->init();
    __syncthreads();
    Items items{(tokens + Shared::ROWS - 1) / Shared::ROWS, heads, section};
    if (warp_index() / GROUP_WARPS == 0) {
        registers_give<PRODUCER_REGISTERS>();
        if (warp_index() == 0) fetch(s, items, next, &q, &k, &v, start, tokens, group, window);
    } else {
        registers_take<CONSUMER_REGISTERS>();
        compute<HEAD_DIM, KEYS, STAGES, TURNS>(s, items, lse, &o, sinks, tokens, scale);
    }
}
