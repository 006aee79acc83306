// What the lanes of a warp do together. The last lane that arrives computes the results of all 32.
#pragma once

namespace emulator {

template <typename T> struct ShuffleOperand {
    T value, result;
    int source;
};
template <typename T> void perform_shuffle(void* const operands[32]) {
    for (int lane = 0; lane < 32; ++lane) {
        auto* own = static_cast<ShuffleOperand<T>*>(operands[lane]);
        if (!own) continue;
        auto* other = static_cast<ShuffleOperand<T>*>(operands[own->source & 31]);
        if (!other) emulator_fail("shuffle: lane %d reads lane %d, which has exited", lane, own->source & 31);
        own->result = other->value;
    }
}
template <typename T> __attribute__((noinline)) T shuffle(T value, int source, Site site) {
    static const Collective what = {"shuffle", false, perform_shuffle<T>};
    ShuffleOperand<T> operand = {value, value, source};
    emulator_collective(what, &operand, site);
    return operand.result;
}
__device__ __forceinline__ int lane_index() {
    Index thread = emulator_thread_index(), dim = emulator_block_dim();
    return int((thread.x + dim.x * (thread.y + dim.y * thread.z)) % 32);
}

struct BallotOperand {
    bool value;
    uint32_t result;
};
inline void perform_ballot(void* const operands[32]) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (operands[lane] && static_cast<BallotOperand*>(operands[lane])->value) votes |= 1u << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (operands[lane]) static_cast<BallotOperand*>(operands[lane])->result = votes;
}

struct LoadOperand {
    uint32_t* r;
    const uint16_t* row;
};
// Lane l holds, of each tile, elements 2*(l%4) and 2*(l%4)+1 of row l/4 (of column l/4 when transposed).
template <bool TRANSPOSED> void perform_ldmatrix(void* const operands[32]) {
    for (int lane = 0; lane < 32; ++lane)
        for (int tile = 0; tile < 4; ++tile) {
            uint32_t both = 0;
            for (int half = 0; half < 2; ++half) {
                int outer = lane / 4, inner = 2 * (lane % 4) + half;
                int row = TRANSPOSED ? inner : outer, column = TRANSPOSED ? outer : inner;
                const uint16_t* values = static_cast<LoadOperand*>(operands[8 * tile + row])->row;
                both |= uint32_t(values[column]) << 16 * half;
            }
            static_cast<LoadOperand*>(operands[lane])->r[tile] = both;
        }
}
template <bool TRANSPOSED> void ldmatrix(uint32_t (&r)[4], const void* row, Site site) {
    static const Collective what = {TRANSPOSED ? "ldmatrix_x4_trans" : "ldmatrix_x4", true,
                                    perform_ldmatrix<TRANSPOSED>};
    emulator_check_shared(row, 16, what.name);
    LoadOperand operand = {r, static_cast<const uint16_t*>(row)};
    emulator_collective(what, &operand, site);
}

struct MmaOperand {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};
inline float half_of(uint32_t both, int half) { return __uint_as_float(half ? both & 0xffff0000u : both << 16); }
// Fragments of mma.m16n8k16: with g = lane/4 and t = lane%4, a[i] holds row g + 8*(i%2), columns
// 2t + 8*(i/2) and the next; b[i] rows 2t + 8*i and the next of column g; d[i] row g + 8*(i/2), column 2t + i%2.
inline void perform_mma(void* const operands[32]) {
    float a[16][16], b[8][16];
    for (int lane = 0; lane < 32; ++lane) {
        auto* own = static_cast<MmaOperand*>(operands[lane]);
        int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = half_of(own->a[i], half);
            for (int i = 0; i < 2; ++i) b[g][2 * t + 8 * i + half] = half_of(own->b[i], half);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        float* d = static_cast<MmaOperand*>(operands[lane])->d;
        for (int i = 0; i < 4; ++i) {
            const float *row = a[lane / 4 + 8 * (i / 2)], *column = b[2 * (lane % 4) + i % 2];
            double sum = d[i];
            for (int k = 0; k < 16; ++k) sum += double(row[k] * column[k]);
            d[i] = float(sum);
        }
    }
}

}  // namespace emulator

template <typename T> __device__ __forceinline__ T warp_shfl_xor(T value, int mask, EMULATOR_CALLER) {
    return emulator::shuffle(value, emulator::lane_index() ^ mask, {file, line});
}
template <typename T> __device__ __forceinline__ T warp_shfl(T value, int lane, EMULATOR_CALLER) {
    return emulator::shuffle(value, lane, {file, line});
}
inline uint32_t warp_ballot(bool value, EMULATOR_CALLER) {
    static const emulator::Collective what = {"ballot", false, emulator::perform_ballot};
    emulator::BallotOperand operand = {value, 0};
    emulator_collective(what, &operand, {file, line});
    return operand.result;
}
inline void warp_sync(EMULATOR_CALLER) { emulator_warp_sync({file, line}); }
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMULATOR_CALLER) {
    emulator::ldmatrix<false>(r, row, {file, line});
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMULATOR_CALLER) {
    emulator::ldmatrix<true>(r, row, {file, line});
}
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_CALLER) {
    static const emulator::Collective what = {"mma_m16n8k16", true, emulator::perform_mma};
    emulator::MmaOperand operand = {d, a, {b0, b1}};
    emulator_collective(what, &operand, {file, line});
}
