// Attention forward on Hopper: online softmax over tiles of keys, with warpgroups in roles as in FlashAttention-3
// (Shah et al. 2024, arXiv 2407.08608).
//
// Step i of a computing warpgroup, with S the scores and O the output of its 64 queries in registers:
//
//     issue S' = Q K_i^T;  issue O += P V_(i-1);  wait for S';  softmax of S' while O is computed;
//     wait for O;  scale O to the new maxima;  P = S' in bf16
//
// The two warpgroups take turns to issue, so that one's softmax runs under the other's products. Keys are walked
// from the diagonal back; only tiles that a query's range cuts are masked. Scores are kept unscaled; exponents are
// base 2 with the scale folded in.
//
// 4 KEYS TILE HEAD_DIM operations move 4 KEYS HEAD_DIM bytes from the L2 cache: 128 operations a byte.
#include "attention_hopper.cuh"

// The softmax state of a lane's two rows.
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
    // The sums over the four lanes of each row.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += warp_shfl_xor(sum[half], 1);
            sum[half] += warp_shfl_xor(sum[half], 2);
        }
    }
};

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
__device__ __forceinline__ void compute(Walk<HEAD_DIM, KEYS, STAGES, STAGES, 1>* s, Items todo, bf16* o, float* lse,
                                        const float* sinks, int tokens, float scale) {
    int self = warp_index() / GROUP_WARPS - 1;
    Issue<TURNS> issue{self};
    Turn<2> turn;
    Turn<1> query_turn;
    Turn<STAGES> k_turn, v_turn;
    typename Walk<HEAD_DIM, KEYS, STAGES, STAGES, 1>::Queries q;
    uint64_t q_tile = descriptor<TILE>(s->queries[0]) + row_step(self * 4);
    uint64_t k_tile = descriptor<KEYS>(s->k), v_tile = descriptor<KEYS>(s->v);
    constexpr int STAGE = KEYS * HEAD_DIM * 2 / 16;
    float scale_log2 = scale * LOG2E;
    issue.open();

    while (s->get(turn, todo, self, q)) {
        float scores[KEYS / 8][4], out[HEAD_DIM / 8][4], decay[2];
        uint32_t weights[KEYS / 16][4];
        // A sink is a key without a value, read before all others.
        float sink = sinks ? sinks[q.head] / scale : -INFINITY, count = sinks && threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
        Softmax softmax{{sink, sink}, {count, count}};
        clear(out);

        s->query_ring.wait_full(query_turn);
        s->k_ring.wait_full(k_turn);
        wgmma_fence();
        multiply_rows<HEAD_DIM, TILE, KEYS>(scores, q_tile, k_tile + k_turn.stage * STAGE);
        wgmma_commit();
        wgmma_wait<0>();
        hold(scores);
        s->k_ring.release(k_turn);
        q.mask(scores, q.key);
        softmax.step(scores, decay, scale_log2);
        pack_left(weights, scores);

        int key = q.key - KEYS;
        if (q.mine > 1) s->k_ring.wait_full(k_turn);
        for (int i = 1; i < q.mine; ++i, key -= KEYS) {
            issue.wait();
            wgmma_fence();
            multiply_rows<HEAD_DIM, TILE, KEYS>(scores, q_tile, k_tile + k_turn.stage * STAGE);
            wgmma_commit();
            s->v_ring.wait_full(v_turn);
            multiply_left<true>(out, weights, v_tile + v_turn.stage * STAGE);
            wgmma_commit();
            issue.pass();
            wgmma_wait<1>();
            hold(scores);
            s->k_ring.release(k_turn);
            if (!q.reads_all(key)) q.mask(scores, key);
            softmax.step(scores, decay, scale_log2);
            // Waited for here: the compiler would move the next wait up before the softmax, but not over a loop.
            if (i + 1 < q.mine) s->k_ring.wait_full(k_turn);
            wgmma_wait<0>();
            hold(out);
            s->v_ring.release(v_turn);
            pack_left(weights, scores);
            rescale(out, decay);
        }
        s->query_ring.release(query_turn);
        s->v_ring.wait_full(v_turn);
        wgmma_fence();
        multiply_left<true>(out, weights, v_tile + v_turn.stage * STAGE);
        wgmma_commit();
        wgmma_wait<0>();
        hold(out);
        s->v_ring.release(v_turn);
        for (int i = q.mine; i < q.all; ++i) {  // tiles that only the other warpgroup reads
            issue.wait();
            issue.pass();
            s->k_ring.wait_full(k_turn);
            s->k_ring.release(k_turn);
            s->v_ring.wait_full(v_turn);
            s->v_ring.release(v_turn);
        }

        softmax.finish();
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            inverse[half] = 1.0f / softmax.sum[half];
            int query = q.query + 8 * half;
            if (threadIdx.x % 4 == 0 && query < tokens)
                lse[int64_t(q.head) * tokens + query] = softmax.top[half] * scale + logf(softmax.sum[half]);
        }
        rescale(out, inverse);
        write_rows(o + q.head * HEAD_DIM, int64_t(todo.heads) * HEAD_DIM, q.row, tokens, out);
    }
}

template <int HEAD_DIM, int KEYS, int STAGES, bool TURNS>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    attention_hopper_fwd(bf16* __restrict__ o,             // (tokens, heads, HEAD_DIM)
                         float* __restrict__ lse,          // (heads, tokens), natural logarithm
                         int* __restrict__ next,           // zero: the first item that no block has taken
                         const GRID_CONSTANT TensorMap q,  // (tokens, heads, HEAD_DIM) in boxes of TILE rows
                         const GRID_CONSTANT TensorMap k,  // (tokens, kv_heads, HEAD_DIM) in boxes of KEYS
                         const GRID_CONSTANT TensorMap v,  // the same
                         const float* __restrict__ sinks,  // (heads,) or null
                         const int* __restrict__ start,    // (tokens,)
                         int tokens, int heads, int group, int section, int window, float scale) {
    typedef Walk<HEAD_DIM, KEYS, STAGES, STAGES, 1> Shared;
    TILES_SHARED(Shared, s);
    if (threadIdx.x == 0) s->init();
    __syncthreads();
    Items todo{tiles_of(tokens), heads, section, false};
    if (warp_index() < GROUP_WARPS) {
        registers_give<FETCH_REGISTERS>();
        if (warp_index() == 0) s->fetch(todo, next, {&q}, &k, &v, start, tokens, group, window);
    } else {
        registers_take<COMPUTE_REGISTERS>();
        compute<HEAD_DIM, KEYS, STAGES, TURNS>(s, todo, o, lse, sinks, tokens, scale);
    }
}
