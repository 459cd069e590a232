// A shared library that runs one kernel on the CPU. Macros: SOURCE, the file in angle brackets; KERNEL, its kernel.
#include SOURCE

#include <tuple>
#include <utility>

template <typename... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<Args*>(args[I])...);
}

template <typename... Args>
void call(void (*kernel)(Args...), void** args) {
    call(kernel, args, std::index_sequence_for<Args...>());
}

// `args`: the address of each argument. `late`: asynchronous copies happen when they are waited for, not at once.
extern "C" void launch(u32 x, u32 y, u32 z, int threads, int shared_bytes, void** args, bool late) {
    cpu::copies_are_late = late;
    cpu::run({x, y, z}, threads, shared_bytes, [args] { call(KERNEL, args); });
}
