// What compiled kernels call (from emulated.cuh) and what launch.py calls.
#pragma once

#include <stdint.h>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// A place in a kernel's source.
struct Site {
    const char* file;
    int line;
};

// A kernel parameter. kind: 'f'loat, 'b'f16, 'i'nteger, 'B'ool or 'o'ther; a pointer's size, kind and
// writable are its pointee's.
struct Parameter {
    int size;
    int pointer;
    int writable;
    char kind;
};

// An argument's memory: the kernel may touch [low, high) and, unless `open`, nothing else but its own.
struct Region {
    const char *low, *high;
    int writable, item_size, argument;
};

// Where a kernel's library lies in memory. Static shared memory is [shared_low, shared_high), its end.
struct Image {
    char *low, *shared_low, *shared_high;
};

struct Launch {
    void (*entry)(void** arguments);
    void** arguments;
    Index grid, block;
    unsigned dynamic_shared;
    Image image;
    const Region* regions;
    int region_count;
    int open;     // the arguments hold addresses of other arrays, so any address is allowed
    int seconds;  // of processor time
};

// Why a launch failed, and the address of the instruction (null: the message says where).
struct Failure {
    char message[1024];
    const void* instruction;
};

}  // namespace emulator

#pragma GCC visibility push(default)
extern "C" {
int emulator_run(const emulator::Launch* launch, emulator::Failure* failure);

// Constant in a thread, so that the compiler may keep them across barriers.
emulator::Index emulator_thread_index() __attribute__((const));
emulator::Index emulator_block_index() __attribute__((const));
emulator::Index emulator_block_dim() __attribute__((const));
emulator::Index emulator_grid_dim() __attribute__((const));
int emulator_lane() __attribute__((const));

void emulator_barrier(emulator::Site site);
void emulator_warp_sync(emulator::Site site);
void emulator_shuffle(void* value, int bytes, int source_lane, emulator::Site site);
uint32_t emulator_ballot(int value, emulator::Site site);
void emulator_ldmatrix(uint32_t* r, const void* row, int transposed, emulator::Site site);
void emulator_mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, emulator::Site site);

void* emulator_dynamic_shared() __attribute__((const));
void emulator_atomic(const void* address, int bytes);
void emulator_fence();
void emulator_copy_async(void* shared, const void* global, int valid, emulator::Site site);
void emulator_copy_commit();
void emulator_copy_wait(int newest_left);

// Ends the launch with a message.
[[noreturn]] void emulator_fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
}
#pragma GCC visibility pop
