// Rows of a table by token id, and the sum of the rows' gradients by id.
//
// The backward sorts positions by id without a sort: count the ids (embedding_count), give each id that
// occurs a range of the list (embedding_ranges), put positions there in any order (embedding_place), then
// each position finds its rank among its id's (embedding_order). The atomics are of integers and decide only
// where a range lies, so that sums are the same every time.
#include "pack.cuh"

constexpr int COPIES = 4;  // packs a thread has in flight
constexpr int ROWS = 8;    // rows a warp has in flight

template <typename T, int N>
__global__ void __launch_bounds__(LAUNCH_THREADS)
    embedding_fwd(T* __restrict__ y,             // (tokens, hidden)
                  const T* __restrict__ weight,  // (vocab, hidden)
                  const int* __restrict__ ids,   // (tokens,)
                  int tokens, int hidden) {
    uint32_t packs = hidden / N, first = blockIdx.x * blockDim.x * COPIES + threadIdx.x;
    Pack<T, N> value[COPIES];
    for (int i = 0; i < COPIES; ++i) {
        uint32_t pack = first + i * blockDim.x, row = pack / packs;
        if (row < uint32_t(tokens)) value[i].load(weight + int64_t(ids[row]) * hidden + (pack - row * packs) * N);
    }
    for (int i = 0; i < COPIES; ++i) {
        uint32_t pack = first + i * blockDim.x;
        if (pack / packs < uint32_t(tokens)) value[i].store(y + int64_t(pack) * N);
    }
}

__global__ void __launch_bounds__(LAUNCH_THREADS)
    embedding_count(int* __restrict__ count,      // (vocab,), zero before
                    int* __restrict__ arrival,    // (tokens,): how many of the id came before
                    const int* __restrict__ ids,  // (tokens,)
                    int tokens) {
    int position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position < tokens) arrival[position] = atomicAdd(count + ids[position], 1);
}

// totals: entries of the list given away, ids in `rare`, ids in `hot`.
__global__ void __launch_bounds__(LAUNCH_THREADS)
    embedding_ranges(int* __restrict__ begin,  // (vocab,): where the id's range of the list begins
                     int* __restrict__ rare,   // (tokens,): ids that occur at most `most` times
                     int* __restrict__ hot,    // (tokens / (most + 1),): the others
                     int* __restrict__ totals, // (3,), zero before
                     const int* __restrict__ count, const int* __restrict__ arrival,
                     const int* __restrict__ ids, int tokens, int most) {
    int position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= tokens || arrival[position]) return;
    int id = ids[position];
    begin[id] = atomicAdd(totals, count[id]);
    if (count[id] <= most) rare[atomicAdd(totals + 1, 1)] = id;
    else hot[atomicAdd(totals + 2, 1)] = id;
}

__global__ void __launch_bounds__(LAUNCH_THREADS)
    embedding_place(int* __restrict__ list,  // (tokens,): positions by id
                    const int* __restrict__ begin, const int* __restrict__ arrival,
                    const int* __restrict__ ids, int tokens) {
    int position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position < tokens) list[begin[ids[position]] + arrival[position]] = position;
}

__global__ void __launch_bounds__(LAUNCH_THREADS)
    embedding_order(int* __restrict__ order,  // (tokens,): positions by id, increasing
                    const int* __restrict__ list, const int* __restrict__ begin,
                    const int* __restrict__ count, const int* __restrict__ ids, int tokens) {
    int position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position >= tokens) return;
    int id = ids[position], occurrences = count[id], rank = 0;
    const int* same = list + begin[id];
#pragma unroll 8
    for (int i = 0; i < occurrences; ++i) rank += same[i] < position;
    order[begin[id] + rank] = position;
}

// dweight[id] = or += the sum of dy over the id's positions, for the ids of one list. WARPS warps share a
// piece of a row of 32 * N columns: warp w adds occurrences w, w + WARPS, ...; then the warps' sums are added.
template <typename S, typename T, int N, int WARPS>
__global__ void __launch_bounds__(WARPS > 1 ? 32 * WARPS : LAUNCH_THREADS)
    embedding_bwd(S* __restrict__ dweight,        // (vocab, hidden)
                  const T* __restrict__ dy,       // (tokens, hidden)
                  const int* __restrict__ ids,    // rare or hot
                  const int* __restrict__ total,  // (1,): how many
                  const int* __restrict__ order, const int* __restrict__ begin,
                  const int* __restrict__ count, int hidden, bool accumulate) {
    __shared__ float shares[WARPS > 1 ? WARPS * 32 * N : 1];
    int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, teams = blockDim.x / (32 * WARPS);
    int pieces = (hidden + 32 * N - 1) / (32 * N);
    int64_t items = int64_t(*total) * pieces;
    for (int64_t item = int64_t(blockIdx.x) * teams + threadIdx.x / (32 * WARPS); item < items;
         item += int64_t(gridDim.x) * teams) {
        int id = ids[item / pieces], column = int(item % pieces) * 32 * N + lane * N;
        int occurrences = count[id];
        const int* positions = order + begin[id];
        const T* source = dy + (column < hidden ? column : 0);
        // Lane k finds the position of the k-th row to come while the rows before are on their way.
        auto find = [&](int i) {
            i += lane * WARPS;
            return lane < ROWS && i < occurrences ? positions[i] : 0;
        };
        float sum[N] = {};
        int found = find(warp);
        for (int i = warp; i < occurrences; i += ROWS * WARPS) {
            Pack<T, N> row[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                int position = warp_shfl(found, k);
                row[k].clear();
                if (i + k * WARPS < occurrences) row[k].load(source + int64_t(position) * hidden);
            }
            found = find(i + ROWS * WARPS);
#pragma unroll
            for (int k = 0; k < ROWS; ++k)
                for (int j = 0; j < N; ++j) sum[j] += row[k].get(j);
        }
        if (WARPS > 1) {
            for (int j = 0; j < N; ++j) shares[(warp * N + j) * 32 + lane] = sum[j];
            __syncthreads();
            for (int j = 0; j < N; ++j) {
                sum[j] = 0.0f;
                for (int k = 0; k < WARPS; ++k) sum[j] += shares[(k * N + j) * 32 + lane];
            }
            __syncthreads();
        }
        if (warp || column >= hidden) continue;
        Pack<S, N> out;
        if (accumulate) {
            out.load(dweight + int64_t(id) * hidden + column);
            for (int j = 0; j < N; ++j) sum[j] += out.get(j);
        }
        out.set(sum);
        out.store(dweight + int64_t(id) * hidden + column);
    }
}
