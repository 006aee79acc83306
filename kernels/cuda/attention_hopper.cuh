// What the attention kernels for Hopper share: who works on what, the walk of tiles of queries over the keys that
// they read, masks, and output.
//
// A block stays on its multiprocessor and takes items (a tile of tokens of a head) until none is left: documents
// make items as unequal as they like. One warp fetches what the items need into rings of tiles; two warpgroups,
// with most of the registers, own 64 rows of an item's tile each.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

constexpr int CONSUMERS = 2, GROUP_THREADS = 128, GROUP_WARPS = 4;  // warpgroups that compute, and their sizes
constexpr int CONSUMER_WARPS = CONSUMERS * GROUP_WARPS, BLOCK_THREADS = (CONSUMERS + 1) * GROUP_THREADS;
constexpr int TILE = CONSUMERS * 64;  // rows of an item
// Registers a thread: 65536 of a multiprocessor for one fetching and two computing warpgroups.
constexpr int FETCH_REGISTERS = 24, COMPUTE_REGISTERS = 240;

// Items: tiles times heads, of `section` heads first: what those read should stay in the L2 cache. Tiles go from
// the first up or from the last down, so that the longest items of a document come first.
struct Items {
    int tiles, heads, section;
    bool up;
    __device__ __forceinline__ int count() const { return tiles * heads; }
    __device__ __forceinline__ int row(int item) const {
        int tile = item % (tiles * section) / section;
        return (up ? tile : tiles - 1 - tile) * TILE;
    }
    __device__ __forceinline__ int head(int item) const {
        return item / (tiles * section) * section + item % section;
    }
};
__device__ __forceinline__ int tiles_of(int tokens) { return (tokens + TILE - 1) / TILE; }

// The next item that no block has taken, for all lanes of a warp.
__device__ __forceinline__ int take_item(int* next) {
    return warp_shfl(threadIdx.x % 32 == 0 ? atomicAdd(next, 1) : 0, 0);
}

// The warp's lanes are done with something, as one arrival.
__device__ __forceinline__ void warp_arrive(Barrier* barrier) {
    warp_sync();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Loads rows [row, row + ROWS) of a head into a tile; one lane.
template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void load_tile(bf16* tile, const TensorMap* map, Barrier* full, int head, int row) {
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += 64) tma_load(tile + column * ROWS, map, full, column, head, row);
}

// Rings of STAGES buffers have a `full` barrier that TMA completes and an `empty` one for the computing warps.
template <int STAGES> struct Ring {
    Barrier full[STAGES], empty[STAGES];
    __device__ __forceinline__ void init(int writers = 1) {
        for (int i = 0; i < STAGES; ++i) barrier_init(&full[i], writers), barrier_init(&empty[i], CONSUMER_WARPS);
    }
    __device__ __forceinline__ void wait_full(const Turn<STAGES>& turn) {
        barrier_wait(&full[turn.stage], turn.parity);
    }
    __device__ __forceinline__ void wait_empty(const Turn<STAGES>& turn) {
        barrier_wait(&empty[turn.stage], turn.parity ^ 1);
    }
    // The reader is done with its place.
    __device__ __forceinline__ void release(Turn<STAGES>& turn) {
        warp_arrive(&empty[turn.stage]);
        turn.next();
    }
};

// The item that is next, and a bound for each of its rows: the first key of a query, the last query of a key.
struct ItemRing {
    int bounds[2][TILE], item[2];
    Ring<2> ring;

    // All lanes of the fetching warp; bound(r) is that of row r.
    template <typename Bound> __device__ __forceinline__ void put(Turn<2>& turn, int value, bool any, Bound bound) {
        ring.wait_empty(turn);
        for (int r = threadIdx.x % 32; any && r < TILE; r += 32) shared_put(&bounds[turn.stage][r], bound(r));
        shared_put(&item[turn.stage], value);
        barrier_arrive(&ring.full[turn.stage]);
        turn.next();
    }
};

// A walk of tiles of queries over the tiles of keys that they read: from the tile that ends with the last query
// back to the one that holds the first key of the first. QUERY_TILES arrays have a tile a block of queries.
template <int HEAD_DIM, int KEYS, int K_STAGES, int V_STAGES, int QUERY_TILES> struct Walk {
    static_assert(KEYS >= TILE, "the first tile of keys must hold a key that each query reads");
    static constexpr int TILE_BYTES = TILE * HEAD_DIM * 2, KEY_BYTES = KEYS * HEAD_DIM * 2;
    bf16 queries[QUERY_TILES][TILE * HEAD_DIM], k[K_STAGES][KEYS * HEAD_DIM], v[V_STAGES][KEYS * HEAD_DIM];
    ItemRing items;
    Ring<1> query_ring;
    Ring<K_STAGES> k_ring;
    Ring<V_STAGES> v_ring;

    __device__ __forceinline__ void init() {
        items.ring.init(32), query_ring.init(), k_ring.init(), v_ring.init();
        barrier_init_fence();
    }
    static __device__ __forceinline__ int key_tiles(int end, int low) { return (end - low + KEYS - 1) / KEYS; }

    // What the fetching warp does. maps: of each array of queries.
    __device__ __forceinline__ void fetch(Items todo, int* next, const TensorMap* const (&maps)[QUERY_TILES],
                                          const TensorMap* k_map, const TensorMap* v_map, const int* start, int tokens,
                                          int group, int window) {
        bool leader = threadIdx.x % 32 == 0;
        Turn<2> turn;
        Turn<1> query_turn;
        Turn<K_STAGES> k_turn;
        Turn<V_STAGES> v_turn;
        while (true) {
            int item = take_item(next);
            bool any = item < todo.count();
            int row = todo.row(item), head = todo.head(item), kv_head = head / group;
            int first = any ? first_key(start, row, window) : 0;
            items.put(turn, item, any, [&](int r) { return first_key(start, min(row + r, tokens - 1), window); });
            if (!any) return;

            query_ring.wait_empty(query_turn);
            if (leader) {
                Barrier* full = &query_ring.full[0];
                barrier_arrive_expect(full, QUERY_TILES * TILE_BYTES);
#pragma unroll
                for (int i = 0; i < QUERY_TILES; ++i) load_tile<HEAD_DIM, TILE>(queries[i], maps[i], full, head, row);
            }
            query_turn.next();
            int key = row + TILE - KEYS;
            for (int i = key_tiles(row + TILE, first); i > 0; --i, key -= KEYS) {
                k_ring.wait_empty(k_turn);
                if (leader) {
                    barrier_arrive_expect(&k_ring.full[k_turn.stage], KEY_BYTES);
                    load_tile<HEAD_DIM, KEYS>(k[k_turn.stage], k_map, &k_ring.full[k_turn.stage], kv_head, key);
                }
                k_turn.next();
                v_ring.wait_empty(v_turn);
                if (leader) {
                    barrier_arrive_expect(&v_ring.full[v_turn.stage], KEY_BYTES);
                    load_tile<HEAD_DIM, KEYS>(v[v_turn.stage], v_map, &v_ring.full[v_turn.stage], kv_head, key);
                }
                v_turn.next();
            }
        }
    }

    // What a lane of a computing warpgroup must know of an item.
    struct Queries {
        int head, row;      // the warpgroup's first query
        int query, low[2];  // the lane's queries, this and 8 further, and their first keys
        int key;            // the first of the first tile of keys
        int mine, all;      // tiles that this warpgroup reads, and that the block does
        int last_low;       // the first key of the warpgroup's last query

        __device__ __forceinline__ bool reads_all(int key) const { return key >= last_low && key + KEYS - 1 <= row; }

        // Hides the scores, against keys from `key` on, of what the lane's queries do not read.
        __device__ __forceinline__ void mask(float (&scores)[KEYS / 8][4], int key) const {
            key += threadIdx.x % 4 * 2;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int j = key + 8 * n + e % 2;
                    if (j > query + e / 2 * 8 || j < low[e / 2]) scores[n][e] = -INFINITY;
                }
        }
    };

    // Takes the next item for warpgroup `self`; false when there is none.
    __device__ __forceinline__ bool get(Turn<2>& turn, const Items& todo, int self, Queries& q) {
        items.ring.wait_full(turn);
        int item = shared_get(&items.item[turn.stage]);
        if (item >= todo.count()) return false;
        const int* lows = items.bounds[turn.stage];
        int lane_row = self * 64 + threadIdx.x / 32 % GROUP_WARPS * 16 + threadIdx.x % 32 / 4;
        int row = todo.row(item), end = row + TILE;
        q.head = todo.head(item), q.row = row + self * 64, q.query = row + lane_row, q.key = end - KEYS;
        q.low[0] = shared_get(lows + lane_row), q.low[1] = shared_get(lows + lane_row + 8);
        q.all = key_tiles(end, shared_get(lows)), q.mine = key_tiles(end, shared_get(lows + self * 64));
        q.last_low = shared_get(lows + self * 64 + 63);
        items.ring.release(turn);
        return true;
    }
};

template <int D> __device__ __forceinline__ void rescale(float (&out)[D][4], const float (&factor)[2]) {
#pragma unroll
    for (int d = 0; d < D; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[d][e] *= factor[e / 2];
}
template <int D> __device__ __forceinline__ void clear(float (&out)[D][4]) {
#pragma unroll
    for (int d = 0; d < D; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[d][e] = 0.0f;
}

// Writes a warpgroup's accumulators as bf16 to rows [row, row + 64) below `end`, 16 bytes an access: the four
// lanes that share a row swap words until each holds eight columns.
template <int D>
__device__ __forceinline__ void write_rows(bf16* out, int64_t stride, int row, int end, const float (&d)[D][4]) {
    int lane = threadIdx.x % 32;
    bool odd = lane & 1, upper = lane & 2;
    row += threadIdx.x / 32 % GROUP_WARPS * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < D; n += 4) {
            Vec<uint32_t, 4> w;
#pragma unroll
            for (int i = 0; i < 4; ++i) w.data[i] = pack_bf16(d[n + i][2 * half], d[n + i][2 * half + 1]);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                uint32_t other = warp_shfl_xor(odd ? w.data[i] : w.data[i + 1], 1);
                w.data[i] = odd ? other : w.data[i], w.data[i + 1] = odd ? w.data[i + 1] : other;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t other = warp_shfl_xor(upper ? w.data[i] : w.data[i + 2], 2);
                w.data[i] = upper ? other : w.data[i], w.data[i + 2] = upper ? w.data[i + 2] : other;
            }
            int r = row + 8 * half;
            if (r < end) w.store(reinterpret_cast<uint32_t*>(out + r * stride + (n + lane % 4) * 8));
        }
}
