// Moves the softmax statistics of every query between the layout of attention.py and that of cuDNN.
//
// Ours is (heads, tokens). cuDNN's is (rows, heads, row_tokens) for whole rows, and (tokens, heads), that
// is token-major, for a table of documents.
#include "common.cuh"

template <bool TO_CUDNN>
__global__ void attention_stats(float* __restrict__ out, const float* __restrict__ in, int tokens, int heads,
                                int row_tokens, bool token_major) {
    int64_t ours = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (ours >= int64_t(heads) * tokens) return;
    int64_t head = ours / tokens, token = ours % tokens;
    int64_t row = token / row_tokens, place = token % row_tokens;
    int64_t theirs = token_major ? token * heads + head : (row * heads + head) * row_tokens + place;
    out[TO_CUDNN ? theirs : ours] = in[TO_CUDNN ? ours : theirs];
}
