// Spreads numbers evenly before they are rounded to int8: a Hadamard transform of every 64 of a row.
//
// Invariants and semantics: a number that is far larger than its neighbours takes the precision of all of them. Spread, it
// is 64 numbers of an eighth of its size. The transform is its own inverse up to a factor of 64, so x . w is the sum of
// products of the spread rows, over 64: linears lose nothing by it but the rounding of float32. It is sums and differences
// in one fixed order: strides of 32, 16, ..., 1; every variant and the torch fall-back (quantized.py) give the same bits.
// What is left at the end of a row is not spread, but scaled alike. Everything has internal linkage (quantize.h).
// Source: QuaRot, Ashkboos 2024, sec. 3: Hadamard transforms of the inputs of linears, here of all, in blocks.
#pragma once

#include <cstdint>

namespace kev {
namespace {

constexpr int64_t SPREAD_BLOCK = 64;
constexpr float SPREAD_SIZE = 8.0f;  // the root of it: how much longer a spread row is

template <int64_t STRIDE>
inline void spread_by(float* x) {
  for (int64_t first = 0; first < SPREAD_BLOCK; first += 2 * STRIDE)
    for (int64_t i = first; i < first + STRIDE; ++i) {
      const float a = x[i], b = x[i + STRIDE];
      x[i] = a + b;
      x[i + STRIDE] = a - b;
    }
}

inline void spread_block(float* x) {
  spread_by<32>(x);
  spread_by<16>(x);
  spread_by<8>(x);
  spread_by<4>(x);
  spread_by<2>(x);
  spread_by<1>(x);
}

}  // namespace
}  // namespace kev
