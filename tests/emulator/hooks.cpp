// Kernels are compiled with GCC's -fsanitize=thread and parts of -fsanitize=undefined, but linked to these
// functions instead of GCC's own: the first calls __tsan_* before every load and store, the second calls
// __ubsan_* where a check in the code has failed.
#include "machine.h"

using namespace emulator;

#pragma GCC visibility push(default)
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define ACCESS(bytes)                                                                               \
    void __tsan_read##bytes(void* p) {                                                              \
        check_access(p, bytes, Access::read, "reads " #bytes " bytes", __builtin_return_address(0)); \
    }                                                                                               \
    void __tsan_write##bytes(void* p) {                                                             \
        check_access(p, bytes, Access::write, "writes " #bytes " bytes", __builtin_return_address(0)); \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

void __tsan_read_range(void* p, unsigned long bytes) {
    check_access(p, int(bytes), Access::read, "reads several values", __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    check_access(p, int(bytes), Access::write, "writes several values", __builtin_return_address(0));
}

#define UNDEFINED(check, what) \
    void __ubsan_handle_##check(const void*) { fail_at(__builtin_return_address(0), what); }
UNDEFINED(out_of_bounds_abort, "index outside of an array")
UNDEFINED(add_overflow_abort, "signed addition overflows")
UNDEFINED(sub_overflow_abort, "signed subtraction overflows")
UNDEFINED(mul_overflow_abort, "signed multiplication overflows")
UNDEFINED(negate_overflow_abort, "signed negation overflows")
UNDEFINED(divrem_overflow_abort, "integer division by zero, or of the least integer by -1")
UNDEFINED(builtin_unreachable, "reaches __builtin_unreachable")
UNDEFINED(missing_return, "function ends without a return")
#undef UNDEFINED

struct TypeMismatch {
    const char* file;
    uint32_t line, column;
    const struct {
        uint16_t kind, info;
        char name[1];
    }* type;
    unsigned char log_alignment;
};

void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, const void* address) {
    const void* instruction = __builtin_return_address(0);
    if (!address) fail_at(instruction, "null pointer to %s", data->type->name);
    fail_at(instruction, "address %p is not aligned to the %d bytes of %s", address, 1 << data->log_alignment,
            data->type->name);
}
}
#pragma GCC visibility pop
