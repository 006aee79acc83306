// What the lanes of a warp compute together, with the fragment layouts of PTX.
#include "machine.h"

#include <string.h>

namespace emulator {
namespace {

struct ShuffleOperand {
    const void* value;
    void* result;
    int bytes, source;
};

void perform_shuffle(void* const operands[WARP]) {
    for (int lane = 0; lane < WARP; ++lane) {
        auto* own = static_cast<ShuffleOperand*>(operands[lane]);
        if (!own) continue;
        int source = own->source & (WARP - 1);
        auto* other = static_cast<const ShuffleOperand*>(operands[source]);
        if (!other) emulator_fail("shuffle: lane %d reads lane %d, which has exited", lane, source);
        if (other->bytes != own->bytes) emulator_fail("shuffle: lanes disagree on the size of the value");
        memcpy(own->result, other->value, size_t(own->bytes));
    }
}

struct BallotOperand {
    bool value;
    uint32_t result;
};

void perform_ballot(void* const operands[WARP]) {
    uint32_t votes = 0;
    for (int lane = 0; lane < WARP; ++lane)
        if (operands[lane] && static_cast<BallotOperand*>(operands[lane])->value) votes |= 1u << lane;
    for (int lane = 0; lane < WARP; ++lane)
        if (operands[lane]) static_cast<BallotOperand*>(operands[lane])->result = votes;
}

struct LoadOperand {
    uint32_t* r;
    const uint16_t* row;
};

// Lane l receives, of each tile, elements 2*(l%4) and the next of row l/4, or of column l/4 when transposed.
// The row's address came from lane 8*tile + row.
template <bool TRANSPOSED> void perform_ldmatrix(void* const operands[WARP]) {
    for (int lane = 0; lane < WARP; ++lane)
        for (int tile = 0; tile < 4; ++tile) {
            uint32_t both = 0;
            for (int half = 0; half < 2; ++half) {
                int outer = lane / 4, inner = 2 * (lane % 4) + half;
                int row = TRANSPOSED ? inner : outer, column = TRANSPOSED ? outer : inner;
                auto* source = static_cast<const LoadOperand*>(operands[8 * tile + row]);
                both |= uint32_t(source->row[column]) << 16 * half;
            }
            static_cast<LoadOperand*>(operands[lane])->r[tile] = both;
        }
}

struct MmaOperand {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};

float bf16_of(uint32_t pair, int half) {
    uint32_t bits = half ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Fragments, with g = lane/4 and t = lane%4: a[i] is row g + 8*(i%2), columns 2t + 8*(i/2) and the next;
// b[i] rows 2t + 8*i and the next of column g; d[i] row g + 8*(i/2), column 2t + i%2.
// Products are exact; their sum is rounded once, where tensor cores round (or truncate) it in some order.
void perform_mma(void* const operands[WARP]) {
    double a[16][16], b[16][8], sums[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        auto* own = static_cast<const MmaOperand*>(operands[lane]);
        int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = bf16_of(own->a[i], half);
            for (int i = 0; i < 2; ++i) b[2 * t + 8 * i + half][g] = bf16_of(own->b[i], half);
        }
        for (int i = 0; i < 4; ++i) sums[g + 8 * (i / 2)][2 * t + i % 2] = own->d[i];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i)
            static_cast<MmaOperand*>(operands[lane])->d[i] =
                float(sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
}

const Collective SHUFFLE = {"shuffle", false, perform_shuffle};
const Collective BALLOT = {"ballot", false, perform_ballot};
const Collective LDMATRIX = {"ldmatrix_x4", true, perform_ldmatrix<false>};
const Collective LDMATRIX_TRANS = {"ldmatrix_x4_trans", true, perform_ldmatrix<true>};
const Collective MMA = {"mma_m16n8k16", true, perform_mma};

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_shuffle(void* value, int bytes, int source_lane, Site site) {
    char result[16];
    ShuffleOperand operand = {value, result, bytes, source_lane};
    arrive(SHUFFLE, &operand, site);
    memcpy(value, result, size_t(bytes));
}

uint32_t emulator_ballot(int value, Site site) {
    BallotOperand operand = {value != 0, 0};
    arrive(BALLOT, &operand, site);
    return operand.result;
}

void emulator_ldmatrix(uint32_t* r, const void* row, int transposed, Site site) {
    const Collective& what = transposed ? LDMATRIX_TRANS : LDMATRIX;
    machine.current->site = site;
    check_shared(row, 16, Access::read, what.name);
    LoadOperand operand = {r, static_cast<const uint16_t*>(row)};
    arrive(what, &operand, site);
}

void emulator_mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Site site) {
    MmaOperand operand = {d, a, {b0, b1}};
    arrive(MMA, &operand, site);
}
}
