// Threads that share one piece of work at a time.
//
// Invariants and semantics: a chunk is taken by counting `remaining` down, which succeeds only while a run is under
// way; so whoever holds a chunk may read the job, and the job is replaced only after every chunk of it is done. Every
// chunk runs in the default floating point environment (nearest even, denormals kept), whatever the calling thread has
// set: threads must not change bits. A chunk that calls pool_run again runs the inner work alone. In a forked child,
// where the threads do not exist, the caller does all the work.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "spin.h"

#if KEV_X86
#include <immintrin.h>
#endif

namespace kev {
namespace {

constexpr int MAX_THREADS = 1024;

std::atomic<uint64_t> forks{0};
thread_local bool inside_chunk = false;
thread_local int worker_number = 0;

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); }); });
}

// The default floating point environment for as long as it lives.
class DefaultFloats {
 public:
  DefaultFloats() : before_(read()) { write(DEFAULT); }
  ~DefaultFloats() { write(before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
#if KEV_X86
  static constexpr uint64_t DEFAULT = 0x1F80;
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t value) { _mm_setcsr(static_cast<unsigned int>(value)); }
#elif defined(__aarch64__)
  static constexpr uint64_t DEFAULT = 0;
  static uint64_t read() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  static constexpr uint64_t DEFAULT = 0;
  static uint64_t read() { return DEFAULT; }
  static void write(uint64_t) {}
#endif
  uint64_t before_;
};

// No signal is handled on a thread started while this lives; Python wants them on its own.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

void run_alone(int64_t num_chunks, ChunkFn fn, void* context) {
  DefaultFloats floats;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk);
}

}  // namespace

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {
    watch_forks();
    born_ = forks.load(std::memory_order_relaxed);
    SignalsBlocked blocked;
    workers_.reserve(static_cast<size_t>(num_threads - 1));
    try {
      for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] {
          worker_number = i;
          work();
        });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  // Whether this is a child process, forked after the threads were started.
  bool forked() const { return forks.load(std::memory_order_relaxed) != born_; }

  int threads() const { return num_threads_; }

  void run(int64_t num_chunks, ChunkFn fn, void* context) {
    if (num_chunks <= 0) return;
    if (num_chunks == 1 || workers_.empty() || inside_chunk || forked()) {
      run_alone(num_chunks, fn, context);
      return;
    }
    std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
    fn_ = fn;
    context_ = context;
    num_chunks_ = num_chunks;
    pending_.store(num_chunks, std::memory_order_relaxed);
    remaining_.store(num_chunks, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      work_came_.notify_all();
    }
    take_chunks();
    wait_until_done();
  }

 private:
  // Takes and runs chunks until none is left.
  void take_chunks() {
    DefaultFloats floats;
    inside_chunk = true;
    int64_t num_done = 0;
    int64_t left = remaining_.load(std::memory_order_acquire);
    while (left > 0) {
      if (remaining_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        fn_(context_, num_chunks_ - left);
        ++num_done;
        left = remaining_.load(std::memory_order_acquire);
      }
    }
    if (num_done > 0) finish(num_done);
    inside_chunk = false;
  }

  void finish(int64_t num_done) {
    if (pending_.fetch_sub(num_done, std::memory_order_seq_cst) == num_done &&
        caller_sleeps_.load(std::memory_order_seq_cst)) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      work_done_.notify_one();
    }
  }

  void wait_until_done() {
    const auto done = [this] { return pending_.load(std::memory_order_seq_cst) == 0; };
    if (spin(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    work_done_.wait(lock, done);
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }

  void work() {
    const auto ready = [this] {
      return remaining_.load(std::memory_order_seq_cst) > 0 || stopping_.load(std::memory_order_seq_cst);
    };
    while (true) {
      if (!spin(ready)) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        work_came_.wait(lock, ready);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
      }
      if (stopping_.load(std::memory_order_acquire)) return;
      take_chunks();
    }
  }

  void stop() {
    stopping_.store(true, std::memory_order_seq_cst);
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    work_came_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  const int num_threads_;
  uint64_t born_ = 0;
  std::vector<std::thread> workers_;
  std::mutex run_mutex_;

  // The job; written while no chunk is out.
  ChunkFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t num_chunks_ = 0;

  alignas(64) std::atomic<int64_t> remaining_{0};  // chunks nobody has taken
  alignas(64) std::atomic<int64_t> pending_{0};    // chunks not yet done
  std::atomic<bool> stopping_{false};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;  // of the two conditions
  std::condition_variable work_came_;
  std::condition_variable work_done_;
};

Pool* pool_create(int num_threads) {
  if (num_threads < 1 || num_threads > MAX_THREADS) return nullptr;
  try {
    return new Pool(num_threads);
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pool_destroy(Pool* pool) {
  // A forked child has neither the threads to join nor locks it could trust: it leaves them.
  if (pool != nullptr && !pool->forked()) delete pool;
}

int pool_worker() { return worker_number; }

int pool_threads(const Pool* pool) { return pool == nullptr ? 1 : pool->threads(); }

void pool_run(Pool* pool, int64_t num_chunks, ChunkFn fn, void* context) {
  if (pool == nullptr) {
    run_alone(num_chunks, fn, context);
  } else {
    pool->run(num_chunks, fn, context);
  }
}

}  // namespace kev
