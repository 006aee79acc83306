// RMSNorm of each query and key head and its rotation, and back.
//
// A warp takes as many heads of a token as it can have in flight, so that the angles are read once for them. A
// head lies on `lanes` lanes (a power of two) with SLOTS slots of two packs each; where SLOTS is above one,
// lanes is 32.
#include "rotary.cuh"

// The values of a lane's slots of one head.
template <typename T, int N, int SLOTS> struct Piece {
    Pack<T, N> low[SLOTS], high[SLOTS];

    __device__ __forceinline__ void load(const T* head, int lane, int slots, int half, bool present) {
        for (int i = 0; i < SLOTS; ++i) {
            low[i].clear();
            high[i].clear();
            Slot<N> slot(lane + 32 * i, half);
            if (present && lane + 32 * i < slots) {
                low[i].load(head + slot.lo);
                high[i].load(head + slot.hi);
            }
        }
    }
    __device__ __forceinline__ void store(T* head, int lane, int slots, int half, bool present) const {
        for (int i = 0; i < SLOTS; ++i) {
            Slot<N> slot(lane + 32 * i, half);
            if (present && lane + 32 * i < slots) {
                low[i].store(head + slot.lo);
                high[i].store(head + slot.hi);
            }
        }
    }
};

// cos and sin of a lane's slots; the packs that only pass have the angle zero.
template <int N, int SLOTS> struct Angles {
    Pack<float, N> cos[SLOTS], sin[SLOTS];

    __device__ __forceinline__ void load(const float* all_cos, const float* all_sin, int position, int lane, int half) {
        float one[N];
        for (int j = 0; j < N; ++j) one[j] = 1.0f;
        for (int i = 0; i < SLOTS; ++i) {
            Slot<N> slot(lane + 32 * i, half);
            int64_t at = int64_t(position) * half + slot.lo;
            cos[i].set(one);
            sin[i].clear();
            if (slot.rotated) {
                cos[i].load(all_cos + at);
                sin[i].load(all_sin + at);
            }
        }
    }
};

// Sum over the lanes of a head.
__device__ __forceinline__ float head_sum(float value, int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) value += warp_shfl_xor(value, mask);
    return value;
}

// Which heads of which token a warp has: `first` and every `abreast`-th after it, at most HEADS.
struct Item {
    int64_t token;
    int first;
    __device__ __forceinline__ Item(uint32_t number, int heads, int heads_of_item, int mine) {
        uint32_t parts = (heads + heads_of_item - 1) / heads_of_item;
        token = number / parts;
        first = int(number % parts) * heads_of_item + mine;
    }
};

// Heads that a lane has in flight.
template <typename T, int SLOTS> constexpr int HEADS = SLOTS == 1 ? 8 / sizeof(T) : 1;

template <typename T, int N, int SLOTS>
__global__ void __launch_bounds__(128, SLOTS == 1 ? 8 : 1)
    qk_norm_rope_fwd(T* qk,                               // (tokens, heads + kv_heads, head_dim)
                     const T* qkv,                        // the same of (.., heads + 2 * kv_heads, ..), or null: qk
                     const T* __restrict__ q_weight,      // (head_dim,), or null: no norm
                     const T* __restrict__ k_weight,      // (head_dim,)
                     const float* __restrict__ cos,       // (max_positions, half)
                     const float* __restrict__ sin,       // (max_positions, half)
                     const int* __restrict__ positions,   // (tokens,)
                     int64_t qk_stride, int64_t qkv_stride,  // between tokens
                     int tokens, int heads, int kv_heads, int head_dim, int half, int lanes, float eps, float offset) {
    constexpr int U = HEADS<T, SLOTS>;
    int slots = head_dim / (2 * N), lane = threadIdx.x % lanes, abreast = 32 / lanes, end = heads + kv_heads;
    Item item(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, end, U * abreast, threadIdx.x % 32 / lanes);
    if (item.token >= tokens) return;
    const T* source = (qkv ? qkv + item.token * qkv_stride : qk + item.token * qk_stride);
    qk += item.token * qk_stride;

    Piece<T, N, SLOTS> value[U], weight;
#pragma unroll
    for (int u = 0; u < U; ++u) {
        int head = item.first + u * abreast;
        value[u].load(source + head * head_dim, lane, slots, half, head < end);
    }
    Angles<N, SLOTS> angles;
    angles.load(cos, sin, positions[item.token], lane, half);
    const T* weights = nullptr;
#pragma unroll
    for (int u = 0; u < U; ++u) {
        int head = item.first + u * abreast;
        float r = 1.0f, square = 0.0f;
        if (q_weight) {
            const T* its = head < heads ? q_weight : k_weight;
            if (its != weights) weight.load(weights = its, lane, slots, half, true);
            for (int i = 0; i < SLOTS; ++i)
                for (int j = 0; j < N; ++j) {
                    float a = value[u].low[i].get(j), b = value[u].high[i].get(j);
                    square += a * a + b * b;
                }
            r = 1.0f / sqrtf(head_sum(square, lanes) / head_dim + eps);
        }
        for (int i = 0; i < SLOTS; ++i) {
            float lo[N], hi[N];
            for (int j = 0; j < N; ++j) {
                lo[j] = value[u].low[i].get(j), hi[j] = value[u].high[i].get(j);
                if (!q_weight) continue;
                lo[j] = lo[j] * r * (weight.low[i].get(j) + offset);
                hi[j] = hi[j] * r * (weight.high[i].get(j) + offset);
            }
            rotate<N>(lo, hi, angles.cos[i], angles.sin[i], 1.0f);
            value[u].low[i].set(lo);
            value[u].high[i].set(hi);
        }
        value[u].store(qk + head * head_dim, lane, slots, half, head < end);
    }
}

// Adds the lanes' shares of a weight gradient over the block, into partial (head_dim,).
template <int N, int SLOTS>
__device__ __forceinline__ void store_share(float* partial, float* shared, float (&low)[SLOTS][N],
                                            float (&high)[SLOTS][N], int lanes, int head_dim, int half) {
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < SLOTS; ++i) {
        for (int mask = lanes; mask < 32; mask *= 2)
            for (int j = 0; j < N; ++j) {
                low[i][j] += warp_shfl_xor(low[i][j], mask);
                high[i][j] += warp_shfl_xor(high[i][j], mask);
            }
        Slot<N> slot(lane + 32 * i, half);
        if (lane < lanes && lane + 32 * i < head_dim / (2 * N))
            for (int j = 0; j < N; ++j) {
                shared[warp * head_dim + slot.lo + j] = low[i][j];
                shared[warp * head_dim + slot.hi + j] = high[i][j];
            }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < warps; ++i) sum += shared[i * head_dim + column];
        partial[column] = sum;
    }
    __syncthreads();
}

// The first q_blocks blocks have the query heads, the others the key heads; their warps walk over items.
template <typename T, int N, int SLOTS>
__global__ void __launch_bounds__(128, SLOTS == 1 ? 5 : 1)
    qk_norm_rope_bwd(T* dqkv,                            // (tokens, heads + 2 * kv_heads, head_dim), dv untouched
                     float* __restrict__ partial,        // (blocks, head_dim): shares of dweight, or null
                     const T* dq,                        // (tokens, heads, head_dim), or null: dq and dk in dqkv
                     const T* dk,                        // (tokens, kv_heads, head_dim)
                     const T* __restrict__ qkv,          // (tokens, heads + 2 * kv_heads, head_dim)
                     const T* __restrict__ q_weight,     // (head_dim,), or null: no norm, and no qkv
                     const T* __restrict__ k_weight,     // (head_dim,)
                     const float* __restrict__ cos,      // (max_positions, half)
                     const float* __restrict__ sin,      // (max_positions, half)
                     const int* __restrict__ positions,  // (tokens,)
                     int64_t dqkv_stride, int64_t dq_stride, int64_t dk_stride, int64_t qkv_stride,  // between tokens
                     int q_blocks, int tokens, int heads, int kv_heads, int head_dim, int half, int lanes, float eps,
                     float offset) {
    constexpr int U = HEADS<T, SLOTS>;
    DYNAMIC_SHARED(float, shared);  // (warps, head_dim), when partial is given
    int slots = head_dim / (2 * N), lane = threadIdx.x % lanes, mine = threadIdx.x % 32 / lanes, abreast = 32 / lanes;
    bool keys = blockIdx.x >= q_blocks;
    int count = keys ? kv_heads : heads, skipped = (keys ? heads : 0) * head_dim, warps = blockDim.x / 32;
    uint32_t block = keys ? blockIdx.x - q_blocks : blockIdx.x, blocks = keys ? gridDim.x - q_blocks : q_blocks;
    uint32_t number = block * warps + threadIdx.x / 32;
    const T* source = keys ? dk : dq;
    int64_t source_stride = keys ? dk_stride : dq_stride;
    Piece<T, N, SLOTS> weight;
    if (q_weight) weight.load(keys ? k_weight : q_weight, lane, slots, half, true);
    float share_low[SLOTS][N] = {}, share_high[SLOTS][N] = {};
    for (;; number += blocks * warps) {
        Item item(number, count, U * abreast, mine);
        if (item.token >= tokens) break;
        T* out = dqkv + item.token * dqkv_stride + skipped;
        const T* grads = dq ? source + item.token * source_stride : out;
        const T* values = qkv + item.token * qkv_stride + skipped;
        Piece<T, N, SLOTS> grad[U], value[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            int head = item.first + u * abreast;
            grad[u].load(grads + head * head_dim, lane, slots, half, head < count);
            if (q_weight) value[u].load(values + head * head_dim, lane, slots, half, head < count);
        }
        Angles<N, SLOTS> angles;
        angles.load(cos, sin, positions[item.token], lane, half);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            int head = item.first + u * abreast;
            float lo[SLOTS][N], hi[SLOTS][N], square = 0.0f, dot = 0.0f;
            for (int i = 0; i < SLOTS; ++i) {
                for (int j = 0; j < N; ++j) lo[i][j] = grad[u].low[i].get(j), hi[i][j] = grad[u].high[i].get(j);
                rotate<N>(lo[i], hi[i], angles.cos[i], angles.sin[i], -1.0f);
            }
            if (q_weight) {
                for (int i = 0; i < SLOTS; ++i)
                    for (int j = 0; j < N; ++j) {
                        float a = value[u].low[i].get(j), b = value[u].high[i].get(j);
                        square += a * a + b * b;
                        dot += lo[i][j] * ((weight.low[i].get(j) + offset) * a);
                        dot += hi[i][j] * ((weight.high[i].get(j) + offset) * b);
                    }
                float r = 1.0f / sqrtf(head_sum(square, lanes) / head_dim + eps);
                float mean = r * head_sum(dot, lanes) / head_dim;
                for (int i = 0; i < SLOTS; ++i)
                    for (int j = 0; j < N; ++j) {
                        float a = value[u].low[i].get(j) * r, b = value[u].high[i].get(j) * r;
                        share_low[i][j] += lo[i][j] * a;
                        share_high[i][j] += hi[i][j] * b;
                        lo[i][j] = r * (lo[i][j] * (weight.low[i].get(j) + offset) - a * mean);
                        hi[i][j] = r * (hi[i][j] * (weight.high[i].get(j) + offset) - b * mean);
                    }
            }
            for (int i = 0; i < SLOTS; ++i) grad[u].low[i].set(lo[i]), grad[u].high[i].set(hi[i]);
            grad[u].store(out + head * head_dim, lane, slots, half, head < count);
        }
    }
    if (partial)
        store_share<N, SLOTS>(partial + int64_t(blockIdx.x) * head_dim, shared, share_low, share_high, lanes, head_dim,
                              half);
}
