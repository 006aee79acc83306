// Rotary positions of heads, a slot (two packs of N values) a thread; the backward has sign -1.
#include "rotary.cuh"

template <typename T, int N>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    rope_fwd(T* __restrict__ y,                    // (tokens, heads, head_dim)
             const T* __restrict__ x,              // (tokens, heads, head_dim), rows x_stride apart
             const float* __restrict__ cos,        // (max_positions, half)
             const float* __restrict__ sin,        // (max_positions, half)
             const int* __restrict__ positions,    // (tokens,)
             int64_t x_stride, int tokens, int heads, int head_dim, int half, float sign) {
    uint32_t slots = head_dim / (2 * N), index = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t head = index / slots, token = head / heads;
    if (token >= uint32_t(tokens)) return;
    Slot<N> slot(index - head * slots, half);
    x += token * x_stride + int64_t(head - token * heads) * head_dim;
    y += int64_t(head) * head_dim;
    Pack<T, N> low, high;
    low.load(x + slot.lo);
    high.load(x + slot.hi);
    if (slot.rotated) {
        Pack<float, N> c, s;
        int64_t angle = int64_t(positions[token]) * half + slot.lo;
        c.load(cos + angle);
        s.load(sin + angle);
        float lo[N], hi[N];
        for (int j = 0; j < N; ++j) lo[j] = low.get(j), hi[j] = high.get(j);
        rotate<N>(lo, hi, c, s, sign);
        low.set(lo);
        high.set(hi);
    }
    low.store(y + slot.lo);
    high.store(y + slot.hi);
}
