// Instructions of Hopper (sm_90a) that C++ does not name: matrix products of a warpgroup, copies of tiles by
// the tensor memory accelerator (TMA), and the barriers that order the two with ordinary code.
//
// A tile in shared memory is made of panels: 64 columns of bf16 (128 bytes) times all of its rows, one panel
// after the other, each panel row after row with its 16-byte chunks permuted by the 128-byte swizzle. TMA
// writes tiles in this form and the products read them. A tile starts at a multiple of 1024 bytes.
//
// A product's accumulators d[n][e] follow the m64 fragment: warp w of the group, lane l: row
// 16 w + l / 4 + 8 (e / 2), column 8 n + 2 (l % 4) + e % 2. Rounded to bf16 in pairs they are the left
// operand of the next product as they stand (see pack_left).
//
// Products run in the background. Nothing may touch their accumulators, left operands in registers, or tiles
// until wgmma_wait says so; `hold` then keeps the compiler from having moved that access up.
#pragma once
#include "common.cuh"

#ifdef SUROGATE_EMULATED
#include "emulated_hopper.cuh"
#else

// A CUtensorMap, which the driver fills in.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};
#define GRID_CONSTANT __grid_constant__

// Declares `type* name`: the dynamic shared memory of the launch, aligned as tiles need it.
#define TILES_SHARED(type, name)                                     \
    extern __shared__ __align__(1024) unsigned char tiles_shared[]; \
    type* name = reinterpret_cast<type*>(tiles_shared)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory. A phase ends when the expected arrivals and bytes have come; waiting for parity 0
// waits for the end of phases 0, 2, 4...
typedef uint64_t Barrier;
__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Shows the barriers that this thread initialised to TMA; __syncthreads shows them to the block.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// All lanes of the warp wait.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@done bra finished;\n\t"
                 "bra again;\n"
                 "finished:\n\t}"
                 :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Hardware barriers 1 to 15 among some warps of the block: `threads` count those that wait and those that only
// arrive.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Values that a Barrier, not __syncthreads, hands from one warp to another.
__device__ __forceinline__ void shared_put(int* p, int value) {
    asm volatile("st.shared.s32 [%0], %1;" :: "r"(shared_address(p)), "r"(value) : "memory");
}
__device__ __forceinline__ int shared_get(const int* p) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(shared_address(p)) : "memory");
    return value;
}

// Copies a box of a tensor [tokens, heads, columns] into a panel, and counts its bytes at the barrier. What lies
// outside of the tensor becomes zeros. One thread.
__device__ __forceinline__ void tma_load(void* panel, const TensorMap* map, Barrier* barrier, int column, int head,
                                         int token) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(shared_address(panel)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(head),
                    "r"(token) : "memory");
}
// Copies `bytes` (a multiple of 16) that lie together, and counts them at the barrier. One thread.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Moves registers between the warpgroups of a block; all warps of a group call it.
template <int REGISTERS> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// Before the first product, and between an ordinary access of a register and a product that uses it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all committed groups but the newest N.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void hold(float (&d)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[n][e]) :: "memory");
}

#define D_4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D_16(i) D_4(i), D_4(i + 1), D_4(i + 2), D_4(i + 3)
#define D_64 D_16(0), D_16(4)
#define D_128 D_16(0), D_16(4), D_16(8), D_16(12)
#define NAMES_64                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "             \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define NAMES_128                                                                         \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "             \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "    \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "    \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d (64 x N) = or (ADD) += a (64 x 16) b (16 x N). a and b are descriptors of tiles, or a is in registers. Tiles
// hold rows of a and columns of b as their rows; the other way round with A_COLUMNS and B_ROWS. P0 to P6 are the
// numbers of the operands after d.
#define WGMMA(N, P0, P1, P2, P3, P4, P5, P6)                                                                       \
    template <bool A_COLUMNS, bool B_ROWS, bool ADD>                                                               \
    __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], uint64_t a, uint64_t b) {                          \
        asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #P2 ", 0;\n\t"                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " NAMES_##N ", %" #P0 ", %" #P1    \
                     ", add, 1, 1, %" #P3 ", %" #P4 ";\n\t}"                                                       \
                     : D_##N : "l"(a), "l"(b), "n"(int(ADD)), "n"(int(A_COLUMNS)), "n"(int(B_ROWS)));              \
    }                                                                                                              \
    template <bool B_ROWS, bool ADD>                                                                               \
    __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {              \
        asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #P5 ", 0;\n\t"                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " NAMES_##N                         \
                     ", {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", add, 1, 1, %" #P6 ";\n\t}"             \
                     : D_##N                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADD)), "n"(int(B_ROWS)));       \
    }
WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
#undef WGMMA

#endif  // SUROGATE_EMULATED

// A place in a ring of buffers: which one, and the parity of the pass. A reader waits for the `full` barrier of
// its place at `parity`; a writer waits for `empty` at `parity ^ 1`, which on the first pass holds at once.
template <int STAGES> struct Turn {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A tile of ROWS rows as an operand: 14 bits each, in units of 16 bytes, of its address, of the distance between
// panels and of the distance between groups of 8 rows; 1 << 62 is the 128-byte swizzle.
template <int ROWS> __device__ __forceinline__ uint64_t descriptor(const void* tile) {
    constexpr uint64_t PANELS = ROWS * 128 / 16, GROUPS = 8 * 128 / 16;
    return (shared_address(tile) & 0x3ffff) >> 4 | PANELS << 16 | GROUPS << 32 | 1ull << 62;
}
// What to add to a descriptor for 16 columns or 16 rows `step` further.
template <int ROWS> __device__ __forceinline__ constexpr int column_step(int step) {
    return step / 4 * ROWS * 8 + step % 4 * 2;
}
__device__ __forceinline__ constexpr int row_step(int step) { return step * 128; }

// d (64 x 8 N) = products of 64 rows of a tile of A_ROWS and 8 N rows of a tile of B_ROWS, over COLUMNS.
template <int COLUMNS, int A_ROWS, int B_ROWS, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N][4], uint64_t a, uint64_t b) {
    wgmma<false, false, false>(d, a, b);
#pragma unroll
    for (int step = 1; step < COLUMNS / 16; ++step)
        wgmma<false, false, true>(d, a + column_step<A_ROWS>(step), b + column_step<B_ROWS>(step));
}
// d (64 x 8 N) = or (ADD) += left (64 x 16 STEPS) times 16 STEPS rows of a tile of 8 N columns.
template <bool ADD, int N, int STEPS>
__device__ __forceinline__ void multiply_left(float (&d)[N][4], const uint32_t (&left)[STEPS][4], uint64_t b) {
    wgmma<true, ADD>(d, left[0], b);
#pragma unroll
    for (int step = 1; step < STEPS; ++step) wgmma<true, true>(d, left[step], b + row_step(step));
}
// Accumulators as the left operand of a product, rounded to bf16.
template <int STEPS>
__device__ __forceinline__ void pack_left(uint32_t (&left)[STEPS][4], const float (&d)[2 * STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = &d[2 * step + i / 2][i % 2 * 2];
            left[step][i] = pack_bf16(pair[0], pair[1]);
        }
}
