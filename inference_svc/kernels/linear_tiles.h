// The tile loop of all linears. Each variant compiles its own copy under its own instruction set: everything here has
// internal linkage, so that the linker cannot put one variant's code into another.
//
// Invariants and semantics: sum[r][p] takes one step after the other, from k = 0 on, by one instruction each; how many
// rows and panels share a tile changes which numbers are near each other in time, not how any of them is summed.
#pragma once

#include "linear_panels.h"

namespace kev {
namespace {

// Into the second-level cache.
inline void fetch([[maybe_unused]] const unsigned char* line) {
#if defined(__GNUC__)
  __builtin_prefetch(line, 0, 2);
#endif
}

// Fetches FETCH cache lines from `next` on in every step.
template <class Op, int ROWS, int PANELS, int FETCH>
void tile(const Panels& job, int64_t row, int64_t panel, [[maybe_unused]] const unsigned char* next) {
  const unsigned char* x = job.x + row * job.x_stride;
  const int64_t x_stride = job.x_stride;
  const int64_t panel_bytes = job.steps * STEP_BYTES;
  const unsigned char* w = job.weight + panel * panel_bytes;
  typename Op::Sum sum[ROWS][PANELS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) sum[r][p] = Op::zero();
  }
  for (int64_t step = 0; step < job.steps; ++step) {
#pragma GCC unroll 16
    for (int line = 0; line < FETCH; ++line) fetch(next + line * STEP_BYTES);
    if (FETCH > 0) next += FETCH * STEP_BYTES;
    typename Op::Weights weights[PANELS];
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) weights[p] = Op::load(w + p * panel_bytes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const typename Op::Values values = Op::broadcast(x + r * x_stride);
#pragma GCC unroll 16
      for (int p = 0; p < PANELS; ++p) sum[r][p] = Op::dot(sum[r][p], values, weights[p]);
    }
    w += STEP_BYTES;
    x += 4;
  }
  // Through memory, so that the sums above can stay in registers while the loop below stays a loop.
  typename Op::Sum sums[ROWS][PANELS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) sums[r][p] = sum[r][p];
  }
#pragma GCC unroll 1
  for (int i = 0; i < ROWS * PANELS; ++i)
    Op::store(job, sums[i / PANELS][i % PANELS], row + i / PANELS, panel + i % PANELS);
}

using TileFn = void (*)(const Panels& job, int64_t row, int64_t panel, const unsigned char* next);

template <class Op, int PANELS, int FETCH, int... ROWS>
struct TileTable {
  static constexpr TileFn of_rows[] = {tile<Op, ROWS, PANELS, FETCH>...};
};

// tile<Op, 1, PANELS, FETCH> ... tile<Op, ROWS, PANELS, FETCH>
template <class Op, int PANELS, int FETCH, int ROWS, int... REST>
struct Tiles : Tiles<Op, PANELS, FETCH, ROWS - 1, ROWS, REST...> {};
template <class Op, int PANELS, int FETCH, int... REST>
struct Tiles<Op, PANELS, FETCH, 0, REST...> : TileTable<Op, PANELS, FETCH, REST...> {};

template <class Op, int PANELS, int FETCH = 0>
void tile_of_rows(const Panels& job, int64_t row, int64_t rows, int64_t panel, const unsigned char* next) {
  Tiles<Op, PANELS, FETCH, Op::MAX_ROWS>::of_rows[rows - 1](job, row, panel, next);
}

// All rows, in blocks of nearly one size, times some panels.
template <class Op, int PANELS>
void all_rows(const Panels& job, int64_t panel) {
  const int64_t num_blocks = (job.rows + Op::MAX_ROWS - 1) / Op::MAX_ROWS;
  int64_t row = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t rows = (job.rows - row) / (num_blocks - block);
    tile_of_rows<Op, PANELS>(job, row, rows, panel, nullptr);
    row += rows;
  }
}

// The same for as many panels as a tile holds, when there is something to fetch: the blocks of rows share the work of
// fetching the bytes [next, end), so that memory and arithmetic are busy at once. A lone block of few rows only waits
// for memory, and the machine fetches ahead better by itself.
template <class Op>
void all_rows_and_fetch(const Panels& job, int64_t panel, const unsigned char* next, const unsigned char* end) {
  constexpr int PANELS = Op::MAX_PANELS;
  const int64_t num_blocks = (job.rows + Op::MAX_ROWS - 1) / Op::MAX_ROWS;
  const int64_t panel_bytes = job.steps * STEP_BYTES;
  int64_t row = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t rows = (job.rows - row) / (num_blocks - block);
    const int64_t left = (end - next) / panel_bytes;
    if (left >= 4 && num_blocks == 1) {
      tile_of_rows<Op, PANELS, 4>(job, row, rows, panel, next);
      next += 4 * panel_bytes;
    } else if (left >= 2 && num_blocks <= 3) {
      tile_of_rows<Op, PANELS, 2>(job, row, rows, panel, next);
      next += 2 * panel_bytes;
    } else if (left >= 1) {
      tile_of_rows<Op, PANELS, 1>(job, row, rows, panel, next);
      next += panel_bytes;
    } else {
      tile_of_rows<Op, PANELS>(job, row, rows, panel, nullptr);
    }
    row += rows;
  }
}

template <class Op>
void panels(const Panels& job) {
  int64_t panel = job.first_panel;
  if constexpr (Op::MAX_PANELS == 4) {
    const int64_t panel_bytes = job.steps * STEP_BYTES;
    const bool fetching = job.rows >= Op::FETCHING_ROWS;
    for (; panel + 4 <= job.last_panel; panel += 4) {
      const unsigned char* next = job.weight + (panel + 4) * panel_bytes;
      if (fetching && panel + 8 <= job.end_panel) {
        all_rows_and_fetch<Op>(job, panel, next, next + 4 * panel_bytes);
      } else if (fetching && job.after != nullptr) {
        all_rows_and_fetch<Op>(job, panel, job.after, job.after + job.after_bytes);
      } else {
        all_rows<Op, 4>(job, panel);
      }
    }
    for (; panel + 2 <= job.last_panel; panel += 2) all_rows<Op, 2>(job, panel);
  }
  for (; panel < job.last_panel; ++panel) all_rows<Op, 1>(job, panel);
}

}  // namespace
}  // namespace kev
