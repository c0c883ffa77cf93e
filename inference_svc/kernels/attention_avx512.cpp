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
      Vec a = vload_part(query + i, size - i), b = vload_part(query + i + LANES, size - i - LANES);
      put_weights(cells, i, a, b);
    }
  }

  static void put_weights(float* cells, int64_t position, Vec& a, Vec& b) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    _mm512_storeu_si512(cells + position / PACK, both);
    a = widened(_mm512_castsi512_si256(both));
    b = widened(_mm512_extracti64x4_epi64(both, 1));
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
  static Vec widened(__m256i numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
  }
};

void run(const AttentionBlock& block, const AttentionScratch& scratch, float* memory) {
  if (static_cast<Precision>(block.call->kv_type) == Precision::F32)
    BlockRun<SingleCells<float, MAX_ROWS>>(block, scratch, memory).run();
  else
    BlockRun<PairCells>(block, scratch, memory).run();
}

}  // namespace

const AttentionVariant ATTENTION_AVX512 = {run};

}  // namespace kev

KEV_TARGET_END

#endif
