// What a kernel may touch, and races: two accesses of one place, one of them a write, by threads that no
// barrier orders. Every load and store of a kernel comes through check_access (see hooks.cpp).
#include "machine.h"

#include <algorithm>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace emulator {
namespace {

alignas(1024) char dynamic[MAX_SHARED];

// A thread of the launch, or the set of threads that read a place since it was last ordered.
enum Who : uint32_t { ONE = 0, LANES = 1, WARPS = 2, BLOCKS = 3, SET = 3, ATOMIC = 4, IN_FLIGHT = 8 };
constexpr int THREAD_SHIFT = 4, WARP_SHIFT = THREAD_SHIFT + 5, BLOCK_SHIFT = THREAD_SHIFT + 10;

// The last accesses of a place, by the machine's clock. Cells start with what earlier launches left: their
// times are before launch_start.
struct Cell {
    uint32_t write_time, writer, read_time, reader;
};

struct Span {
    const char *low, *high;
    bool writable, shared;
    int cell_shift;  // log2 of a cell's bytes
    int argument;
    Cell* cells;  // null: races are not looked for
};

constexpr size_t MAX_CELLS = 16 << 20, KEPT_CELLS = 2 << 20;
constexpr int MAX_SPANS = 66;
Span spans[MAX_SPANS];
int span_count, last_span;
size_t cells_used;

Cell* cell_arena() {
    static Cell* all = nullptr;
    if (all) return all;
    void* memory = mmap(nullptr, MAX_CELLS * sizeof(Cell), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return all = static_cast<Cell*>(memory);
}

void add_span(Span span) {
    size_t cells = (size_t(span.high - span.low) >> span.cell_shift) + 1;
    if (span.writable && cells_used + cells <= MAX_CELLS) {
        span.cells = cell_arena() + cells_used;
        cells_used += cells;
    }
    spans[span_count++] = span;
}

// Arrays that overlap are one span, so that each place has one cell.
void add_regions(const Region* regions, int count) {
    Region sorted[MAX_SPANS];
    std::copy(regions, regions + count, sorted);
    std::sort(sorted, sorted + count, [](const Region& a, const Region& b) { return a.low < b.low; });
    for (int i = 0; i < count;) {
        Region whole = sorted[i];
        for (++i; i < count && sorted[i].low < whole.high; ++i) {
            whole.high = std::max(whole.high, sorted[i].high);
            whole.writable |= sorted[i].writable;
            whole.item_size = std::min(whole.item_size, sorted[i].item_size);
        }
        int shift = std::min(3, __builtin_ctz(unsigned(whole.item_size)));
        add_span({whole.low, whole.high, whole.writable != 0, false, shift, whole.argument, nullptr});
    }
}

uint32_t self_code() { return machine.block_number << BLOCK_SHIFT | machine.current->number << THREAD_SHIFT; }

// What `ordered` asks of the running thread. Nothing from before `start` matters: for shared memory that is
// the last barrier, for global memory the start of the launch.
struct Now {
    uint32_t self, start, barrier, phase;

    explicit Now(bool shared)
        : self(self_code()), start(shared ? machine.barrier_time : machine.launch_start),
          barrier(machine.barrier_time), phase(machine.warps[machine.current->number / WARP].phase) {}

    bool ordered(uint32_t time, uint32_t who) const {
        if (time < start) return true;
        uint32_t differs = who ^ self, set = who & SET;
        if (set == BLOCKS || differs >> BLOCK_SHIFT) return machine.fenced;
        if (time < barrier) return true;
        if (set == WARPS || differs >> WARP_SHIFT) return false;
        return time < phase || (set == ONE && !(differs >> THREAD_SHIFT));
    }
};

[[noreturn]] void fail_race(const Span& span, uint32_t who, const char* now, const char* before,
                            const void* instruction) {
    unsigned number = who >> THREAD_SHIFT & (MAX_THREADS - 1);
    Index other = machine.fibers[number].index;
    fail_at(instruction, "race: %s %s memory that %sthread (%u,%u,%u) of block %u %s, with no barrier between", now,
            span.shared ? "shared" : "global", (who & SET) == ONE ? "" : "several threads, among them ", other.x,
            other.y, other.z, who >> BLOCK_SHIFT, before);
}

void record_read(Cell& cell, const Now& now) {
    uint32_t differs = cell.reader ^ now.self;
    if (now.ordered(cell.read_time, cell.reader)) cell.reader = now.self;
    else if (differs >> BLOCK_SHIFT) cell.reader |= BLOCKS;
    else if (differs >> WARP_SHIFT && (cell.reader & SET) != BLOCKS) cell.reader = (cell.reader & ~SET) | WARPS;
    else if ((cell.reader & SET) == ONE) cell.reader |= LANES;
    cell.read_time = machine.clock;
}

void check_races(const Span& span, size_t offset, int bytes, Access access, const void* instruction) {
    const Now now(span.shared);
    size_t first = offset >> span.cell_shift, last = (offset + size_t(bytes) - 1) >> span.cell_shift;
    for (size_t i = first; i <= last; ++i) {
        Cell& cell = span.cells[i];
        if (cell.writer & IN_FLIGHT && cell.write_time >= machine.block_start)
            fail_at(instruction, "race: touches shared memory that a cp_async_16 nobody waited for is writing");
        bool atomics = access == Access::atomic && cell.writer & ATOMIC;
        if (!atomics && !now.ordered(cell.write_time, cell.writer & ~ATOMIC))
            fail_race(span, cell.writer, access == Access::read ? "reads" : "writes", "wrote", instruction);
        if (access == Access::read) {
            record_read(cell, now);
            continue;
        }
        if (!now.ordered(cell.read_time, cell.reader))
            fail_race(span, cell.reader, "writes", "read", instruction);
        cell.write_time = machine.clock;
        cell.writer = now.self | (access == Access::atomic ? uint32_t(ATOMIC) : 0);
    }
}

const Span* find(const char* address, int bytes) {
    for (int step = 0; step < span_count; ++step) {
        int i = last_span + step < span_count ? last_span + step : last_span + step - span_count;
        if (address < spans[i].low || address + bytes > spans[i].high) continue;
        last_span = i;
        return &spans[i];
    }
    return nullptr;
}

[[noreturn]] void fail_outside(const char* address, int bytes, const char* what, const void* instruction) {
    const Span* nearest = nullptr;
    int64_t least = INT64_MAX;
    for (int i = 0; i < span_count; ++i) {
        if (spans[i].low == spans[i].high) continue;
        int64_t distance = address < spans[i].low ? spans[i].low - address : address + bytes - spans[i].high;
        if (distance < least) least = distance, nearest = &spans[i];
    }
    if (!nearest) fail_at(instruction, "%s outside of all memory that the kernel has", what);
    const char* side = address < nearest->low ? "before the start" : "past the end";
    if (nearest->shared) fail_at(instruction, "%s, %lld bytes %s of shared memory", what, (long long)least, side);
    fail_at(instruction, "%s, %lld bytes %s of argument %d", what, (long long)least, side, nearest->argument);
}

bool in_any_stack(const char* address) {
    return address >= machine.fibers[0].stack_low && address < machine.fibers[machine.threads - 1].stack_high;
}

}  // namespace

void begin_launch_memory() {
    if (machine.clock > 0xf0000000u || cells_used > KEPT_CELLS) {
        madvise(cell_arena(), MAX_CELLS * sizeof(Cell), MADV_DONTNEED);
        machine.clock = 0;
    }
    machine.launch_start = ++machine.clock;
    const Image& image = machine.launch.image;
    span_count = last_span = 0;
    cells_used = 0;
    add_span({dynamic, dynamic + machine.launch.dynamic_shared, true, true, 0, -1, nullptr});
    add_span({image.shared_low, image.shared_high, true, true, 0, -1, nullptr});
    add_regions(machine.launch.regions, machine.launch.region_count);
}

// Fresh shared memory is NaN, so that reading what nobody wrote shows.
void begin_block_memory() {
    const Image& image = machine.launch.image;
    memset(image.shared_low, 0xFF, size_t(image.shared_high - image.shared_low));
    memset(dynamic, 0xFF, machine.launch.dynamic_shared);
}

void check_access(const void* address, int bytes, Access access, const char* what, const void* instruction) {
    auto* byte = static_cast<const char*>(address);
    const Fiber& self = *machine.current;
    if (byte >= self.stack_low && byte < self.stack_high) return;
    if (const Span* span = find(byte, bytes)) {
        if (access != Access::read && !span->writable)
            fail_at(instruction, "%s to argument %d, which is const", what, span->argument);
        if (span->cells) check_races(*span, size_t(byte - span->low), bytes, access, instruction);
        return;
    }
    if (in_any_stack(byte)) fail_at(instruction, "%s of a local variable of another thread", what);
    const Image& image = machine.launch.image;
    if (access == Access::read && byte >= image.low && byte < image.shared_low) return;  // a constant
    bool is_shared = byte >= dynamic && byte < dynamic + sizeof dynamic;
    if (!machine.launch.open || is_shared) fail_outside(byte, bytes, what, instruction);
}

void check_shared(const void* address, int bytes, Access access, const char* what) {
    const Site& site = machine.current->site;
    if (reinterpret_cast<uintptr_t>(address) % unsigned(bytes))
        emulator_fail("%s: address %p is not aligned to %d bytes (%s:%d)", what, address, bytes,
                      base_name(site.file), site.line);
    const Span* span = find(static_cast<const char*>(address), bytes);
    if (!span || !span->shared)
        emulator_fail("%s: address %p is not in the shared memory of the block (%s:%d)", what, address,
                      base_name(site.file), site.line);
    check_access(address, bytes, access, what, nullptr);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void* emulator_dynamic_shared() { return dynamic; }

void emulator_atomic(const void* address, int bytes) {
    const void* instruction = __builtin_return_address(0);
    if (reinterpret_cast<uintptr_t>(address) % unsigned(bytes))
        fail_at(instruction, "atomic: address %p is not aligned to %d bytes", address, bytes);
    check_access(address, bytes, Access::atomic, "atomic", instruction);
}

// Blocks that talk to each other through fences and atomics are not checked for races from here on.
void emulator_fence() { machine.fenced = true; }

// The copy happens when its own thread waits for it. Until then the destination is NaN and in flight.
void emulator_copy_async(void* shared, const void* global, int valid, Site site) {
    machine.current->site = site;
    check_shared(shared, 16, Access::write, "cp_async_16");
    const void* instruction = __builtin_return_address(0);
    if (reinterpret_cast<uintptr_t>(global) % 16)
        emulator_fail("cp_async_16: source %p is not aligned to 16 bytes (%s:%d)", global,
                      base_name(site.file), site.line);
    if (valid) check_access(global, 16, Access::read, "cp_async_16 reads", instruction);
    memset(shared, 0xFF, 16);
    Fiber& self = *machine.current;
    auto* destination = static_cast<char*>(shared);
    const Span* span = find(destination, 16);
    for (int i = 0; i < 16; ++i) span->cells[destination - span->low + i].writer |= IN_FLIGHT;
    self.copies.push_back({destination, static_cast<const char*>(global), valid != 0, self.committed_groups});
}

void emulator_copy_commit() { ++machine.current->committed_groups; }

void emulator_copy_wait(int newest_left) {
    Fiber& self = *machine.current;
    size_t kept = 0;
    for (const Copy& copy : self.copies) {
        if (copy.group >= self.committed_groups - newest_left) {
            self.copies[kept++] = copy;
            continue;
        }
        if (copy.valid) memcpy(copy.shared, copy.global, 16);
        else memset(copy.shared, 0, 16);
        const Span* span = find(copy.shared, 16);
        for (int i = 0; i < 16; ++i) {
            Cell& cell = span->cells[copy.shared - span->low + i];
            cell.write_time = machine.clock;
            cell.writer = self_code();
        }
    }
    self.copies.resize(kept);
}
}
