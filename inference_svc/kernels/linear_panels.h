// Between linear.cpp, which cuts the work, and the variants, which do it.
//
// Invariants and semantics: a panel is 16 outputs over all k, in steps of 64 bytes: 16 outputs x 4 bytes, which hold 1
// float, 2 bfloat16 or 4 int8 of consecutive k. A prepared row is 4 bytes per step of the same kind. So one tile loop
// serves all three precisions, and all variants read the same packed weight. What lies beyond n or k is zero.
#pragma once

#include <cstdint>

#include "isa.h"
#include "kernels.h"

namespace kev {

inline constexpr int64_t PANEL_OUTPUTS = 16;
inline constexpr int64_t STEP_BYTES = 64;
inline constexpr int NUM_PRECISIONS = 3;

constexpr int64_t values_per_step(Precision precision) {
  return precision == Precision::F32 ? 1 : precision == Precision::BF16 ? 2 : 4;
}

constexpr int64_t num_steps(Precision precision, int64_t k) {
  const int64_t values = values_per_step(precision);
  return (k + values - 1) / values;
}

constexpr int64_t num_panels(int64_t n) { return (n + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS; }

// Rows below this magnitude count as zero when they are quantized: 127 / max must stay a finite float.
inline constexpr float SMALLEST_MAX = 0x1p-100f;

// Some rows times some panels.
struct Panels {
  const unsigned char* x;  // prepared rows, x_stride bytes apart
  int64_t x_stride;
  const float* x_scale;  // I8: of each row
  int64_t rows;
  const unsigned char* weight;  // panel 0
  int64_t steps;
  const float* scale;   // I8, of output 0
  const int32_t* sums;  // I8, of output 0
  const float* bias;    // of output 0, or null
  int64_t n;
  int64_t first_panel;
  int64_t last_panel;  // exclusive
  int64_t end_panel;   // whose data may be fetched ahead; exclusive
  const unsigned char* after;  // what to fetch ahead at the end: the first bytes of what is wanted next, or null
  int64_t after_bytes;
  float* y;            // output first_output of row 0
  int64_t ldy;
  int64_t first_output;
};

struct LinearVariant {
  // Prepares one row: BF16 rounds, I8 quantizes and sets *scale. F32 rows are used where they are.
  void (*round_row)(const float* x, int64_t k, unsigned char* out);
  void (*quantize_row)(const float* x, int64_t k, unsigned char* out, float* scale);
  void (*panels[NUM_PRECISIONS])(const Panels& job);
  // First of y[0, count) that is larger than `limit` or NaN; count when there is none.
  int64_t (*find_larger)(const float* y, int64_t count, float limit);
};

// Null where it is not compiled.
const LinearVariant* linear_portable();
const LinearVariant* linear_avx2();
const LinearVariant* linear_avx512();

}  // namespace kev
