// One block of attention, in lanes. Include after one of vec_*.h, MAX_ROWS and PANEL_VECS.
//
// Invariants and semantics: scores and outputs are products of small matrices whose terms are summed one by one: over
// the head for a score, over positions for an output, each number in a lane of its own. So neither the shape of a tile
// nor the other units change its bits. Scores of the whole visible range are kept, so the softmax knows its maximum
// before its first exponential; exponentials are summed by position modulo lanes, then across the lanes in one fixed
// tree. Positions that a unit does not see may be read for a neighbour that sees them; to the unit's sums they add
// a zero at most, which changes nothing but the sign of a zero, and finish() gives every zero the same sign.
//
// A block of few units computes little for every number that it reads: there the products ask for the keys and values
// that come next, so that memory and arithmetic are busy at once.
//
// A block is computed in passes over neighbouring ranges of positions: what is laid out on a shelf, and what is not; or
// what several questions share, for the units of all, and then the rest of one question at a time. A unit's own sums go
// from position to position as in one pass.
//
// Not here: how the arena becomes cells (attention_layout.h).
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention_layout.h"

namespace kev {
namespace {

// sum[r, j] += a[r] . b[j]
template <class Cells, int ROWS, int VECS>
inline __attribute__((always_inline)) void add_products(const float* a, int64_t lda, const float* b,
                                                        Vec (&sum)[ROWS][VECS]) {
  Vec columns[VECS];
  for (int v = 0; v < VECS; ++v) columns[v] = vload(b + v * LANES);
  for (int r = 0; r < ROWS; ++r) {
    const Vec factor = vsplat(a[r * lda]);
    for (int v = 0; v < VECS; ++v) sum[r][v] = Cells::add_product(sum[r][v], factor, columns[v]);
  }
}

// c[r, j] = scale * sum over i of a[r, i] . b[i, j], one i after the other. Asks for FETCH lines on the way.
template <class Cells, int ROWS, int VECS, int FETCH>
__attribute__((noinline)) void score_product(const float* a, int64_t lda, const float* b, int64_t steps, float scale,
                                             float* c, int64_t ldc, [[maybe_unused]] Ahead* ahead) {
  Vec sum[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) sum[r][v] = vsplat(0.0f);
  for (int64_t i = 0; i < steps; ++i) {
    for (int line = 0; line < FETCH; ++line) ahead->line();
    add_products<Cells>(a + i, lda, b + i * PANEL, sum);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) vstore(c + r * ldc + v * LANES, sum[r][v] * vsplat(scale));
}

// The cells of positions that some of a group of units see.
struct Cover {
  int64_t position;         // of the first
  int64_t before;           // cells until all see them whole
  int64_t together;         // cells that all see
  int64_t after;            // cells after those
  const int64_t *low, *end;  // [units]
};

// The bits of a cell, its first number at `position`, that a unit sees which sees [low, end).
template <class Cells>
inline uint32_t visible_bits(int64_t position, int64_t low, int64_t end) {
  constexpr int BITS = 32 / Cells::PACK;
  uint32_t bits = 0;
  for (int i = 0; i < Cells::PACK; ++i)
    if (position + i >= low && position + i < end) bits |= 0xFFFFFFFFu >> (32 - BITS) << i * BITS;
  return bits;
}

// c[r, j] += sum over the cells of a[r, i] . b[i, j], one i after the other; what a unit does not see counts as zero.
template <class Cells, int ROWS, int VECS, int FETCH>
__attribute__((noinline)) void mix_product(const float* a, int64_t lda, const float* b, const Cover& cover, float* c,
                                           int64_t ldc, [[maybe_unused]] Ahead* ahead) {
  Vec sum[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) sum[r][v] = vload(c + r * ldc + v * LANES);
  const auto add_visible = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      for (int r = 0; r < ROWS; ++r) {
        const uint32_t bits = visible_bits<Cells>(cover.position + i * Cells::PACK, cover.low[r], cover.end[r]);
        const Vec factor = vbits_and(vsplat(a[r * lda + i]), bits);
        for (int v = 0; v < VECS; ++v)
          sum[r][v] = Cells::add_product(sum[r][v], factor, vbits_and(vload(b + i * PANEL + v * LANES), bits));
      }
    }
  };
  const int64_t middle = cover.before + cover.together;
  add_visible(0, cover.before);
  for (int64_t i = cover.before; i < middle; ++i) {
    for (int line = 0; line < FETCH; ++line) ahead->line();
    add_products<Cells>(a + i, lda, b + i * PANEL, sum);
  }
  add_visible(middle, middle + cover.after);
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) vstore(c + r * ldc + v * LANES, sum[r][v]);
}

using ScoreProduct = void (*)(const float*, int64_t, const float*, int64_t, float, float*, int64_t, Ahead*);
using MixProduct = void (*)(const float*, int64_t, const float*, const Cover&, float*, int64_t, Ahead*);

// The products for as many registers of columns as hold `count` columns, at most PANEL.
template <class Cells, int ROWS, int FETCH, int VECS = PANEL_VECS>
inline ScoreProduct score_product_of(int64_t count) {
  if constexpr (VECS > 1)
    if (count <= (VECS - 1) * LANES) return score_product_of<Cells, ROWS, FETCH, VECS - 1>(count);
  return score_product<Cells, ROWS, VECS, FETCH>;
}
template <class Cells, int ROWS, int FETCH, int VECS = PANEL_VECS>
inline MixProduct mix_product_of(int64_t count) {
  if constexpr (VECS > 1)
    if (count <= (VECS - 1) * LANES) return mix_product_of<Cells, ROWS, FETCH, VECS - 1>(count);
  return mix_product<Cells, ROWS, VECS, FETCH>;
}

// Calls body(size, first) for groups of units that are computed together; the size is a compile-time constant.
template <int ROWS, class F>
inline void in_groups(int64_t units, F&& body, int64_t first = 0) {
  for (; units - first >= ROWS; first += ROWS) body(std::integral_constant<int, ROWS>{}, first);
  if constexpr (ROWS > 1) in_groups<(ROWS > 8 ? 8 : ROWS > 4 ? 4 : ROWS / 2)>(units, body, first);
}

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
    }
    std::memset(nothing_, 0, static_cast<size_t>(call_.head_size) * sizeof(Number));
    in_passes([&] { score(); });
    for (int64_t u = 0; u < units_; ++u)
      shares_[u] = 1.0f / weigh(scores_ + u * stride_, lows_[u] - base_, ends_[u] - base_);
    std::memset(sums_, 0, static_cast<size_t>(units_ * head_) * sizeof(float));
    in_passes([&] { mix(); });
    for (int64_t u = 0; u < units_; ++u) finish(u);
  }

 private:
  using Number = typename Cells::Number;
  // Lines that a step asks for, half of a tile: laying out the tile before has asked for the other half.
  static constexpr int LINES_AT_LEAST = static_cast<int>(PANEL * Cells::PACK * sizeof(Number) / CACHE_LINE / 2);
  static constexpr int LINES = LINES_AT_LEAST > 0 ? LINES_AT_LEAST : 1;

  // Calls body() for each pass.
  template <class F>
  void in_passes(F&& body) {
    const int64_t end = ends_[units_ - 1];
    if (!block_.several) {
      int64_t from = base_;
      if (block_.prefix) pass(*block_.only, block_.prefix, 0, units_, from, block_.prefix->end, body);
      if (block_.prefix) from = most(from, block_.prefix->end);
      return pass(*block_.only, block_.own, 0, units_, from, end, body);
    }
    const int64_t group = block_.group(), shared = end_together(*block_.several[0]);
    pass(*block_.several[0], nullptr, 0, units_, base_, shared, body);
    for (int64_t u = 0; u < units_; u += group)
      pass(block_.segment(block_.first + u), nullptr, u, u + group, shared, ends_[u], body);
  }

  // Units [first, last), over what they see of positions [from, to), which lie where the segment or the shelf says.
  template <class F>
  void pass(const Segment& segment, const Shelf* shelf, int64_t first, int64_t last, int64_t from, int64_t to, F&& body) {
    const int64_t low = most(from, lows_[first]), end = least(to, ends_[last - 1]);
    if (low >= end) return;
    source_ = Source<Cells>(call_, segment, block_.kv_head, low, end, nothing_);
    shelf_ = shelf;
    first_ = first;
    last_ = last;
    few_ = last - first <= Cells::ROWS && !shelf;
    body();
  }

  int64_t row(int64_t u) const { return block_.segment(block_.first + u).row + block_.row(block_.first + u); }
  int64_t head(int64_t u) const { return block_.kv_head * block_.group() + (block_.first + u) % block_.group(); }
  const float* query(int64_t u) const { return call_.q + row(u) * call_.ldq + head(u) * call_.head_size; }

  // Scores of the pass.
  void score() {
    const int64_t first = source_.low() / POSITION_STEP * POSITION_STEP;
    for (int64_t tile = first; tile < source_.end(); tile += PANEL) {
      if (shelf_) {
        score(tile, ShelfCells<Cells>(call_, *shelf_, block_.kv_head).keys_at(tile));
        continue;
      }
      ahead_ = tile + PANEL < source_.end() ? source_.keys_from(tile + PANEL) : source_.values_from(source_.low());
      source_.lay_keys(tile, keys_, few_ ? &ahead_ : nullptr);
      score(tile, keys_);
    }
  }

  // Scores of PANEL positions from `tile` on, for every unit of the pass that sees any of them.
  void score(int64_t tile, const float* keys) {
    const int64_t count = least(source_.end() - tile, PANEL);
    in_groups<Cells::ROWS>(last_, [&](auto size, int64_t u) {
      constexpr int ROWS = decltype(size)::value;
      const bool more = read_queries(u + ROWS);
      if (tile >= ends_[u + ROWS - 1] || tile + PANEL <= lows_[u]) return;
      const int64_t skipped = few_ ? 0 : most(lows_[u] - tile, 0) / LANES * LANES;
      const int64_t seen = few_ ? count : least(count, ends_[u + ROWS - 1] - tile) - skipped;
      const ScoreProduct product = few_   ? score_product_of<Cells, ROWS, LINES>(seen)
                                   : more ? score_product_of<Cells, ROWS, 1>(seen)
                                          : score_product_of<Cells, ROWS, 0>(seen);
      product(queries_ + u * head_, head_, keys + skipped, steps_, call_.scale,
              scores_ + u * stride_ + tile + skipped - base_, stride_, &ahead_);
    }, first_);
  }

  // Reads the queries of the first so many units, if that was not done before; then says whether more are to come, and
  // has the next ones fetched.
  bool read_queries(int64_t count) {
    if (count <= num_read_) return false;
    for (; num_read_ < count; ++num_read_)
      Cells::put_query(query(num_read_), call_.head_size, queries_ + num_read_ * head_);
    if (few_ || num_read_ == units_) return false;
    const int64_t first = num_read_ - (block_.first + num_read_) % block_.group();  // of its row
    ahead_ = Ahead(call_.q + row(first) * call_.ldq + block_.kv_head * block_.group() * call_.head_size,
                   block_.group() * call_.head_size * static_cast<int64_t>(sizeof(float)),
                   call_.ldq * static_cast<int64_t>(sizeof(float)));
    return true;
  }

  // Calls body(position, whole) for every two registers of positions that hold any of [low, end); whole: no others.
  template <class F>
  static void in_pairs(int64_t low, int64_t end, F&& body) {
    constexpr int64_t STEP = 2 * LANES;
    int64_t i = low / STEP * STEP;
    if (i < low) body(i, std::false_type{}), i += STEP;
    for (; i + STEP <= end; i += STEP) body(i, std::true_type{});
    if (i < end) body(i, std::false_type{});
  }

  // Turns a unit's scores of positions [low, end) (from the base) into weights, and returns their sum.
  float weigh(float* scores, int64_t low, int64_t end) const {
    if (call_.softcap > 0.0f)
      for (int64_t i = low / LANES * LANES; i < end; i += LANES)
        vstore(scores + i, vsoften(vload(scores + i), vsplat(call_.softcap)));
    Vec largest = vsplat(-INFINITY), other = largest;
    in_pairs(low, end, [&](int64_t i, auto whole) {
      largest = vmax(largest, visible(whole, vload(scores + i), i, low, end, -INFINITY));
      other = vmax(other, visible(whole, vload(scores + i + LANES), i + LANES, low, end, -INFINITY));
    });
    const Vec shift = vsplat(vlargest(vmax(largest, other)));
    Vec total = vsplat(0.0f);
    in_pairs(low, end, [&](int64_t i, auto whole) {
      const Vec a = visible(whole, Cells::weight(vload(scores + i), shift), i, low, end, 0.0f);
      const Vec b = visible(whole, Cells::weight(vload(scores + i + LANES), shift), i + LANES, low, end, 0.0f);
      total = Cells::put_weights(scores, i, a, b, total);
    });
    return vsum(total);
  }

  // x where its position is in [low, end), else `other`.
  template <bool WHOLE>
  static Vec visible(std::bool_constant<WHOLE>, Vec x, int64_t position, int64_t low, int64_t end, float other) {
    if constexpr (WHOLE) return x;
    else return vselect(vwithout(vfirst(end - position), vfirst(low - position)), x, vsplat(other));
  }

  // Adds the weighted values of the pass.
  void mix() {
    const int64_t first = source_.low() / POSITION_STEP * POSITION_STEP;
    if (shelf_) return mix(first, source_.end(), ShelfCells<Cells>(call_, *shelf_, block_.kv_head).values);
    const int64_t step = few_ ? POSITION_STEP : VALUE_POSITIONS;  // small where memory is what few units wait for
    for (int64_t tile = first; tile < source_.end(); tile += step) {
      const ValuePanels<Cells> panels{values_, tile, VALUE_POSITIONS};
      const int64_t stop = least(tile + step, source_.end());
      ahead_ = source_.values_from(stop);
      source_.lay_values(tile, stop, panels, few_ ? &ahead_ : nullptr);
      mix(tile, stop, panels);
    }
  }

  // The same of positions [from, to).
  void mix(int64_t from, int64_t to, const ValuePanels<Cells>& panels) {
    for (int64_t column = 0; column < call_.head_size; column += PANEL) {
      const int64_t count = call_.head_size - column;
      in_groups<Cells::ROWS>(last_, [&](auto size, int64_t u) {
        constexpr int ROWS = decltype(size)::value;
        constexpr int64_t PACK = Cells::PACK;
        const int64_t low = most(from, lows_[u]) / PACK, end = (least(to, ends_[u + ROWS - 1]) + PACK - 1) / PACK;
        if (low >= end) return;
        const int64_t all_low = least((most(from, lows_[u + ROWS - 1]) + PACK - 1) / PACK, end);
        const int64_t all_end = most(least(to, ends_[u]) / PACK, all_low);
        const Cover cover{low * PACK, all_low - low, all_end - all_low, end - all_end, lows_ + u, ends_ + u};
        const MixProduct product =
            few_ ? mix_product_of<Cells, ROWS, LINES>(count) : mix_product_of<Cells, ROWS, 0>(count);
        product(scores_ + u * stride_ + low - base_ / PACK, stride_, panels.at(column, low * PACK), cover,
                sums_ + u * head_ + column, head_, &ahead_);
      }, first_);
    }
  }

  // Writes a unit's output.
  void finish(int64_t u) {
    float* out = call_.out + row(u) * call_.ldo + head(u) * call_.head_size;
    const float* sums = sums_ + u * head_;
    const Vec share = vsplat(shares_[u]), zero = vsplat(0.0f);
    for (int64_t i = 0; i < call_.head_size; i += LANES)
      vstore_part(out + i, (vload(sums + i) + zero) * share, call_.head_size - i);
  }

  const AttentionBlock& block_;
  const Attention& call_;
  const int64_t units_;
  const int64_t base_;   // position of the first score
  const int64_t steps_;  // cells of a head
  const int64_t head_, stride_;
  // Of the pass under way.
  Source<Cells> source_;
  const Shelf* shelf_ = nullptr;    // null: the block lays the positions out
  int64_t first_ = 0, last_ = 0;  // its units
  bool few_ = false;              // units: one group of them
  Number* nothing_;  // a row of zeros
  Ahead ahead_;
  float *queries_, *keys_, *values_, *sums_, *scores_;
  int64_t lows_[MAX_BLOCK_UNITS], ends_[MAX_BLOCK_UNITS];  // of the positions that a unit sees
  float shares_[MAX_BLOCK_UNITS];                          // of its output that a weight of one stands for
  int64_t num_read_ = 0;                                   // queries
};

}  // namespace
}  // namespace kev
