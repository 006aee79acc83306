// The state of the emulated multiprocessor, which runs one block at a time.
#pragma once

#include "runtime.h"

#include <stddef.h>
#include <vector>

namespace emulator {

constexpr int MAX_THREADS = 1024, WARP = 32;
constexpr unsigned MAX_SHARED = 227 * 1024;  // bytes of a block on Hopper
constexpr size_t GUARD = 4096;               // bytes below a stack that fault

enum class State : uint8_t { ready, at_barrier, in_collective, done };

// A cp.async that was issued and not waited for.
struct Copy {
    char* shared;
    const char* global;
    bool valid;
    int group;
};

struct Fiber {
    void* stack_pointer;  // where it was switched away from
    char *stack_low, *stack_high;
    Index index;
    unsigned number;  // in the block
    State state;
    Site site;  // where it waits
    int committed_groups;
    std::vector<Copy> copies;
};

// Something that the lanes of a warp do together. The last lane to arrive performs it for all, on operands
// that lie on the stacks of the lanes that wait; null is a lane that has exited or never was.
struct Collective {
    const char* name;
    bool needs_all_lanes;
    void (*perform)(void* const operands[WARP]);
};

struct Warp {
    unsigned live, arrived;
    uint32_t phase;  // the time of its last warp_sync or barrier
    const Collective* collective;
    void* operands[WARP];
};

struct Machine {
    Launch launch;
    Index block_index;
    unsigned block_number, threads, live, waiting;
    Site barrier_site;
    Fiber* current;  // null between blocks
    void* launcher;  // stack pointer of run_block
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_THREADS / WARP];
    // A clock that ticks at every barrier and warp_sync: what happened before a tick that both threads took
    // part in is ordered before what happens after.
    uint32_t clock, launch_start, block_start, barrier_time;
    bool fenced;  // some thread of the launch called __threadfence
    Failure* failure;
    bool failed;
};
extern Machine machine;

// fibers.cpp
void run_block();
void abandon_block();
void arrive(const Collective& what, void* operand, Site site);

// memory.cpp
enum class Access { read, write, atomic };
void begin_launch_memory();
void begin_block_memory();
void check_access(const void* address, int bytes, Access access, const char* what, const void* instruction);
void check_shared(const void* address, int bytes, Access access, const char* what);

// launch.cpp
[[noreturn]] void fail_at(const void* instruction, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* base_name(const char* file);

}  // namespace emulator
