// Lanes of floats on any CPU, with the vector types of GCC and Clang; vec_avx512.h states the contract.
//
// Here vfma is a product and a sum, each rounded: std::fma is a slow call where the CPU lacks the instruction.
#pragma once

#include <cstdint>
#include <cstring>

namespace kev {
namespace {

constexpr int LANES = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));

template <class To, class From>
inline To vcast(From x) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline Vec vsplat(float x) { return Vec{x, x, x, x}; }
inline Bits vsplat_bits(uint32_t x) { return Bits{x, x, x, x}; }
inline Vec vload(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void vstore(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline Vec vselect(Mask m, Vec yes, Vec no) { return vcast<Vec>((m & vcast<Mask>(yes)) | (~m & vcast<Mask>(no))); }
inline Mask vless(Vec a, Vec b) { return a < b; }
inline Vec vfma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec vmax(Vec a, Vec b) { return vselect(a > b, a, b); }
inline Vec vmin(Vec a, Vec b) { return vselect(a < b, a, b); }

// In two steps, so that subnormal results round once.
inline Vec vscale(Vec x, Vec n) {
  const Mask bounded = vcast<Mask>(vmin(vmax(n, vsplat(-300.0f)), vsplat(300.0f)) + vsplat(12582912.0f));
  const Mask whole = bounded - vcast<Mask>(vsplat(12582912.0f));
  const Mask half = whole >> 1;
  const Bits first = (vcast<Bits>(half) + 127) << 23;
  const Bits second = (vcast<Bits>(whole - half) + 127) << 23;
  return x * vcast<Vec>(first) * vcast<Vec>(second);
}

inline Vec vbits_and(Vec x, uint32_t bits) { return vcast<Vec>(vcast<Bits>(x) & vsplat_bits(bits)); }
inline Vec vabs(Vec x) { return vbits_and(x, 0x7FFFFFFFu); }
inline Vec vwith_sign(Vec magnitude, Vec sign) {
  return vcast<Vec>(vcast<Bits>(vabs(magnitude)) | vcast<Bits>(vbits_and(sign, 0x80000000u)));
}

inline Mask vfirst(int64_t n) {
  const auto count = static_cast<int32_t>(n < 0 ? 0 : n > LANES ? LANES : n);
  return Mask{0, 1, 2, 3} < Mask{count, count, count, count};
}
inline Mask vwithout(Mask a, Mask b) { return a & ~b; }

inline Vec vload_part(const float* p, int64_t n) {
  if (n >= LANES) return vload(p);
  Vec x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
inline void vstore_part(float* p, Vec x, int64_t n) {
  if (n >= LANES) return vstore(p, x);
  for (int64_t i = 0; i < n; ++i) p[i] = x[i];
}

inline Vec vload_bf16_part(const uint16_t* p, int64_t n) {
  Bits bits = {};
  for (int64_t i = 0; i < (n < LANES ? n : LANES); ++i) bits[i] = p[i];
  return vcast<Vec>(bits << 16);
}

inline void vstore_bf16_part(uint16_t* p, Vec x, int64_t n) {
  const Bits bits = vcast<Bits>(x);
  const Bits near = bits + 0x7FFF + ((bits >> 16) & 1);
  const Bits nan = vcast<Bits>(x != x);
  const Bits kept = ((nan & (bits | 0x400000)) | (~nan & near)) >> 16;
  for (int64_t i = 0; i < (n < LANES ? n : LANES); ++i) p[i] = static_cast<uint16_t>(kept[i]);
}

inline float vsum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float vlargest(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2];
  const float b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

inline void vtranspose(Vec (&rows)[LANES]) {
  for (int i = 0; i < LANES; ++i)
    for (int j = i + 1; j < LANES; ++j) {
      const float kept = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = kept;
    }
}

}  // namespace
}  // namespace kev
