// Attention with AVX2 and FMA: bfloat16 keys and values are widened to floats, which loses nothing.
#include "isa.h"

#if KEV_X86

#include <cmath>
#include <cstring>
#include <type_traits>

#include <immintrin.h>

#include "attention_block.h"

KEV_TARGET_AVX2

#include "vec_avx2.h"

namespace kev {
namespace {
constexpr int MAX_ROWS = 6;    // of a product
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

const AttentionVariant ATTENTION_AVX2 = {run, lay_out, 1};

}  // namespace kev

KEV_TARGET_END

#endif
