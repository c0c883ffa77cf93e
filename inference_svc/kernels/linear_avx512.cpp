// Linears with AVX-512 (F, BW, VL, DQ, BF16, VNNI).
//
// Invariants and semantics: bf16 sums by vdpbf16ps, which takes subnormal numbers as zero; int8 by vpdpbusd, whose
// first factor is unsigned, so rows are stored as int8 + 128 and 128 * sums[j] is taken off at the end.
#include "linear_panels.h"

#if KEV_X86

#include <immintrin.h>

KEV_TARGET_AVX512

#include "linear_tiles.h"
#include "spread.h"

namespace kev {
namespace {

inline __mmask16 first_lanes(int64_t count) {
  return count >= PANEL_OUTPUTS ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

// Adds the bias and stores what lies inside n.
inline void put(const Panels& job, __m512 y, int64_t row, int64_t panel, __mmask16 lanes) {
  const int64_t output = panel * PANEL_OUTPUTS;
  if (job.bias != nullptr) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(lanes, job.bias + output));
  _mm512_mask_storeu_ps(job.y + row * job.ldy + (output - job.first_output), lanes, y);
}

// FETCHING_ROWS: from so many rows on, fetching the next panels pays (measured on Zen 4).
struct FloatStep {
  using Sum = __m512;
  static constexpr int MAX_ROWS = 6;
  static constexpr int MAX_PANELS = 4;
  static Sum zero() { return _mm512_setzero_ps(); }
  static void store(const Panels& job, Sum sum, int64_t row, int64_t panel) {
    put(job, sum, row, panel, first_lanes(job.n - panel * PANEL_OUTPUTS));
  }
};

struct F32Step : FloatStep {
  static constexpr int FETCHING_ROWS = MAX_ROWS + 1;
  using Weights = __m512;
  using Values = __m512;
  static Weights load(const unsigned char* w) { return _mm512_load_ps(w); }
  static Values broadcast(const unsigned char* x) {
    float value;
    __builtin_memcpy(&value, x, sizeof value);
    return _mm512_set1_ps(value);
  }
  static Sum dot(Sum sum, Values values, Weights weights) { return _mm512_fmadd_ps(values, weights, sum); }
};

inline __m512i broadcast_word(const unsigned char* x) {
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return _mm512_set1_epi32(word);
}

struct Bf16Step : FloatStep {
  static constexpr int FETCHING_ROWS = 4;
  using Weights = __m512i;
  using Values = __m512i;
  static Weights load(const unsigned char* w) { return _mm512_load_si512(w); }
  static Values broadcast(const unsigned char* x) { return broadcast_word(x); }
  static Sum dot(Sum sum, Values values, Weights weights) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(values), reinterpret_cast<__m512bh>(weights));
  }
};

struct I8Step {
  using Sum = __m512i;
  using Weights = __m512i;
  using Values = __m512i;
  static constexpr int MAX_ROWS = 6;
  static constexpr int MAX_PANELS = 4;
  static constexpr int FETCHING_ROWS = 1;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Weights load(const unsigned char* w) { return _mm512_load_si512(w); }
  static Values broadcast(const unsigned char* x) { return broadcast_word(x); }
  static Sum dot(Sum sum, Values values, Weights weights) { return _mm512_dpbusd_epi32(sum, values, weights); }
  static void store(const Panels& job, Sum sum, int64_t row, int64_t panel) {
    const int64_t output = panel * PANEL_OUTPUTS;
    const __mmask16 lanes = first_lanes(job.n - output);
    const __m512i offset = _mm512_slli_epi32(_mm512_maskz_loadu_epi32(lanes, job.sums + output), 7);
    const __m512 scale =
        _mm512_mul_ps(_mm512_set1_ps(job.x_scale[row]), _mm512_maskz_loadu_ps(lanes, job.scale + output));
    put(job, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, offset)), scale), row, panel, lanes);
  }
};

void round_row(const float* x, int64_t k, unsigned char* out) {
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i), rounded);
  }
  if (i < k) {
    const __mmask16 in = first_lanes(k - i);
    const __mmask16 stored = first_lanes((k - i + 1) / 2 * 2);
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(in, x + i)));
    _mm256_mask_storeu_epi16(out + 2 * i, stored, rounded);
  }
}

// Magnitudes compare as integers: every finite one < infinity < NaN.
float largest_magnitude(const float* x, int64_t k) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 16) {
    const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(first_lanes(k - i), x + i));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude));
  }
  const int32_t bits = _mm512_reduce_max_epi32(largest);
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Sums and differences of partners: `other` has each lane's, which comes first in `second` lanes. One rounding, as of a sum.
inline __m512 joined(__m512 x, __m512 other, __mmask16 second) {
  return _mm512_fmadd_ps(x, _mm512_mask_blend_ps(second, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f)), other);
}

// spread_block() of four vectors.
inline void spread_block(const float* x, __m512* out) {
  const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
  const __m512 x2 = _mm512_loadu_ps(x + 32), x3 = _mm512_loadu_ps(x + 48);
  const __m512 a0 = _mm512_add_ps(x0, x2), a1 = _mm512_add_ps(x1, x3);
  const __m512 a2 = _mm512_sub_ps(x0, x2), a3 = _mm512_sub_ps(x1, x3);
  const __m512 whole[4] = {_mm512_add_ps(a0, a1), _mm512_sub_ps(a0, a1), _mm512_add_ps(a2, a3), _mm512_sub_ps(a2, a3)};
  for (int i = 0; i < 4; ++i) {
    __m512 y = whole[i];
    y = joined(y, _mm512_shuffle_f32x4(y, y, 0x4E), 0xFF00);
    y = joined(y, _mm512_shuffle_f32x4(y, y, 0xB1), 0xF0F0);
    y = joined(y, _mm512_permute_ps(y, 0x4E), 0xCCCC);
    out[i] = joined(y, _mm512_permute_ps(y, 0xB1), 0xAAAA);
  }
}

// Spreads what of a row fits here, so that it is done once; longer rows are spread twice.
constexpr int64_t SPREAD_AT_ONCE = 4096;

// Writes the spread row from `first` on, at most SPREAD_AT_ONCE values; zeros after its end.
void spread_part(const float* x, int64_t k, int64_t first, float* out) {
  const int64_t last = k - first < SPREAD_AT_ONCE ? k : first + SPREAD_AT_ONCE;
  int64_t i = first;
  for (; i + SPREAD_BLOCK <= last; i += SPREAD_BLOCK, out += SPREAD_BLOCK) {
    __m512 block[4];
    spread_block(x + i, block);
    for (int part = 0; part < 4; ++part) _mm512_store_ps(out + 16 * part, block[part]);
  }
  for (; i < last; i += 16, out += 16)
    _mm512_store_ps(out, _mm512_mul_ps(_mm512_maskz_loadu_ps(first_lanes(last - i), x + i), _mm512_set1_ps(SPREAD_SIZE)));
}

void quantize_row(const float* x, int64_t k, unsigned char* out, float* scale) {
  alignas(64) float spread[SPREAD_AT_ONCE];
  float max = 0.0f;
  for (int64_t first = 0; first < k; first += SPREAD_AT_ONCE) {
    spread_part(x, k, first, spread);
    const float found = largest_magnitude(spread, k - first < SPREAD_AT_ONCE ? k - first : SPREAD_AT_ONCE);
    if (max == max && !(found <= max)) max = found;  // NaN stays
  }
  const bool finite = max < __builtin_inff();
  const bool zero = max < SMALLEST_MAX;
  *scale = zero ? 0.0f : finite ? max / 127.0f / SPREAD_SIZE : __builtin_nanf("");
  const __mmask16 used = zero || !finite ? 0 : 0xFFFF;
  const __m512 factor = _mm512_set1_ps(used ? 127.0f / max : 0.0f);
  const int64_t padded = (k + 3) / 4 * 4;
  for (int64_t i = 0; i < padded; i += 16) {
    if (k > SPREAD_AT_ONCE && i % SPREAD_AT_ONCE == 0) spread_part(x, k, i, spread);
    const __m512 values = _mm512_maskz_loadu_ps(first_lanes(k - i) & used, spread + i % SPREAD_AT_ONCE);
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, factor));
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, _mm512_set1_epi32(128)));
    _mm_mask_storeu_epi8(out + i, first_lanes(padded - i), bytes);
  }
}

int64_t find_larger(const float* y, int64_t count, float limit) {
  const __m512 limits = _mm512_set1_ps(limit);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    const __mmask16 larger = _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, y + i), limits, _CMP_NLE_UQ);
    if (larger != 0) return i + __builtin_ctz(larger);
  }
  return count;
}

constexpr LinearVariant VARIANT = {
    round_row,
    quantize_row,
    {panels<F32Step>, panels<Bf16Step>, panels<I8Step>},
    find_larger,
};

}  // namespace
}  // namespace kev

KEV_TARGET_END

namespace kev {
const LinearVariant* linear_avx512() { return &VARIANT; }
}  // namespace kev

#else

namespace kev {
const LinearVariant* linear_avx512() { return nullptr; }
}  // namespace kev

#endif
