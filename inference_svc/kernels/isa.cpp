#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace kev {
namespace {

constexpr int32_t UNDECIDED = -1;
std::atomic<int32_t> chosen{UNDECIDED};

const char* const NAMES[NUM_ISAS] = {"portable", "avx2", "avx512_bf16_vnni"};

Isa best() {
  for (int32_t i = NUM_ISAS - 1; i > 0; --i) {
    if (isa_supported(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return Isa::PORTABLE;
}

bool find(const char* name, Isa* found) {
  for (int32_t i = 0; i < NUM_ISAS; ++i) {
    if (std::strcmp(name, NAMES[i]) == 0) {
      *found = static_cast<Isa>(i);
      return isa_supported(*found);
    }
  }
  return false;
}

}  // namespace

bool isa_supported(Isa isa) {
#if KEV_X86
  switch (isa) {
    case Isa::AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    case Isa::AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::PORTABLE:
      return true;
  }
  return false;
#else
  return isa == Isa::PORTABLE;
#endif
}

Isa isa() {
  int32_t now = chosen.load(std::memory_order_acquire);
  if (now == UNDECIDED) {
    Isa first = best();
    if (const char* asked = std::getenv("KEV_KERNELS")) find(asked, &first);
    now = static_cast<int32_t>(first);
    int32_t expected = UNDECIDED;
    if (!chosen.compare_exchange_strong(expected, now, std::memory_order_acq_rel)) now = expected;
  }
  return static_cast<Isa>(now);
}

const char* isa_name(Isa isa) { return NAMES[static_cast<int32_t>(isa)]; }

const char* isa_name() { return isa_name(isa()); }

bool isa_select(const char* name) {
  Isa wanted;
  if (!find(name, &wanted)) return false;
  chosen.store(static_cast<int32_t>(wanted), std::memory_order_release);
  return true;
}

}  // namespace kev
