// The instructions that common.cuh wraps, with the place of the call for messages.
#pragma once

template <typename T> __device__ __forceinline__ T warp_shfl(T value, int lane, EMULATOR_CALLER) {
    emulator_shuffle(&value, sizeof value, lane, {file, line});
    return value;
}
template <typename T> __device__ __forceinline__ T warp_shfl_xor(T value, int mask, EMULATOR_CALLER) {
    return warp_shfl(value, emulator_lane() ^ mask, file, line);
}
__device__ __forceinline__ uint32_t warp_ballot(bool value, EMULATOR_CALLER) {
    return emulator_ballot(value, {file, line});
}
__device__ __forceinline__ void warp_sync(EMULATOR_CALLER) { emulator_warp_sync({file, line}); }

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMULATOR_CALLER) {
    emulator_ldmatrix(r, row, false, {file, line});
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMULATOR_CALLER) {
    emulator_ldmatrix(r, row, true, {file, line});
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             EMULATOR_CALLER) {
    emulator_mma(d, a, b0, b1, {file, line});
}

__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true, EMULATOR_CALLER) {
    emulator_copy_async(shared, global, valid, {file, line});
}
__device__ __forceinline__ void cp_async_commit() { emulator_copy_commit(); }
template <int N> __device__ __forceinline__ void cp_async_wait() { emulator_copy_wait(N); }
