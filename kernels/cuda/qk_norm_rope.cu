// RMSNorm of each query and key head and its rotation, and back. Without a norm, the way back is the forward one
// with the angles' opposite.
//
// A head lies on a team of LANES lanes (a power of two), each with SLOTS slots of two packs of N values. A
// team takes an item at a time: HEADS neighbouring heads of one token, so that the angles are read once for
// them and their sums go through the lanes together. The first q_blocks blocks have the query heads, the
// others the key heads; their teams walk over items, and an item's loads begin where the one before ends.
#include "rotary.cuh"

// A lane's columns of a head, the same for all heads.
template <int N, int SLOTS, int LANES> struct Columns {
    int lo[SLOTS], hi[SLOTS];
    bool inside[SLOTS], rotated[SLOTS];
    __device__ __forceinline__ Columns(int head_dim, int half) {
        for (int i = 0; i < SLOTS; ++i) {
            int number = threadIdx.x % LANES + LANES * i;
            Slot<N> slot(number, half);
            lo[i] = slot.lo, hi[i] = slot.hi, rotated[i] = slot.rotated;
            inside[i] = number < head_dim / (2 * N);
        }
    }
};

// The values of a lane's slots of one head; zeros outside.
template <typename T, int N, int SLOTS> struct Piece {
    Pack<T, N> low[SLOTS], high[SLOTS];

    template <int LANES>
    __device__ __forceinline__ void load(const T* head, const Columns<N, SLOTS, LANES>& at, bool present) {
        for (int i = 0; i < SLOTS; ++i) {
            low[i].clear();
            high[i].clear();
            if (present && at.inside[i]) {
                low[i].load(head + at.lo[i]);
                high[i].load(head + at.hi[i]);
            }
        }
    }
    template <int LANES>
    __device__ __forceinline__ void store(T* head, const Columns<N, SLOTS, LANES>& at, bool present) const {
        for (int i = 0; i < SLOTS; ++i)
            if (present && at.inside[i]) {
                low[i].store(head + at.lo[i]);
                high[i].store(head + at.hi[i]);
            }
    }
};

// cos and sin of a lane's slots; the packs that only pass have the angle zero.
template <int N, int SLOTS> struct Angles {
    Pack<float, N> cos[SLOTS], sin[SLOTS];

    template <int LANES>
    __device__ __forceinline__ void load(const float* all_cos, const float* all_sin, int position, int half,
                                         const Columns<N, SLOTS, LANES>& at) {
        float one[N];
        for (int j = 0; j < N; ++j) one[j] = 1.0f;
        for (int i = 0; i < SLOTS; ++i) {
            cos[i].set(one);
            sin[i].clear();
            if (at.rotated[i]) {
                int64_t first = int64_t(position) * half + at.lo[i];
                cos[i].load(all_cos + first);
                sin[i].load(all_sin + first);
            }
        }
    }
};

// What a head's columns are multiplied by: weight + offset, or 1 without a weight.
template <int N, int SLOTS> struct Scale {
    float low[SLOTS][N], high[SLOTS][N];

    template <typename T, int LANES>
    __device__ __forceinline__ Scale(const T* weight, float offset, const Columns<N, SLOTS, LANES>& at) {
        Piece<T, N, SLOTS> piece;
        piece.load(weight, at, weight != nullptr);
        for (int i = 0; i < SLOTS; ++i)
            for (int j = 0; j < N; ++j) {
                low[i][j] = weight ? piece.low[i].get(j) + offset : 1.0f;
                high[i][j] = weight ? piece.high[i].get(j) + offset : 1.0f;
            }
    }
};

// The items of one team, of a block's segment of heads. Steps are taken apart once, not at each item.
template <int LANES, int HEADS> struct Walk {
    int token, part, parts, token_step, part_step;
    __device__ __forceinline__ Walk(uint32_t block, uint32_t blocks, int heads) {
        uint32_t teams = blockDim.x / LANES, number = block * teams + threadIdx.x / LANES, step = blocks * teams;
        parts = (heads + HEADS - 1) / HEADS;
        token = number / parts, part = number % parts;
        token_step = step / parts, part_step = step % parts;
    }
    __device__ __forceinline__ int head() const { return part * HEADS; }
    __device__ __forceinline__ void next() {
        token += token_step, part += part_step;
        if (part >= parts) part -= parts, ++token;
    }
};

// Sums over the lanes of a head, several at once.
template <int LANES, int COUNT> __device__ __forceinline__ void team_sums(float (&value)[COUNT]) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2)
#pragma unroll
        for (int k = 0; k < COUNT; ++k) value[k] += warp_shfl_xor(value[k], mask);
}

// 1 / sqrt(x) in the precision that T can show.
template <typename T> __device__ __forceinline__ float reciprocal_root(float x) {
    return sizeof(T) == 4 ? 1.0f / sqrtf(x) : fast_rsqrt(x);
}

template <typename T, int N, int SLOTS, int LANES, int DIM, int HEADS, int RESIDENT>
__global__ void __launch_bounds__(LAUNCH_THREADS, RESIDENT)
    qk_norm_rope_fwd(T* qk,                               // (tokens, heads + kv_heads, head_dim)
                     const T* qkv,                        // the same of (.., heads + 2 * kv_heads, ..), or null: qk
                     const T* __restrict__ q_weight,      // (head_dim,), or null: no norm
                     const T* __restrict__ k_weight,      // (head_dim,)
                     const float* __restrict__ cos,       // (max_positions, half)
                     const float* __restrict__ sin,       // (max_positions, half)
                     const int* __restrict__ positions,   // (tokens,)
                     int64_t qk_stride, int64_t qkv_stride,  // between tokens
                     int q_blocks, int tokens, int heads, int kv_heads, int any_dim, int any_half, float eps,
                     float offset, float direction) {
    const int head_dim = DIM ? DIM : any_dim, half = DIM ? DIM / 2 : any_half;
    bool keys = blockIdx.x >= q_blocks;
    int count = keys ? kv_heads : heads, skipped = (keys ? heads : 0) * head_dim;
    Walk<LANES, HEADS> walk(keys ? blockIdx.x - q_blocks : blockIdx.x, keys ? gridDim.x - q_blocks : q_blocks, count);
    Columns<N, SLOTS, LANES> at(head_dim, half);
    const T* source = qkv ? qkv + skipped : qk + skipped;
    int64_t source_stride = qkv ? qkv_stride : qk_stride;
    float per_column = 1.0f / head_dim;

    Piece<T, N, SLOTS> value[HEADS];
    auto load = [&](int u) {
        const T* item = source + walk.token * source_stride + walk.head() * head_dim;
        value[u].load(item + u * head_dim, at, walk.token < tokens && walk.head() + u < count);
    };
#pragma unroll
    for (int u = 0; u < HEADS; ++u) load(u);
    int position = walk.token < tokens ? positions[walk.token] : 0;
    Scale<N, SLOTS> scale(keys ? k_weight : q_weight, offset, at);
    while (warp_ballot(walk.token < tokens)) {
        Angles<N, SLOTS> angles;
        angles.load(cos, sin, position, half, at);
        float r[HEADS];
#pragma unroll
        for (int u = 0; u < HEADS; ++u) r[u] = 1.0f;
        if (q_weight) {
#pragma unroll
            for (int u = 0; u < HEADS; ++u) {
                r[u] = 0.0f;
                for (int i = 0; i < SLOTS; ++i)
                    for (int j = 0; j < N; ++j) {
                        float a = value[u].low[i].get(j), b = value[u].high[i].get(j);
                        r[u] += a * a + b * b;
                    }
            }
            team_sums<LANES>(r);
#pragma unroll
            for (int u = 0; u < HEADS; ++u) r[u] = reciprocal_root<T>(r[u] * per_column + eps);
        }
        T* out = qk + walk.token * qk_stride + skipped + walk.head() * head_dim;
        int left = walk.token < tokens ? count - walk.head() : 0;
        walk.next();
        if (walk.token < tokens) position = positions[walk.token];
#pragma unroll
        for (int u = 0; u < HEADS; ++u) {
            for (int i = 0; i < SLOTS; ++i) {
                float lo[N], hi[N];
                for (int j = 0; j < N; ++j) {
                    lo[j] = value[u].low[i].get(j) * r[u] * scale.low[i][j];
                    hi[j] = value[u].high[i].get(j) * r[u] * scale.high[i][j];
                }
                rotate<N>(lo, hi, angles.cos[i], angles.sin[i], direction);
                value[u].low[i].set(lo);
                value[u].high[i].set(hi);
            }
            value[u].store(out + u * head_dim, at, u < left);
            load(u);
        }
    }
}

// Adds the lanes' shares of a weight gradient over the block, into partial (head_dim,).
template <int N, int SLOTS, int LANES>
__device__ __forceinline__ void store_share(float* partial, float* shared, float (&low)[SLOTS][N],
                                            float (&high)[SLOTS][N], const Columns<N, SLOTS, LANES>& at, int head_dim) {
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < SLOTS; ++i) {
#pragma unroll
        for (int mask = LANES; mask < 32; mask *= 2)
            for (int j = 0; j < N; ++j) {
                low[i][j] += warp_shfl_xor(low[i][j], mask);
                high[i][j] += warp_shfl_xor(high[i][j], mask);
            }
        if (lane < LANES && at.inside[i])
            for (int j = 0; j < N; ++j) {
                shared[warp * head_dim + at.lo[i] + j] = low[i][j];
                shared[warp * head_dim + at.hi[i] + j] = high[i][j];
            }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < warps; ++i) sum += shared[i * head_dim + column];
        partial[column] = sum;
    }
}

// With x the head before the norm, d its gradient after it, w the weight and r = 1 / rms(x):
// dweight = sum of d x r, dx = r (d w - x r^2 mean(d w x)). FROZEN: without dweight, whose shares would
// take registers all the same.
template <typename T, int N, int SLOTS, int LANES, int DIM, int HEADS, int RESIDENT, bool FROZEN>
__global__ void __launch_bounds__(LAUNCH_THREADS, RESIDENT)
    qk_norm_rope_bwd(T* dqkv,                            // (tokens, heads + 2 * kv_heads, head_dim), dv untouched
                     float* __restrict__ partial,        // (blocks, head_dim): shares of dweight; null if FROZEN
                     const T* dq,                        // (tokens, heads, head_dim), or null: dq and dk in dqkv
                     const T* dk,                        // (tokens, kv_heads, head_dim)
                     const T* __restrict__ qkv,          // (tokens, heads + 2 * kv_heads, head_dim)
                     const T* __restrict__ q_weight,     // (head_dim,)
                     const T* __restrict__ k_weight,     // (head_dim,)
                     const float* __restrict__ cos,      // (max_positions, half)
                     const float* __restrict__ sin,      // (max_positions, half)
                     const int* __restrict__ positions,  // (tokens,)
                     int64_t dqkv_stride, int64_t dq_stride, int64_t dk_stride, int64_t qkv_stride,  // between tokens
                     int q_blocks, int tokens, int heads, int kv_heads, int any_dim, int any_half, float eps,
                     float offset) {
    const int head_dim = DIM ? DIM : any_dim, half = DIM ? DIM / 2 : any_half;
    DYNAMIC_SHARED(float, shared);  // (warps, head_dim), unless FROZEN
    bool keys = blockIdx.x >= q_blocks;
    int count = keys ? kv_heads : heads, skipped = (keys ? heads : 0) * head_dim;
    Walk<LANES, HEADS> walk(keys ? blockIdx.x - q_blocks : blockIdx.x, keys ? gridDim.x - q_blocks : q_blocks, count);
    Columns<N, SLOTS, LANES> at(head_dim, half);
    const T* grads = dq ? (keys ? dk : dq) : dqkv + skipped;
    int64_t grads_stride = dq ? (keys ? dk_stride : dq_stride) : dqkv_stride;
    const T* values = qkv + skipped;
    float per_column = 1.0f / head_dim;

    int position = walk.token < tokens ? positions[walk.token] : 0;  // first: the angles wait for it
    Piece<T, N, SLOTS> grad[HEADS], value[HEADS];
    auto load = [&](int u) {
        bool present = walk.token < tokens && walk.head() + u < count;
        int first = walk.head() * head_dim;
        grad[u].load(grads + walk.token * grads_stride + first + u * head_dim, at, present);
        value[u].load(values + walk.token * qkv_stride + first + u * head_dim, at, present);
    };
#pragma unroll
    for (int u = 0; u < HEADS; ++u) load(u);
    Scale<N, SLOTS> scale(keys ? k_weight : q_weight, offset, at);
    float share_low[SLOTS][N] = {}, share_high[SLOTS][N] = {};
    while (warp_ballot(walk.token < tokens)) {
        Angles<N, SLOTS> angles;
        angles.load(cos, sin, position, half, at);
        float lo[HEADS][SLOTS][N], hi[HEADS][SLOTS][N];
#pragma unroll
        for (int u = 0; u < HEADS; ++u)
            for (int i = 0; i < SLOTS; ++i) {
                for (int j = 0; j < N; ++j) lo[u][i][j] = grad[u].low[i].get(j), hi[u][i][j] = grad[u].high[i].get(j);
                rotate<N>(lo[u][i], hi[u][i], angles.cos[i], angles.sin[i], -1.0f);
            }
        T* out = dqkv + walk.token * dqkv_stride + skipped + walk.head() * head_dim;
        int left = walk.token < tokens ? count - walk.head() : 0;
        walk.next();
        if (walk.token < tokens) position = positions[walk.token];
        float sums[2 * HEADS];  // of squares, then of d w x
#pragma unroll
        for (int u = 0; u < HEADS; ++u) {
            float square = 0.0f, dot = 0.0f;
            for (int i = 0; i < SLOTS; ++i)
                for (int j = 0; j < N; ++j) {
                    float a = value[u].low[i].get(j), b = value[u].high[i].get(j);
                    square += a * a + b * b;
                    dot += lo[u][i][j] * scale.low[i][j] * a;
                    dot += hi[u][i][j] * scale.high[i][j] * b;
                }
            sums[u] = square, sums[HEADS + u] = dot;
        }
        team_sums<LANES>(sums);
#pragma unroll
        for (int u = 0; u < HEADS; ++u) {
            float r = reciprocal_root<T>(sums[u] * per_column + eps);
            float c = r * r * (sums[HEADS + u] * per_column);
            for (int i = 0; i < SLOTS; ++i) {
                for (int j = 0; j < N; ++j) {
                    float a = value[u].low[i].get(j), b = value[u].high[i].get(j);
                    if (!FROZEN) share_low[i][j] += lo[u][i][j] * (a * r);
                    if (!FROZEN) share_high[i][j] += hi[u][i][j] * (b * r);
                    lo[u][i][j] = r * (lo[u][i][j] * scale.low[i][j] - a * c);
                    hi[u][i][j] = r * (hi[u][i][j] * scale.high[i][j] - b * c);
                }
                grad[u].low[i].set(lo[u][i]);
                grad[u].high[i].set(hi[u][i]);
            }
            grad[u].store(out + u * head_dim, at, u < left);
            load(u);
        }
    }
    if (!FROZEN)
        store_share(partial + int64_t(blockIdx.x) * head_dim, shared, share_low, share_high, at, head_dim);
}
