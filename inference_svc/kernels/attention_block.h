// The unit of work of attention: some query rows of one key-value head, of one question or of several with one prefix.
//
// Invariants and semantics: a unit `u` is the pair (row u / group, query head u % group of the key-value head), where
// rows are those of one segment, or of several that have one each, by position: later units see the same or later
// positions. How units are cut into blocks changes no bit of any of them: the sums of a unit run in order of its own
// positions, whoever else is in the block.
//
// Keys and values that several blocks see are laid out for products once, by shelves, before any block runs.
//
// Not here: how blocks are cut and handed to threads (attention_cut.h), how one is computed (attention_body.h).
#pragma once

#include "kernels.h"

namespace kev {

constexpr int64_t MAX_BLOCK_UNITS = 144;
constexpr int64_t MIN_BLOCK_UNITS = 12;    // that fit in the scratch, however long the context is
constexpr int64_t SHELF_BLOCK_UNITS = 72;   // of a block that finds all that it sees laid out
constexpr int64_t POSITION_STEP = 64;      // tiles begin at multiples of it; the widest panel
constexpr int64_t VALUE_POSITIONS = 256;   // of a tile of values
constexpr int64_t SCORE_BYTES = 512 << 10;  // of a block with a long context: they stay in the second-level cache

inline int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// One thread's working memory, in floats from its start; every part begins at a multiple of 64 bytes.
struct AttentionScratch {
  int64_t head;     // head_size, padded
  int64_t nothing;  // [head] zeros
  int64_t queries;  // [units, head]
  int64_t keys;     // [head, POSITION_STEP] one tile, transposed
  int64_t values;   // [head / panel, VALUE_POSITIONS + 1, panel] one tile
  int64_t sums;     // [units, head] of the output
  int64_t scores;   // [units, stride of positions]
  int64_t floats;   // of all

  AttentionScratch(int64_t head_size, int64_t span) {
    head = rounded_up(head_size, POSITION_STEP);
    nothing = 0;
    queries = nothing + head;
    keys = queries + MAX_BLOCK_UNITS * head;
    values = keys + POSITION_STEP * head;
    sums = values + (VALUE_POSITIONS + 1) * head;
    scores = sums + MAX_BLOCK_UNITS * head;
    floats = scores + score_floats(stride(span));
  }

  // Scores from unit to unit, for `span` positions from first to last; no multiple of a page.
  static int64_t stride(int64_t span) { return rounded_up(span + POSITION_STEP, POSITION_STEP) + 16; }
  // How many units a block may have.
  static int64_t units(int64_t span) {
    const int64_t fit = SCORE_BYTES / 4 / stride(span) / MIN_BLOCK_UNITS * MIN_BLOCK_UNITS;
    return fit < MIN_BLOCK_UNITS ? MIN_BLOCK_UNITS : fit > MAX_BLOCK_UNITS ? MAX_BLOCK_UNITS : fit;
  }

 private:
  // Grows with the stride, and holds units() of it.
  static int64_t score_floats(int64_t stride) {
    const int64_t most = MAX_BLOCK_UNITS * stride, least = MIN_BLOCK_UNITS * stride, fit = SCORE_BYTES / 4;
    return least > fit ? least : most < fit ? most : fit;
  }
};

// Where the tiles end that lie in the prefix as a whole: several questions read those together.
inline int64_t end_together(const Segment& segment) { return segment.num_prefix / POSITION_STEP * POSITION_STEP; }

// The first position that a row at `position` sees.
inline int64_t lowest_visible(const Attention& call, int64_t position) {
  return call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
}

// What blocks see of positions [low, end) of a segment, laid out for every key-value head.
struct Shelf {
  const Segment* segment;
  int64_t low;
  int64_t end;
  float* memory;   // [key-value heads, floats]
  int64_t floats;  // of one head: [positions, head] of keys, [head / panel, positions + 1, panel] of values, in cells

  // `pack` numbers to a cell.
  static int64_t floats_of(int64_t positions, int64_t head_size, int64_t pack) {
    return (2 * positions / pack + 1) * rounded_up(head_size, POSITION_STEP);
  }
  int64_t from() const { return low / POSITION_STEP * POSITION_STEP; }
  int64_t positions() const { return rounded_up(end - from(), POSITION_STEP); }
};

struct AttentionBlock {
  const Attention* call;
  const Segment* only;              // of all rows; unless:
  const Segment* const* several;    // one for each row, by position; they share the prefix
  const Shelf* prefix;               // of `only`, its first positions; or null
  const Shelf* own;                  // of `only`, those that follow; null: the block lays them out for itself
  int64_t kv_head;
  int64_t first;  // units [first, last)
  int64_t last;

  int64_t group() const { return call->num_heads / call->num_kv_heads; }
  const Segment& segment(int64_t unit) const { return several ? *several[unit / group()] : *only; }
  int64_t row(int64_t unit) const { return several ? 0 : unit / group(); }  // of its segment
  // The unit sees positions [lowest(unit), end(unit)).
  int64_t end(int64_t unit) const { return segment(unit).position + row(unit) + 1; }
  int64_t lowest(int64_t unit) const { return lowest_visible(*call, end(unit) - 1); }
};

struct AttentionVariant {
  void (*run)(const AttentionBlock& block, const AttentionScratch& scratch, float* memory);
  // Lays out POSITION_STEP positions of a shelf, from `tile` on, for one key-value head.
  void (*lay_out)(const Attention& call, const Shelf& shelf, int64_t kv_head, int64_t tile, float* nothing);
  int64_t pack;  // bfloat16 numbers to a cell
};

extern const AttentionVariant ATTENTION_PORTABLE;
extern const AttentionVariant ATTENTION_AVX2;
extern const AttentionVariant ATTENTION_AVX512;

}  // namespace kev
