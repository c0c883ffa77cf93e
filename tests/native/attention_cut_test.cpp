// How attention is cut into blocks: every output once, within the scratch, and together what reads the same.
#include <cstdio>
#include <vector>

#include "check.h"
#include "inference_svc/kernels/attention_cut.h"

namespace {

using namespace kev;

Attention call_of(int64_t num_heads, int64_t num_kv_heads, int64_t window) {
  Attention call{};
  call.num_heads = num_heads;
  call.num_kv_heads = num_kv_heads;
  call.head_size = 8;
  call.window = window;
  return call;
}

// The last row of a question over a prefix that begins at the place `prefix`.
Segment last_row(int64_t position, int64_t num_prefix, int64_t prefix = 0) {
  return {0, 1, position, prefix, num_prefix, 100000 + 1000 * position};
}

// All segments get rows of their own, and blocks are looked at one by one.
class Looked {
 public:
  Looked(const Attention& call, std::vector<Segment> segments, int64_t threads, int64_t room = 1 << 20)
      : call_(call), segments_(std::move(segments)), memory_(static_cast<size_t>(room)) {
    int64_t rows = 0, span = 1;
    for (Segment& segment : segments_) {
      segment.row = rows;
      rows += segment.num_rows;
      span = std::max(span, block_span(call_, segment));
    }
    seen_.resize(static_cast<size_t>(rows * call_.num_heads));
    Shelves shelves(call_, 2, memory_.data(), room);
    const Cut cut(call_, segments_.data(), static_cast<int64_t>(segments_.size()), threads, shelves);
    count_ = cut.count();
    for (int64_t b = 0; b < count_; ++b) look_at(cut.block(b), AttentionScratch(call_.head_size, span));
    for (int times : seen_) CHECK(times == 1);
  }

  int64_t count() const { return count_; }
  int64_t num_shared() const { return num_shared_; }
  int64_t num_shelved() const { return num_shelved_; }
  int64_t num_over_prefix_shelf() const { return num_over_prefix_shelf_; }

 private:
  void look_at(const AttentionBlock& block, const AttentionScratch& scratch) {
    const int64_t units = block.last - block.first;
    CHECK(units > 0 && units <= MAX_BLOCK_UNITS);
    const int64_t span = block.end(block.last - 1) - block.lowest(block.first);
    CHECK(scratch.scores + units * AttentionScratch::stride(span) <= scratch.floats);
    if (block.several) ++num_shared_;
    if (block.own) ++num_shelved_;
    if (block.prefix) ++num_over_prefix_shelf_;
    for (const Shelf* shelf : {block.prefix, block.own})
      if (shelf) CHECK(shelf->memory + shelf->floats * call_.num_kv_heads <= memory_.data() + memory_.size());
    for (int64_t u = block.first; u < block.last; ++u) {
      const int64_t row = block.segment(u).row + block.row(u);
      const int64_t head = block.kv_head * block.group() + u % block.group();
      ++seen_[static_cast<size_t>(row * call_.num_heads + head)];
      if (u > block.first) CHECK(block.lowest(u) >= block.lowest(u - 1) && block.end(u) >= block.end(u - 1));
      if (block.prefix) CHECK(block.prefix->low <= block.lowest(u));
      if (block.own) CHECK(block.own->end >= block.end(u));
      const int64_t before_own = block.prefix ? block.prefix->end : 0;
      if (block.own) CHECK(block.own->low <= std::max(before_own, block.lowest(u)));
    }
    if (block.several)
      for (int64_t u = block.first; u < block.last; ++u) CHECK(same_prefix(block.segment(u), block.segment(0)));
  }

  const Attention call_;
  std::vector<Segment> segments_;
  std::vector<float> memory_;
  std::vector<int> seen_;
  int64_t count_ = 0, num_shared_ = 0, num_shelved_ = 0, num_over_prefix_shelf_ = 0;
};

void every_output_is_in_one_block_that_fits() {
  const std::vector<Segment> mixed = {{0, 300, 0, 0, 0, 0},       {0, 1, 40, 0, 0, 1000},    {0, 22, 900, 0, 900, 2000},
                                      {0, 22, 901, 0, 900, 3000}, {0, 1, 900, 0, 900, 4000}, {0, 1, 950, 0, 900, 5000},
                                      {0, 5, 200, 0, 900, 6000},  {0, 0, 7, 0, 0, 0},        {0, 1, 500, 0, 900, 7000},
                                      {0, 200, 902, 0, 900, 8000}};
  for (int64_t window : {0, 1, 64, 512})
    for (int64_t threads : {1, 2, 7})
      for (int64_t room : {0, 20000, 1 << 20})
        for (auto heads : {std::pair<int64_t, int64_t>{4, 1}, {6, 2}, {5, 5}, {130, 1}})
          Looked(call_of(heads.first, heads.second, window), mixed, threads, room);
  Looked(call_of(4, 1, 0), std::vector<Segment>(200, last_row(1200, 1000)), 2);
  Looked(call_of(4, 1, 0), {}, 2);
}

// Together they would need more scores than there is room for.
void windows_far_apart_are_not_read_together() {
  std::vector<Segment> far, close;
  for (int64_t i = 0; i < 18; ++i) {
    far.push_back(last_row(1701 + 75 * i, 1700));
    close.push_back(last_row(1701 + 7 * i, 1700));
  }
  const Attention call = call_of(4, 1, 1500);
  CHECK(Looked(call, far, 1).count() > Looked(call, close, 1).count());
  CHECK(Looked(call, {last_row(1701, 1700), last_row(1701 + MAX_BLOCK_UNITS - 1, 1700)}, 1).num_shared() == 1);
  CHECK(Looked(call, {last_row(1701, 1700), last_row(1701 + MAX_BLOCK_UNITS, 1700)}, 1).num_shared() == 0);
}

void rows_over_one_prefix_are_read_together() {
  const auto blocks = [](const std::vector<Segment>& segments, int64_t window = 0) {
    return Looked(call_of(4, 1, window), segments, 1).num_shared();
  };
  CHECK(blocks({last_row(300, 300), last_row(300, 300), last_row(310, 300)}) == 1);  // the first of their own rows, too
  CHECK(blocks({last_row(300, 300), last_row(300, 300, 5000)}) == 0);                // another prefix
  CHECK(blocks({last_row(300, 300), last_row(300, 290)}) == 0);                      // another end
  CHECK(blocks({last_row(310, 300), last_row(311, 300)}, 100) == 0);                 // windows that see little of it
  CHECK(blocks({last_row(400, 100), last_row(401, 100)}) == 0);                      // a short one
  CHECK(blocks({last_row(50, 300), last_row(51, 300)}) == 0);                        // rows that come early in it
  CHECK(Looked(call_of(4, 1, 0), {last_row(300, 300), last_row(301, 300)}, 2).num_shared() == 0);  // one each
}

void what_several_blocks_see_is_on_a_shelf() {
  const Attention call = call_of(4, 1, 512);
  CHECK(Looked(call, {{0, 18, 500, 0, 0, 0}}, 1).num_shelved() == 0);  // one block
  const Looked long_one(call, {{0, 256, 500, 0, 0, 0}}, 1);
  CHECK(long_one.num_shelved() == long_one.count() && long_one.count() > 4);
  const Looked no_room(call, {{0, 256, 500, 0, 0, 0}}, 1, 1000);
  CHECK(no_room.num_shelved() == 0);
  const Looked branches(call, {{0, 16, 1900, 0, 1900, 0}, {0, 16, 1900, 0, 1900, 3000}}, 1);
  CHECK(branches.num_over_prefix_shelf() == branches.count() && branches.num_shelved() == 0);
}

}  // namespace

int main() {
  every_output_is_in_one_block_that_fits();
  windows_far_apart_are_not_read_together();
  rows_over_one_prefix_are_read_together();
  what_several_blocks_see_is_on_a_shelf();
  std::puts("attention cut: done");
  return 0;
}
