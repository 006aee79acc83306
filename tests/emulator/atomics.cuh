// Atomic read-modify-write: fibers never run at once, so each is its plain self. Returns the old value.
#pragma once

#define EMULATED_ATOMIC(name, type, expression)                    \
    EMULATOR_UNCHECKED inline type name(type* address, type value) { \
        emulator_atomic(address, sizeof(type));                    \
        type old = *address;                                       \
        *address = (expression);                                   \
        return old;                                                \
    }
EMULATED_ATOMIC(atomicAdd, int, int(unsigned(old) + unsigned(value)))
EMULATED_ATOMIC(atomicAdd, unsigned, old + value)
EMULATED_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATED_ATOMIC(atomicAdd, float, old + value)
EMULATED_ATOMIC(atomicAdd, double, old + value)
EMULATED_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(value)))
EMULATED_ATOMIC(atomicSub, unsigned, old - value)
EMULATED_ATOMIC(atomicMax, int, max(old, value))
EMULATED_ATOMIC(atomicMax, unsigned, max(old, value))
EMULATED_ATOMIC(atomicMax, unsigned long long, max(old, value))
EMULATED_ATOMIC(atomicMin, int, min(old, value))
EMULATED_ATOMIC(atomicMin, unsigned, min(old, value))
EMULATED_ATOMIC(atomicMin, unsigned long long, min(old, value))
EMULATED_ATOMIC(atomicOr, int, old | value)
EMULATED_ATOMIC(atomicOr, unsigned, old | value)
EMULATED_ATOMIC(atomicAnd, int, old & value)
EMULATED_ATOMIC(atomicAnd, unsigned, old & value)
EMULATED_ATOMIC(atomicXor, int, old ^ value)
EMULATED_ATOMIC(atomicXor, unsigned, old ^ value)
EMULATED_ATOMIC(atomicExch, int, value)
EMULATED_ATOMIC(atomicExch, unsigned, value)
EMULATED_ATOMIC(atomicExch, float, value)
EMULATED_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
#undef EMULATED_ATOMIC

EMULATOR_UNCHECKED inline uint32_t relaxed_load(uint32_t* address) {
    emulator_atomic(address, sizeof(uint32_t));
    return *address;
}

template <typename T> EMULATOR_UNCHECKED inline T atomicCAS(T* address, T expected, T value) {
    emulator_atomic(address, sizeof(T));
    T old = *address;
    if (old == expected) *address = value;
    return old;
}
