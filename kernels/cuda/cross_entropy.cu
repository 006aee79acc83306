// Cross entropy of rows of logits, a block a row. A row is read once for its maximum and the sum of its
// exponentials together; the gradient is a second read, backwards, since the L2 cache still holds the
// row's end. Rows of any length and alignment: what precedes the first 16-byte boundary and follows the
// last goes value by value. Labels: IGNORED rows are neither read nor supervised; a label outside the
// row makes NaN, never a read elsewhere.
#include "common.cuh"

constexpr int IGNORED = -100;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.402823466e38f;  // finite, so that a logit of -infinity makes no NaN

__device__ __forceinline__ float exponential(float x) { return fast_exp2(x * LOG2E); }

// Where the aligned vectors of a row lie: [head, head + vectors * WIDTH).
template <typename T> struct Split {
    int head, vectors;
    __device__ __forceinline__ Split(const T* row, int vocab) {
        int past = int(reinterpret_cast<uint64_t>(row) % 16 / sizeof(T));
        head = min(vocab, (WIDTH<T> - past) % WIDTH<T>);
        vectors = (vocab - head) / WIDTH<T>;
    }
};

struct Online {
    float top = LOWEST, sum = 0.0f;  // of exp(x - top)
    template <int N> __device__ __forceinline__ void add(const float (&x)[N]) {
        float high = top;
        for (int i = 0; i < N; ++i) high = fmaxf(high, x[i]);
        sum *= exponential(top - high);
        top = high;
        for (int i = 0; i < N; ++i) sum += exponential(x[i] - top);
    }
};

// log(sum(exp(row))), known to all threads.
template <typename T> __device__ float row_lse(const T* row, int vocab) {
    constexpr int N = WIDTH<T>;
    Split<T> split(row, vocab);
    Online mine;
    for (int v = threadIdx.x; v < split.vectors; v += blockDim.x) {
        auto values = Vec<T, N>::load(row + split.head + v * N);
        float x[N];
        for (int i = 0; i < N; ++i) x[i] = to_float(values.data[i]);
        mine.add(x);
    }
    int tail = split.head + split.vectors * N;
    for (int i = threadIdx.x; i < split.head + vocab - tail; i += blockDim.x) {
        float x[1] = {to_float(row[i < split.head ? i : tail + i - split.head])};
        mine.add(x);
    }
    float top = block_max(mine.top);
    return top + logf(block_sum(mine.sum * exponential(mine.top - top)));
}

// out = (softmax(row) - onehot(label)) * scale; out may be the row itself.
template <typename T>
__device__ void row_gradient(T* out, const T* row, float lse, int label, float scale, int vocab) {
    constexpr int N = WIDTH<T>;
    Split<T> split(row, vocab);
    auto gradient = [&](float x, int column) {
        return (exponential(x - lse) - (column == label ? 1.0f : 0.0f)) * scale;
    };
    int tail = split.head + split.vectors * N;
    for (int i = threadIdx.x; i < split.head + vocab - tail; i += blockDim.x) {
        int column = i < split.head ? i : tail + i - split.head;
        out[column] = from_float<T>(gradient(to_float(row[column]), column));
    }
    for (int v = split.vectors - 1 - int(threadIdx.x); v >= 0; v -= blockDim.x) {
        int column = split.head + v * N;
        auto values = Vec<T, N>::load(row + column);
        for (int i = 0; i < N; ++i)
            values.data[i] = from_float<T>(gradient(to_float(values.data[i]), column + i));
        values.store(out + column);
    }
}

template <typename T> __device__ void row_zero(T* out, int vocab) {
    constexpr int N = WIDTH<T>;
    Split<T> split(out, vocab);
    Vec<T, N> none;
    for (int i = 0; i < N; ++i) none.data[i] = from_float<T>(0.0f);
    for (int v = threadIdx.x; v < split.vectors; v += blockDim.x) none.store(out + split.head + v * N);
    int tail = split.head + split.vectors * N;
    for (int i = threadIdx.x; i < split.head + vocab - tail; i += blockDim.x)
        out[i < split.head ? i : tail + i - split.head] = none.data[0];
}

template <typename T> __device__ float label_logprob(const T* row, int label, float lse, int vocab) {
    bool inside = label >= 0 && label < vocab;
    return inside ? to_float(row[label]) - lse : __int_as_float(0x7fffffff);
}

template <typename T>
__global__ void cross_entropy_fwd(float* __restrict__ logprobs,  // (tokens,), 0 where ignored
                                  float* __restrict__ lse,       // (tokens,), 0 where ignored
                                  const T* __restrict__ logits,  // (tokens, vocab)
                                  const int* __restrict__ labels, int vocab) {
    int64_t token = blockIdx.x;
    int label = labels[token];
    const T* row = logits + token * vocab;
    float sum = label == IGNORED ? 0.0f : row_lse(row, vocab);
    if (threadIdx.x == 0) {
        lse[token] = sum;
        logprobs[token] = label == IGNORED ? 0.0f : label_logprob(row, label, sum, vocab);
    }
}

// d(nll) = d_nll_sum - d_logprobs of the token; a null pointer is 0. out may be logits.
template <typename T>
__global__ void cross_entropy_bwd(T* out,           // (tokens, vocab)
                                  const T* logits,  // (tokens, vocab)
                                  const float* __restrict__ lse, const int* __restrict__ labels,
                                  const float* __restrict__ d_nll_sum,   // scalar
                                  const float* __restrict__ d_logprobs,  // (tokens,)
                                  int vocab) {
    int64_t token = blockIdx.x;
    int label = labels[token];
    float scale = (d_nll_sum ? *d_nll_sum : 0.0f) - (d_logprobs ? d_logprobs[token] : 0.0f);
    if (label == IGNORED)
        row_zero(out + token * vocab, vocab);
    else
        row_gradient(out + token * vocab, logits + token * vocab, lse[token], label, scale, vocab);
}

// Forward and the gradient of the sum of all nll, in place.
template <typename T>
__global__ void cross_entropy_fused(float* __restrict__ logprobs,  // (tokens,), 0 where ignored
                                    T* logits,                     // (tokens, vocab) -> gradient
                                    const int* __restrict__ labels, int vocab) {
    int64_t token = blockIdx.x;
    int label = labels[token];
    T* row = logits + token * vocab;
    if (label == IGNORED) {
        if (threadIdx.x == 0) logprobs[token] = 0.0f;
        row_zero(row, vocab);
        return;
    }
    float lse = row_lse(row, vocab);
    if (threadIdx.x == 0) logprobs[token] = label_logprob(row, label, lse, vocab);
    __syncthreads();  // the label's logit is read before it is overwritten
    row_gradient(row, row, lse, label, 1.0f, vocab);
}

// One block: the order of the sum depends on the number of tokens alone.
__global__ void nll_total(float* nll_sum, int* count, const float* __restrict__ logprobs,
                          const int* __restrict__ labels, int tokens, bool accumulate) {
    float sum = 0.0f, supervised = 0.0f;  // counts are exact in float32 up to 2^24
    for (int i = threadIdx.x; i < tokens; i += blockDim.x)
        if (labels[i] != IGNORED) sum -= logprobs[i], supervised += 1.0f;
    sum = block_sum(sum);
    supervised = block_sum(supervised);
    if (threadIdx.x == 0) {
        *nll_sum = (accumulate ? *nll_sum : 0.0f) + sum;
        *count = (accumulate ? *count : 0) + int(supervised);
    }
}
