// Cuts attention into blocks and hands them to the threads.
//
// Invariants and semantics: the cut follows the work at hand (long contexts first, smaller blocks when there are few),
// and may: no number depends on it (attention_block.h). Questions that add one row each to the same prefix share
// blocks, which read the prefix once, as far as that leaves every thread a block. Every thread works in its own part of
// the scratch.
#include <algorithm>
#include <atomic>
#include <tuple>

#include "attention_block.h"
#include "isa.h"

namespace kev {
namespace {

constexpr int64_t MAX_SORTED = 128;      // segments beyond these follow unsorted
constexpr int64_t BLOCKS_PER_THREAD = 4;  // so that the last block does not keep the others waiting
constexpr int64_t MIN_SHARED = 128;       // positions of a prefix that are worth reading for several questions at once

const AttentionVariant& variant() {
#if KEV_X86
  switch (isa()) {
    case Isa::AVX512: return ATTENTION_AVX512;
    case Isa::AVX2: return ATTENTION_AVX2;
    case Isa::PORTABLE: break;
  }
#endif
  return ATTENTION_PORTABLE;
}

// Positions from the first to the last that a block of the segment can see.
int64_t span(const Attention& call, const Segment& segment) {
  const int64_t context = segment.position + segment.num_rows;
  const int64_t reach = call.window + MAX_BLOCK_UNITS;
  return call.window > 0 && reach < context ? reach : context;
}

// Whether a segment may be read along with others of its prefix: one row, that sees much of the prefix, to its end.
bool may_share(const Attention& call, const Segment& segment) {
  if (segment.num_rows != 1 || segment.position < segment.num_prefix) return false;
  return end_together(segment) - lowest_visible(call, segment.position) >= MIN_SHARED;
}

bool same_prefix(const Segment& a, const Segment& b) {
  return a.prefix_start == b.prefix_start && a.num_prefix == b.num_prefix;
}

// What is cut by itself: one segment; or several that share a prefix, which make one block for each key-value head.
struct Piece {
  int64_t first;  // of the order
  int64_t count;
};

class Cut {
 public:
  Cut(const Attention& call, const Segment* segments, int64_t num_segments, int64_t threads)
      : call_(call),
        segments_(segments),
        num_segments_(num_segments),
        num_sorted_(num_segments < MAX_SORTED ? num_segments : MAX_SORTED) {
    join(threads);
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
              index % call_.num_kv_heads,
              units(piece) * part / blocks,
              units(piece) * (part + 1) / blocks};
    }
  }

 private:
  int64_t group() const { return call_.num_heads / call_.num_kv_heads; }
  int64_t units(const Piece& piece) const {
    return group() * (piece.count > 1 ? piece.count : segment(piece.first).num_rows);
  }
  int64_t blocks_of(const Piece& piece) const {
    if (piece.count > 1) return 1;
    const int64_t fit = AttentionScratch::units(span(call_, segment(piece.first))), most = fit < limit_ ? fit : limit_;
    return (units(piece) + most - 1) / most;
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
    std::sort(pieces_, pieces_ + num_pieces_, [&](const Piece& a, const Piece& b) { return longest(a) > longest(b); });
  }

  // Those that may share a prefix by prefix, then by position.
  bool before(const Segment& a, const Segment& b) const {
    if (may_share(call_, a) != may_share(call_, b)) return may_share(call_, a);
    return std::tie(a.prefix_start, a.num_prefix, a.position) < std::tie(b.prefix_start, b.num_prefix, b.position);
  }

  // Makes pieces of neighbours in the order: as many to a piece as leave work for every thread, and fit in the scratch.
  void join(int64_t first, int64_t last, int64_t threads) {
    const int64_t fit = AttentionScratch::units(span(call_, *order_[last - 1])) / group();
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
  int64_t longest(const Piece& piece) const { return span(call_, segment(piece.first + piece.count - 1)); }

  const Attention& call_;
  const Segment* segments_;
  const int64_t num_segments_, num_sorted_;
  int64_t limit_ = MAX_BLOCK_UNITS;
  int64_t count_ = 0, num_pieces_ = 0;
  const Segment* order_[MAX_SORTED];
  Piece pieces_[MAX_SORTED];
};

}  // namespace

int64_t attention_scratch_bytes(int num_threads, int64_t max_context, int64_t head_size, int64_t) {
  return num_threads * AttentionScratch(head_size, max_context).floats * static_cast<int64_t>(sizeof(float));
}

void attention(Pool* pool, const Attention& call, const Segment* segments, int64_t num_segments, void* scratch) {
  const int64_t threads = pool_threads(pool);
  const Cut cut(call, segments, num_segments, threads);
  int64_t longest = 1;
  for (int64_t i = 0; i < num_segments; ++i)
    if (span(call, segments[i]) > longest) longest = span(call, segments[i]);
  const AttentionScratch parts(call.head_size, longest);
  const AttentionVariant& chosen = variant();
  std::atomic<int64_t> next{0};
  parallel(pool, threads < cut.count() ? threads : cut.count(), [&](int64_t worker) {
    float* memory = static_cast<float*>(scratch) + worker * parts.floats;
    for (int64_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < cut.count();)
      chosen.run(cut.block(b), parts, memory);
  });
}

}  // namespace kev
