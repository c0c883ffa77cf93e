// The C ABI of attention and of the functions of each row alone. What the calls do is said in kernels.h.
//
// Invariants and semantics: as capi.h: KEV_OK, or the first thing found wrong, and then nothing was done. Places and
// rows are not checked against the arena and the tensors: their sizes are not known here.
#include "capi_attention.h"

using kev::Attention;
using kev::Pool;
using kev::Precision;
using kev::Segment;

namespace {

constexpr int64_t LARGEST = int64_t{1} << 32;  // of any one dimension
constexpr uintptr_t ALIGNMENT = 64;

bool counts(int64_t a) { return a >= 0 && a <= LARGEST; }

bool arena_type(int precision) {
  return precision == static_cast<int>(Precision::F32) || precision == static_cast<int>(Precision::BF16);
}

int check_rows(const void* x, int64_t ldx, int64_t width, int64_t first, int64_t last) {
  if (!counts(width) || !counts(first) || !counts(last) || first > last) return KEV_BAD_SHAPE;
  if (ldx < width || ldx > LARGEST) return KEV_BAD_STRIDE;
  return x == nullptr && first < last ? KEV_MISSING : KEV_OK;
}

int check_call(const Attention* call) {
  if (call == nullptr) return KEV_MISSING;
  if (!arena_type(call->kv_type)) return KEV_BAD_PRECISION;
  if (call->num_kv_heads <= 0 || call->num_heads <= 0 || call->num_heads % call->num_kv_heads != 0 ||
      call->num_heads > LARGEST || call->head_size <= 0 || call->head_size > LARGEST || !counts(call->window))
    return KEV_BAD_SHAPE;
  const int64_t width = call->num_heads * call->head_size;
  if (call->ldq < width || call->ldo < width) return KEV_BAD_STRIDE;
  const bool complete = call->q != nullptr && call->keys != nullptr && call->values != nullptr && call->out != nullptr;
  return complete ? KEV_OK : KEV_MISSING;
}

bool sound(const Segment& segment) {
  return counts(segment.row) && counts(segment.num_rows) && counts(segment.position) && counts(segment.num_prefix) &&
         counts(segment.prefix_start) && counts(segment.private_start);
}

}  // namespace

int64_t kev_attention_scratch_bytes(int num_threads, int64_t max_context, int64_t head_size, int64_t num_heads) {
  if (num_threads < 1 || !counts(max_context) || head_size < 1 || head_size > LARGEST || num_heads < 1) return -1;
  return kev::attention_scratch_bytes(num_threads, max_context, head_size, num_heads);
}

int kev_attention(void* pool, const Attention* call, const Segment* segments, int64_t num_segments, void* scratch) {
  if (const int status = check_call(call)) return status;
  if (!counts(num_segments)) return KEV_BAD_SHAPE;
  if (num_segments > 0 && (segments == nullptr || scratch == nullptr)) return KEV_MISSING;
  if (reinterpret_cast<uintptr_t>(scratch) % ALIGNMENT != 0) return KEV_NOT_ALIGNED;
  for (int64_t i = 0; i < num_segments; ++i)
    if (!sound(segments[i])) return KEV_BAD_RANGE;
  kev::attention(static_cast<Pool*>(pool), *call, segments, num_segments, scratch);
  return KEV_OK;
}

int kev_rms_norm(const float* x, int64_t ldx, const float* weight, float offset, float eps, int64_t width, float* out,
                 int64_t ldo, int64_t first, int64_t last) {
  if (const int status = check_rows(x, ldx, width, first, last)) return status;
  if (const int status = check_rows(out, ldo, width, first, last)) return status;
  if (weight == nullptr) return KEV_MISSING;
  kev::rms_norm(x, ldx, weight, offset, eps, width, out, ldo, first, last);
  return KEV_OK;
}

int kev_layer_norm(const float* x, int64_t ldx, const float* weight, const float* bias, float eps, int64_t width,
                   float* out, int64_t ldo, int64_t first, int64_t last) {
  if (const int status = check_rows(x, ldx, width, first, last)) return status;
  if (const int status = check_rows(out, ldo, width, first, last)) return status;
  if (weight == nullptr) return KEV_MISSING;
  kev::layer_norm(x, ldx, weight, bias, eps, width, out, ldo, first, last);
  return KEV_OK;
}

int kev_rotate(float* x, int64_t ldx, int64_t num_heads, int64_t head_size, int64_t half, const float* cos,
               const float* sin, const int64_t* positions, int64_t first, int64_t last) {
  if (!counts(num_heads) || !counts(head_size) || half < 0 || 2 * half > head_size) return KEV_BAD_SHAPE;
  if (const int status = check_rows(x, ldx, num_heads * head_size, first, last)) return status;
  if (first < last && (cos == nullptr || sin == nullptr || positions == nullptr)) return KEV_MISSING;
  kev::rotate(x, ldx, num_heads, head_size, half, cos, sin, positions, first, last);
  return KEV_OK;
}

int kev_activate(int kind, const float* gate, int64_t ldg, const float* up, int64_t ldu, int64_t width, float* out,
                 int64_t ldo, int64_t first, int64_t last) {
  if (kind < 0 || kind > static_cast<int>(kev::Activation::RELU)) return KEV_BAD_PRECISION;
  if (const int status = check_rows(gate, ldg, width, first, last)) return status;
  if (const int status = check_rows(out, ldo, width, first, last)) return status;
  if (up != nullptr && ldu < width) return KEV_BAD_STRIDE;
  kev::activate(static_cast<kev::Activation>(kind), gate, ldg, up, ldu, width, out, ldo, first, last);
  return KEV_OK;
}

int kev_add(const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo, int64_t first, int64_t last) {
  if (const int status = check_rows(x, ldx, width, first, last)) return status;
  if (const int status = check_rows(out, ldo, width, first, last)) return status;
  kev::add(x, ldx, width, out, ldo, first, last);
  return KEV_OK;
}

int kev_soften(float* x, int64_t count, float softcap) {
  if (!counts(count)) return KEV_BAD_SHAPE;
  if (count > 0 && x == nullptr) return KEV_MISSING;
  kev::soften(x, count, softcap);
  return KEV_OK;
}

int kev_store(const float* x, int64_t count, int type, void* out) {
  if (!arena_type(type)) return KEV_BAD_PRECISION;
  if (!counts(count)) return KEV_BAD_SHAPE;
  if (count > 0 && (x == nullptr || out == nullptr)) return KEV_MISSING;
  if (count > 0) kev::store(x, count, static_cast<Precision>(type), out);
  return KEV_OK;
}

int kev_load(const void* x, int64_t count, int type, float* out) {
  if (!arena_type(type)) return KEV_BAD_PRECISION;
  if (!counts(count)) return KEV_BAD_SHAPE;
  if (count > 0 && (x == nullptr || out == nullptr)) return KEV_MISSING;
  if (count > 0) kev::load(x, count, static_cast<Precision>(type), out);
  return KEV_OK;
}
