// One source, several instruction sets.
//
// A loop that the compiler vectorises is a struct with an always-inlined static `run` and its type, `Function`.
// `select<Loop>(isa)` gives a copy of it for that instruction set. Code that is written for the registers of each is
// included by a file of its own for each, between TM_BEGIN_TARGET and TM_END_TARGET. Features are listed one by one
// instead of by level name, because older compilers know only those, and because they are what the processor is asked
// for.
#pragma once

#include <cstdint>

#define TM_INLINE __attribute__((always_inline)) inline

// Iterations do not depend on each other, though a source may be the target itself.
#if defined(__clang__)
#define TM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TM_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tiermem {

enum Isa : int32_t { BASELINE = 0, V3 = 1, V4 = 2, ISA_COUNT = 3 };

#if defined(__x86_64__)

#define TM_FEATURES_V3 "avx2,bmi,bmi2,f16c,fma,lzcnt"
#define TM_FEATURES_V4 TM_FEATURES_V3 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#define TM_TARGET_V3 __attribute__((target(TM_FEATURES_V3)))
#define TM_TARGET_V4 __attribute__((target(TM_FEATURES_V4)))

// For all functions between them: no standard header may come there, whose functions other files share.
#define TM_PRAGMA_OF(text) _Pragma(#text)
#define TM_PRAGMA(text) TM_PRAGMA_OF(text)
#if defined(__clang__)
#define TM_BEGIN_TARGET(features) \
    TM_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TM_END_TARGET TM_PRAGMA(clang attribute pop)
#else
#define TM_BEGIN_TARGET(features) TM_PRAGMA(GCC target(features))
#define TM_END_TARGET
#endif

constexpr const char* isa_names[ISA_COUNT] = {"x86-64", "x86-64-v3", "x86-64-v4"};

inline bool supported(int32_t isa) {
    if (isa == BASELINE) return true;
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("fma");
    if (isa == V3) return v3;
    return isa == V4 && v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

#else

#define TM_TARGET_V3
#define TM_TARGET_V4

#if defined(__aarch64__)
constexpr const char* isa_names[ISA_COUNT] = {"aarch64", nullptr, nullptr};
#else
constexpr const char* isa_names[ISA_COUNT] = {"baseline", nullptr, nullptr};
#endif

inline bool supported(int32_t isa) { return isa == BASELINE; }

#endif

template <class Loop, class Result, class... Arguments>
Result on_baseline(Arguments... arguments) {
    return Loop::run(arguments...);
}

template <class Loop, class Result, class... Arguments>
TM_TARGET_V3 Result on_v3(Arguments... arguments) {
    return Loop::run(arguments...);
}

template <class Loop, class Result, class... Arguments>
TM_TARGET_V4 Result on_v4(Arguments... arguments) {
    return Loop::run(arguments...);
}

template <class Loop, class Result, class... Arguments>
auto select_as(int32_t isa, Result (*)(Arguments...)) -> Result (*)(Arguments...) {
#if defined(__x86_64__)
    if (isa == V4) return on_v4<Loop, Result, Arguments...>;
    if (isa == V3) return on_v3<Loop, Result, Arguments...>;
#endif
    (void)isa;
    return on_baseline<Loop, Result, Arguments...>;
}

template <class Loop>
auto select(int32_t isa) -> typename Loop::Function {
    return select_as<Loop>(isa, typename Loop::Function(nullptr));
}

}  // namespace tiermem
