// How launch.py reaches a kernel: its parameters as data, and a call with an array of pointers to arguments.
#pragma once

namespace emulator {

template <typename T> constexpr char kind_of() {
    if (std::is_same<T, bool>::value) return 'B';
    if (std::is_same<T, bf16>::value) return 'b';
    if (std::is_floating_point<T>::value) return 'f';
    return std::is_integral<T>::value ? 'i' : 'o';
}
template <typename T> constexpr Parameter describe_one() {
    if constexpr (!std::is_pointer<T>::value) {
        return {int(sizeof(T)), 0, 0, kind_of<T>()};
    } else {
        using Pointee = std::remove_pointer_t<T>;
        constexpr int writable = !std::is_const<Pointee>::value;
        if constexpr (std::is_void<Pointee>::value) return {0, 1, writable, 'o'};
        else return {int(sizeof(Pointee)), 1, writable, kind_of<std::remove_cv_t<Pointee>>()};
    }
}
template <typename... A> EMULATOR_UNCHECKED int describe(void (*)(A...), Parameter* out) {
    int count = 0;
    ((out[count++] = describe_one<A>()), ...);
    return count;
}

template <typename... A, size_t... I>
EMULATOR_UNCHECKED void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <typename... A> void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

}  // namespace emulator
