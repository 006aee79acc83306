// y = a + b, N values of each a thread: N * sizeof(T) is 16 bytes, or N is 1. And into += x, value by value.
#include "common.cuh"

template <typename T, int N>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    add_fwd(T* __restrict__ y, const T* __restrict__ a, const T* __restrict__ b, int64_t size) {
    int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (i + N <= size) {
        auto x = Vec<T, N>::load(a + i), z = Vec<T, N>::load(b + i);
        for (int j = 0; j < N; ++j) x.data[j] = from_float<T>(to_float(x.data[j]) + to_float(z.data[j]));
        x.store(y + i);
    } else {
        for (; i < size; ++i) y[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
    }
}

template <typename S, typename T>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    accumulate(S* __restrict__ into, const T* __restrict__ x, int64_t size) {
    constexpr int N = WIDTH<T>;
    int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    for (int j = 0; j < N; ++j)
        if (i + j < size) into[i + j] = from_float<S>(to_float(into[i + j]) + to_float(x[i + j]));
}
