// Cuts attention into blocks, and says what several of them find laid out.
//
// Invariants and semantics: the cut follows the work at hand (long contexts first, smaller blocks when there are few),
// and may: no number depends on it (attention_block.h). Questions that add one row each to the same prefix share
// blocks, which read the prefix once, as far as that leaves every thread a block. What more than one block of a
// question sees, or more than one question with several rows, goes on a shelf as long as there is room for it.
//
// Not here: how a block is computed (attention_body.h), how a shelf is laid out (attention_layout.h).
#pragma once

#include <algorithm>
#include <tuple>

#include "attention_block.h"

namespace kev {
namespace {

constexpr int64_t MAX_SORTED = 128;      // segments beyond these follow unsorted
constexpr int64_t BLOCKS_PER_THREAD = 4;  // so that the last block does not keep the others waiting
constexpr int64_t MIN_SHARED = 128;       // positions of a prefix that are worth reading for several questions at once
constexpr int64_t SHELF_BYTES = 4 << 20;   // of all shelves
constexpr int64_t MAX_SHELVES = 32;

// Positions from the first to the last that a block of the segment can see.
inline int64_t block_span(const Attention& call, const Segment& segment) {
  const int64_t context = segment.position + segment.num_rows;
  const int64_t reach = call.window + MAX_BLOCK_UNITS;
  return call.window > 0 && reach < context ? reach : context;
}

inline int64_t end_of(const Segment& segment) { return segment.position + segment.num_rows; }

// Whether a segment may be read along with others of its prefix: one row, that sees much of it.
inline bool may_share(const Attention& call, const Segment& segment) {
  const int64_t seen = std::min(end_together(segment), end_of(segment)) - lowest_visible(call, segment.position);
  return segment.num_rows == 1 && seen >= MIN_SHARED;
}

inline bool same_prefix(const Segment& a, const Segment& b) {
  return a.prefix_start == b.prefix_start && a.num_prefix == b.num_prefix;
}

// What is laid out before the blocks are computed.
class Shelves {
 public:
  // `pack` numbers to a cell; `room` floats of memory.
  Shelves(const Attention& call, int64_t pack, float* memory, int64_t room)
      : call_(call), pack_(pack), memory_(memory), room_(room) {}

  // Positions [low, end) of a segment; null when there is no room for them.
  const Shelf* add(const Segment& segment, int64_t low, int64_t end) {
    if (low >= end || count_ == MAX_SHELVES) return nullptr;
    Shelf shelf{&segment, low, end, memory_, 0};
    shelf.floats = Shelf::floats_of(shelf.positions(), call_.head_size, pack_);
    if (shelf.floats * call_.num_kv_heads > room_) return nullptr;
    memory_ += shelf.floats * call_.num_kv_heads;
    room_ -= shelf.floats * call_.num_kv_heads;
    tiles_ += shelf.positions() / POSITION_STEP;
    shelves_[count_] = shelf;
    return &shelves_[count_++];
  }

  // Of POSITION_STEP positions, of all shelves.
  int64_t tiles() const { return tiles_; }

  // Calls body(shelf, position) with the shelf of a tile and its first position.
  template <class F>
  void with_tile(int64_t tile, F&& body) const {
    const Shelf* shelf = shelves_;
    for (; tile >= shelf->positions() / POSITION_STEP; ++shelf) tile -= shelf->positions() / POSITION_STEP;
    body(*shelf, shelf->from() + tile * POSITION_STEP);
  }

 private:
  const Attention& call_;
  const int64_t pack_;
  float* memory_;
  int64_t room_;
  int64_t count_ = 0, tiles_ = 0;
  Shelf shelves_[MAX_SHELVES];
};

// What is cut by itself: one segment; or several that share a prefix, which make one block for each key-value head.
struct Piece {
  int64_t first;  // of the order
  int64_t count;
  const Shelf* prefix = nullptr;
  const Shelf* own = nullptr;
};

class Cut {
 public:
  Cut(const Attention& call, const Segment* segments, int64_t num_segments, int64_t threads, Shelves& shelves)
      : call_(call),
        segments_(segments),
        num_segments_(num_segments),
        num_sorted_(num_segments < MAX_SORTED ? num_segments : MAX_SORTED) {
    join(threads);
    lay_out(shelves);
    std::sort(pieces_, pieces_ + num_pieces_, [&](const Piece& a, const Piece& b) { return longest(a) > longest(b); });
    while (count_blocks() < BLOCKS_PER_THREAD * threads && limit_ > MIN_BLOCK_UNITS)
      limit_ = limit_ / 2 > MIN_BLOCK_UNITS ? limit_ / 2 : MIN_BLOCK_UNITS;
    while (count_blocks() < threads && limit_ > 1) limit_ = (limit_ + 1) / 2;
    count_ = count_blocks();
  }

  int64_t count() const { return count_; }

  AttentionBlock block(int64_t index) const {
    for (int64_t i = 0;; ++i) {
      const Piece piece = this->piece(i);
      const int64_t blocks = blocks_of(piece);
      if (index >= blocks * call_.num_kv_heads) {
        index -= blocks * call_.num_kv_heads;
        continue;
      }
      const int64_t part = blocks - 1 - index / call_.num_kv_heads;  // the longest contexts first
      return {&call_,
              &segment(piece.first),
              piece.count > 1 ? order_ + piece.first : nullptr,
              piece.prefix,
              piece.own,
              index % call_.num_kv_heads,
              border(piece, part, blocks),
              border(piece, part + 1, blocks)};
    }
  }

 private:
  int64_t group() const { return call_.num_heads / call_.num_kv_heads; }
  int64_t units(const Piece& piece) const {
    return group() * (piece.count > 1 ? piece.count : segment(piece.first).num_rows);
  }
  // Blocks begin at multiples of this many units, where whole groups of them begin.
  int64_t grain() const { return limit_ < MIN_BLOCK_UNITS ? 1 : MIN_BLOCK_UNITS; }
  int64_t grains(const Piece& piece) const { return (units(piece) + grain() - 1) / grain(); }
  int64_t border(const Piece& piece, int64_t part, int64_t blocks) const {
    return std::min(units(piece), grains(piece) * part / blocks * grain());
  }
  int64_t blocks_of(const Piece& piece) const {
    if (piece.count > 1) return 1;
    const int64_t fit = AttentionScratch::units(block_span(call_, segment(piece.first)));
    const int64_t most = std::min({fit, limit_, piece.own ? SHELF_BLOCK_UNITS : MAX_BLOCK_UNITS}) / grain();
    return (grains(piece) + most - 1) / most;
  }
  int64_t count_blocks() const {
    int64_t count = 0;
    for (int64_t i = 0; i < num_pieces_ + num_segments_ - num_sorted_; ++i)
      count += blocks_of(piece(i)) * call_.num_kv_heads;
    return count;
  }

  const Segment& segment(int64_t i) const { return i < num_sorted_ ? *order_[i] : segments_[i]; }
  Piece piece(int64_t i) const { return i < num_pieces_ ? pieces_[i] : Piece{i - num_pieces_ + num_sorted_, 1}; }

  // Makes the pieces of the sorted segments, the longest contexts first.
  void join(int64_t threads) {
    for (int64_t i = 0; i < num_sorted_; ++i) order_[i] = &segments_[i];
    std::sort(order_, order_ + num_sorted_, [&](const Segment* a, const Segment* b) { return before(*a, *b); });
    for (int64_t first = 0, last; first < num_sorted_; first = last) {
      last = first + 1;
      if (may_share(call_, *order_[first]))
        while (last < num_sorted_ && may_share(call_, *order_[last]) && same_prefix(*order_[first], *order_[last]))
          ++last;
      join(first, last, threads);
    }
  }

  // Those that may share a prefix by prefix, then by position.
  bool before(const Segment& a, const Segment& b) const {
    if (may_share(call_, a) != may_share(call_, b)) return may_share(call_, a);
    return std::tie(a.prefix_start, a.num_prefix, a.position) < std::tie(b.prefix_start, b.num_prefix, b.position);
  }

  // Makes pieces of neighbours in the order: as many to a piece as leave work for every thread, and fit in the scratch.
  void join(int64_t first, int64_t last, int64_t threads) {
    const int64_t fit = AttentionScratch::units(block_span(call_, *order_[last - 1])) / group();
    const int64_t fair = (num_segments_ * call_.num_kv_heads + threads - 1) / threads;
    const int64_t most = std::max<int64_t>(1, std::min(fit, fair)), count = last - first;
    const int64_t size = (count + (count + most - 1) / most - 1) / ((count + most - 1) / most);
    while (first < last) {
      Piece& piece = pieces_[num_pieces_++] = {first++, 1};
      for (; piece.count < size && first < last && near(*order_[piece.first], *order_[first]); ++first) ++piece.count;
    }
  }

  // Whether windows that end at both lie in the span of one segment.
  static bool near(const Segment& a, const Segment& b) { return b.position - a.position < MAX_BLOCK_UNITS; }

  // The span of the longest of a piece.
  int64_t longest(const Piece& piece) const { return block_span(call_, segment(piece.first + piece.count - 1)); }

  // Puts on shelves what more than one block would lay out. Pieces stand in the order of their segments.
  void lay_out(Shelves& shelves) {
    for (int64_t first = 0, last; first < num_pieces_; first = last) {
      last = first + 1;
      if (!has_rows(pieces_[first])) continue;
      int64_t end = end_of(segment(first_of(first)));
      while (last < num_pieces_ && has_rows(pieces_[last]) && reads_on(first, last, end))
        end = std::max(end, end_of(segment(first_of(last++))));
      lay_out(shelves, first, last, end);
    }
  }

  int64_t first_of(int64_t piece) const { return pieces_[piece].first; }
  bool has_rows(const Piece& piece) const { return piece.count == 1 && segment(piece.first).num_rows > 1; }
  int64_t lowest(int64_t piece) const { return lowest_visible(call_, segment(first_of(piece)).position); }

  // Whether a piece sees positions of the prefix that others have seen, which end at `end`.
  bool reads_on(int64_t first, int64_t next, int64_t end) const {
    const Segment &a = segment(first_of(first)), &b = segment(first_of(next));
    return same_prefix(a, b) && end_together(a) - lowest(next) >= MIN_SHARED && lowest(next) < end;
  }

  // Pieces with a common prefix, of which they see positions before `end`; or a single one.
  void lay_out(Shelves& shelves, int64_t first, int64_t last, int64_t end) {
    const Segment& any = segment(first_of(first));
    const Shelf* prefix = nullptr;
    if (last - first > 1) prefix = shelves.add(any, lowest(first), std::min(end, end_together(any)));
    for (int64_t i = first; i < last; ++i) {
      Piece& piece = pieces_[i];
      const Segment& segment = this->segment(piece.first);
      piece.prefix = prefix && prefix->end > lowest(i) ? prefix : nullptr;
      const int64_t low = piece.prefix ? std::max(lowest(i), prefix->end) : lowest(i);
      if (units(piece) > SHELF_BLOCK_UNITS) piece.own = shelves.add(segment, low, end_of(segment));
    }
  }

  const Attention& call_;
  const Segment* segments_;
  const int64_t num_segments_, num_sorted_;
  int64_t limit_ = MAX_BLOCK_UNITS;
  int64_t count_ = 0, num_pieces_ = 0;
  const Segment* order_[MAX_SORTED];
  Piece pieces_[MAX_SORTED];
};

}  // namespace
}  // namespace kev
