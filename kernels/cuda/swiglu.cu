// SwiGLU over the packed (gate, up) row: N values of each a thread, N * sizeof(T) is 16 bytes or one value. Unless F is
// void, codes are made of what is written, which takes 8 values of bf16 a thread.
#include "fp8.cuh"

// exp in the precision that T can show. Both are infinite where 1 / (1 + exp) is zero.
template <typename T> __device__ __forceinline__ float exponential(float x) {
    return sizeof(T) == 4 ? expf(x) : __expf(x);
}
template <typename T> __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exponential<T>(-x)); }

// The thread's values: N of `row` from `column` on. An array's rows lie `stride` elements apart.
template <int N> struct Place {
    bool inside;
    uint32_t row, column;
    __device__ __forceinline__ Place(int tokens, int ffn) {
        uint32_t packs = ffn / N, pack = blockIdx.x * blockDim.x + threadIdx.x;
        row = pack / packs;
        column = (pack - row * packs) * N;
        inside = row < uint32_t(tokens);
    }
    __device__ __forceinline__ int64_t in(int stride) const { return int64_t(row) * stride + column; }
};

template <typename T, int N, typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    swiglu_fwd(T* __restrict__ y,                     // (tokens, ffn), y_stride apart
               uint8_t* __restrict__ code,            // (tokens, ffn), or null
               float* amax,                           // raised to max |y|, or null
               const T* __restrict__ gate_up,         // (tokens, 2 * ffn)
               const float* __restrict__ code_scale,  // of the codes, or null
               int y_stride, int tokens, int ffn) {
    Place<N> place(tokens, ffn);
    Cast<F> cast(code_scale);
    if (place.inside) {
        Pack<T, N> gate, up;
        gate_up += place.in(2 * ffn);
        gate.load(gate_up);
        up.load(gate_up + ffn);
        float out[N];
        for (int j = 0; j < N; ++j) out[j] = gate.get(j) * sigmoid<T>(gate.get(j)) * up.get(j);
        gate.set(out);
        gate.store(y + place.in(y_stride));
        cast.store(code + place.in(ffn), gate);
    }
    cast.finish(amax);
}

template <typename T, int N, typename F>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    swiglu_bwd(T* d_gate_up,                          // (tokens, 2 * ffn), d_stride apart
               T* __restrict__ y,                     // (tokens, ffn): the output once more, or null
               uint8_t* __restrict__ code,            // (tokens, 2 * ffn): of d_gate_up, or null
               float* amax,                           // raised to max |d_gate_up|, or null
               const T* __restrict__ dy,              // (tokens, ffn), dy_stride apart
               const T* gate_up,                      // (tokens, 2 * ffn), or null: it is in d_gate_up
               const float* __restrict__ code_scale,  // of the codes, or null
               int d_stride, int dy_stride, int tokens, int ffn) {
    Place<N> place(tokens, ffn);
    Cast<F> cast(code_scale);
    if (place.inside) {
        d_gate_up += place.in(d_stride);
        const T* source = gate_up ? gate_up + place.in(2 * ffn) : d_gate_up;
        Pack<T, N> gate, up, grad;
        gate.load(source);
        up.load(source + ffn);
        grad.load(dy + place.in(dy_stride));
        float d_gate[N], d_up[N], out[N];
        for (int j = 0; j < N; ++j) {
            float g = gate.get(j), s = sigmoid<T>(g), silu = g * s;
            d_up[j] = grad.get(j) * silu;
            d_gate[j] = grad.get(j) * up.get(j) * (s + silu * (1.0f - s));
            out[j] = silu * up.get(j);
        }
        gate.set(d_gate);
        gate.store(d_gate_up);
        up.set(d_up);
        up.store(d_gate_up + ffn);
        code += place.in(2 * ffn);
        cast.store(code, gate);
        cast.store(code + ffn, up);
        if (y) {
            grad.set(out);
            grad.store(y + place.in(ffn));
        }
    }
    cast.finish(amax);
}
