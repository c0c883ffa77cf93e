// Lanes of floats for AVX2 with FMA; vec_avx512.h states the contract.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kev {
namespace {

using Vec = __m256;
using Mask = __m256;  // all bits of a lane, or none
constexpr int LANES = 8;

inline Vec vsplat(float x) { return _mm256_set1_ps(x); }
inline Vec vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }

// In two steps, so that subnormal results round once.
inline Vec vscale(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return x * _mm256_castsi256_ps(first) * _mm256_castsi256_ps(second);
}

inline Vec vabs(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Vec vwith_sign(Vec magnitude, Vec sign) {
  const Vec bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
inline Vec vbits_and(Vec x, uint32_t bits) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(bits))));
}

inline Mask vfirst(int64_t n) {
  const auto count = static_cast<int32_t>(n < 0 ? 0 : n > LANES ? LANES : n);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
}
inline Mask vwithout(Mask a, Mask b) { return _mm256_andnot_ps(b, a); }
inline Mask vless(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Vec vselect(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }

inline Vec vload_part(const float* p, int64_t n) {
  return n >= LANES ? vload(p) : _mm256_maskload_ps(p, _mm256_castps_si256(vfirst(n)));
}
inline void vstore_part(float* p, Vec x, int64_t n) {
  if (n >= LANES) return vstore(p, x);
  _mm256_maskstore_ps(p, _mm256_castps_si256(vfirst(n)), x);
}

inline Vec vload_bf16_part(const uint16_t* p, int64_t n) {
  __m128i half;
  if (n >= LANES) {
    half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  } else {
    alignas(16) uint16_t part[LANES] = {};
    for (int64_t i = 0; i < n; ++i) part[i] = p[i];
    half = _mm_load_si128(reinterpret_cast<const __m128i*>(part));
  }
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline void vstore_bf16_part(uint16_t* p, Vec x, int64_t n) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, nan), 16);
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
  if (n >= LANES) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
  alignas(16) uint16_t part[LANES];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), half);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

inline float vsum(Vec x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

inline float vlargest(Vec x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

inline __attribute__((always_inline)) void vtranspose(Vec (&rows)[LANES]) {
  __m256d pairs[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i], rows[i + 1]));
    pairs[i + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i], rows[i + 1]));
  }
  Vec quads[8];
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[i], pairs[i + 2]));
    quads[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[i], pairs[i + 2]));
    quads[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[i + 1], pairs[i + 3]));
    quads[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[i + 1], pairs[i + 3]));
  }
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x20);
    rows[c + 4] = _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x31);
  }
}

}  // namespace
}  // namespace kev
