// How keys and values of the arena become cells that a product can read. Include after one of vec_*.h, MAX_ROWS and
// PANEL_VECS.
//
// Invariants and semantics: keys stand as columns, PANEL positions side by side; values by panels of PANEL columns. A
// `Cells` says how numbers become lanes: a cell is 32 bits, and PACK how many numbers it holds: one float, or two
// bfloat16. Positions that nobody sees are zeros, and their memory is not read.
//
// Not here: who sees what (attention_body.h).
#pragma once

#include <cstring>
#include <type_traits>

#include "attention_block.h"
#include "vecmath.h"

namespace kev {
namespace {

constexpr int64_t PANEL = PANEL_VECS * LANES;  // keys of a tile, columns of a panel of values
constexpr int64_t FETCH_AHEAD = 16;            // positions of values
constexpr int64_t CACHE_LINE = 64;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

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

// Panels of the values of so many positions. They lie a little more than a power of two apart: at one, they would share
// few sets of the cache.
template <class Cells>
struct ValuePanels {
  float* memory;
  int64_t from, positions;

  // The cells of a position, PANEL columns of them.
  float* at(int64_t column, int64_t position) const {
    return memory + (column / PANEL * (positions / Cells::PACK + 1) + (position - from) / Cells::PACK) * PANEL;
  }
};

// Where positions [low, end) of a segment lie, for one key-value head.
template <class Cells>
class Source {
 public:
  using Number = typename Cells::Number;

  Source() = default;
  // `nothing` is a row of zeros.
  Source(const Attention& call, const Segment& segment, int64_t kv_head, int64_t low, int64_t end,
         const Number* nothing)
      : call_(&call), segment_(&segment), kv_head_(kv_head), low_(low), end_(end), nothing_(nothing) {}

  int64_t low() const { return low_; }
  int64_t end() const { return end_; }

  // What follows `position`; where that is elsewhere, asking for it is vain and harmless.
  Ahead keys_from(int64_t position) const { return ahead_of(call_->keys, position); }
  Ahead values_from(int64_t position) const { return ahead_of(call_->values, position); }

  // Writes the keys of PANEL positions as columns; asks for what `ahead` says, or else for the keys that come next.
  void lay_keys(int64_t tile, float* columns, Ahead* ahead) const {
    for (int64_t key = 0; key < PANEL && tile + key < end_; key += LANES)
      transpose_keys(tile + key, columns + key, ahead);
  }

  // Writes the values of a tile of positions up to `stop`.
  void lay_values(int64_t tile, int64_t stop, const ValuePanels<Cells>& panels, Ahead* ahead) const {
    const int64_t first = most(tile, low_ / Cells::PACK * Cells::PACK);
    for (int64_t p = first; p < stop; p += Cells::PACK) put_values(p, panels, ahead);
  }

 private:
  // The key or value of a position; zeros when nobody sees it.
  const Number* place(const void* arena, int64_t position) const {
    if (position < low_ || position >= end_) return nothing_;
    const int64_t at = position < segment_->num_prefix ? segment_->prefix_start + position
                                                       : segment_->private_start + position - segment_->num_prefix;
    return static_cast<const Number*>(arena) + (at * call_->num_kv_heads + kv_head_) * call_->head_size;
  }

  Ahead ahead_of(const void* arena, int64_t position) const {
    const int64_t row_bytes = call_->head_size * static_cast<int64_t>(sizeof(Number));
    return position < end_ ? Ahead(place(arena, position), row_bytes, row_bytes * call_->num_kv_heads)
                           : Ahead(nothing_, row_bytes, 0);
  }

  void transpose_keys(int64_t position, float* columns, Ahead* ahead) const {
    const Number *rows[LANES], *next[LANES];
    for (int i = 0; i < LANES; ++i) {
      rows[i] = place(call_->keys, position + i);
      next[i] = ahead ? rows[i] : place(call_->keys, position + PANEL + i);
    }
    int64_t cell = 0;
    for (; cell + LANES <= call_->head_size / Cells::PACK; cell += LANES) {
      transpose_cells(rows, cell, LANES * Cells::PACK, columns, LANES);
      if (cell * Cells::PACK * sizeof(Number) % CACHE_LINE != 0) continue;
      if (ahead)
        for (int i = 0; i < LANES / 2; ++i) ahead->line();
      else
        for (int i = 0; i < LANES; ++i) __builtin_prefetch(next[i] + cell * Cells::PACK);
    }
    const int64_t left = call_->head_size - cell * Cells::PACK;
    if (left > 0) transpose_cells(rows, cell, left, columns, (left + Cells::PACK - 1) / Cells::PACK);
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

  // Lays out the values of one cell of positions by panels of columns.
  void put_values(int64_t position, const ValuePanels<Cells>& panels, Ahead* ahead) const {
    const Number *rows[Cells::PACK], *next[Cells::PACK];
    for (int i = 0; i < Cells::PACK; ++i) {
      rows[i] = place(call_->values, position + i);
      next[i] = ahead ? rows[i] : place(call_->values, position + FETCH_AHEAD + i);
    }
    int64_t column = 0;
    for (; column + PANEL <= call_->head_size; column += PANEL) {
      Cells::put_values(rows, column, PANEL, panels.at(column, position));
      for (int i = 0; i < Cells::PACK; ++i)
        if (ahead) ahead->line();
        else __builtin_prefetch(next[i] + column);
    }
    if (column < call_->head_size)
      Cells::put_values(rows, column, call_->head_size - column, panels.at(column, position));
  }

  const Attention* call_ = nullptr;
  const Segment* segment_ = nullptr;
  int64_t kv_head_ = 0, low_ = 0, end_ = 0;
  const Number* nothing_ = nullptr;
};

// A shelf of one key-value head, as cells.
template <class Cells>
struct ShelfCells {
  float* keys;
  int64_t from, steps;  // steps: cells of a head
  ValuePanels<Cells> values;

  ShelfCells(const Attention& call, const Shelf& shelf, int64_t kv_head)
      : keys(shelf.memory + kv_head * shelf.floats),
        from(shelf.from()),
        steps((call.head_size + Cells::PACK - 1) / Cells::PACK),
        values{keys + shelf.positions() * rounded_up(call.head_size, POSITION_STEP) / Cells::PACK, from,
               shelf.positions()} {}

  float* keys_at(int64_t tile) const { return keys + (tile - from) * steps; }
};

template <class Cells>
void lay_out_shelf(const Attention& call, const Shelf& shelf, int64_t kv_head, int64_t tile, float* nothing) {
  std::memset(nothing, 0, static_cast<size_t>(call.head_size) * sizeof(typename Cells::Number));
  const Source<Cells> source(call, *shelf.segment, kv_head, shelf.low, shelf.end,
                             reinterpret_cast<const typename Cells::Number*>(nothing));
  const ShelfCells<Cells> cells(call, shelf, kv_head);
  const int64_t stop = least(tile + POSITION_STEP, shelf.end);
  for (int64_t t = tile; t < stop; t += PANEL) source.lay_keys(t, cells.keys_at(t), nullptr);
  source.lay_values(tile, stop, cells.values, nullptr);
}

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

  static Vec weight(Vec score, Vec largest) { return vexp(score - largest); }

  // Writes the weights of 2 * LANES positions, and adds them to the total.
  static Vec put_weights(float* cells, int64_t position, Vec a, Vec b, Vec total) {
    vstore(cells + position, a);
    vstore(cells + position + LANES, b);
    return (total + a) + b;
  }

  // PANEL columns, from `column` on, of the values of a cell of positions; 0 beyond `count` of them.
  static void put_values(const Number* const (&rows)[PACK], int64_t column, int64_t count, float* cells) {
    for (int64_t i = 0; i < PANEL; i += LANES) vstore(cells + i, read(rows[0] + column + i, count - i));
  }
};

}  // namespace
}  // namespace kev
