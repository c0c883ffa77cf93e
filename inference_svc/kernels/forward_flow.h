// All layers of a step with many rows, without places where all threads meet.
//
// Invariants and semantics: the work of a layer is blocks of rows, from the attention of the layer before to that of
// its own (forward_rows.h), then pieces of attention, which are rows of questions. Threads take them one by one, in
// this order. Each waits for just those whose results it reads: a piece of attention for the blocks that store keys and
// values it sees, a block for the pieces that hold its rows. Those come earlier in the order, so somebody has them in
// hand already, and a thread seldom waits: while one finishes a layer, the others begin the next. Bits follow from rows
// alone, never from who computed what when. Of the last layer only keys and values are computed.
//
// Not here: the last layer for the wanted rows, and steps of few rows (forward.cpp).
#pragma once

#include <atomic>
#include <vector>

#include "forward_rows.h"

namespace kev {

class Flow {
 public:
  // Of one thread.
  struct Memory {
    float* pass;      // RowPass::Parts::floats
    void* attention;  // attention_scratch_bytes of one thread
  };

  Flow(const Model& model, const Step& step, const PassRows& rows, int64_t threads);

  // Takes work until there is none left. Threads that share the flow all call this.
  void work(const RowPass::Parts& parts, const Memory& memory, WorkTimes* spent);

 private:
  struct Range {
    int64_t first = INT64_MAX;
    int64_t last = 0;  // exclusive

    void include(int64_t index) {
      first = index < first ? index : first;
      last = index >= last ? index + 1 : last;
    }
  };
  struct Block {
    int64_t first;  // rows [first, last)
    int64_t last;
    Range pieces;  // that hold its rows
  };
  struct Piece {
    int64_t first_segment;
    int64_t last_segment;  // exclusive
    Range blocks;          // whose keys and values it sees, and that hold its rows
  };
  struct alignas(64) Progress {
    std::atomic<int64_t> layers{0};
  };

  void cut_rows(int64_t threads);
  void cut_segments(int64_t threads);
  void connect();
  void run_block(RowPass& pass, int64_t layer, int64_t index) const;
  void run_piece(int64_t layer, int64_t index, void* scratch) const;
  static void await(const std::vector<Progress>& all, const Range& range, int64_t layers, WorkTimes* spent);

  const Model& model_;
  const Step& step_;
  const PassRows rows_;
  std::vector<Block> blocks_;
  std::vector<Segment> segments_;
  std::vector<Piece> pieces_;
  std::vector<Progress> blocks_done_, pieces_done_;
  std::atomic<int64_t> next_{0};
};

}  // namespace kev
