// The parts of a layer that need no other row, for a block of rows on one thread.
//
// Invariants and semantics: with many rows this keeps a block's activations in the cache of one core from the attention
// of a layer to that of the next, and threads meet only there; the weights stream by. Every kernel handles a row by
// itself, so the bits are those of the way over outputs (forward.cpp), wherever blocks begin.
#pragma once

#include "forward.h"

namespace kev {

constexpr int64_t MAX_PASS_ROWS = 24;  // measured on Zen 4: as fast as 48, and threads wait half as long at the end

// Activations of all rows.
struct PassRows {
  float* hidden;  // [rows, hidden]
  float* qkv;     // [rows, qkv_width]
  float* mixed;   // [rows, query_width], what attention made
};

class RowPass {
 public:
  // Working memory of one thread, in floats.
  struct Parts {
    int64_t normed, added, slice, activated, prepared, floats;
    explicit Parts(const Model& model);
  };

  RowPass(const Model& model, const Parts& parts, float* memory, WorkTimes* times)
      : model_(model), parts_(parts), memory_(memory), times_(times) {}

  // From the residual stream to queries, keys and values; those of `step` are stored. Without `queries` only the latter
  // two. `next` is the weight that this thread will read after these.
  void before_attention(const Layer& layer, const Step& step, const PassRows& rows, bool queries, const Weight* next,
                        int64_t first, int64_t last);
  // From what attention made to the residual stream after the layer. The layer has no experts.
  void after_attention(const Layer& layer, const PassRows& rows, const Weight* next, int64_t first, int64_t last);

 private:
  float* at(int64_t part) const { return memory_ + part; }
  void lap(Work work) { lap_ = times_->add(work, lap_); }
  void multiply(Work work, const Weight& weight, const float* x, int64_t rows, int64_t ldx, const float* bias, float* y,
                const Weight* next, int64_t first_output = 0);
  void run_mlp(const Mlp& mlp, int64_t rows, const Weight* next);

  const Model& model_;
  const Parts& parts_;
  float* memory_;
  WorkTimes* times_;
  int64_t lap_ = 0;
};

}  // namespace kev
