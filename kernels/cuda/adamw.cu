// AdamW over all tensors of one combination of dtypes, one block a chunk of a tensor.
//
// Every product and sum is rounded on its own and no thread adds to another's, so the result is the
// host version's to the bit. Formulas: kernels/adamw.py.
#include "multi_tensor.cuh"
#include "rounding.cuh"

static_assert(GROUP == ROUNDING_GROUP, "a thread's elements are the ones that share random bits");

// Columns of the table, as kernels/adamw.py writes them.
enum { SIZE, FIRST_CHUNK, PARAM, GRAD, M, V, MASTER, DECAY, TENSOR, FIRST_ELEMENT, COLUMNS };
enum { PARAM_ROLE, M_ROLE, V_ROLE };

// What one step knows before it sees an element.
struct Step {
    float grad_scale, lr_decay, step_size, inverse_root2;
    float beta1, grow1, beta2, grow2, epsilon;
    uint32_t seed, step;
};

// Stores x rounded to T: bf16 at random, float as it is.
template <typename T>
__device__ __forceinline__ void store_unbiased(T* p, float (&x)[GROUP], int count, bool whole, int64_t element,
                                               uint32_t tensor, uint32_t role, const Step& s) {
    if (sizeof(T) == 2) stochastic_round_group(x, element, tensor, role, s.seed, s.step);
    store_group(p, x, count, whole);
}

__device__ __forceinline__ void adamw_group(float (&p)[GROUP], float (&m)[GROUP], float (&v)[GROUP],
                                            const float (&g)[GROUP], bool decay, const Step& s) {
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        float grad = exact_mul(g[j], s.grad_scale);
        m[j] = exact_add(exact_mul(s.beta1, m[j]), exact_mul(s.grow1, grad));
        v[j] = exact_add(exact_mul(s.beta2, v[j]), exact_mul(s.grow2, exact_mul(grad, grad)));
        float direction = m[j] / exact_add(exact_mul(sqrtf(v[j]), s.inverse_root2), s.epsilon);
        if (decay) p[j] = exact_add(p[j], -exact_mul(s.lr_decay, p[j]));
        p[j] = exact_add(p[j], -exact_mul(s.step_size, direction));
    }
}

// scalars: lr, 1 - beta1^t, 1 - beta2^t, then seed and t as integers' bits. norm: see grad_norm.cu; null
// stands for a scale of 1. grow1 and grow2 are 1 - beta, rounded once.
template <typename P, typename G, typename S, bool MASTERED>
__global__ void adamw_step(const int64_t* __restrict__ table, const int* __restrict__ chunk_tensor,
                           const float* __restrict__ scalars, const float* __restrict__ norm, int chunk,
                           float beta1, float grow1, float beta2, float grow2, float epsilon,
                           float weight_decay, bool zero_grad) {
    Chunk work = chunk_of_block(table, chunk_tensor, COLUMNS, chunk);
    const int64_t* row = work.row;
    P* param = reinterpret_cast<P*>(row[PARAM]);
    G* grad = reinterpret_cast<G*>(row[GRAD]);
    S* moment1 = reinterpret_cast<S*>(row[M]);
    S* moment2 = reinterpret_cast<S*>(row[V]);
    float* master = reinterpret_cast<float*>(row[MASTER]);
    bool decay = row[DECAY], apply = norm == nullptr || norm[2] != 0.0f;
    bool aligned = vector_aligned(row[PARAM] | row[GRAD] | row[M] | row[V] | row[MASTER]);
    uint32_t tensor = uint32_t(row[TENSOR]);

    Step s = {norm == nullptr ? 1.0f : norm[1], exact_mul(scalars[0], weight_decay), scalars[0] / scalars[1],
              1.0f / sqrtf(scalars[2]), beta1, grow1, beta2, grow2, epsilon, __float_as_uint(scalars[3]),
              __float_as_uint(scalars[4])};

    for (int64_t i = work.begin + threadIdx.x * GROUP; i < work.end; i += int64_t(blockDim.x) * GROUP) {
        int count = work.end - i < GROUP ? int(work.end - i) : GROUP;
        bool whole = aligned && count == GROUP;
        int64_t element = row[FIRST_ELEMENT] + i;
        float p[GROUP], g[GROUP], m[GROUP], v[GROUP];
        if (apply) {
            load_group(g, grad + i, count, whole);
            load_group(m, moment1 + i, count, whole);
            load_group(v, moment2 + i, count, whole);
            if (MASTERED) load_group(p, master + i, count, whole);
            else load_group(p, param + i, count, whole);
            adamw_group(p, m, v, g, decay, s);
            store_unbiased(moment1 + i, m, count, whole, element, tensor, M_ROLE, s);
            store_unbiased(moment2 + i, v, count, whole, element, tensor, V_ROLE, s);
            if (MASTERED) {
                store_group(master + i, p, count, whole);
                store_group(param + i, p, count, whole);
            } else {
                store_unbiased(param + i, p, count, whole, element, tensor, PARAM_ROLE, s);
            }
        }
        if (zero_grad) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) g[j] = 0.0f;
            store_group(grad + i, g, count, whole);
        }
    }
}
