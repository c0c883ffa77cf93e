// Where the time of forwards goes, by kind of work.
//
// Invariants and semantics: times are those of threads: what one thread spends on a kind counts once, what all of them
// are held for counts for each. So the kinds, WAIT included, add up to the wall time of all forwards times the threads.
// Reading the clock costs some 20 ns, a few hundred times per forward.
#pragma once

#include <chrono>
#include <cstdint>

namespace kev {

enum class Work : int32_t {
  EMBED,
  NORM,      // and the residual stream
  PREPARE,   // rounding or quantizing rows for a linear, where it is not part of the linear's time
  QKV,
  ROTATE,    // norms of heads, and storing keys and values
  ATTENTION,
  OUT,
  UP,
  ACTIVATE,
  DOWN,
  EXPERTS,   // choosing and gathering; their linears count as the others
  HEAD,      // and the search for the best token
  WAIT,      // threads without work while others have some
  COUNT,
};

class WorkTimes {
 public:
  // Adds the time since `start`, for `threads` of them, and returns what time it is.
  int64_t add(Work work, int64_t start, int64_t threads = 1) {
    const int64_t end = now();
    at(work) += (end - start) * threads;
    return end;
  }
  void add(const WorkTimes& other) {
    for (int32_t i = 0; i < static_cast<int32_t>(Work::COUNT); ++i) nanoseconds_[i] += other.nanoseconds_[i];
  }
  int64_t& at(Work work) { return nanoseconds_[static_cast<int32_t>(work)]; }
  int64_t sum() const {
    int64_t total = 0;
    for (int64_t each : nanoseconds_) total += each;
    return total;
  }
  const int64_t* nanoseconds() const { return nanoseconds_; }
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

 private:
  int64_t nanoseconds_[static_cast<int32_t>(Work::COUNT)] = {};
};

}  // namespace kev
