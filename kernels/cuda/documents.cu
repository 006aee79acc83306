// A table of a micro-batch's documents: their lengths, and where each begins.
//
// One block. A thread counts the documents that begin in its stretch of tokens, a scan of the counts says
// which rows are its, and it writes them. So rows are in the order of tokens, whatever the block does.
#include "common.cuh"

constexpr int BLOCK = 1024, WARPS = BLOCK / 32, STRIDES = 6;

// Sum of the values of all threads before this one, and of all threads.
__device__ __forceinline__ int block_scan(int value, int& total) {
    __shared__ int sums[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sum = value;
    for (int step = 1; step < 32; step *= 2) {
        int before = warp_shfl(sum, lane >= step ? lane - step : lane);
        if (lane >= step) sum += before;
    }
    __syncthreads();  // the previous call's readers are done
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) before = total;
        total += sums[i];
    }
    return before + sum - value;
}

// Documents of `shortest` to `longest` tokens; those past the last row are counted but not written.
__global__ void document_table(int* __restrict__ lengths,      // (max_documents,), 0 in empty rows
                               int64_t* __restrict__ offsets,  // (strides, max_documents + 1)
                               int* __restrict__ found,        // documents; tokens of those in the table
                               const int* __restrict__ start,  // (tokens,)
                               const int* __restrict__ end,    // (tokens,)
                               int tokens, int max_documents, int shortest, int longest, int strides,
                               int64_t stride0, int64_t stride1, int64_t stride2, int64_t stride3,
                               int64_t stride4, int64_t stride5) {
    const int64_t stride[STRIDES] = {stride0, stride1, stride2, stride3, stride4, stride5};
    int64_t width = int64_t(max_documents) + 1;
    int stretch = (tokens + BLOCK - 1) / BLOCK;
    int first = min(int(threadIdx.x) * stretch, tokens), last = min(first + stretch, tokens);
    auto listed = [&](int i) {
        int length = end[i] - i;
        return start[i] == i && length >= shortest && length <= longest;
    };

    int count = 0, documents, held = 0, tokens_held;
    for (int i = first; i < last; ++i) count += listed(i);
    int row = block_scan(count, documents);
    for (int i = first; i < last && row < max_documents; ++i) {
        if (!listed(i)) continue;
        lengths[row] = end[i] - i;
        held += end[i] - i;
        for (int s = 0; s < strides; ++s) offsets[s * width + row] = i * stride[s];
        ++row;
    }
    block_scan(held, tokens_held);
    for (int i = documents + threadIdx.x; i <= max_documents; i += BLOCK) {
        if (i < max_documents) lengths[i] = 0;
        for (int s = 0; s < strides; ++s) offsets[s * width + i] = tokens * stride[s];
    }
    if (threadIdx.x != 0) return;
    if (documents > max_documents)
        for (int s = 0; s < strides; ++s) offsets[s * width + max_documents] = tokens * stride[s];
    found[0] = documents, found[1] = tokens_held;
}
