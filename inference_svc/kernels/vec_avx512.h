// Lanes of floats for AVX-512: what vecmath.h, attention_body.h and rowwise_body.h are written in.
//
// Invariants and semantics: one of vec_*.h is included per translation unit, after that unit's target pragma. All names
// have internal linkage, so that no other unit runs instructions its CPU may lack. + - * / act lane by lane.
// A part (n lanes) reads and writes those n lanes of memory only; the others read as 0.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kev {
namespace {

using Vec = __m512;
using Mask = __mmask16;
constexpr int LANES = 16;

inline Vec vsplat(float x) { return _mm512_set1_ps(x); }
inline Vec vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// The second when either is NaN.
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }

// x * 2^n for whole n, rounded once.
inline Vec vscale(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

inline Vec vabs(Vec x) { return _mm512_abs_ps(x); }
inline Vec vwith_sign(Vec magnitude, Vec sign) {
  const __m512i bit = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(_mm512_castps_si512(magnitude), _mm512_castps_si512(sign), bit, 0xD8));
}
inline Vec vbits_and(Vec x, uint32_t bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int32_t>(bits))));
}

// Lanes [0, n); n may be negative or beyond the last.
inline Mask vfirst(int64_t n) {
  return n >= LANES ? Mask(0xFFFF) : n <= 0 ? Mask(0) : static_cast<Mask>((1u << n) - 1);
}
inline Mask vwithout(Mask a, Mask b) { return static_cast<Mask>(a & ~b); }
inline Mask vless(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Vec vselect(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }

inline Vec vload_part(const float* p, int64_t n) {
  return n >= LANES ? vload(p) : _mm512_maskz_loadu_ps(vfirst(n), p);
}
inline void vstore_part(float* p, Vec x, int64_t n) {
  if (n >= LANES) return vstore(p, x);
  _mm512_mask_storeu_ps(p, vfirst(n), x);
}

// bfloat16 numbers as floats.
inline Vec vload_bf16_part(const uint16_t* p, int64_t n) {
  const __m256i half = _mm256_maskz_loadu_epi16(vfirst(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// The nearest bfloat16 (ties to even; NaN stays NaN; subnormal numbers are kept).
inline void vstore_bf16_part(uint16_t* p, Vec x, int64_t n) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), near, quiet);
  _mm256_mask_storeu_epi16(p, vfirst(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

inline float vsum(Vec x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

inline float vlargest(Vec x) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

// rows[i] lane j becomes rows[j] lane i.
inline __attribute__((always_inline)) void vtranspose(Vec (&rows)[LANES]) {
  __m512d pairs[16];
  for (int i = 0; i < 16; i += 2) {
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    pairs[i] = low;
    pairs[i + 1] = high;
  }
  for (int i = 0; i < 16; i += 4) {  // rows[i + c]: column c of each 128-bit lane, of four rows
    rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[i], pairs[i + 2]));
    rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[i], pairs[i + 2]));
    rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[i + 1], pairs[i + 3]));
    rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[i + 1], pairs[i + 3]));
  }
  for (int c = 0; c < 4; ++c) {
    const Vec left_even = _mm512_shuffle_f32x4(rows[c], rows[c + 4], 0x88);
    const Vec left_odd = _mm512_shuffle_f32x4(rows[c], rows[c + 4], 0xDD);
    const Vec right_even = _mm512_shuffle_f32x4(rows[c + 8], rows[c + 12], 0x88);
    const Vec right_odd = _mm512_shuffle_f32x4(rows[c + 8], rows[c + 12], 0xDD);
    rows[c] = _mm512_shuffle_f32x4(left_even, right_even, 0x88);
    rows[c + 4] = _mm512_shuffle_f32x4(left_odd, right_odd, 0x88);
    rows[c + 8] = _mm512_shuffle_f32x4(left_even, right_even, 0xDD);
    rows[c + 12] = _mm512_shuffle_f32x4(left_odd, right_odd, 0xDD);
  }
}

}  // namespace
}  // namespace kev
