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

void lay_out(const Attention& call, const Shelf& shelf, int64_t kv_head, int64_t tile, float* nothing) {
  if (static_cast<Precision>(call.kv_type) == Precision::F32)
    lay_out_shelf<SingleCells<float, MAX_ROWS>>(call, shelf, kv_head, tile, nothing);
  else
    lay_out_shelf<SingleCells<uint16_t, MAX_ROWS>>(call, shelf, kv_head, tile, nothing);
}

}  // namespace

const AttentionVariant ATTENTION_PORTABLE = {run, lay_out, 1};

}  // namespace kev
