// Hands the blocks of attention to the threads.
//
// Invariants and semantics: every thread works in its own part of the scratch; shelves, which all threads read, are laid
// out before the first block is computed. No number depends on who computes what.
#include <algorithm>
#include <atomic>

#include "attention_cut.h"
#include "isa.h"

namespace kev {
namespace {

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

// Floats for shelves of a call whose longest context is given; they grow with it.
int64_t shelf_floats(int64_t longest, int64_t head_size, int64_t num_heads) {
  const int64_t all = num_heads * Shelf::floats_of(rounded_up(longest, POSITION_STEP), head_size, 1);
  return std::min(SHELF_BYTES / 64 * 16, all);
}

// Calls body(item, worker) for every item, in any order.
template <class F>
void share_out(Pool* pool, int64_t count, F&& body) {
  std::atomic<int64_t> next{0};
  parallel(pool, std::min<int64_t>(pool_threads(pool), count), [&](int64_t worker) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(item, worker);
  });
}

}  // namespace

int64_t attention_scratch_bytes(int num_threads, int64_t max_context, int64_t head_size, int64_t num_heads) {
  const int64_t floats = num_threads * AttentionScratch(head_size, max_context).floats;
  return (floats + shelf_floats(max_context, head_size, num_heads)) * static_cast<int64_t>(sizeof(float));
}

void attention(Pool* pool, const Attention& call, const Segment* segments, int64_t num_segments, void* scratch) {
  const int64_t threads = pool_threads(pool);
  int64_t longest = 1, span = 1;
  for (int64_t i = 0; i < num_segments; ++i) {
    longest = std::max(longest, segments[i].position + segments[i].num_rows);
    span = std::max(span, block_span(call, segments[i]));
  }
  const AttentionScratch parts(call.head_size, span);
  const AttentionVariant& chosen = variant();
  const int64_t pack = static_cast<Precision>(call.kv_type) == Precision::BF16 ? chosen.pack : 1;
  float* memory = static_cast<float*>(scratch);
  const int64_t room = shelf_floats(longest, call.head_size, call.num_heads);
  Shelves shelves(call, pack, memory, room);
  const Cut cut(call, segments, num_segments, threads, shelves);
  const auto own_part = [&](int64_t worker) { return memory + room + worker * parts.floats; };
  share_out(pool, shelves.tiles() * call.num_kv_heads, [&](int64_t item, int64_t worker) {
    shelves.with_tile(item / call.num_kv_heads, [&](const Shelf& shelf, int64_t position) {
      chosen.lay_out(call, shelf, item % call.num_kv_heads, position, own_part(worker) + parts.nothing);
    });
  });
  share_out(pool, cut.count(), [&](int64_t block, int64_t worker) {
    chosen.run(cut.block(block), parts, own_part(worker));
  });
}

}  // namespace kev
