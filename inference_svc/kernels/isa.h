// Which variant of the kernels runs on this machine.
//
// Invariants and semantics: a variant is chosen once, when first asked for: the best that the CPU and the operating
// system can run, or the one that KEV_KERNELS names if they can run it. `isa_select` changes it later, for tests;
// nobody may compute meanwhile. Weights are packed alike for every variant, so packed data outlives a change.
//
// Not here: what a variant computes (linear_avx512.cpp and its siblings), telling a person that KEV_KERNELS is wrong
// (library.py).
#pragma once

#include <cstdint>

// 1 where the AVX variants can be compiled; elsewhere only the portable one exists.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KEV_X86 1
#else
#define KEV_X86 0
#endif

// What lies between KEV_TARGET_... and KEV_TARGET_END may use that instruction set. It must have internal linkage: the
// linker keeps one copy of an inline function or template, and would keep it for machines that cannot run it.
#if KEV_X86
#if defined(__clang__)
#define KEV_TARGET(names) KEV_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define KEV_TARGET_END KEV_PRAGMA(clang attribute pop)
#else
#define KEV_TARGET(names) KEV_PRAGMA(GCC push_options) KEV_PRAGMA(GCC target(names))
#define KEV_TARGET_END KEV_PRAGMA(GCC pop_options)
#endif
#define KEV_PRAGMA(text) _Pragma(#text)
#define KEV_TARGET_AVX512 KEV_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma")
#define KEV_TARGET_AVX2 KEV_TARGET("avx2,fma")
#endif

namespace kev {

enum class Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };
inline constexpr int NUM_ISAS = 3;

// The variant in use.
Isa isa();
// As KEV_KERNELS spells it: "portable", "avx2" or "avx512_bf16_vnni".
const char* isa_name(Isa isa);
// Whether this machine can run it.
bool isa_supported(Isa isa);
// Uses the variant of this name from now on. False, and no change: unknown, or not for this machine.
bool isa_select(const char* name);

}  // namespace kev
