// Products of tiles in every form, and mistakes that the emulator must find.
#include "hopper.cuh"

struct Shared {
    bf16 a[64 * 128], b[128 * 128];
    Barrier full;
};

// d = a b: a is 64 x 64 and b 64 x 128, in tiles whose rows are those of a or its columns, the columns of b or its
// rows. LEFT: a in registers.
template <bool LEFT, bool A_COLUMNS, bool B_ROWS>
__global__ void product(float* d, const GRID_CONSTANT TensorMap a, const GRID_CONSTANT TensorMap b) {
    constexpr int B_TILE = B_ROWS ? 64 : 128;
    TILES_SHARED(Shared, s);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    if (threadIdx.x == 0) {
        barrier_init(&s->full, 1);
        barrier_init_fence();
        barrier_arrive_expect(&s->full, 64 * 128 + 64 * 128 * 2);
        tma_load(s->a, &a, &s->full, 0, 0, 0);
        for (int panel = 0; panel < (B_ROWS ? 2 : 1); ++panel)
            tma_load(s->b + panel * B_TILE * 64, &b, &s->full, 64 * panel, 0, 0);
    }
    __syncthreads();
    barrier_wait(&s->full, 0);
    float out[16][4] = {};
    uint64_t left = descriptor<64>(s->a), right = descriptor<B_TILE>(s->b);
    uint32_t pairs[4][4];
    for (int step = 0; step < 4; ++step)
        for (int i = 0; i < 4; ++i) {
            int r = row + i % 2 * 8, chunk = 2 * step + i / 2;
            pairs[step][i] = shared_get(reinterpret_cast<const int*>(s->a + r * 64 + (chunk ^ r % 8) * 8) + lane % 4);
        }
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {
        uint64_t b_step = right + (B_ROWS ? row_step(step) : column_step<128>(step));
        if constexpr (LEFT) wgmma<B_ROWS, true>(out, pairs[step], b_step);
        else wgmma<A_COLUMNS, B_ROWS, true>(out, left + (A_COLUMNS ? row_step(step) : column_step<64>(step)), b_step);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(out);
    for (int n = 0; n < 16; ++n)
        for (int e = 0; e < 4; ++e) d[(row + e / 2 * 8) * 128 + 8 * n + lane % 4 * 2 + e % 2] = out[n][e];
}

// MISTAKE: 0 no fence, 1 reads before the wait, 2 expects too many bytes, 3 a tile off its alignment.
template <int MISTAKE> __global__ void wrong(float* d, const GRID_CONSTANT TensorMap a) {
    TILES_SHARED(Shared, s);
    if (threadIdx.x == 0) {
        barrier_init(&s->full, 1);
        barrier_init_fence();
        barrier_arrive_expect(&s->full, 64 * 128 + (MISTAKE == 2 ? 16 : 0));
        tma_load(s->a + (MISTAKE == 3 ? 64 : 0), &a, &s->full, 0, 0, 0);
    }
    __syncthreads();
    barrier_wait(&s->full, 0);
    float out[8][4] = {};
    if (MISTAKE != 0) wgmma_fence();
    wgmma<false, false, false>(out, descriptor<64>(s->a), descriptor<64>(s->a));
    wgmma_commit();
    if (MISTAKE == 1) d[threadIdx.x] = out[0][0];
    wgmma_wait<0>();
    hold(out);
    if (MISTAKE != 1) d[threadIdx.x] = out[0][0];
}
