// How numbers are rounded: to bfloat16, and, spread (spread.h), to int8 with one scale for a row.
//
// Invariants and semantics: the AVX-512 variant and the torch fall-back (quantized.py) give these very bits. Everything
// has internal linkage, so that each file compiles its own copy under its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear_panels.h"
#include "spread.h"

namespace kev {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Nearest even; NaN stays NaN.
inline uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline float float_of_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Magnitudes compare as integers: every finite one < infinity < NaN.
inline float largest_magnitude(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return float_of(largest);
}

// spread value = SPREAD_SIZE * scale * integer, the integer in [-127, 127].
class Quantizer {
 public:
  explicit Quantizer(float max) {
    if (max < SMALLEST_MAX) return;
    if (bits_of(max) >= 0x7F800000u) {
      scale_ = float_of(0x7FC00000u);
      return;
    }
    scale_ = max / 127.0f / SPREAD_SIZE;
    factor_ = 127.0f / max;
  }
  float scale() const { return scale_; }  // 0: the row counts as zero; NaN: it holds NaN or infinity
  int8_t operator()(float value) const {
    if (factor_ == 0.0f) return 0;        // the value may be NaN
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits below 1, rounding to nearest even
    return static_cast<int8_t>(static_cast<int32_t>((value * factor_ + SHIFT) - SHIFT));
  }

 private:
  float scale_ = 0.0f;
  float factor_ = 0.0f;
};

// As LinearVariant wants them.
inline void round_row_plainly(const float* x, int64_t k, unsigned char* out) {
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t bits = bf16_of(x[i]);
    std::memcpy(out + 2 * i, &bits, sizeof bits);
  }
  if (k % 2 != 0) std::memset(out + 2 * k, 0, 2);
}

// Calls body(first, values, count) for the spread row, at most SPREAD_BLOCK values at a time. `value(i)` is a number of the row.
template <class Value, class Body>
inline void over_spread(int64_t k, Value&& value, Body&& body) {
  for (int64_t first = 0; first < k; first += SPREAD_BLOCK) {
    const int64_t count = k - first < SPREAD_BLOCK ? k - first : SPREAD_BLOCK;
    float block[SPREAD_BLOCK];
    for (int64_t i = 0; i < count; ++i) block[i] = value(first + i);
    if (count == SPREAD_BLOCK) {
      spread_block(block);
    } else {
      for (int64_t i = 0; i < count; ++i) block[i] *= SPREAD_SIZE;
    }
    body(first, static_cast<const float*>(block), count);
  }
}

// Calls body(i, integer) for a row.
template <class Value, class Body>
inline float quantized_plainly(int64_t k, Value&& value, Body&& body) {
  float max = 0.0f;
  over_spread(k, value, [&](int64_t, const float* block, int64_t count) {
    const float found = largest_magnitude(block, count);
    max = bits_of(found) > bits_of(max) ? found : max;
  });
  const Quantizer quantizer(max);
  over_spread(k, value, [&](int64_t first, const float* block, int64_t count) {
    for (int64_t i = 0; i < count; ++i) body(first + i, quantizer(block[i]));
  });
  return quantizer.scale();
}

inline void quantize_row_plainly(const float* x, int64_t k, unsigned char* out, float* scale) {
  const auto value = [x](int64_t i) { return x[i]; };
  *scale = quantized_plainly(k, value, [out](int64_t i, int8_t q) { out[i] = static_cast<unsigned char>(q); });
  const int64_t padded = (k + 3) / 4 * 4;
  std::memset(out + k, 0, static_cast<size_t>(padded - k));
}

}  // namespace
}  // namespace kev
