// Writes one value to every element: a memset as a kernel.
#include "common.cuh"

template <typename T>
__global__ void __launch_bounds__(256) fill(T* out, uint32_t value, int64_t count) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
        out[i] = T(value);
}
