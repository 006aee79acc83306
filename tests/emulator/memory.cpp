// Memory as the emulated block sees it: shared memory, background copies, and what may be touched.
#include "machine.h"

#include <string.h>

namespace emulator {
namespace {

constexpr int GUARD = 1024;
alignas(1024) char dynamic[228 * 1024 + GUARD];

struct Memory {
    char *static_low, *static_high;
    unsigned dynamic_bytes;
    const Region* regions;
    int region_count;
} memory;

bool is_shared(const char* address, int bytes) {
    return (address >= memory.static_low && address + bytes <= memory.static_high) ||
           (address >= dynamic && address + bytes <= dynamic + memory.dynamic_bytes);
}

void require_aligned(const void* address, int bytes, const char* what) {
    if (reinterpret_cast<uintptr_t>(address) % bytes)
        emulator_fail("%s: address %p is not aligned to %d bytes", what, address, bytes);
}

}  // namespace

void begin_launch_memory(char* low, char* high, unsigned shared, const Region* regions, int count) {
    memory = {low, high, shared, regions, count};
}

// Fresh shared memory is NaN, so that reading what nobody wrote shows.
void begin_block_memory() {
    memset(memory.static_low, 0xFF, size_t(memory.static_high - memory.static_low));
    memset(dynamic, 0xFF, memory.dynamic_bytes);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void* emulator_dynamic_shared() { return dynamic; }

void emulator_check_shared(const void* address, int bytes, const char* what) {
    require_aligned(address, bytes, what);
    if (!is_shared(static_cast<const char*>(address), bytes))
        emulator_fail("%s: %p is not in the block's shared memory", what, address);
}

void emulator_check(const void* address, int bytes, int writes, const char* what) {
    require_aligned(address, bytes, what);
    const char* byte = static_cast<const char*>(address);
    for (int i = 0; i < memory.region_count; ++i) {
        const Region& region = memory.regions[i];
        if (byte >= region.low && byte + bytes <= region.high && region.writable >= writes) return;
    }
    if (!is_shared(byte, bytes)) emulator_fail("%s: %p is outside of the arrays that the kernel got", what, address);
}

void emulator_atomic(void* address, int bytes) { emulator_check(address, bytes, 1, "atomic"); }
void emulator_fence() {}

// The copy happens when its own thread waits for it; until then the destination is NaN.
void emulator_copy_async(void* shared, const void* global, int valid, Site) {
    emulator_check_shared(shared, 16, "cp_async_16");
    if (valid) emulator_check(global, 16, 0, "cp_async_16");
    memset(shared, 0xFF, 16);
    Fiber& self = *machine.current;
    self.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global), valid != 0, self.committed});
}

void emulator_copy_commit() { ++machine.current->committed; }

void emulator_copy_wait(int newest_left) {
    Fiber& self = *machine.current;
    size_t kept = 0;
    for (const Copy& copy : self.copies) {
        if (copy.group >= self.committed - newest_left) {
            self.copies[kept++] = copy;
        } else if (copy.valid) {
            memcpy(copy.shared, copy.global, 16);
        } else {
            memset(copy.shared, 0, 16);
        }
    }
    self.copies.resize(kept);
}
}
