// SwiGLU over the packed (gate, up) row: N values of each a thread, N * sizeof(T) is 16 bytes or one value.
#include "pack.cuh"

// exp in the precision that T can show. Both are infinite where 1 / (1 + exp) is zero.
template <typename T> __device__ __forceinline__ float exponential(float x) {
    return sizeof(T) == 4 ? expf(x) : __expf(x);
}
template <typename T> __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exponential<T>(-x)); }

// Where the thread's values lie: in y at `narrow`, in gate_up at `wide` (gate) and `wide + ffn` (up).
template <int N> struct Place {
    bool inside;
    int64_t narrow, wide;
    __device__ __forceinline__ Place(int tokens, int ffn) {
        uint32_t packs = ffn / N, pack = blockIdx.x * blockDim.x + threadIdx.x;
        uint32_t row = pack / packs;
        inside = row < uint32_t(tokens);
        narrow = int64_t(pack) * N;
        wide = narrow + int64_t(row) * ffn;
    }
};

template <typename T, int N>
__global__ void swiglu_fwd(T* __restrict__ y,              // (tokens, ffn)
                           const T* __restrict__ gate_up,  // (tokens, 2 * ffn)
                           int tokens, int ffn) {
    Place<N> place(tokens, ffn);
    if (!place.inside) return;
    Pack<T, N> gate, up;
    gate.load(gate_up + place.wide);
    up.load(gate_up + place.wide + ffn);
    float out[N];
    for (int j = 0; j < N; ++j) out[j] = gate.get(j) * sigmoid<T>(gate.get(j)) * up.get(j);
    gate.set(out);
    gate.store(y + place.narrow);
}

template <typename T, int N>
__global__ void swiglu_bwd(T* d_gate_up,                   // (tokens, 2 * ffn)
                           T* __restrict__ y,              // (tokens, ffn): the output once more, or null
                           const T* __restrict__ dy,       // (tokens, ffn)
                           const T* gate_up,               // (tokens, 2 * ffn), or null: it is in d_gate_up
                           int tokens, int ffn) {
    Place<N> place(tokens, ffn);
    if (!place.inside) return;
    const T* source = (gate_up ? gate_up : d_gate_up) + place.wide;
    Pack<T, N> gate, up, grad;
    gate.load(source);
    up.load(source + ffn);
    grad.load(dy + place.narrow);
    float d_gate[N], d_up[N], out[N];
    for (int j = 0; j < N; ++j) {
        float g = gate.get(j), s = sigmoid<T>(g), silu = g * s;
        d_up[j] = grad.get(j) * silu;
        d_gate[j] = grad.get(j) * up.get(j) * (s + silu * (1.0f - s));
        out[j] = silu * up.get(j);
    }
    gate.set(d_gate);
    gate.store(d_gate_up + place.wide);
    up.set(d_up);
    up.store(d_gate_up + place.wide + ffn);
    if (!y) return;
    grad.set(out);
    grad.store(y + place.narrow);
}
