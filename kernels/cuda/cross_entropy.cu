// Cross entropy of rows of logits, a block a row at a time. One pass takes a row's maximum and the sum of its
// exponentials together, a second its gradient; cross_entropy_fused keeps the row on the chip between them.
// Rows of any length and alignment: what precedes the first 16-byte boundary and follows the last goes value
// by value. Labels: IGNORED rows are neither read nor supervised; a label outside the row makes NaN, never a
// read elsewhere.
#include "pack.cuh"

constexpr int IGNORED = -100;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.402823466e38f;  // finite, so that a logit of -infinity makes no NaN

__device__ __forceinline__ float exponential(float x) { return fast_exp2(x * LOG2E); }

template <typename T> using Values = Pack<T, WIDTH<T>>;

// Where the aligned vectors of a row lie: [head, head + vectors * WIDTH). The other values are `loose`. A row
// that goes to an `out` of another alignment is all loose.
template <typename T> struct Split {
    int head, vectors, loose;
    __device__ __forceinline__ Split(const T* row, int vocab) : Split(row, vocab, row) {}
    __device__ __forceinline__ Split(const T* row, int vocab, const T* out) {
        int past = int(reinterpret_cast<uint64_t>(row) % 16 / sizeof(T));
        head = min(vocab, (WIDTH<T> - past) % WIDTH<T>);
        if ((reinterpret_cast<uint64_t>(row) ^ reinterpret_cast<uint64_t>(out)) % 16) head = vocab;
        vectors = (vocab - head) / WIDTH<T>;
        loose = vocab - vectors * WIDTH<T>;
    }
    __device__ __forceinline__ int loose_column(int i) const { return i < head ? i : i + vectors * WIDTH<T>; }
};

struct Online {
    float top = LOWEST, sum = 0.0f;  // of exp(x - top)
    template <typename T, int N> __device__ __forceinline__ void add(const Pack<T, N>& x) {
        float high = top;
        for (int i = 0; i < N; ++i) high = fmaxf(high, x.get(i));
        sum *= exponential(top - high);
        top = high;
        for (int i = 0; i < N; ++i) sum += exponential(x.get(i) - top);
    }
};

// Adds vectors first, first + blockDim.x, ... below `end`; FLIGHT of them are loaded at once.
template <int FLIGHT, typename T>
__device__ __forceinline__ void add_vectors(Online& mine, const T* vectors, int first, int end) {
    int v = first, step = blockDim.x;
    for (; v + (FLIGHT - 1) * step < end; v += FLIGHT * step) {
        Values<T> x[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) x[k].load(vectors + (v + k * step) * WIDTH<T>);
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) mine.add(x[k]);
    }
    for (; v < end; v += step) {
        Values<T> x;
        x.load(vectors + v * WIDTH<T>);
        mine.add(x);
    }
}

template <typename T> __device__ __forceinline__ void add_loose(Online& mine, const T* row, const Split<T>& split) {
    for (int i = threadIdx.x; i < split.loose; i += blockDim.x) {
        Pack<T, 1> x;
        x.load(row + split.loose_column(i));
        mine.add(x);
    }
}

// log(sum(exp(row))) of what the threads have seen, known to all of them. Calls that follow one another take
// `turn` 0 and 1 in turn: then one barrier a call is enough.
__device__ __forceinline__ float block_lse(const Online& mine, int turn) {
    __shared__ float tops[2][32], sums[2][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    float top = warp_max(mine.top), sum = warp_sum(mine.sum * exponential(mine.top - top));
    if (lane == 0) tops[turn][warp] = top, sums[turn][warp] = sum;
    __syncthreads();
    float part = lane < warps ? tops[turn][lane] : LOWEST;
    sum = lane < warps ? sums[turn][lane] : 0.0f;
    top = warp_max(part);
    return top + logf(warp_sum(sum * exponential(part - top)));
}

// (softmax(row) - onehot(label)) * scale.
struct Gradient {
    float lse, scale;
    int label;
    template <typename T, int N> __device__ __forceinline__ void apply(Pack<T, N>& x, int column) const {
        float value[N];
        for (int i = 0; i < N; ++i) value[i] = exponential(x.get(i) - lse) * scale;
        if (uint32_t(label - column) < N)
            for (int i = 0; i < N; ++i)
                if (label == column + i) value[i] = (exponential(x.get(i) - lse) - 1.0f) * scale;
        x.set(value);
    }
};

// Gradients of the vectors that add_vectors takes, and of the loose values. out may be the row itself.
template <int FLIGHT, typename T>
__device__ __forceinline__ void store_gradient(T* out, const T* row, const Split<T>& split, int first,
                                               const Gradient& gradient) {
    int step = blockDim.x;
    for (int v = first; v < split.vectors; v += FLIGHT * step) {
        Values<T> x[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k)
            if (v + k * step < split.vectors) x[k].load(row + split.head + (v + k * step) * WIDTH<T>);
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) {
            int column = split.head + (v + k * step) * WIDTH<T>;
            if (v + k * step >= split.vectors) break;
            gradient.apply(x[k], column);
            x[k].store(out + column);
        }
    }
    for (int i = threadIdx.x; i < split.loose; i += blockDim.x) {
        Pack<T, 1> x;
        x.load(row + split.loose_column(i));
        gradient.apply(x, split.loose_column(i));
        x.store(out + split.loose_column(i));
    }
}

template <typename T> __device__ void row_zero(T* out, int vocab) {
    Split<T> split(out, vocab);
    Values<T> none;
    none.clear();
    for (int v = threadIdx.x; v < split.vectors; v += blockDim.x) none.store(out + split.head + v * WIDTH<T>);
    for (int i = threadIdx.x; i < split.loose; i += blockDim.x) out[split.loose_column(i)] = from_float<T>(0.0f);
}

// NaN for a label outside the row.
template <typename T> __device__ float label_logit(const T* row, int label, int vocab) {
    bool inside = label >= 0 && label < vocab;
    return inside ? to_float(row[label]) : __int_as_float(0x7fffffff);
}

template <typename T>
__global__ void __launch_bounds__(1024, 2)
    cross_entropy_fwd(float* __restrict__ logprobs,  // (tokens,), 0 where ignored
                      float* __restrict__ lse,       // (tokens,), 0 where ignored
                      const T* __restrict__ logits,  // (tokens, vocab)
                      const int* __restrict__ labels, int vocab) {
    int64_t token = blockIdx.x;
    int label = labels[token];
    const T* row = logits + token * vocab;
    float sum = 0.0f, logprob = 0.0f;
    if (label != IGNORED) {
        Split<T> split(row, vocab);
        Online mine;
        add_vectors<2>(mine, row + split.head, threadIdx.x, split.vectors);
        add_loose(mine, row, split);
        sum = block_lse(mine, 0);
        if (threadIdx.x == 0) logprob = label_logit(row, label, vocab) - sum;
    }
    if (threadIdx.x == 0) lse[token] = sum, logprobs[token] = logprob;
}

// d(nll) = d_nll_sum - d_logprobs of the token; a null pointer is 0. out may be logits.
template <typename T>
__global__ void __launch_bounds__(1024, 2)
    cross_entropy_bwd(T* out,           // (tokens, vocab)
                      const T* logits,  // (tokens, vocab)
                      const float* __restrict__ lse, const int* __restrict__ labels,
                      const float* __restrict__ d_nll_sum,   // scalar
                      const float* __restrict__ d_logprobs,  // (tokens,)
                      int vocab) {
    int64_t token = blockIdx.x;
    int label = labels[token];
    float scale = (d_nll_sum ? *d_nll_sum : 0.0f) - (d_logprobs ? d_logprobs[token] : 0.0f);
    const T* row = logits + token * vocab;
    out += token * vocab;
    if (label == IGNORED)
        row_zero(out, vocab);
    else
        store_gradient<2>(out, row, Split<T>(row, vocab, out), threadIdx.x, {lse[token], scale, label});
}

// Of 8192 x 151936 on an H200: 1281 us so, 1299 with 14 portions of which four are on their way, 1350 with one.
constexpr int KEPT = 5;      // vectors of a row that a thread keeps in registers, as in cross_entropy.py
constexpr int PORTIONS = 7;  // in which the vectors in shared memory are waited for
constexpr int LAG = 1;       // portions that are on their way when one is waited for

// Forward and the gradient of the sum of all nll, in place. A block walks over rows. A thread's first KEPT
// vectors of a row lie in registers, the next `held` in its own place in shared memory, and only what is left
// is read twice. As soon as a vector has become its gradient, the next row's takes its place, and LAG portions
// later it is added to that row's sum: so reads, writes and both passes' arithmetic go on together, and no
// thread waits for another but in the sums.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    cross_entropy_fused(float* __restrict__ logprobs,  // (tokens,), 0 where ignored
                        T* logits,                     // (tokens, vocab) -> gradient
                        const int* __restrict__ labels, int tokens, int vocab, int held) {
    constexpr int N = WIDTH<T>;
    DYNAMIC_SHARED(T, places);  // (held, threads, N)
    int threads = blockDim.x, me = threadIdx.x;
    Values<T> kept[KEPT];
    auto place = [&](int k) { return places + (k * threads + me) * N; };
    auto portion = [&](int p) { return p * held / PORTIONS; };
    auto fetch = [&](const T* row, const Split<T>& split, int k) {
        int v = (KEPT + k) * threads + me;
        if (v < split.vectors) cp_async_16(place(k), row + split.head + v * N);
    };
    auto keep = [&](const T* row, const Split<T>& split, int k) {
        int v = k * threads + me;
        if (v < split.vectors) kept[k].load(row + split.head + v * N);
    };
    // The first row from `token` on that has a label; those before it are done with.
    auto supervised = [&](int64_t token, int& label) {
        while (token < tokens && label == IGNORED) {
            if (me == 0) logprobs[token] = 0.0f;
            row_zero(logits + token * vocab, vocab);
            token += gridDim.x;
            label = token < tokens ? labels[token] : IGNORED;
        }
        return token;
    };

    int label = labels[blockIdx.x];
    int64_t token = supervised(blockIdx.x, label);
    if (token >= tokens) return;
    T* row = logits + token * vocab;
    Split<T> split(row, vocab);
    Online mine;
    auto add_kept = [&](const Split<T>& its) {
#pragma unroll
        for (int k = 0; k < KEPT; ++k)
            if (k * threads + me < its.vectors) mine.add(kept[k]);
    };
    auto add_portion = [&](const Split<T>& its, int p) {
        for (int k = portion(p); k < portion(p + 1); ++k) {
            if ((KEPT + k) * threads + me >= its.vectors) break;
            Values<T> x;
            x.load(place(k));
            mine.add(x);
        }
    };
    // The portions that are still on their way, and what is left.
    auto add_rest = [&](const T* its_row, const Split<T>& its) {
        cp_async_wait<0>();
        for (int p = PORTIONS - LAG; p < PORTIONS; ++p) add_portion(its, p);
        add_vectors<2>(mine, its_row + its.head, (KEPT + held) * threads + me, its.vectors);
        add_loose(mine, its_row, its);
    };
#pragma unroll
    for (int k = 0; k < KEPT; ++k) keep(row, split, k);
    for (int p = 0; p < PORTIONS; ++p) {
        for (int k = portion(p); k < portion(p + 1); ++k) fetch(row, split, k);
        cp_async_commit();
    }
    add_kept(split);
#pragma unroll
    for (int p = 0; p < PORTIONS - LAG; ++p) {
        cp_async_wait_all_but<PORTIONS - 1>(PORTIONS - 1 - p);
        add_portion(split, p);
    }
    add_rest(row, split);

    for (int turn = 0; token < tokens; turn ^= 1) {
        int64_t next = token + gridDim.x;
        int next_label = next < tokens ? labels[next] : IGNORED;
        float target = me == 0 ? label_logit(row, label, vocab) : 0.0f;  // before it is overwritten
        float lse = block_lse(mine, turn);
        if (me == 0) logprobs[token] = target - lse;

        next = supervised(next, next_label);
        T* next_row = logits + (next < tokens ? next : token) * vocab;
        Split<T> next_split(next_row, next < tokens ? vocab : 0);
        Gradient gradient = {lse, 1.0f, label};
        mine = Online();
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            int column = split.head + (k * threads + me) * N;
            if (k * threads + me < split.vectors) {
                gradient.apply(kept[k], column);
                kept[k].store(row + column);
            }
            keep(next_row, next_split, k);
        }
        store_gradient<2>(row, row, split, (KEPT + held) * threads + me, gradient);
        for (int p = 0; p < PORTIONS; ++p) {
            for (int k = portion(p); k < portion(p + 1); ++k) {
                int v = (KEPT + k) * threads + me, column = split.head + v * N;
                if (v < split.vectors) {
                    Values<T> x;
                    x.load(place(k));
                    gradient.apply(x, column);
                    x.store(row + column);
                }
                fetch(next_row, next_split, k);
            }
            cp_async_commit();
            if (p == LAG - 1) add_kept(next_split);
            if (p < LAG) continue;
            cp_async_wait<LAG>();
            add_portion(next_split, p - LAG);
        }
        add_rest(next_row, next_split);
        token = next, label = next_label, row = next_row, split = next_split;
    }
}

// One block: the order of the sum depends on the number of tokens alone.
__global__ void __launch_bounds__(1024)
    nll_total(float* nll_sum, int* count, const float* __restrict__ logprobs, const int* __restrict__ labels,
              int tokens, bool accumulate) {
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
