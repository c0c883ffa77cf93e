// Packing weights: [n, k] row by row into panels of 16 outputs (linear_panels.h).
//
// Invariants and semantics: the bytes are the same for every variant, on however many threads, in however many pieces.
// Only whole panels are written; rows past n and values past k are zero.
#include <cstring>

#include "kernels.h"
#include "linear_panels.h"
#include "quantize.h"

namespace kev {
namespace {

struct F32Source {
  using Element = float;
  static float value(Element element) { return element; }
  static uint16_t bf16(Element element) { return bf16_of(element); }
};

struct Bf16Source {
  using Element = uint16_t;
  static float value(Element element) { return float_of_bf16(element); }
  static uint16_t bf16(Element element) { return element; }
};

// One row into its 4 bytes of every step. `out` is where the row's first step goes; what is not written is zero.
template <class Source>
void pack_f32(const typename Source::Element* row, int64_t k, unsigned char* out) {
  for (int64_t i = 0; i < k; ++i) {
    const float value = Source::value(row[i]);
    std::memcpy(out + i * STEP_BYTES, &value, sizeof value);
  }
}

template <class Source>
void pack_bf16(const typename Source::Element* row, int64_t k, unsigned char* out) {
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t value = Source::bf16(row[i]);
    std::memcpy(out + i / 2 * STEP_BYTES + i % 2 * 2, &value, sizeof value);
  }
}

template <class Source>
void pack_i8(const typename Source::Element* row, int64_t k, unsigned char* out, float* scale, int32_t* sum) {
  int32_t total = 0;
  const auto value = [row](int64_t i) { return Source::value(row[i]); };
  *scale = quantized_plainly(k, value, [&](int64_t i, int8_t integer) {
    total += integer;
    std::memcpy(out + i / 4 * STEP_BYTES + i % 4, &integer, sizeof integer);
  });
  *sum = total;
}

template <class Source>
void pack_panels(Pool* pool, Precision precision, const void* source, int64_t stride, int64_t first, int64_t count,
                 int64_t k, unsigned char* data, float* scale, int32_t* sums) {
  const auto* rows = static_cast<const typename Source::Element*>(source);
  const int64_t panel_bytes = num_steps(precision, k) * STEP_BYTES;
  parallel(pool, num_panels(count), [&](int64_t chunk) {
    const int64_t begin = chunk * PANEL_OUTPUTS;
    const int64_t end = begin + PANEL_OUTPUTS < count ? begin + PANEL_OUTPUTS : count;
    unsigned char* panel = data + (first / PANEL_OUTPUTS + chunk) * panel_bytes;
    std::memset(panel, 0, static_cast<size_t>(panel_bytes));
    for (int64_t i = begin; i < end; ++i) {
      const typename Source::Element* row = rows + i * stride;
      unsigned char* out = panel + (i - begin) * 4;
      if (precision == Precision::F32) pack_f32<Source>(row, k, out);
      if (precision == Precision::BF16) pack_bf16<Source>(row, k, out);
      if (precision == Precision::I8) pack_i8<Source>(row, k, out, scale + first + i, sums + first + i);
    }
  });
}

}  // namespace

int64_t packed_bytes(Precision precision, int64_t n, int64_t k) {
  return num_panels(n) * num_steps(precision, k) * STEP_BYTES;
}

void pack_rows(Pool* pool, Precision precision, const void* source, Precision source_type, int64_t stride,
               int64_t first, int64_t count, int64_t /*n*/, int64_t k, void* data, float* scale, int32_t* sums) {
  auto* bytes = static_cast<unsigned char*>(data);
  if (source_type == Precision::F32) {
    pack_panels<F32Source>(pool, precision, source, stride, first, count, k, bytes, scale, sums);
  } else {
    pack_panels<Bf16Source>(pool, precision, source, stride, first, count, k, bytes, scale, sums);
  }
}

void unpack_row(const Weight& weight, int64_t index, float* out) {
  const auto precision = static_cast<Precision>(weight.precision);
  const auto* data = static_cast<const unsigned char*>(weight.data);
  data += index / PANEL_OUTPUTS * num_steps(precision, weight.k) * STEP_BYTES + index % PANEL_OUTPUTS * 4;
  for (int64_t i = 0; i < weight.k; ++i) {
    if (precision == Precision::F32) {
      std::memcpy(out + i, data + i * STEP_BYTES, sizeof(float));
    } else if (precision == Precision::BF16) {
      uint16_t value;
      std::memcpy(&value, data + i / 2 * STEP_BYTES + i % 2 * 2, sizeof value);
      out[i] = float_of_bf16(value);
    } else {
      int8_t value;
      std::memcpy(&value, data + i / 4 * STEP_BYTES + i % 4, sizeof value);
      out[i] = static_cast<float>(value);
    }
  }
  if (precision != Precision::I8) return;
  const float scale = weight.scale[index];
  const int64_t spread = weight.k / SPREAD_BLOCK * SPREAD_BLOCK;
  for (int64_t first = 0; first < spread; first += SPREAD_BLOCK) spread_block(out + first);
  for (int64_t i = 0; i < weight.k; ++i) out[i] *= i < spread ? scale / SPREAD_SIZE : scale;
}

}  // namespace kev
