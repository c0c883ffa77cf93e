// Cuts attention into blocks and hands them to the threads.
//
// Invariants and semantics: the cut follows the work at hand (long contexts first, smaller blocks when there are few),
// and may: no number depends on it (attention_block.h). Every thread works in its own part of the scratch.
#include <atomic>

#include "attention_block.h"
#include "isa.h"

namespace kev {
namespace {

constexpr int64_t MAX_SORTED = 128;      // segments beyond these follow unsorted
constexpr int64_t BLOCKS_PER_THREAD = 4;  // so that the last block does not keep the others waiting

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

class Cut {
 public:
  Cut(const Attention& call, const Segment* segments, int64_t num_segments, int64_t threads)
      : call_(call), segments_(segments), num_segments_(num_segments) {
    sort();
    while (count_blocks() < BLOCKS_PER_THREAD * threads && limit_ > MIN_BLOCK_UNITS)
      limit_ = limit_ / 2 > MIN_BLOCK_UNITS ? limit_ / 2 : MIN_BLOCK_UNITS;
    while (count_blocks() < threads && limit_ > 1) limit_ = (limit_ + 1) / 2;
    count_ = count_blocks();
  }

  int64_t count() const { return count_; }

  AttentionBlock block(int64_t index) const {
    for (int64_t i = 0;; ++i) {
      const Segment& segment = segments_[ordered(i)];
      const int64_t blocks = blocks_of(segment);
      if (index >= blocks * call_.num_kv_heads) {
        index -= blocks * call_.num_kv_heads;
        continue;
      }
      const int64_t part = blocks - 1 - index / call_.num_kv_heads;  // the longest contexts first
      return {&call_, &segment, index % call_.num_kv_heads, units(segment) * part / blocks,
              units(segment) * (part + 1) / blocks};
    }
  }

 private:
  int64_t units(const Segment& segment) const { return segment.num_rows * (call_.num_heads / call_.num_kv_heads); }
  int64_t blocks_of(const Segment& segment) const {
    const int64_t fit = AttentionScratch::units(span(call_, segment)), most = fit < limit_ ? fit : limit_;
    return (units(segment) + most - 1) / most;
  }
  int64_t count_blocks() const {
    int64_t count = 0;
    for (int64_t i = 0; i < num_segments_; ++i) count += blocks_of(segments_[i]) * call_.num_kv_heads;
    return count;
  }

  int64_t ordered(int64_t i) const { return i < MAX_SORTED ? order_[i] : i; }
  void sort() {
    const int64_t sorted = num_segments_ < MAX_SORTED ? num_segments_ : MAX_SORTED;
    for (int64_t i = 0; i < sorted; ++i) {
      int64_t at = i;
      for (; at > 0 && span(call_, segments_[order_[at - 1]]) < span(call_, segments_[i]); --at)
        order_[at] = order_[at - 1];
      order_[at] = i;
    }
  }

  const Attention& call_;
  const Segment* segments_;
  const int64_t num_segments_;
  int64_t limit_ = MAX_BLOCK_UNITS;
  int64_t count_ = 0;
  int64_t order_[MAX_SORTED];
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
