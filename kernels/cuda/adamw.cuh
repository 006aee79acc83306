// What AdamW's kernels share: one step of a few elements, whatever their moments are kept in. Every product and
// sum is rounded on its own and no thread adds to another's, so the result is the host version's to the bit.
// Formulas: kernels/adamw.py.
#pragma once
#include "update.cuh"

// Columns of a table, as kernels/adamw.py writes them.
enum { SIZE, FIRST_CHUNK, PARAM, GRAD, M, V, MASTER, DECAY, TENSOR, FIRST_ELEMENT, ADAMW_COLUMNS };

// What one step knows before it sees an element.
struct Step {
    float grad_scale, lr_decay, step_size, inverse_root2;
    float beta1, grow1, beta2, grow2, epsilon;
    bool cautious;
    bool usual;  // epsilon and inverse_root2 are where adamw_group's shortcut is exact
};

// scalars: lr, 1 - beta1^t, 1 - beta2^t, then what draw_of takes. norm: see grad_norm.cu; null stands for a scale
// of 1. grow1 and grow2 are 1 - beta, rounded once.
__device__ __forceinline__ Step step_of(const float* scalars, const float* norm, float beta1, float grow1, float beta2,
                                        float grow2, float epsilon, float weight_decay, bool cautious) {
    Step s = {norm == nullptr ? 1.0f : norm[1], exact_mul(scalars[0], weight_decay), scalars[0] / scalars[1],
              1.0f / sqrtf(scalars[2]), beta1, grow1, beta2, grow2, epsilon, cautious};
    s.usual = epsilon <= 1.0f && s.inverse_root2 >= 1.0f && s.inverse_root2 <= 4096.0f;
    return s;
}

// Where all moments are well inside the range of float, divisions and roots need no branches; where all
// first moments are zero, as in rows of an embedding that no token has met, the quotients are those zeros.
template <int N>
__device__ __forceinline__ void adamw_group(float (&p)[N], float (&m)[N], float (&v)[N], const float (&g)[N], bool decay,
                                            const Step& s) {
    constexpr float LEAST_M = 5.42101086e-20f, LEAST_V = 7.88860905e-31f, MOST = 1.84467441e19f;  // 2^-64, 2^-100, 2^64
    float low_m = INFINITY, low_v = INFINITY, size_m = 0.0f, size_v = 0.0f, direction[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        float grad = exact_mul(g[j], s.grad_scale);
        m[j] = exact_add(exact_mul(s.beta1, m[j]), exact_mul(s.grow1, grad));
        v[j] = exact_add(exact_mul(s.beta2, v[j]), exact_mul(s.grow2, exact_mul(grad, grad)));
        low_m = fminf(low_m, fabsf(m[j])), low_v = fminf(low_v, v[j]);
        size_m += fabsf(m[j]), size_v += fabsf(v[j]);
    }
    if (s.usual && low_m >= LEAST_M && low_v >= LEAST_V && size_m <= MOST && size_v <= MOST) {
#pragma unroll
        for (int j = 0; j < N; ++j)
            direction[j] = exact_div(m[j], exact_add(exact_mul(exact_sqrt(v[j]), s.inverse_root2), s.epsilon));
    } else {
        bool none = s.usual && s.epsilon > 0.0f && size_m == 0.0f && size_v <= MOST && low_v >= 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            direction[j] = m[j];
            if (!none) direction[j] /= exact_add(exact_mul(sqrtf(v[j]), s.inverse_root2), s.epsilon);
        }
    }
    if (decay) {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (!s.cautious || exact_mul(direction[j], p[j]) >= 0.0f)
                p[j] = exact_add(p[j], -exact_mul(s.lr_decay, p[j]));
    }
#pragma unroll
    for (int j = 0; j < N; ++j) p[j] = exact_add(p[j], -exact_mul(s.step_size, direction[j]));
}
