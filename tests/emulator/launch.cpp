// Runs a launch block after block. Whatever goes wrong, faults and endless loops included, ends the launch
// and not the process.
#include "machine.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulator {

Machine machine;

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
struct sigaction old_actions[65];
pid_t running_thread;

// An address in the interrupted instruction, but not its first: as good as a return address.
const char* instruction_of(const void* context) {
    auto* registers = &static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return reinterpret_cast<const char*>(registers->gregs[REG_RIP] + 1);
#else
    return reinterpret_cast<const char*>(registers->pc + 1);
#endif
}

void on_signal(int signal, siginfo_t* info, void* context) {
    const char* instruction = instruction_of(context);
    if (signal == SIGVTALRM) {
        // Only the kernel's own code may be left at any point. Elsewhere wait for the next tick.
        if (instruction < machine.launch.image.low || instruction >= machine.launch.image.shared_low) return;
        fail_at(instruction, "still running after %d s of processor time", machine.launch.seconds);
    }
    if (syscall(SYS_gettid) != running_thread || !machine.current) {
        sigaction(signal, &old_actions[signal], nullptr);  // not a kernel's: happens again, to its owner
        return;
    }
    if (signal == SIGFPE) fail_at(instruction, "integer division by zero");
    const char *address = static_cast<const char*>(info->si_addr), *guard = machine.current->stack_low;
    if (address >= guard && address < guard + GUARD) fail_at(instruction, "stack overflow");
    fail_at(instruction, "invalid address %p", static_cast<const void*>(address));
}

// While one lives, faults of this thread and its processor time end the launch.
class SignalGuard {
public:
    explicit SignalGuard(int seconds) {
        static char stack[64 * 1024];
        stack_t alternate = {};
        alternate.ss_sp = stack;
        alternate.ss_size = sizeof stack;
        sigaltstack(&alternate, &old_stack);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int signal : SIGNALS) sigaction(signal, &action, &old_actions[signal]);
        running_thread = pid_t(syscall(SYS_gettid));

        struct sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = SIGVTALRM;
        event._sigev_un._tid = running_thread;
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
        struct itimerspec limit = {};
        limit.it_value.tv_sec = seconds;
        limit.it_interval.tv_nsec = 1'000'000;
        timer_settime(timer, 0, &limit, nullptr);
    }
    ~SignalGuard() {
        timer_delete(timer);
        for (int signal : SIGNALS) sigaction(signal, &old_actions[signal], nullptr);
        sigaltstack(&old_stack, nullptr);
    }
    SignalGuard(const SignalGuard&) = delete;

private:
    stack_t old_stack;
    timer_t timer;
};

// What the driver would refuse.
bool refuse(const Launch& launch, Failure& failure) {
    Index grid = launch.grid, block = launch.block;
    uint64_t threads = uint64_t(block.x) * block.y * block.z;
    auto refused = [&](const char* what, Index size) {
        snprintf(failure.message, sizeof failure.message, "%s (%u,%u,%u) is empty or too large", what, size.x,
                 size.y, size.z);
        return true;
    };
    if (!grid.x || !grid.y || !grid.z || grid.x >> 31 || grid.y > 65535 || grid.z > 65535)
        return refused("grid", grid);
    if (!threads || threads > MAX_THREADS || block.z > 64) return refused("block", block);
    if (launch.dynamic_shared <= MAX_SHARED) return false;
    snprintf(failure.message, sizeof failure.message, "asks for %u bytes of shared memory, a block has %u",
             launch.dynamic_shared, MAX_SHARED);
    return true;
}

[[noreturn]] void fail(const void* instruction, const char* format, va_list arguments) {
    Failure& failure = *machine.failure;
    const Index &block = machine.block_index, &thread = machine.current->index;
    int length = snprintf(failure.message, sizeof failure.message, "block (%u,%u,%u), thread (%u,%u,%u): ",
                          block.x, block.y, block.z, thread.x, thread.y, thread.z);
    vsnprintf(failure.message + length, sizeof failure.message - size_t(length), format, arguments);
    failure.instruction = instruction;
    machine.failed = true;
    abandon_block();
    __builtin_unreachable();
}

}  // namespace

void fail_at(const void* instruction, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail(instruction, format, arguments);
}

const char* base_name(const char* file) {
    const char* slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail(nullptr, format, arguments);
}

// True when the kernel ran to its end; otherwise `failure` says why.
int emulator_run(const Launch* launch, Failure* failure) {
    *failure = {};
    if (refuse(*launch, *failure)) return 0;
    machine.launch = *launch;
    machine.failure = failure;
    machine.failed = machine.fenced = false;
    Index grid = launch->grid, block = launch->block;
    machine.threads = block.x * block.y * block.z;
    begin_launch_memory();
    SignalGuard guard(launch->seconds);
    machine.block_number = 0;
    for (unsigned z = 0; z < grid.z && !machine.failed; ++z)
        for (unsigned y = 0; y < grid.y && !machine.failed; ++y)
            for (unsigned x = 0; x < grid.x && !machine.failed; ++x) {
                machine.block_index = {x, y, z};
                begin_block_memory();
                run_block();
                ++machine.block_number;
            }
    return !machine.failed;
}
}
