// Waiting for another thread of this process: at full speed for a moment, then without holding a core.
#pragma once

#include <chrono>
#include <thread>

#include "isa.h"

#if KEV_X86
#include <immintrin.h>
#endif

namespace kev {

// Long enough to bridge the serial stretches between two runs of one forward, short enough not to burn a core between
// forwards.
inline constexpr std::chrono::microseconds SPIN{40};
inline constexpr std::chrono::microseconds NAP{50};

inline void relax() {
#if KEV_X86
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready()` or until the time is up; says which.
template <class Ready>
bool spin(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// Returns once `ready()`, which a thread that has already begun will bring about.
template <class Ready>
void wait_for(Ready ready) {
  if (spin(ready)) return;
  while (!ready()) std::this_thread::sleep_for(NAP);
}

}  // namespace kev
