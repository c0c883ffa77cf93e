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

}  // namespace

const AttentionVariant ATTENTION_AVX2 = {run};

}  // namespace kev

KEV_TARGET_END

#endif
