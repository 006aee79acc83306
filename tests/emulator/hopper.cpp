// Hopper's background work: barriers in shared memory, named barriers, copies of tiles and products of a
// warpgroup. Warps that wait poll, all lanes at once, so that all lanes see the same answer.
#include "hopper.h"
#include "machine.h"

#include <deque>
#include <functional>
#include <map>
#include <string.h>
#include <vector>

namespace emulator {
namespace {

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int PATIENCE = 200000;  // polls in vain, with nothing else happening, that make a deadlock

struct SharedBarrier {
    int expected, pending;
    long bytes;
    uint32_t phase;
    std::vector<std::function<int()>> copies;  // each returns its bytes

    void settle() {
        if (pending || bytes) return;
        pending = expected;
        ++phase;
    }
};

// Threads that have come, and how often the barrier has opened.
struct Gate {
    int arrived;
    uint32_t opened;
};

struct Thread {
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;
    std::map<float*, std::vector<float>> accumulators;  // in flight: the registers hold NaN
    bool fenced;
};

struct Hopper {
    uint32_t block;
    int idle;
    std::map<const void*, SharedBarrier> barriers;
    Gate named[16], products[MAX_THREADS / GROUP];
    Thread threads[MAX_THREADS];
} hopper;

void fresh() {
    if (hopper.block == machine.block_start) return;
    hopper.block = machine.block_start;
    hopper.idle = 0;
    hopper.barriers.clear();
    for (Gate& gate : hopper.named) gate = {};
    for (Gate& gate : hopper.products) gate = {};
    for (Thread& thread : hopper.threads) thread = {};
}

Thread& self() {
    fresh();
    return hopper.threads[machine.current->number];
}

SharedBarrier& find_barrier(const void* barrier) {
    fresh();
    auto found = hopper.barriers.find(barrier);
    if (found == hopper.barriers.end()) emulator_fail("mbarrier: nobody initialised the one at %p", barrier);
    return found->second;
}

void check_tile(const void* low, size_t bytes, size_t alignment, const char* what) {
    auto* start = static_cast<const char*>(low);
    auto* shared = static_cast<const char*>(emulator_dynamic_shared());
    if (start < shared || start + bytes > shared + machine.launch.dynamic_shared)
        emulator_fail("%s: %zu bytes at %zd of the block's %u of shared memory", what, bytes, start - shared,
                      machine.launch.dynamic_shared);
    if (size_t(start - shared) % alignment) emulator_fail("%s: not aligned to %zu bytes", what, alignment);
}

// Waiting.

struct PollOperand {
    bool (*done)(const PollOperand&);
    const void* what;
    uint32_t value;
    bool result;
};

void perform_poll(void* const operands[WARP]) {
    auto* first = static_cast<PollOperand*>(operands[0]);
    bool result = first->done(*first);
    hopper.idle = result ? 0 : hopper.idle + 1;
    for (int lane = 0; lane < WARP; ++lane) {
        auto* own = static_cast<PollOperand*>(operands[lane]);
        if (own->done != first->done || own->what != first->what || own->value != first->value)
            emulator_fail("lanes of a warp wait for different things");
        own->result = result;
    }
    const Site& site = machine.current->site;
    if (hopper.idle > PATIENCE)
        emulator_fail("deadlock: among others, this warp waits for ever (%s:%d)", base_name(site.file), site.line);
}

const Collective POLL = {"wait for a barrier or product", true, perform_poll};

void wait_until(bool (*done)(const PollOperand&), const void* what, uint32_t value, Site site) {
    PollOperand operand = {done, what, value, false};
    do arrive(POLL, &operand, site);
    while (!operand.result);
}

bool phase_over(const PollOperand& operand) {
    SharedBarrier& barrier = find_barrier(operand.what);
    if ((barrier.phase & 1) == operand.value && !barrier.pending) {
        std::vector<std::function<int()>> copies;
        copies.swap(barrier.copies);
        for (auto& copy : copies) barrier.bytes -= copy();
        barrier.settle();
    }
    return (barrier.phase & 1) != operand.value;
}

bool gate_opened(const PollOperand& operand) {
    return static_cast<const Gate*>(operand.what)->opened != operand.value;
}

struct GateOperand {
    Gate* gate;
    int threads;
    uint32_t opened;  // before this warp came
};

void perform_gate(void* const operands[WARP]) {
    auto* first = static_cast<GateOperand*>(operands[0]);
    uint32_t opened = first->gate->opened;
    first->gate->arrived += WARP;
    if (first->gate->arrived > first->threads) emulator_fail("named barrier: more threads than %d", first->threads);
    if (first->gate->arrived == first->threads) {
        first->gate->arrived = 0;
        ++first->gate->opened;
    }
    hopper.idle = 0;
    for (int lane = 0; lane < WARP; ++lane) static_cast<GateOperand*>(operands[lane])->opened = opened;
}

const Collective GATE = {"named barrier", true, perform_gate};

// Products.

float element(const char* shared, uint64_t descriptor, int outer, int k, bool outer_contiguous) {
    uint64_t start = (descriptor & 0x3fff) << 4, panels = (descriptor >> 16 & 0x3fff) << 4;
    uint64_t groups = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1 || descriptor >> 49 & 7)
        emulator_fail("wgmma: only the 128-byte swizzle with base offset 0 is emulated");
    int row = outer_contiguous ? k : outer, column = outer_contiguous ? outer : k;
    uint64_t at = start + row / 8 * groups + row % 8 * 128;
    at += outer_contiguous ? column / 64 * panels + column % 64 * 2 : column * 2;
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > machine.launch.dynamic_shared) emulator_fail("wgmma: an operand lies outside of shared memory");
    uint16_t half;
    memcpy(&half, shared + at, 2);
    uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float left_element(const Product* const* products, int row, int k) {
    int lane = row % 8 * 4 + k % 8 / 2, thread = row / 16 * WARP + lane;
    uint32_t pair = products[thread]->left[row % 16 / 8 + k / 8 * 2];
    uint32_t bits = k % 2 ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Sums are exact and rounded once a product, where tensor cores round or truncate in some order.
void multiply(const Product* const* products, Thread* threads) {
    const Product& first = *products[0];
    auto* shared = static_cast<const char*>(emulator_dynamic_shared());
    static float a[64][16], b[256][16];
    for (int row = 0; row < 64; ++row)
        for (int k = 0; k < 16; ++k)
            a[row][k] = first.a_in_registers ? left_element(products, row, k)
                                             : element(shared, first.a, row, k, first.a_columns);
    for (int column = 0; column < first.n; ++column)
        for (int k = 0; k < 16; ++k) b[column][k] = element(shared, first.b, column, k, first.b_rows);
    for (int t = 0; t < GROUP; ++t) {
        const Product& own = *products[t];
        if (own.n != first.n || own.a != first.a || own.b != first.b || own.add != first.add)
            emulator_fail("wgmma: threads of a warpgroup disagree");
        std::vector<float>& d = threads[t].accumulators.at(own.d);
        for (int i = 0; i < first.n / 2; ++i) {
            const float* row = a[t / WARP * 16 + t % WARP / 4 + i % 4 / 2 * 8];
            const float* column = b[i / 4 * 8 + t % 4 * 2 + i % 2];
            double sum = first.add ? double(d[size_t(i)]) : 0.0;
            for (int k = 0; k < 16; ++k) sum += double(row[k]) * double(column[k]);
            d[size_t(i)] = float(sum);
        }
    }
}

bool in_flight(const Thread& thread, const float* d) {
    for (auto& group : thread.groups)
        for (auto& product : group)
            if (product.d == d) return true;
    for (auto& product : thread.open)
        if (product.d == d) return true;
    return false;
}

void finish_groups(Thread* threads, int newest_left) {
    while (int(threads[0].groups.size()) > newest_left) {
        size_t count = threads[0].groups.front().size();
        for (size_t i = 0; i < count; ++i) {
            const Product* products[GROUP];
            for (int t = 0; t < GROUP; ++t) {
                if (threads[t].groups.empty() || threads[t].groups.front().size() != count)
                    emulator_fail("wgmma: threads of a warpgroup committed different products");
                products[t] = &threads[t].groups.front()[i];
            }
            multiply(products, threads);
        }
        for (int t = 0; t < GROUP; ++t) threads[t].groups.pop_front();
    }
    for (int t = 0; t < GROUP; ++t)
        for (auto it = threads[t].accumulators.begin(); it != threads[t].accumulators.end();) {
            if (in_flight(threads[t], it->first)) {
                ++it;
                continue;
            }
            memcpy(it->first, it->second.data(), it->second.size() * 4);
            it = threads[t].accumulators.erase(it);
        }
}

struct FinishOperand {
    int newest_left;
    uint32_t opened;
};

void perform_finish(void* const operands[WARP]) {
    auto* first = static_cast<FinishOperand*>(operands[0]);
    unsigned group = machine.current->number / GROUP;
    Gate& gate = hopper.products[group];
    uint32_t opened = gate.opened;
    if ((gate.arrived += WARP) == GROUP) {
        finish_groups(hopper.threads + group * GROUP, first->newest_left);
        gate.arrived = 0;
        ++gate.opened;
    }
    hopper.idle = 0;
    for (int lane = 0; lane < WARP; ++lane) static_cast<FinishOperand*>(operands[lane])->opened = opened;
}

const Collective FINISH = {"wgmma_wait", true, perform_finish};

// Copies.

// Fills a panel from the box of the tensor at these coordinates.
void copy_box(const TensorMap& map, char* panel, int column, int head, int token) {
    if (map.box[0] * map.item_size != 128 || map.box[1] != 1)
        emulator_fail("tma_load: only boxes of 128 bytes of one head are emulated");
    for (uint64_t row = 0; row < map.box[2]; ++row)
        for (uint64_t chunk = 0; chunk < 8; ++chunk) {
            int64_t at_column = column + int64_t(chunk * 16 / map.item_size), at_token = token + int64_t(row);
            bool inside = at_column >= 0 && uint64_t(at_column) < map.sizes[0] && head >= 0 &&
                          uint64_t(head) < map.sizes[1] && at_token >= 0 && uint64_t(at_token) < map.sizes[2];
            auto* memory = reinterpret_cast<const char*>(map.address) + at_token * int64_t(map.strides[1]) +
                           head * int64_t(map.strides[0]) + at_column * int64_t(map.item_size);
            char* shared = panel + row * 128 + (chunk ^ row % 8) * 16;
            if (inside) memcpy(shared, memory, 16);
            else memset(shared, 0, 16);
        }
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_mbarrier_init(void* barrier, int arrivals) {
    fresh();
    check_tile(barrier, 8, 8, "mbarrier");
    hopper.barriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}

// One arrival, which first expects `bytes` more.
void emulator_mbarrier_arrive(void* address, int bytes) {
    SharedBarrier& barrier = find_barrier(address);
    barrier.bytes += bytes;
    if (--barrier.pending < 0) emulator_fail("mbarrier: more arrivals than the %d expected", barrier.expected);
    hopper.idle = 0;
    barrier.settle();
}

void emulator_mbarrier_wait(void* barrier, uint32_t parity, Site site) { wait_until(phase_over, barrier, parity, site); }

void emulator_named_barrier(int id, int threads, int wait, Site site) {
    fresh();
    if (id < 1 || id > 15) emulator_fail("named barrier: %d is not 1 to 15", id);
    GateOperand operand = {&hopper.named[id], threads, 0};
    arrive(GATE, &operand, site);
    if (wait) wait_until(gate_opened, operand.gate, operand.opened, site);
}

void emulator_tma_load(void* panel, const TensorMap* map, void* barrier, int column, int head, int token) {
    size_t bytes = map->box[2] * 128;
    check_tile(panel, bytes, 1024, "tma_load");
    memset(panel, 0xFF, bytes);
    find_barrier(barrier).copies.push_back([=, map = *map] {
        copy_box(map, static_cast<char*>(panel), column, head, token);
        return int(bytes);
    });
}

void emulator_bulk_load(void* shared, const void* global, int bytes, void* barrier) {
    check_tile(shared, size_t(bytes), 16, "bulk_load");
    if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16)
        emulator_fail("bulk_load: %d bytes at %p are no whole chunks of 16", bytes, global);
    check_access(global, bytes, Access::read, "bulk_load reads", __builtin_return_address(0));
    memset(shared, 0xFF, size_t(bytes));
    find_barrier(barrier).copies.push_back([=] {
        memcpy(shared, global, size_t(bytes));
        return bytes;
    });
}

void emulator_wgmma_fence() { self().fenced = true; }

void emulator_wgmma(const Product* product) {
    Thread& thread = self();
    if (!thread.fenced) emulator_fail("wgmma: no wgmma_fence since registers were free to be touched");
    size_t count = size_t(product->n / 2);
    if (!thread.accumulators.count(product->d)) {
        thread.accumulators[product->d] = std::vector<float>(product->d, product->d + count);
        memset(product->d, 0xFF, count * 4);
    }
    thread.open.push_back(*product);
}

void emulator_wgmma_commit() {
    self().groups.push_back(std::move(self().open));
    self().open.clear();
}

void emulator_wgmma_wait(int newest_left, Site site) {
    self().fenced = false;
    FinishOperand operand = {newest_left, 0};
    arrive(FINISH, &operand, site);
    wait_until(gate_opened, &hopper.products[machine.current->number / GROUP], operand.opened, site);
}
}
