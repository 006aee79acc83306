// The threads of a block as fibers: one runs until it waits at a barrier or in a collective of its warp, then
// the next that is ready runs, round-robin. When none is ready, the kernel has deadlocked.
#include "machine.h"
#include "switch.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace emulator {
namespace {

constexpr size_t STACK = 256 * 1024;  // of a fiber; the lowest page is a guard

// Stacks start at different places of a cache: tops at one multiple of a page would evict one another.
constexpr size_t COLOR = 9 * 64, MAX_COLOR = 32 * 1024;

// warp_sync exchanges nothing: it orders the lanes' accesses to memory.
const Collective WARP_SYNC = {"warp_sync", false, [](void* const*) {}};

void leave();

void fiber_main() {
    machine.launch.entry(machine.launch.arguments);
    leave();
}

char* stacks() {
    static char* all = nullptr;
    if (all) return all;
    void* memory = mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    all = static_cast<char*>(memory);
    for (int i = 0; i < MAX_THREADS; ++i) mprotect(all + i * STACK, GUARD, PROT_NONE);
    return all;
}

void start(unsigned number) {
    Fiber& fiber = machine.fibers[number];
    fiber.stack_low = stacks() + number * STACK;
    fiber.stack_high = fiber.stack_low + STACK - number * COLOR % MAX_COLOR;
    void** words = reinterpret_cast<void**>(fiber.stack_high) - 2 - SAVED_WORDS;
    memset(words, 0, SAVED_WORDS * sizeof(void*));
    words[RETURN_WORD] = reinterpret_cast<void*>(fiber_main);
    fiber.stack_pointer = words;

    Index dim = machine.launch.block;
    fiber.index = {number % dim.x, number / dim.x % dim.y, number / dim.x / dim.y};
    fiber.number = number;
    fiber.state = State::ready;
    fiber.committed_groups = 0;
    fiber.copies.clear();
    ++machine.warps[number / WARP].live;
}

const char* place(const Fiber& fiber) {
    if (fiber.state == State::at_barrier) return "__syncthreads";
    return machine.warps[fiber.number / WARP].collective->name;
}

// Names a thread that waits and another that waits elsewhere; without one, some lanes wait for themselves.
[[noreturn]] void fail_deadlock() {
    const Fiber* first = nullptr;
    for (unsigned i = 0; i < machine.threads; ++i) {
        Fiber& fiber = machine.fibers[i];
        if (fiber.state == State::done) continue;
        if (!first) {
            first = &fiber;
        } else if (fiber.state != first->state || fiber.site.line != first->site.line) {
            machine.current = &fiber;
            emulator_fail("deadlock: this thread waits at %s (%s:%d), thread (%u,%u,%u) at %s (%s:%d)",
                          place(fiber), base_name(fiber.site.file), fiber.site.line, first->index.x,
                          first->index.y, first->index.z, place(*first), base_name(first->site.file),
                          first->site.line);
        }
    }
    emulator_fail("deadlock at %s (%s:%d)", place(*first), base_name(first->site.file), first->site.line);
}

// Runs other fibers until this one is ready.
void yield() {
    Fiber* self = machine.current;
    for (unsigned step = 1; step <= machine.threads; ++step) {
        unsigned next = self->number + step;
        Fiber& fiber = machine.fibers[next < machine.threads ? next : next - machine.threads];
        if (fiber.state != State::ready) continue;
        machine.current = &fiber;
        if (&fiber != self) emulator_switch(&self->stack_pointer, fiber.stack_pointer);
        return;
    }
    fail_deadlock();
}

void complete(Warp& warp, unsigned number) {
    const Collective* what = warp.collective;
    if (what->needs_all_lanes && warp.arrived != WARP)
        emulator_fail("%s needs all 32 lanes of the warp, but only %u are left", what->name, warp.arrived);
    what->perform(warp.operands);
    if (what == &WARP_SYNC) warp.phase = ++machine.clock;
    warp.arrived = 0;
    memset(warp.operands, 0, sizeof warp.operands);
    for (unsigned i = number * WARP; i < (number + 1) * WARP && i < machine.threads; ++i)
        if (machine.fibers[i].state == State::in_collective) machine.fibers[i].state = State::ready;
}

void release_barrier() {
    machine.waiting = 0;
    machine.barrier_time = ++machine.clock;
    for (unsigned i = 0; i < machine.threads; ++i)
        if (machine.fibers[i].state == State::at_barrier) machine.fibers[i].state = State::ready;
    for (Warp& warp : machine.warps) warp.phase = machine.clock;
}

// A thread that has exited no longer counts at barriers and in collectives, as on every card since Volta.
void leave() {
    machine.current->state = State::done;
    unsigned number = machine.current->number / WARP;
    Warp& warp = machine.warps[number];
    --machine.live;
    --warp.live;
    if (machine.live == 0) abandon_block();
    if (warp.arrived && warp.arrived == warp.live) complete(warp, number);
    if (machine.waiting && machine.waiting == machine.live) release_barrier();
    yield();
    abort();  // nothing makes it ready again
}

}  // namespace

void run_block() {
    machine.live = machine.threads;
    machine.waiting = 0;
    machine.block_start = machine.barrier_time = ++machine.clock;
    memset(machine.warps, 0, sizeof machine.warps);
    for (Warp& warp : machine.warps) warp.phase = machine.clock;
    for (unsigned i = 0; i < machine.threads; ++i) start(i);
    machine.current = machine.fibers;
    emulator_switch(&machine.launcher, machine.fibers[0].stack_pointer);
    machine.current = nullptr;
}

// Continues after run_block's switch; the fibers are never resumed.
void abandon_block() {
    void* nobody;
    emulator_switch(&nobody, machine.launcher);
    abort();
}

void arrive(const Collective& what, void* operand, Site site) {
    Fiber& self = *machine.current;
    Warp& warp = machine.warps[self.number / WARP];
    if (warp.arrived && warp.collective != &what)
        emulator_fail("the warp diverges: this thread is in %s (%s:%d), other lanes are in %s", what.name,
                      base_name(site.file), site.line, warp.collective->name);
    warp.collective = &what;
    warp.operands[self.number % WARP] = operand;
    self.site = site;
    if (++warp.arrived == warp.live) {
        complete(warp, self.number / WARP);
        return;
    }
    self.state = State::in_collective;
    yield();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_barrier(Site site) {
    Fiber& self = *machine.current;
    if (machine.waiting && machine.barrier_site.line != site.line)
        emulator_fail("__syncthreads diverges: this thread is at %s:%d, others are at %s:%d",
                      base_name(site.file), site.line, base_name(machine.barrier_site.file),
                      machine.barrier_site.line);
    machine.barrier_site = self.site = site;
    if (++machine.waiting == machine.live) {
        release_barrier();
        return;
    }
    self.state = State::at_barrier;
    yield();
}

void emulator_warp_sync(Site site) { arrive(WARP_SYNC, &machine, site); }

Index emulator_thread_index() { return machine.current->index; }
Index emulator_block_index() { return machine.block_index; }
Index emulator_block_dim() { return machine.launch.block; }
Index emulator_grid_dim() { return machine.launch.grid; }
int emulator_lane() { return int(machine.current->number % WARP); }
}
