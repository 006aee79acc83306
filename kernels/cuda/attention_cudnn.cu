// Moves the softmax statistics of every query between the layout of attention.py, (heads, tokens), and that
// of cuDNN, (rows, heads, row_tokens).
#include "common.cuh"

template <bool TO_CUDNN>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    attention_stats(float* __restrict__ out, const float* __restrict__ in, int tokens, int heads,
                    int row_tokens) {
    int64_t ours = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (ours >= int64_t(heads) * tokens) return;
    int64_t head = ours / tokens, token = ours % tokens;
    int64_t theirs = (token / row_tokens * heads + head) * row_tokens + token % row_tokens;
    out[TO_CUDNN ? theirs : ours] = in[TO_CUDNN ? ours : theirs];
}
