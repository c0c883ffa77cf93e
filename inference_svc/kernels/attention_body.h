// One block of attention, in lanes. Include after one of vec_*.h, MAX_ROWS and PANEL_VECS.
//
// Invariants and semantics: scores and outputs are products of small matrices whose terms are summed one by one: over
// the head for a score, over positions for an output, each number in a lane of its own. So neither the shape of a tile
// nor the other units change its bits. Scores of the whole visible range are kept, so the softmax knows its maximum
// before its first exponential; exponentials are summed by (position % lanes), then across the lanes in one fixed tree.
// Positions that a unit does not see may be read for a neighbour that sees them, and never enter the unit's sums.
//
// A block of few units computes little for every number that it reads: there the products ask for the keys and values
// that come next, so that memory and arithmetic are busy at once.
//
// Several questions with one prefix are computed in passes: over the tiles of the prefix for the units of all, then over
// the rest for the units of one question at a time. A unit's own sums go from position to position as in one pass.
//
// A `Cells` says how numbers of the arena become lanes: a cell is 32 bits, and PACK how many numbers it holds: one
// float, or two bfloat16.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention_block.h"
#include "vecmath.h"

namespace kev {
namespace {

constexpr int64_t PANEL = PANEL_VECS * LANES;  // keys of a tile, columns of a panel of values
constexpr int64_t FETCH_AHEAD = 16;            // positions of values
constexpr int64_t CACHE_LINE = 64;

// Asks for lines of memory one by one: `row_bytes` of every `stride`.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* rows, int64_t row_bytes, int64_t stride)
      : row_(static_cast<const char*>(rows)), row_bytes_(row_bytes), stride_(stride) {}
  void line() {
    __builtin_prefetch(row_ + offset_, 0, 2);
    offset_ += CACHE_LINE;
    if (offset_ < row_bytes_) return;
    offset_ = 0;
    row_ += stride_;
  }

 private:
  const char* row_ = nullptr;
  int64_t row_bytes_ = 0, stride_ = 0, offset_ = 0;
};

// c[r, j] = (KEEP ? c[r, j] : 0) + sum over i of a[r, i] . b[i, j], one i after the other; times `scale` unless KEEP.
// Asks for FETCH lines on the way.
template <class Cells, int ROWS, int VECS, bool KEEP, int FETCH>
__attribute__((noinline)) void multiply(const float* a, int64_t lda, const float* b, int64_t steps, float scale,
                                        float* c, int64_t ldc, [[maybe_unused]] Ahead* ahead) {
  Vec sum[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) sum[r][v] = KEEP ? vload(c + r * ldc + v * LANES) : vsplat(0.0f);
  for (int64_t i = 0; i < steps; ++i) {
    for (int line = 0; line < FETCH; ++line) ahead->line();
    Vec columns[VECS];
    for (int v = 0; v < VECS; ++v) columns[v] = vload(b + i * PANEL + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Vec factor = vsplat(a[r * lda + i]);
      for (int v = 0; v < VECS; ++v) sum[r][v] = Cells::add_product(sum[r][v], factor, columns[v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) vstore(c + r * ldc + v * LANES, KEEP ? sum[r][v] : sum[r][v] * vsplat(scale));
}

using Product = void (*)(const float*, int64_t, const float*, int64_t, float, float*, int64_t, Ahead*);

// The product for as many registers of columns as hold `count` columns, at most PANEL.
template <class Cells, int ROWS, bool KEEP, int FETCH, int VECS = PANEL_VECS>
inline Product product_of(int64_t count) {
  if constexpr (VECS > 1)
    if (count <= (VECS - 1) * LANES) return product_of<Cells, ROWS, KEEP, FETCH, VECS - 1>(count);
  return multiply<Cells, ROWS, VECS, KEEP, FETCH>;
}

// Calls body(size, first) for groups of units that are computed together; the size is a compile-time constant.
template <int ROWS, class F>
inline void in_groups(int64_t units, F&& body, int64_t first = 0) {
  for (; units - first >= ROWS; first += ROWS) body(std::integral_constant<int, ROWS>{}, first);
  if constexpr (ROWS > 1) in_groups<(ROWS > 8 ? 8 : ROWS > 4 ? 4 : ROWS / 2)>(units, body, first);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

template <class Cells>
class BlockRun {
 public:
  BlockRun(const AttentionBlock& block, const AttentionScratch& scratch, float* memory)
      : block_(block),
        call_(*block.call),
        units_(block.last - block.first),
        base_(block.lowest(block.first) / POSITION_STEP * POSITION_STEP),
        steps_((call_.head_size + Cells::PACK - 1) / Cells::PACK),
        head_(scratch.head),
        stride_(AttentionScratch::stride(block.end(block.last - 1) - block.lowest(block.first))),
        row_bytes_(call_.head_size * static_cast<int64_t>(sizeof(Number))),
        row_stride_(row_bytes_ * call_.num_kv_heads),
        nothing_(reinterpret_cast<Number*>(memory + scratch.nothing)),
        queries_(memory + scratch.queries),
        keys_(memory + scratch.keys),
        values_(memory + scratch.values),
        sums_(memory + scratch.sums),
        scores_(memory + scratch.scores) {}

  void run() {
    for (int64_t u = 0; u < units_; ++u) {
      lows_[u] = block_.lowest(block_.first + u);
      ends_[u] = block_.end(block_.first + u);
      Cells::put_query(query(u), call_.head_size, queries_ + u * head_);
    }
    std::memset(nothing_, 0, static_cast<size_t>(call_.head_size) * sizeof(Number));
    in_passes(PANEL, [&](int64_t tile) { score(tile); });
    for (int64_t u = 0; u < units_; ++u) totals_[u] = weigh(scores_ + u * stride_, lows_[u] - base_, ends_[u] - base_);
    std::memset(sums_, 0, static_cast<size_t>(units_ * head_) * sizeof(float));
    in_passes(VALUE_POSITIONS, [&](int64_t tile) { mix(tile); });
    for (int64_t u = 0; u < units_; ++u) finish(u);
  }

 private:
  using Number = typename Cells::Number;
  // Lines that a step asks for, half of a tile: laying out the tile before has asked for the other half.
  static constexpr int LINES_AT_LEAST = static_cast<int>(PANEL * Cells::PACK * sizeof(Number) / CACHE_LINE / 2);
  static constexpr int LINES = LINES_AT_LEAST > 0 ? LINES_AT_LEAST : 1;

  // Calls body(tile) for the tiles of each pass, at most `step` positions long.
  template <class F>
  void in_passes(int64_t step, F&& body) {
    if (!block_.several) return pass(*block_.only, 0, units_, base_, ends_[units_ - 1], step, body);
    const int64_t group = block_.group(), shared = end_together(*block_.several[0]);
    pass(*block_.several[0], 0, units_, base_, shared, step, body);
    for (int64_t u = 0; u < units_; u += group)
      pass(block_.segment(block_.first + u), u, u + group, shared, ends_[u], step, body);
  }

  // Units [first, last), over what they see of positions [from, to), which lie where the segment says.
  template <class F>
  void pass(const Segment& segment, int64_t first, int64_t last, int64_t from, int64_t to, int64_t step, F&& body) {
    segment_ = &segment;
    first_ = first;
    last_ = last;
    low_ = most(from, lows_[first]);
    end_ = least(to, ends_[last - 1]);
    few_ = last - first <= Cells::ROWS;
    step_ = few_ ? least(step, POSITION_STEP) : step;  // small where memory is what few units wait for
    for (int64_t tile = low_ / POSITION_STEP * POSITION_STEP; tile < end_; tile += step_) body(tile);
  }

  int64_t row(int64_t u) const { return block_.segment(block_.first + u).row + block_.row(block_.first + u); }
  int64_t head(int64_t u) const { return block_.kv_head * block_.group() + (block_.first + u) % block_.group(); }
  const float* query(int64_t u) const { return call_.q + row(u) * call_.ldq + head(u) * call_.head_size; }

  // in_groups() of the units of the pass.
  template <class F>
  void in_units(F&& body) const {
    in_groups<Cells::ROWS>(last_, body, first_);
  }

  // The key or value of a position; zeros when nobody in the pass sees it.
  const Number* place(const void* arena, int64_t position) const {
    if (position < low_ || position >= end_) return nothing_;
    const int64_t at = position < segment_->num_prefix ? segment_->prefix_start + position
                                                       : segment_->private_start + position - segment_->num_prefix;
    return static_cast<const Number*>(arena) + (at * call_.num_kv_heads + block_.kv_head) * call_.head_size;
  }

  // What follows `position`; where that is elsewhere, asking for it is vain and harmless.
  Ahead ahead_of(const void* arena, int64_t position) const {
    return position < end_ ? Ahead(place(arena, position), row_bytes_, row_stride_) : Ahead(nothing_, row_bytes_, 0);
  }

  // Scores of PANEL positions from `tile` on, for every unit of the pass that sees any of them.
  void score(int64_t tile) {
    const int64_t count = least(end_ - tile, PANEL);
    ahead_ = tile + PANEL < end_ ? ahead_of(call_.keys, tile + PANEL) : ahead_of(call_.values, low_);
    for (int64_t key = 0; key < count; key += LANES) transpose_keys(tile + key, keys_ + key);
    in_units([&](auto size, int64_t u) {
      constexpr int ROWS = decltype(size)::value;
      if (tile >= ends_[u + ROWS - 1] || tile + PANEL <= lows_[u]) return;
      const Product product = few_ ? product_of<Cells, ROWS, false, LINES>(count)
                                   : product_of<Cells, ROWS, false, 0>(least(count, ends_[u + ROWS - 1] - tile));
      product(queries_ + u * head_, head_, keys_, steps_, call_.scale, scores_ + u * stride_ + tile - base_, stride_,
              &ahead_);
    });
  }

  // Writes the keys of LANES positions as columns, and asks for those of the next tile unless the products do.
  void transpose_keys(int64_t position, float* columns) {
    const Number *rows[LANES], *next[LANES];
    for (int i = 0; i < LANES; ++i) {
      rows[i] = place(call_.keys, position + i);
      next[i] = few_ ? rows[i] : place(call_.keys, position + PANEL + i);
    }
    int64_t cell = 0;
    for (; cell + LANES <= call_.head_size / Cells::PACK; cell += LANES) {
      transpose_cells(rows, cell, LANES * Cells::PACK, columns, LANES);
      if (cell * Cells::PACK * sizeof(Number) % CACHE_LINE != 0) continue;
      if (few_)
        for (int i = 0; i < LANES / 2; ++i) ahead_.line();
      else
        for (int i = 0; i < LANES; ++i) __builtin_prefetch(next[i] + cell * Cells::PACK);
    }
    if (cell < steps_) transpose_cells(rows, cell, call_.head_size - cell * Cells::PACK, columns, steps_ - cell);
  }

  // Cells from `cell` on, that hold `numbers` of each row; writes `count` lines of columns.
  static void transpose_cells(const Number* const (&rows)[LANES], int64_t cell, int64_t numbers, float* columns,
                              int64_t count) {
    Vec block[LANES];
    for (int i = 0; i < LANES; ++i) block[i] = Cells::read(rows[i] + cell * Cells::PACK, numbers);
    vtranspose(block);
    for (int i = 0; i < LANES; ++i)
      if (i < count) vstore(columns + (cell + i) * PANEL, block[i]);
  }

  // Turns a unit's scores of positions [low, end) (from the base) into weights, and returns their sum.
  float weigh(float* scores, int64_t low, int64_t end) const {
    const int64_t first = low / (2 * LANES) * (2 * LANES);
    Vec largest = vsplat(-INFINITY);
    for (int64_t i = first; i < end; i += LANES) {
      Vec x = vload(scores + i);
      if (call_.softcap > 0.0f) {
        x = vsoften(x, vsplat(call_.softcap));
        vstore(scores + i, x);
      }
      largest = vmax(largest, visible(x, i, low, end, -INFINITY));
    }
    const Vec shift = vsplat(vlargest(largest));
    Vec total = vsplat(0.0f);
    for (int64_t i = first; i < end; i += 2 * LANES) {
      Vec a = visible(vexp(vload(scores + i) - shift), i, low, end, 0.0f);
      Vec b = visible(vexp(vload(scores + i + LANES) - shift), i + LANES, low, end, 0.0f);
      Cells::put_weights(scores, i, a, b);
      total = total + a;
      total = total + b;
    }
    return vsum(total);
  }

  // x where its position is in [low, end), else `other`.
  static Vec visible(Vec x, int64_t position, int64_t low, int64_t end, float other) {
    if (position >= low && position + LANES <= end) return x;
    return vselect(vwithout(vfirst(end - position), vfirst(low - position)), x, vsplat(other));
  }

  // Adds the weighted values of a tile of positions.
  void mix(int64_t tile) {
    const int64_t stop = least(tile + step_, end_);
    ahead_ = ahead_of(call_.values, stop);
    for (int64_t p = most(tile, low_ / Cells::PACK * Cells::PACK); p < stop; p += Cells::PACK) pack_values(tile, p);
    for (int64_t column = 0; column < call_.head_size; column += PANEL) {
      in_units([&](auto size, int64_t u) {
        constexpr int ROWS = decltype(size)::value;
        // All of the group see positions [from, to); what only some of them see, each adds alone.
        int64_t from = rounded_up(most(tile, lows_[u + ROWS - 1]), Cells::PACK);
        int64_t to = least(stop, ends_[u]) / Cells::PACK * Cells::PACK;
        if (from >= to) from = to = stop;
        for (int64_t i = u; i < u + ROWS; ++i) mix_one(tile, column, i, most(tile, lows_[i]), least(from, ends_[i]));
        if (from < to) mix_group<ROWS>(tile, column, u, from, to);
        for (int64_t i = u; i < u + ROWS; ++i) mix_one(tile, column, i, to, least(stop, ends_[i]));
      });
    }
  }

  // Lays out the values of one cell of positions by panels of columns, and asks for those of a later cell.
  void pack_values(int64_t tile, int64_t position) {
    const Number *rows[Cells::PACK], *next[Cells::PACK];
    for (int i = 0; i < Cells::PACK; ++i) {
      rows[i] = place(call_.values, position + i);
      next[i] = few_ ? rows[i] : place(call_.values, position + FETCH_AHEAD + i);
    }
    int64_t column = 0;
    for (; column + PANEL <= call_.head_size; column += PANEL) {
      Cells::put_values(rows, column, PANEL, panel(tile, column, position));
      for (int i = 0; i < Cells::PACK; ++i)
        if (few_) ahead_.line();
        else __builtin_prefetch(next[i] + column);
    }
    if (column < call_.head_size)
      Cells::put_values(rows, column, call_.head_size - column, panel(tile, column, position));
  }

  // The cells of a position, PANEL columns of them. Panels lie a little more than a power of two apart: at one, they
  // would share few sets of the cache.
  float* panel(int64_t tile, int64_t column, int64_t position) const {
    return values_ + (column / PANEL * (VALUE_POSITIONS / Cells::PACK + 1) + (position - tile) / Cells::PACK) * PANEL;
  }

  // Positions [from, to), PANEL columns.
  template <int ROWS>
  void mix_group(int64_t tile, int64_t column, int64_t u, int64_t from, int64_t to) {
    const int64_t count = call_.head_size - column;
    const Product product =
        few_ ? product_of<Cells, ROWS, true, LINES>(count) : product_of<Cells, ROWS, true, 0>(count);
    product(scores_ + u * stride_ + (from - base_) / Cells::PACK, stride_, panel(tile, column, from),
            (to - from) / Cells::PACK, 1.0f, sums_ + u * head_ + column, head_, &ahead_);
  }

  // The same for one unit, whose positions may begin or end inside a cell.
  void mix_one(int64_t tile, int64_t column, int64_t u, int64_t from, int64_t to) {
    if (from >= to) return;
    if constexpr (Cells::PACK == 2) {
      if (from % 2 != 0) mix_half(tile, column, u, from++, 0xFFFF0000u);
      if (to % 2 != 0) {
        if (from < to - 1) mix_group<1>(tile, column, u, from, to - 1);
        return mix_half(tile, column, u, to - 1, 0x0000FFFFu);
      }
    }
    if (from < to) mix_group<1>(tile, column, u, from, to);
  }

  // One position of a cell; the other half is not the unit's to see, and its weight is 0 already.
  void mix_half(int64_t tile, int64_t column, int64_t u, int64_t position, uint32_t half) {
    const Vec weight = vsplat(scores_[u * stride_ + (position - base_) / Cells::PACK]);
    const float* cells = panel(tile, column, position);
    float* sum = sums_ + u * head_ + column;
    for (int64_t i = 0; i < PANEL; i += LANES)
      vstore(sum + i, Cells::add_product(vload(sum + i), weight, vbits_and(vload(cells + i), half)));
  }

  void finish(int64_t u) {
    float* out = call_.out + row(u) * call_.ldo + head(u) * call_.head_size;
    const Vec total = vsplat(totals_[u]);
    for (int64_t column = 0; column < call_.head_size; column += LANES)
      vstore_part(out + column, vload(sums_ + u * head_ + column) / total, call_.head_size - column);
  }

  const AttentionBlock& block_;
  const Attention& call_;
  const int64_t units_;
  const int64_t base_;       // position of the first score
  const int64_t steps_;      // cells of a head
  const int64_t head_, stride_;
  const int64_t row_bytes_, row_stride_;  // of a position in the arena
  // Of the pass under way.
  const Segment* segment_ = nullptr;
  int64_t first_ = 0, last_ = 0;  // its units
  int64_t low_ = 0, end_ = 0;     // positions that somebody in it sees
  int64_t step_ = 0;              // positions of a tile
  bool few_ = false;              // units: one group of them
  Number* nothing_;  // a row of zeros
  Ahead ahead_;      // of the values
  float *queries_, *keys_, *values_, *sums_, *scores_;
  int64_t lows_[MAX_BLOCK_UNITS], ends_[MAX_BLOCK_UNITS];  // of the positions that a unit sees
  float totals_[MAX_BLOCK_UNITS];
};

// Numbers as floats, one to a cell.
template <class N, int MAX_ROWS>
struct SingleCells {
  using Number = N;
  static constexpr int PACK = 1;
  static constexpr int ROWS = MAX_ROWS;

  static Vec add_product(Vec sum, Vec a, Vec b) { return vfma(a, b, sum); }

  // LANES cells of a row, made of `count` numbers; 0 beyond them.
  static Vec read(const Number* row, int64_t count) {
    if constexpr (std::is_same_v<Number, float>) return vload_part(row, count);
    else return vload_bf16_part(row, count);
  }

  static void put_query(const float* query, int64_t size, float* cells) {
    std::memcpy(cells, query, static_cast<size_t>(size) * sizeof(float));
  }

  // Writes the weights of 2 * LANES positions; a and b become what was written.
  static void put_weights(float* cells, int64_t position, Vec& a, Vec& b) {
    vstore(cells + position, a);
    vstore(cells + position + LANES, b);
  }

  // PANEL columns, from `column` on, of the values of a cell of positions; 0 beyond `count` of them.
  static void put_values(const Number* const (&rows)[PACK], int64_t column, int64_t count, float* cells) {
    for (int64_t i = 0; i < PANEL; i += LANES) vstore(cells + i, read(rows[0] + column + i, count - i));
  }
};

}  // namespace
}  // namespace kev
