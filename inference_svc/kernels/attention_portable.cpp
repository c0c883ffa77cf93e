// Attention on any CPU: bfloat16 keys and values are widened to floats, which loses nothing.
#include "vec_portable.h"

namespace kev {
namespace {
constexpr int MAX_ROWS = 4;    // of a product
constexpr int PANEL_VECS = 2;  // registers of a row of a panel
}  // namespace
}  // namespace kev

#include "attention_body.h"

namespace kev {
namespace {

void run(const AttentionBlock& block, const AttentionScratch& scratch, float* memory) {
  if (static_cast<Precision>(block.call->kv_type) == Precision::F32)
    BlockRun<SingleCells<float, MAX_ROWS>>(block, scratch, memory).run();
  else
    BlockRun<SingleCells<uint16_t, MAX_ROWS>>(block, scratch, memory).run();
}

}  // namespace

const AttentionVariant ATTENTION_PORTABLE = {run};

}  // namespace kev
