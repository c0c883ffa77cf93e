// Hands the functions of each row alone to the variant in use.
#include "isa.h"
#include "rowwise_variant.h"

namespace kev {
namespace {

const RowwiseVariant& variant() {
#if KEV_X86
  switch (isa()) {
    case Isa::AVX512: return ROWWISE_AVX512;
    case Isa::AVX2: return ROWWISE_AVX2;
    case Isa::PORTABLE: break;
  }
#endif
  return ROWWISE_PORTABLE;
}

}  // namespace

void rms_norm(const float* x, int64_t ldx, const float* weight, float offset, float eps, int64_t width, float* out,
              int64_t ldo, int64_t first, int64_t last) {
  variant().rms_norm(x, ldx, weight, offset, eps, width, out, ldo, first, last);
}

void layer_norm(const float* x, int64_t ldx, const float* weight, const float* bias, float eps, int64_t width,
                float* out, int64_t ldo, int64_t first, int64_t last) {
  variant().layer_norm(x, ldx, weight, bias, eps, width, out, ldo, first, last);
}

void rotate(float* x, int64_t ldx, int64_t num_heads, int64_t head_size, int64_t half, const float* cos,
            const float* sin, const int64_t* positions, int64_t first, int64_t last) {
  variant().rotate(x, ldx, num_heads, head_size, half, cos, sin, positions, first, last);
}

void activate(Activation kind, const float* gate, int64_t ldg, const float* up, int64_t ldu, int64_t width, float* out,
              int64_t ldo, int64_t first, int64_t last) {
  variant().activate(kind, gate, ldg, up, ldu, width, out, ldo, first, last);
}

void add(const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo, int64_t first, int64_t last) {
  variant().add(x, ldx, width, out, ldo, first, last);
}

void soften(float* x, int64_t count, float softcap) { variant().soften(x, count, softcap); }

void store(const float* x, int64_t count, Precision type, void* out) { variant().store(x, count, type, out); }

void load(const void* x, int64_t count, Precision type, float* out) { variant().load(x, count, type, out); }

}  // namespace kev
