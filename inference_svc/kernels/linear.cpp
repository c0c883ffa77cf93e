// Linears: prepares the rows, cuts the outputs into chunks, and lets the variant in use do them.
//
// Not here: the sums themselves (linear_tiles.h), packing (linear_pack.cpp).
#include <atomic>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "linear_panels.h"

namespace kev {
namespace {

constexpr int64_t CACHE_LINE = 64;
constexpr int64_t BLOCK_PANELS = 4;         // what a tile takes at once
constexpr int64_t CHUNKS_PER_THREAD = 8;    // so that a thread put aside delays little
constexpr int64_t MAX_ARGMAX_CHUNKS = 128;  // each keeps a best per row
constexpr int64_t MAX_SHARES = 64;
constexpr int64_t TILE_ROWS = 24;           // rows of which argmax keeps the outputs of one block
constexpr int64_t GROUP_ROWS = 96;          // fewest rows worth a chunk of their own

constexpr int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }
constexpr int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }
constexpr int64_t at_least(int64_t value, int64_t limit) { return value > limit ? value : limit; }

const LinearVariant& variant() {
  switch (isa()) {
    case Isa::AVX512:
      return *linear_avx512();
    case Isa::AVX2:
      return *linear_avx2();
    case Isa::PORTABLE:
      break;
  }
  return *linear_portable();
}

// An odd number of cache lines, so that rows do not fall upon each other in the cache.
int64_t row_bytes(Precision precision, int64_t k) {
  const int64_t lines = ceil_div(num_steps(precision, k) * 4, CACHE_LINE);
  return (lines | 1) * CACHE_LINE;
}

int64_t scales_bytes(Precision precision, int64_t rows) {
  return precision == Precision::I8 ? up(rows * static_cast<int64_t>(sizeof(float)), CACHE_LINE) : 0;
}

// Where the prepared rows will lie; F32 rows stay where they are.
PreparedRows layout(Precision precision, const float* x, int64_t rows, int64_t ldx, int64_t k, void* memory) {
  if (precision == Precision::F32)
    return {reinterpret_cast<const unsigned char*>(x), ldx * static_cast<int64_t>(sizeof(float)), nullptr};
  auto* out = static_cast<unsigned char*>(memory);
  const int64_t stride = row_bytes(precision, k);
  return {out, stride, reinterpret_cast<const float*>(out + rows * stride)};
}

void fill(const LinearVariant& use, Precision precision, const float* x, int64_t ldx, int64_t k,
          const PreparedRows& made, int64_t first, int64_t last) {
  if (precision == Precision::F32) return;
  for (int64_t row = first; row < last; ++row) {
    auto* prepared = const_cast<unsigned char*>(made.x) + row * made.stride;
    if (precision == Precision::BF16) {
      use.round_row(x + row * ldx, k, prepared);
    } else {
      use.quantize_row(x + row * ldx, k, prepared, const_cast<float*>(made.scale) + row);
    }
  }
}

// All panels, without a place for the outputs.
Panels job_of(const Weight& weight, const PreparedRows& x, int64_t rows, const float* bias) {
  Panels job{};
  job.x = x.x;
  job.x_stride = x.stride;
  job.x_scale = x.scale;
  job.rows = rows;
  job.weight = static_cast<const unsigned char*>(weight.data);
  job.steps = num_steps(static_cast<Precision>(weight.precision), weight.k);
  job.scale = weight.scale;
  job.sums = weight.sums;
  job.bias = bias;
  job.n = weight.n;
  job.end_panel = num_panels(weight.n);
  return job;
}

// The same, with the rows prepared by all threads.
Panels prepare(Pool* pool, const LinearVariant& use, const Weight& weight, const float* x, int64_t rows, int64_t ldx,
               const float* bias, void* scratch) {
  const auto precision = static_cast<Precision>(weight.precision);
  const PreparedRows made = layout(precision, x, rows, ldx, weight.k, scratch);
  if (precision != Precision::F32) {
    constexpr int64_t ELEMENTS_PER_CHUNK = 16384;
    const int64_t chunk_rows = at_least(ELEMENTS_PER_CHUNK / at_least(weight.k, 1), 1);
    parallel(pool, ceil_div(rows, chunk_rows), [&](int64_t chunk) {
      const int64_t last = at_most((chunk + 1) * chunk_rows, rows);
      fill(use, precision, x, ldx, weight.k, made, chunk * chunk_rows, last);
    });
  }
  return job_of(weight, made, rows, bias);
}

// The part of `job` for rows [row, row + rows).
Panels rows_of(Panels job, int64_t row, int64_t rows) {
  job.x += row * job.x_stride;
  if (job.x_scale != nullptr) job.x_scale += row;
  if (job.y != nullptr) job.y += row * job.ldy;
  job.rows = rows;
  return job;
}

// Chunks are some panels times some rows.
struct Cut {
  int64_t panels;       // of a chunk
  int64_t num_columns;  // chunks side by side
  int64_t rows;
  int64_t num_groups;
};

// Full blocks of panels while there are enough for all threads; smaller ones rather than an idle thread.
int64_t panels_of_chunk(int64_t panels, int64_t threads) {
  const int64_t blocks = panels / BLOCK_PANELS;
  if (threads == 1) return panels;
  if (blocks >= 2 * threads) return BLOCK_PANELS;
  return panels >= 4 * threads ? 2 : 1;
}

Cut cut(int64_t panels, int64_t rows, int64_t threads) {
  Cut made{};
  made.panels = at_least(panels_of_chunk(panels, threads), rows >= GROUP_ROWS ? BLOCK_PANELS : 1);
  made.num_columns = ceil_div(panels, made.panels);
  const int64_t wanted = threads == 1 ? 1 : ceil_div(threads * CHUNKS_PER_THREAD, made.num_columns);
  const int64_t groups = at_least(at_most(wanted, rows / GROUP_ROWS), 1);
  made.rows = up(ceil_div(rows, groups), TILE_ROWS);
  made.num_groups = ceil_div(rows, made.rows);
  return made;
}

// Neighbouring chunks, of which one thread takes most.
struct Share {
  int64_t index;
  int64_t first;
  int64_t last;
};

Share share_of(int64_t chunks, int64_t index, int64_t shares) {
  return {index, chunks * index / shares, chunks * (index + 1) / shares};
}

// Calls body(chunk, share) for every chunk: each thread begins with a share of its own, which it reads as one stream,
// and then helps the others with what is left of theirs.
template <class F>
void in_shares(Pool* pool, int64_t chunks, F&& body) {
  struct alignas(CACHE_LINE) Next {
    std::atomic<int64_t> chunk;
  };
  Next next[MAX_SHARES];
  const int64_t shares = at_most(at_most(pool_threads(pool), MAX_SHARES), chunks);
  for (int64_t i = 0; i < shares; ++i)
    next[i].chunk.store(share_of(chunks, i, shares).first, std::memory_order_relaxed);
  parallel(pool, at_most(pool_threads(pool), chunks), [&](int64_t) {
    for (int64_t i = 0; i < shares; ++i) {
      const Share share = share_of(chunks, (pool_worker() + i) % shares, shares);
      std::atomic<int64_t>& taken = next[share.index].chunk;
      for (int64_t chunk; (chunk = taken.fetch_add(1, std::memory_order_relaxed)) < share.last;) body(chunk, share);
    }
  });
}

// Lets a chunk fetch what the same thread will read first of the weight after this one.
void fetch_after(Panels& job, const Weight& next, const Share& share, int64_t rows, Pool* pool) {
  const Cut made = cut(num_panels(next.n), rows, pool_threads(pool));
  const int64_t shares = at_most(at_most(pool_threads(pool), MAX_SHARES), made.num_columns);
  const int64_t panel = share_of(made.num_columns, share.index % shares, shares).first * made.panels;
  const int64_t bytes = num_steps(static_cast<Precision>(next.precision), next.k) * STEP_BYTES;
  job.after = static_cast<const unsigned char*>(next.data) + panel * bytes;
  job.after_bytes = at_most(BLOCK_PANELS, num_panels(next.n) - panel) * bytes;
}

// The largest output of a row so far.
struct Best {
  float value;
  int64_t index;
};

bool better(const Best& a, const Best& b) {
  const bool a_nan = std::isnan(a.value);
  const bool b_nan = std::isnan(b.value);
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.index < b.index;
}

// Goes on with the search of one row over y[0, count), whose first output is `first`.
void search(const LinearVariant& use, const float* y, int64_t count, int64_t first, Best* best) {
  for (int64_t i = 0; i < count && !std::isnan(best->value); ++i) {
    i += use.find_larger(y + i, count - i, best->value);
    if (i < count) *best = {y[i], first + i};
  }
}

// Computes a few rows of one block of panels, and searches it.
void search_block(const LinearVariant& use, Precision precision, Panels block, float softcap, Best* bests) {
  alignas(CACHE_LINE) float y[TILE_ROWS * BLOCK_PANELS * PANEL_OUTPUTS];
  block.y = y;
  block.ldy = BLOCK_PANELS * PANEL_OUTPUTS;
  block.first_output = block.first_panel * PANEL_OUTPUTS;
  use.panels[static_cast<int>(precision)](block);
  const int64_t count = at_most(block.ldy, block.n - block.first_output);
  for (int64_t row = 0; row < block.rows; ++row) {
    float* found = y + row * block.ldy;
    if (softcap > 0.0f) soften(found, count, softcap);
    search(use, found, count, block.first_output, bests + row);
  }
}

}  // namespace

int64_t prepared_bytes(Precision precision, int64_t rows, int64_t k) {
  return precision == Precision::F32 ? 0 : rows * row_bytes(precision, k) + scales_bytes(precision, rows);
}

PreparedRows prepare_rows(Precision precision, const float* x, int64_t rows, int64_t ldx, int64_t k, void* memory) {
  const PreparedRows made = layout(precision, x, rows, ldx, k, memory);
  fill(variant(), precision, x, ldx, k, made, 0, rows);
  return made;
}

void linear_rows(const Weight& weight, const PreparedRows& x, int64_t rows, int64_t first, int64_t last,
                 const float* bias, float* y, int64_t ldy, const Weight* next) {
  if (rows <= 0 || first >= last) return;
  Panels job = job_of(weight, x, rows, bias);
  job.y = y;
  job.ldy = ldy;
  job.first_output = first;
  job.first_panel = first / PANEL_OUTPUTS;
  job.last_panel = num_panels(last);
  if (next != nullptr) {
    const auto precision = static_cast<Precision>(next->precision);
    job.after = static_cast<const unsigned char*>(next->data);
    job.after_bytes = at_most(BLOCK_PANELS, num_panels(next->n)) * num_steps(precision, next->k) * STEP_BYTES;
  }
  variant().panels[weight.precision](job);
}

int64_t linear_scratch_bytes(Precision precision, int64_t rows, int64_t k) {
  return prepared_bytes(precision, rows, k) + MAX_ARGMAX_CHUNKS * rows * static_cast<int64_t>(sizeof(Best));
}

void linear(Pool* pool, const Weight& weight, const float* x, int64_t rows, int64_t ldx, const float* bias, float* y,
            int64_t ldy, void* scratch, const Weight* next) {
  if (rows <= 0 || weight.n <= 0) return;
  const LinearVariant& use = variant();
  Panels job = prepare(pool, use, weight, x, rows, ldx, bias, scratch);
  job.y = y;
  job.ldy = ldy;
  const Cut made = cut(job.end_panel, rows, pool_threads(pool));
  in_shares(pool, made.num_columns * made.num_groups, [&](int64_t chunk, const Share& share) {
    const int64_t row = chunk / made.num_columns * made.rows;
    Panels mine = rows_of(job, row, at_most(made.rows, rows - row));
    mine.first_panel = chunk % made.num_columns * made.panels;
    mine.last_panel = at_most(mine.first_panel + made.panels, job.end_panel);
    if (made.num_groups == 1) {
      mine.end_panel = at_most(share.last * made.panels, job.end_panel);
      if (next != nullptr) fetch_after(mine, *next, share, rows, pool);
    }
    use.panels[weight.precision](mine);
  });
}

void linear_argmax(Pool* pool, const Weight& weight, const float* x, int64_t rows, int64_t ldx, const float* bias,
                   float softcap, int64_t* index, float* value, void* scratch) {
  if (rows <= 0 || weight.n <= 0) return;
  const LinearVariant& use = variant();
  const auto precision = static_cast<Precision>(weight.precision);
  const Panels job = prepare(pool, use, weight, x, rows, ldx, bias, scratch);
  auto* bests =
      reinterpret_cast<Best*>(static_cast<unsigned char*>(scratch) + prepared_bytes(precision, rows, weight.k));
  const int64_t each = up(ceil_div(job.end_panel, MAX_ARGMAX_CHUNKS), BLOCK_PANELS);
  const int64_t num_chunks = ceil_div(job.end_panel, each);
  in_shares(pool, num_chunks, [&](int64_t chunk, const Share&) {
    Best* mine = bests + chunk * rows;
    const int64_t last = at_most((chunk + 1) * each, job.end_panel);
    for (int64_t row = 0; row < rows; ++row) {
      mine[row] = {-std::numeric_limits<float>::infinity(), chunk * each * PANEL_OUTPUTS};
    }
    for (int64_t panel = chunk * each; panel < last; panel += BLOCK_PANELS) {
      for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        Panels block = rows_of(job, row, at_most(TILE_ROWS, rows - row));
        block.first_panel = panel;
        block.last_panel = at_most(panel + BLOCK_PANELS, last);
        search_block(use, precision, block, softcap, mine + row);
      }
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    Best best = bests[row];
    for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
      if (better(bests[chunk * rows + row], best)) best = bests[chunk * rows + row];
    }
    index[row] = best.index;
    value[row] = best.value;
  }
}

}  // namespace kev
