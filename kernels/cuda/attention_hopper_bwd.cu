// Attention backward on Hopper without atomics on values, so the same bits every time, in two kernels:
//
//   attention_hopper_bwd_dq     a tile of queries over its keys: delta = sum(do * o), and dQ = scale * sum of dS K
//   attention_hopper_bwd_dkdv   a tile of keys over its queries: dV = sum of P^T dO, dK = scale * sum of dS^T Q
//
// with P = exp(scale * Q K^T - lse) computed again in both, and dS = P * (dO V^T - delta).
//
// Why two: of a pair of 128 queries and 128 keys the one kernel of FlashAttention does 5 products of 128^3, these
// do 3 + 4. But every product of these takes P or dS from registers. The one kernel sends dS through shared memory
// (all keys of a block meet in dQ) and dQ, in float32, on to device memory, where a fixed order makes blocks wait
// for each other. At 2048 operations a cycle the 7 products take 7168 cycles, and these kernels read and write
// 320 + 448 KiB of shared memory at 128 bytes a cycle in 6144 of them: products are the bound. The 5 products take
// 5120, but with tiles that fit the registers move 736 KiB in 5888 cycles: shared memory is the bound, before any
// wait. So a fixed order of sums costs at most a fifth here, and nothing waits.
#include "attention_hopper.cuh"

// Of a query: lse / ln 2 and delta.
typedef Vec<float, 2> Stat;

// delta of the lane's two queries, row and row + 8 of the warp's 16: lanes share a row of o and do, 8 columns each.
template <int HEAD_DIM>
__device__ __forceinline__ void row_products(float (&delta)[2], const bf16* o, int64_t o_stride, const bf16* d_o,
                                             int64_t do_stride, int rows) {
    constexpr int LANES = HEAD_DIM / 8, AT_ONCE = 32 / LANES, STEPS = 16 / AT_ONCE;
    int lane = threadIdx.x % 32, first = lane / LANES;
    Vec<bf16, 8> x[STEPS], dx[STEPS];
    o += first * o_stride + lane % LANES * 8, d_o += first * do_stride + lane % LANES * 8;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        int row = min(i * AT_ONCE, rows - 1 - first);  // rows past the end are not used
        if (rows <= first) row = -first;
        x[i] = Vec<bf16, 8>::load(o + row * o_stride), dx[i] = Vec<bf16, 8>::load(d_o + row * do_stride);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += to_float(x[i].data[e]) * to_float(dx[i].data[e]);
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) sum += warp_shfl_xor(sum, mask);
        sum = warp_shfl(sum, lane / 4 % AT_ONCE * LANES);
        if (lane / 4 / AT_ONCE == i % (STEPS / 2)) delta[i / (STEPS / 2)] = sum;
    }
}

template <int HEAD_DIM, int KEYS, int K_STAGES, int V_STAGES>
__device__ __forceinline__ void compute_dq(Walk<HEAD_DIM, KEYS, K_STAGES, V_STAGES, 2>* s, Items todo, bf16* dq,
                                           Stat* stats, const bf16* o, const bf16* d_o, const float* lse, int tokens,
                                           int64_t d_stride, int64_t do_stride, float scale) {
    int self = warp_index() / GROUP_WARPS - 1;
    Turn<2> turn;
    Turn<1> query_turn;
    Turn<K_STAGES> k_turn, k_use;  // for scores; for dQ
    Turn<V_STAGES> v_turn;
    typename Walk<HEAD_DIM, KEYS, K_STAGES, V_STAGES, 2>::Queries q;
    uint64_t q_tile = descriptor<TILE>(s->queries[0]) + row_step(self * 4);
    uint64_t do_tile = descriptor<TILE>(s->queries[1]) + row_step(self * 4);
    uint64_t k_tile = descriptor<KEYS>(s->k), v_tile = descriptor<KEYS>(s->v);
    constexpr int STAGE = KEYS * HEAD_DIM * 2 / 16;
    float scale_log2 = scale * LOG2E;

    while (s->get(turn, todo, self, q)) {
        float scores[KEYS / 8][4], ds[KEYS / 8][4], out[HEAD_DIM / 8][4], delta[2], base[2];
        uint32_t left[KEYS / 16][4];
        s->query_ring.wait_full(query_turn);
        s->k_ring.wait_full(k_turn);
        wgmma_fence();
        multiply_rows<HEAD_DIM, TILE, KEYS>(scores, q_tile, k_tile + k_turn.stage * STAGE);
        wgmma_commit();
        k_turn.next();

        int warp_row = q.row + warp_index() % GROUP_WARPS * 16;
        int64_t token = min(warp_row, tokens - 1);
        row_products<HEAD_DIM>(delta, o + (token * todo.heads + q.head) * HEAD_DIM, int64_t(todo.heads) * HEAD_DIM,
                               d_o + token * do_stride + q.head * HEAD_DIM, do_stride, tokens - warp_row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int query = q.query + 8 * half;
            bool any = query < tokens;
            base[half] = any ? lse[int64_t(q.head) * tokens + query] * LOG2E : INFINITY;
            if (!any) delta[half] = 0.0f;
            if (threadIdx.x % 4 == 0)
                Stat{base[half], delta[half]}.store(&stats[int64_t(q.head) * todo.tiles * TILE + query].data[0]);
        }
        clear(out);

        // Takes in tile i of keys, whose scores are on their way, and leaves its share of dQ on its way.
        auto take_in = [&](int i) {
            int key = q.key - i * KEYS;
            s->v_ring.wait_full(v_turn);
            wgmma_fence();
            multiply_rows<HEAD_DIM, TILE, KEYS>(ds, do_tile, v_tile + v_turn.stage * STAGE);
            wgmma_commit();
            wgmma_wait<1>();
            hold(scores);
            if (!q.reads_all(key)) q.mask(scores, key);
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) scores[n][e] = fast_exp2(scores[n][e] * scale_log2 - base[e / 2]);
            // Waited for here: the compiler would move the next wait up before the exponents, but not over a loop.
            if (i + 1 < q.mine) s->k_ring.wait_full(k_turn);
            wgmma_wait<0>();
            hold(ds);
            s->v_ring.release(v_turn);
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) ds[n][e] = scores[n][e] * (ds[n][e] - delta[e / 2]);
            pack_left(left, ds);
            wgmma_fence();
            multiply_left<true>(out, left, k_tile + k_use.stage * STAGE);
            wgmma_commit();
        };
        take_in(0);
        for (int i = 1; i < q.mine; ++i) {
            wgmma_fence();
            multiply_rows<HEAD_DIM, TILE, KEYS>(scores, q_tile, k_tile + k_turn.stage * STAGE);
            wgmma_commit();
            k_turn.next();
            wgmma_wait<1>();
            s->k_ring.release(k_use);
            take_in(i);
        }
        wgmma_wait<0>();
        hold(out);
        s->k_ring.release(k_use);
        s->query_ring.release(query_turn);
        for (int i = q.mine; i < q.all; ++i) {  // tiles that only the other warpgroup reads
            s->k_ring.wait_full(k_turn);
            s->k_ring.release(k_use);
            k_turn.next();
            s->v_ring.wait_full(v_turn);
            s->v_ring.release(v_turn);
        }
        float factor[2] = {scale, scale};
        rescale(out, factor);
        write_rows(dq + q.head * HEAD_DIM, d_stride, q.row, tokens, out);
    }
}

template <int HEAD_DIM, int KEYS, int K_STAGES, int V_STAGES>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    attention_hopper_bwd_dq(bf16* __restrict__ dq,              // (tokens, heads, HEAD_DIM), d_stride a token
                            float* __restrict__ stats,          // (heads, padded, 2): lse / ln 2, delta; or inf, 0
                            int* __restrict__ next,             // zero: the first item that no block has taken
                            const GRID_CONSTANT TensorMap q,    // (tokens, heads, HEAD_DIM) in boxes of TILE rows
                            const GRID_CONSTANT TensorMap k,    // (tokens, kv_heads, HEAD_DIM) in boxes of KEYS
                            const GRID_CONSTANT TensorMap v,    // the same
                            const GRID_CONSTANT TensorMap do_map,  // of d_o, as q
                            const bf16* __restrict__ o,         // (tokens, heads, HEAD_DIM)
                            const bf16* __restrict__ d_o,       // (tokens, heads, HEAD_DIM), do_stride a token
                            const float* __restrict__ lse,      // (heads, tokens)
                            const int* __restrict__ start,      // (tokens,)
                            int tokens, int heads, int group, int section, int64_t d_stride, int64_t do_stride,
                            int window, float scale) {
    typedef Walk<HEAD_DIM, KEYS, K_STAGES, V_STAGES, 2> Shared;
    TILES_SHARED(Shared, s);
    if (threadIdx.x == 0) s->init();
    __syncthreads();
    Items todo{tiles_of(tokens), heads, section, false};
    if (warp_index() < GROUP_WARPS) {
        registers_give<FETCH_REGISTERS>();
        if (warp_index() == 0) s->fetch(todo, next, {&q, &do_map}, &k, &v, start, tokens, group, window);
    } else {
        registers_take<COMPUTE_REGISTERS>();
        compute_dq(s, todo, dq, reinterpret_cast<Stat*>(stats), o, d_o, lse, tokens, d_stride, do_stride, scale);
    }
}

// A tile of keys and its values, and the ring of tiles of queries that read them: Q, dO and their numbers.
template <int HEAD_DIM, int ROWS, int STAGES> struct KeyShared {
    static constexpr int TILE_BYTES = TILE * HEAD_DIM * 2, ROW_BYTES = ROWS * HEAD_DIM * 2, STAT_BYTES = ROWS * 8;
    bf16 k[TILE * HEAD_DIM], v[TILE * HEAD_DIM], q[STAGES][ROWS * HEAD_DIM], d_o[STAGES][ROWS * HEAD_DIM];
    Stat stats[STAGES][ROWS];
    ItemRing items;
    Ring<1> key_ring;
    Ring<STAGES> ring;

    __device__ __forceinline__ void init() {
        items.ring.init(32), key_ring.init(), ring.init();
        barrier_init_fence();
    }
    static __device__ __forceinline__ int row_tiles(int first, int end) { return (end - first + ROWS - 1) / ROWS; }

    // What the fetching warp does.
    __device__ __forceinline__ void fetch(Items todo, int* next, const TensorMap* q_map, const TensorMap* k_map,
                                          const TensorMap* v_map, const TensorMap* do_map, const Stat* numbers,
                                          const int* end, int tokens, int group, int window) {
        bool leader = threadIdx.x % 32 == 0;
        Turn<2> turn;
        Turn<1> key_turn;
        Turn<STAGES> row_turn;
        int64_t padded = int64_t(todo.tiles) * TILE;
        while (true) {
            int item = take_item(next);
            bool any = item < todo.count();
            int key = todo.row(item), kv_head = todo.head(item);
            int last = any ? end_query(end, min(key + TILE, tokens) - 1, window) : 0;
            items.put(turn, item, any, [&](int r) { return key + r < tokens ? end_query(end, key + r, window) : 0; });
            if (!any) return;

            key_ring.wait_empty(key_turn);
            if (leader) {
                barrier_arrive_expect(&key_ring.full[0], 2 * TILE_BYTES);
                load_tile<HEAD_DIM, TILE>(k, k_map, &key_ring.full[0], kv_head, key);
                load_tile<HEAD_DIM, TILE>(v, v_map, &key_ring.full[0], kv_head, key);
            }
            key_turn.next();
            for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
                for (int row = key; row < last; row += ROWS, row_turn.next()) {
                    ring.wait_empty(row_turn);
                    if (!leader) continue;
                    Barrier* full = &ring.full[row_turn.stage];
                    barrier_arrive_expect(full, 2 * ROW_BYTES + STAT_BYTES);
                    load_tile<HEAD_DIM, ROWS>(q[row_turn.stage], q_map, full, head, row);
                    load_tile<HEAD_DIM, ROWS>(d_o[row_turn.stage], do_map, full, head, row);
                    bulk_load(stats[row_turn.stage], numbers + head * padded + row, STAT_BYTES, full);
                }
        }
    }
};

// The walk of a warpgroup's 64 keys over the tiles of queries of each head of the group. Everything is transposed:
// keys are rows.
template <int HEAD_DIM, int ROWS, int STAGES>
__device__ __forceinline__ void compute_dkdv(KeyShared<HEAD_DIM, ROWS, STAGES>* s, Items todo, bf16* dk, bf16* dv,
                                             int tokens, int group, int64_t d_stride, float scale) {
    int self = warp_index() / GROUP_WARPS - 1, lane = threadIdx.x % 32;
    int lane_key = self * 64 + warp_index() % GROUP_WARPS * 16 + lane / 4;  // in the tile, and 8 further
    Turn<2> turn;
    Turn<1> key_turn;
    Turn<STAGES> row_turn, row_use;  // for scores; for the rest
    uint64_t k_tile = descriptor<TILE>(s->k) + row_step(self * 4), v_tile = descriptor<TILE>(s->v) + row_step(self * 4);
    uint64_t q_tile = descriptor<ROWS>(s->q), do_tile = descriptor<ROWS>(s->d_o);
    constexpr int STAGE = ROWS * HEAD_DIM * 2 / 16;
    float scale_log2 = scale * LOG2E;

    while (true) {
        s->items.ring.wait_full(turn);
        int item = shared_get(&s->items.item[turn.stage]);
        if (item >= todo.count()) break;
        int* ends = s->items.bounds[turn.stage];
        int end[2] = {shared_get(ends + lane_key), shared_get(ends + lane_key + 8)};
        int tile = todo.row(item), last_key = min(TILE, tokens - tile) - 1;
        int all_end = shared_get(ends + self * 64);  // the first query that not all keys are read by
        int any_end = shared_get(ends + min(self * 64 + 63, last_key));  // the first that none is read by
        int all = s->row_tiles(tile, shared_get(ends + last_key));
        s->items.ring.release(turn);
        // The tiles [first, last) of each head are this warpgroup's; with no key below `tokens`, none is.
        int first = self * 64 / ROWS, last = max(first, s->row_tiles(tile, any_end));
        if (self * 64 > last_key) last = first;

        float dk_rows[HEAD_DIM / 8][4], dv_rows[HEAD_DIM / 8][4], p[ROWS / 8][4], ds[ROWS / 8][4];
        uint32_t p_left[ROWS / 16][4], ds_left[ROWS / 16][4];
        clear(dk_rows), clear(dv_rows);
        auto skip = [&] {
            s->ring.wait_full(row_turn);
            s->ring.release(row_use);
            row_turn.next();
        };
        s->key_ring.wait_full(key_turn);
        for (int head = 0; head < group; ++head) {
            for (int i = 0; i < min(first, all); ++i) skip();
            for (int i = first; i < last; ++i) {
                int row = tile + i * ROWS;
                s->ring.wait_full(row_turn);
                wgmma_fence();
                multiply_rows<HEAD_DIM, TILE, ROWS>(p, k_tile, q_tile + row_turn.stage * STAGE);
                wgmma_commit();
                wgmma_wait<1>();
                if (i > first) s->ring.release(row_use);
                wgmma_fence();
                multiply_rows<HEAD_DIM, TILE, ROWS>(ds, v_tile, do_tile + row_turn.stage * STAGE);
                wgmma_commit();
                wgmma_wait<1>();
                hold(p);
                const float* stat = &s->stats[row_turn.stage][lane % 4 * 2].data[0];
#pragma unroll
                for (int n = 0; n < ROWS / 8; ++n) {
                    auto two = Vec<float, 4>::load(stat + 16 * n);  // of two queries
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        p[n][e] = fast_exp2(p[n][e] * scale_log2 - two.data[e % 2 * 2]);
                }
                if (i == first || row + ROWS > all_end) {
                    int query = row + lane % 4 * 2;
#pragma unroll
                    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            int j = query + 8 * n + e % 2;
                            if (j < tile + lane_key + e / 2 * 8 || j >= end[e / 2]) p[n][e] = 0.0f;
                        }
                }
                pack_left(p_left, p);
                wgmma_fence();
                multiply_left<true>(dv_rows, p_left, do_tile + row_turn.stage * STAGE);
                wgmma_commit();
                wgmma_wait<1>();
                hold(ds);
#pragma unroll
                for (int n = 0; n < ROWS / 8; ++n) {
                    auto two = Vec<float, 4>::load(stat + 16 * n);
#pragma unroll
                    for (int e = 0; e < 4; ++e) ds[n][e] = p[n][e] * (ds[n][e] - two.data[e % 2 * 2 + 1]);
                }
                pack_left(ds_left, ds);
                wgmma_fence();
                multiply_left<true>(dk_rows, ds_left, q_tile + row_turn.stage * STAGE);
                wgmma_commit();
                row_turn.next();
            }
            wgmma_wait<0>();
            hold(dk_rows), hold(dv_rows);
            if (first < last) s->ring.release(row_use);
            for (int i = max(last, min(first, all)); i < all; ++i) skip();
        }
        s->key_ring.release(key_turn);
        float factor[2] = {scale, scale};
        rescale(dk_rows, factor);
        int offset = todo.head(item) * HEAD_DIM, row = tile + self * 64;
        write_rows(dk + offset, d_stride, row, tokens, dk_rows);
        write_rows(dv + offset, d_stride, row, tokens, dv_rows);
    }
}

template <int HEAD_DIM, int ROWS, int STAGES>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    attention_hopper_bwd_dkdv(bf16* __restrict__ dk,            // (tokens, kv_heads, HEAD_DIM), d_stride a token
                              bf16* __restrict__ dv,            // the same
                              int* __restrict__ next,           // zero: the first item that no block has taken
                              const GRID_CONSTANT TensorMap q,  // (tokens, heads, HEAD_DIM) in boxes of ROWS
                              const GRID_CONSTANT TensorMap k,  // (tokens, kv_heads, HEAD_DIM) in boxes of TILE rows
                              const GRID_CONSTANT TensorMap v,  // the same
                              const GRID_CONSTANT TensorMap d_o,  // as q
                              const float* __restrict__ stats,  // (heads, padded, 2)
                              const int* __restrict__ end,      // (tokens,)
                              int tokens, int kv_heads, int group, int section, int64_t d_stride, int window,
                              float scale) {
    typedef KeyShared<HEAD_DIM, ROWS, STAGES> Shared;
    TILES_SHARED(Shared, s);
    if (threadIdx.x == 0) s->init();
    __syncthreads();
    Items todo{tiles_of(tokens), kv_heads, section, true};
    if (warp_index() < GROUP_WARPS) {
        registers_give<FETCH_REGISTERS>();
        if (warp_index() == 0)
            s->fetch(todo, next, &q, &k, &v, &d_o, reinterpret_cast<const Stat*>(stats), end, tokens, group, window);
    } else {
        registers_take<COMPUTE_REGISTERS>();
        compute_dkdv(s, todo, dk, dv, tokens, group, d_stride, scale);
    }
}
