// The pool under many small runs, several callers, several pools, and a fork. Run with the thread sanitizer and with
// the address sanitizer. "fork" as argument adds the fork, which the thread sanitizer does not support.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "inference_svc/kernels/kernels.h"

namespace {

// Every chunk exactly once, and all of them done when the run returns: the counts are plain numbers on purpose.
void run_and_count(kev::Pool* pool, int64_t num_chunks) {
  std::vector<int> seen(static_cast<size_t>(num_chunks), 0);
  kev::parallel(pool, num_chunks, [&](int64_t chunk) { ++seen[static_cast<size_t>(chunk)]; });
  for (int count : seen) CHECK(count == 1);
}

void test_small_runs() {
  for (int threads = 1; threads <= 4; ++threads) {
    kev::Pool* pool = kev::pool_create(threads);
    CHECK(pool != nullptr);
    CHECK(kev::pool_threads(pool) == threads);
    for (int64_t i = 0; i < 3000; ++i) run_and_count(pool, i % 37);
    kev::pool_destroy(pool);
  }
}

// Long enough between the runs for the workers to sleep, long enough within them for the caller to.
void test_sleep_and_wake() {
  kev::Pool* pool = kev::pool_create(3);
  for (int i = 0; i < 30; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(i * 20));
    run_and_count(pool, 5);
    std::atomic<int> done{0};
    kev::parallel(pool, 3, [&](int64_t chunk) {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * chunk * (i % 4)));
      done.fetch_add(1);
    });
    CHECK(done.load() == 3);
  }
  kev::pool_destroy(pool);
}

// Workers that sleep are woken: each chunk waits for the other, so one thread alone would not get far.
void test_sleepers_help() {
  kev::Pool* pool = kev::pool_create(2);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> arrived{0};
    kev::parallel(pool, 2, [&](int64_t) {
      arrived.fetch_add(1);
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (arrived.load() < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      CHECK(arrived.load() == 2);
    });
  }
  kev::pool_destroy(pool);
}

// Threads that are all in one run have numbers of their own, the caller 0.
void test_numbers() {
  constexpr int THREADS = 3;
  kev::Pool* pool = kev::pool_create(THREADS);
  std::atomic<int> seen[THREADS] = {};
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> arrived{0};
  kev::parallel(pool, THREADS, [&](int64_t) {
    const int number = kev::pool_worker();
    CHECK(number >= 0 && number < THREADS && (number == 0) == (std::this_thread::get_id() == caller));
    seen[number].fetch_add(1);
    arrived.fetch_add(1);
    while (arrived.load() < THREADS) std::this_thread::yield();
  });
  for (const std::atomic<int>& count : seen) CHECK(count.load() == 1);
  CHECK(kev::pool_worker() == 0);
  kev::pool_destroy(pool);
}

void test_several_callers_of_one_pool() {
  kev::Pool* pool = kev::pool_create(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int64_t n = 0; n < 500; ++n) run_and_count(pool, n % 11);
    });
  }
  for (std::thread& caller : callers) caller.join();
  kev::pool_destroy(pool);
}

void test_several_pools() {
  std::vector<std::thread> owners;
  for (int i = 0; i < 3; ++i) {
    owners.emplace_back([] {
      for (int round = 0; round < 20; ++round) {
        kev::Pool* pool = kev::pool_create(2);
        for (int64_t n = 0; n < 20; ++n) run_and_count(pool, n);
        kev::pool_destroy(pool);
      }
    });
  }
  for (std::thread& owner : owners) owner.join();
}

void test_a_chunk_may_run_more() {
  kev::Pool* pool = kev::pool_create(3);
  std::atomic<int> total{0};
  kev::parallel(pool, 8, [&](int64_t) { kev::parallel(pool, 5, [&](int64_t) { total.fetch_add(1); }); });
  CHECK(total.load() == 40);
  kev::pool_destroy(pool);
}

void test_bounds() {
  CHECK(kev::pool_create(0) == nullptr);
  CHECK(kev::pool_create(-1) == nullptr);
  CHECK(kev::pool_create(1 << 20) == nullptr);
  CHECK(kev::pool_threads(nullptr) == 1);
  run_and_count(nullptr, 9);
  kev::pool_destroy(nullptr);
}

// A child has only the thread that forked: it works alone, and neither waits for nor frees what is not there.
void test_fork() {
  kev::Pool* pool = kev::pool_create(3);
  run_and_count(pool, 10);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    run_and_count(pool, 100);
    kev::pool_destroy(pool);
    kev::Pool* own = kev::pool_create(2);
    run_and_count(own, 100);
    kev::pool_destroy(own);
    _exit(7);
  }
  run_and_count(pool, 100);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  kev::pool_destroy(pool);
}

}  // namespace

int main(int num_arguments, char** arguments) {
  test_small_runs();
  test_sleep_and_wake();
  test_sleepers_help();
  test_numbers();
  test_several_callers_of_one_pool();
  test_several_pools();
  test_a_chunk_may_run_more();
  test_bounds();
  if (num_arguments > 1 && std::strcmp(arguments[1], "fork") == 0) test_fork();
  std::puts("pool: done");
  return 0;
}
