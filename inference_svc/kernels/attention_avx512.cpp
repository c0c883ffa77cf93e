// Attention with AVX-512 (F, BW, VL, DQ, BF16).
//
// Invariants and semantics: bfloat16 keys and values are taken in pairs by vdpbf16ps: of numbers of the head for a
// score (the query is rounded to bfloat16), of positions 2m and 2m + 1 for an output (weights are rounded to bfloat16,
// and the sum they are divided by is that of the rounded ones). It takes subnormal numbers as zero.
#include "isa.h"

#if KEV_X86

#include <cmath>
#include <cstring>
#include <type_traits>

#include <immintrin.h>

#include "attention_block.h"

KEV_TARGET_AVX512

#include "vec_avx512.h"

namespace kev {
namespace {
constexpr int MAX_ROWS = 6;    // of a product
constexpr int PANEL_VECS = 4;  // registers of a row of a panel
}  // namespace
}  // namespace kev

#include "attention_body.h"

namespace kev {
namespace {

static_assert(PANEL % 32 == 0, "values are laid out in pairs of registers");

struct PairCells {
  using Number = uint16_t;
  static constexpr int PACK = 2;
  static constexpr int ROWS = MAX_ROWS;

  static Vec add_product(Vec sum, Vec a, Vec b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }

  static Vec read(const Number* row, int64_t count) { return _mm512_castsi512_ps(numbers(row, count)); }

  static void put_query(const float* query, int64_t size, float* cells) {
    for (int64_t i = 0; i < size; i += PACK * LANES) {
      const Vec a = vload_part(query + i, size - i), b = vload_part(query + i + LANES, size - i - LANES);
      _mm512_storeu_si512(cells + i / PACK, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }

  // exp(score - largest), to 2^-17 of itself: rounding it to bfloat16 loses more.
  static Vec weight(Vec score, Vec largest) {
    const Vec x = (score - largest) * vsplat(LOG2_E);
    const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x); 0 for infinities
    Vec p = vfma(vsplat(C4), f, vsplat(C3));
    p = vfma(p, f, vsplat(C2));
    p = vfma(p, f, vsplat(C1));
    p = vfma(p, f, vsplat(C0));
    return vscale(p, x);  // times 2^floor(x)
  }

  static Vec put_weights(float* cells, int64_t position, Vec a, Vec b, Vec total) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a), ones = _mm512_set1_epi32(0x3F803F80);
    _mm512_storeu_si512(cells + position / PACK, both);
    return _mm512_dpbf16_ps(total, (__m512bh)both, (__m512bh)ones);
  }

  static void put_values(const Number* const (&rows)[PACK], int64_t column, int64_t count, float* cells) {
    // Indices a0, b0, a1, b1, ...: 0 to 31 name the numbers of a, 32 to 63 those of b.
    const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i both = _mm512_or_si512(_mm512_slli_epi32(step, 16), step);
    const __m512i low = _mm512_add_epi32(both, _mm512_set1_epi32(32 << 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < PANEL; i += 2 * LANES) {
      const __m512i a = numbers(rows[0] + column + i, count - i), b = numbers(rows[1] + column + i, count - i);
      _mm512_storeu_si512(cells + i, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(cells + i + LANES, _mm512_permutex2var_epi16(a, high, b));
    }
  }

 private:
  static __m512i numbers(const Number* row, int64_t count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? 0xFFFFFFFFu : count <= 0 ? 0 : (1u << count) - 1, row);
  }
  static constexpr float LOG2_E = 1.44269504f;
  // 2^f on [0, 1], by the Remez exchange.
  static constexpr float C0 = 1.00000262f, C1 = 0.693003833f, C2 = 0.241442755f, C3 = 0.0520114601f, C4 = 0.0135341678f;
};

void run(const AttentionBlock& block, const AttentionScratch& scratch, float* memory) {
  if (static_cast<Precision>(block.call->kv_type) == Precision::F32)
    BlockRun<SingleCells<float, MAX_ROWS>>(block, scratch, memory).run();
  else
    BlockRun<PairCells>(block, scratch, memory).run();
}

void lay_out(const Attention& call, const Shelf& shelf, int64_t kv_head, int64_t tile, float* nothing) {
  if (static_cast<Precision>(call.kv_type) == Precision::F32)
    lay_out_shelf<SingleCells<float, MAX_ROWS>>(call, shelf, kv_head, tile, nothing);
  else
    lay_out_shelf<PairCells>(call, shelf, kv_head, tile, nothing);
}

}  // namespace

const AttentionVariant ATTENTION_AVX512 = {run, lay_out, PairCells::PACK};

}  // namespace kev

KEV_TARGET_END

#endif
