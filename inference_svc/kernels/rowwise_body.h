// The functions of each row alone, in lanes. Include after one of vec_*.h.
//
// Invariants and semantics: a number's lane follows from its column only, and sums over a row fold four registers of
// lanes in one fixed tree. Lanes beyond the row read as zero and are never written.
#pragma once

#include <cmath>
#include <cstring>

#include "rowwise_variant.h"
#include "vecmath.h"

namespace kev {
namespace {

// Calls body(first, count) for groups of columns: all LANES of them (a constant, once inlined), at the end the rest.
template <class F>
inline __attribute__((always_inline)) void for_lanes(int64_t width, F&& body) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) body(i, LANES);
  if (i < width) body(i, width - i);
}

struct Rowwise {
  // The sum over columns of term(column, count), of which only the first `count` lanes may be other than 0.
  template <class F>
  static float summed(int64_t width, F&& term) {
    Vec sum[4] = {vsplat(0.0f), vsplat(0.0f), vsplat(0.0f), vsplat(0.0f)};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
      for (int v = 0; v < 4; ++v) sum[v] = sum[v] + term(i + v * LANES, LANES);
    for (int v = 0; i < width; i += LANES, ++v) sum[v] = sum[v] + term(i, width - i);
    return vsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }

  static void rms_norm(const float* x, int64_t ldx, const float* weight, float offset, float eps, int64_t width,
                       float* out, int64_t ldo, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* row = x + r * ldx;
      const float squares = summed(width, [&](int64_t i, int64_t count) {
        const Vec value = vload_part(row + i, count);
        return value * value;
      });
      const Vec scale = vsplat(1.0f / std::sqrt(squares / static_cast<float>(width) + eps));
      for_lanes(width, [&](int64_t i, int64_t count) {
        const Vec factor = vload_part(weight + i, count) + vsplat(offset);
        vstore_part(out + r * ldo + i, vload_part(row + i, count) * scale * factor, count);
      });
    }
  }

  static void layer_norm(const float* x, int64_t ldx, const float* weight, const float* bias, float eps, int64_t width,
                         float* out, int64_t ldo, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* row = x + r * ldx;
      const float sum = summed(width, [&](int64_t i, int64_t count) { return vload_part(row + i, count); });
      const Vec mean = vsplat(sum / static_cast<float>(width));
      const float squares = summed(width, [&](int64_t i, int64_t count) {
        const Vec away = vselect(vfirst(count), vload_part(row + i, count) - mean, vsplat(0.0f));
        return away * away;
      });
      const Vec scale = vsplat(1.0f / std::sqrt(squares / static_cast<float>(width) + eps));
      for_lanes(width, [&](int64_t i, int64_t count) {
        Vec y = (vload_part(row + i, count) - mean) * scale * vload_part(weight + i, count);
        if (bias != nullptr) y = y + vload_part(bias + i, count);
        vstore_part(out + r * ldo + i, y, count);
      });
    }
  }

  static void rotate(float* x, int64_t ldx, int64_t num_heads, int64_t head_size, int64_t half, const float* cos,
                     const float* sin, const int64_t* positions, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* cosines = cos + positions[r] * half;
      const float* sines = sin + positions[r] * half;
      for (int64_t h = 0; h < num_heads; ++h) {
        float* left = x + r * ldx + h * head_size;
        float* right = left + half;
        for_lanes(half, [&](int64_t i, int64_t count) {
          const Vec a = vload_part(left + i, count), b = vload_part(right + i, count);
          const Vec c = vload_part(cosines + i, count), s = vload_part(sines + i, count);
          vstore_part(left + i, a * c - b * s, count);
          vstore_part(right + i, b * c + a * s, count);
        });
      }
    }
  }

  static Vec activated(Activation kind, Vec x) {
    switch (kind) {
      case Activation::SILU: return x * vsigmoid(x);
      case Activation::GELU_TANH: {  // (1 + tanh(u)) / 2 is the sigmoid of 2u, without the cancellation
        const Vec u = vsplat(0.797884561f) * vfma(x * x * x, vsplat(0.044715f), x);
        return x * vsigmoid(u + u);
      }
      case Activation::GELU: return x * vsplat(0.5f) * (vsplat(1.0f) + verf(x * vsplat(0.707106781f)));
      case Activation::RELU: return vmax(vsplat(0.0f), x);
    }
    return vsplat(NAN);
  }

  template <Activation KIND>
  static void activate_rows(const float* gate, int64_t ldg, const float* up, int64_t ldu, int64_t width, float* out,
                            int64_t ldo, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for_lanes(width, [&](int64_t i, int64_t count) {
        Vec y = activated(KIND, vload_part(gate + r * ldg + i, count));
        if (up != nullptr) y = y * vload_part(up + r * ldu + i, count);
        vstore_part(out + r * ldo + i, y, count);
      });
  }

  static void activate(Activation kind, const float* gate, int64_t ldg, const float* up, int64_t ldu, int64_t width,
                       float* out, int64_t ldo, int64_t first, int64_t last) {
    switch (kind) {
      case Activation::SILU:
        return activate_rows<Activation::SILU>(gate, ldg, up, ldu, width, out, ldo, first, last);
      case Activation::GELU_TANH:
        return activate_rows<Activation::GELU_TANH>(gate, ldg, up, ldu, width, out, ldo, first, last);
      case Activation::GELU:
        return activate_rows<Activation::GELU>(gate, ldg, up, ldu, width, out, ldo, first, last);
      case Activation::RELU:
        return activate_rows<Activation::RELU>(gate, ldg, up, ldu, width, out, ldo, first, last);
    }
  }

  static void add(const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for_lanes(width, [&](int64_t i, int64_t count) {
        float* to = out + r * ldo + i;
        vstore_part(to, vload_part(to, count) + vload_part(x + r * ldx + i, count), count);
      });
  }

  static void soften(float* x, int64_t count, float softcap) {
    for_lanes(count, [&](int64_t i, int64_t part) {
      vstore_part(x + i, vsoften(vload_part(x + i, part), vsplat(softcap)), part);
    });
  }

  static void store(const float* x, int64_t count, Precision type, void* out) {
    if (type == Precision::F32) {
      std::memcpy(out, x, static_cast<size_t>(count) * sizeof(float));
      return;
    }
    for_lanes(count, [&](int64_t i, int64_t part) {
      vstore_bf16_part(static_cast<uint16_t*>(out) + i, vload_part(x + i, part), part);
    });
  }

  static void load(const void* x, int64_t count, Precision type, float* out) {
    if (type == Precision::F32) {
      std::memcpy(out, x, static_cast<size_t>(count) * sizeof(float));
      return;
    }
    for_lanes(count, [&](int64_t i, int64_t part) {
      vstore_part(out + i, vload_bf16_part(static_cast<const uint16_t*>(x) + i, part), part);
    });
  }

  static constexpr RowwiseVariant variant() {
    return {rms_norm, layer_norm, rotate, activate, add, soften, store, load};
  }
};

}  // namespace
}  // namespace kev
