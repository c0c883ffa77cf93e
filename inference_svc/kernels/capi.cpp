#include "capi.h"

#include "isa.h"
#include "pages.h"

using kev::Pool;
using kev::Precision;
using kev::Weight;

namespace {

constexpr int ABI_VERSION = 2;
constexpr int64_t LARGEST = int64_t{1} << 40;       // of any one dimension, and of rows times width
constexpr int64_t LARGEST_I8_K = int64_t{1} << 17;  // 127 * 127 * k must fit int32
constexpr uintptr_t ALIGNMENT = 64;

bool known(int precision) { return precision >= 0 && precision <= static_cast<int>(Precision::I8); }

bool fits(int64_t a, int64_t b) {
  return a >= 0 && b >= 0 && a <= LARGEST && b <= LARGEST && (b == 0 || a <= LARGEST / b);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % ALIGNMENT == 0; }

int check_shape(int precision, int64_t n, int64_t k) {
  if (!known(precision)) return KEV_BAD_PRECISION;
  if (!fits(n, k)) return KEV_BAD_SHAPE;
  if (precision == static_cast<int>(Precision::I8) && k > LARGEST_I8_K) return KEV_BAD_SHAPE;
  return KEV_OK;
}

int check_packed(int precision, const void* data, const float* scale, const int32_t* sums) {
  if (data == nullptr) return KEV_MISSING;
  if (precision == static_cast<int>(Precision::I8) && (scale == nullptr || sums == nullptr)) return KEV_MISSING;
  return aligned(data) ? KEV_OK : KEV_NOT_ALIGNED;
}

int check_weight(const Weight* weight) {
  if (weight == nullptr) return KEV_MISSING;
  if (const int status = check_shape(weight->precision, weight->n, weight->k)) return status;
  return check_packed(weight->precision, weight->data, weight->scale, weight->sums);
}

int check_rows(const Weight* weight, const float* x, int64_t rows, int64_t ldx, const void* scratch) {
  if (const int status = check_weight(weight)) return status;
  if (!fits(rows, weight->k) || !fits(rows, weight->n)) return KEV_BAD_SHAPE;
  if (ldx < weight->k || ldx > LARGEST) return KEV_BAD_STRIDE;
  if (rows > 0 && (x == nullptr || scratch == nullptr)) return KEV_MISSING;
  return aligned(scratch) ? KEV_OK : KEV_NOT_ALIGNED;
}

Pool* pool_of(void* pool) { return static_cast<Pool*>(pool); }

}  // namespace

int kev_abi_version() { return ABI_VERSION; }

const char* kev_status_text(int status) {
  switch (status) {
    case KEV_OK:
      return "done";
    case KEV_BAD_PRECISION:
      return "unknown precision";
    case KEV_BAD_SHAPE:
      return "a dimension is negative or too large";
    case KEV_BAD_STRIDE:
      return "a row is longer than the distance between rows";
    case KEV_BAD_RANGE:
      return "rows outside the weight, or not from a multiple of 16 on";
    case KEV_MISSING:
      return "a pointer is missing";
    case KEV_NOT_ALIGNED:
      return "packed data or scratch does not start at a multiple of 64 bytes";
    case KEV_BAD_VARIANT:
      return "unknown variant, or not for this machine";
    default:
      return "unknown status";
  }
}

const char* kev_isa_name() { return kev::isa_name(); }

int kev_isa_select(const char* name) {
  if (name == nullptr) return KEV_MISSING;
  return kev::isa_select(name) ? KEV_OK : KEV_BAD_VARIANT;
}

void* kev_pool_create(int num_threads) { return kev::pool_create(num_threads); }

void kev_pool_destroy(void* pool) { kev::pool_destroy(pool_of(pool)); }

int kev_pool_threads(const void* pool) { return kev::pool_threads(static_cast<const Pool*>(pool)); }

int64_t kev_packed_bytes(int precision, int64_t n, int64_t k) {
  if (check_shape(precision, n, k) != KEV_OK) return -1;
  return kev::packed_bytes(static_cast<Precision>(precision), n, k);
}

int64_t kev_linear_scratch_bytes(int precision, int64_t rows, int64_t k) {
  if (check_shape(precision, rows, k) != KEV_OK) return -1;
  return kev::linear_scratch_bytes(static_cast<Precision>(precision), rows, k);
}

void kev_prefer_huge_pages(void* data, int64_t num_bytes) { kev::prefer_large_pages(data, num_bytes); }

int kev_pack_rows(void* pool, int precision, const void* source, int source_type, int64_t stride, int64_t first,
                  int64_t count, int64_t n, int64_t k, void* data, float* scale, int32_t* sums) {
  if (const int status = check_shape(precision, n, k)) return status;
  if (source_type != static_cast<int>(Precision::F32) && source_type != static_cast<int>(Precision::BF16)) {
    return KEV_BAD_PRECISION;
  }
  if (first < 0 || count < 0 || first > n || count > n - first || first % 16 != 0) return KEV_BAD_RANGE;
  if (count % 16 != 0 && first + count != n) return KEV_BAD_RANGE;
  if (stride < k || stride > LARGEST) return KEV_BAD_STRIDE;
  if (const int status = check_packed(precision, data, scale, sums)) return status;
  if (count > 0 && source == nullptr) return KEV_MISSING;
  kev::pack_rows(pool_of(pool), static_cast<Precision>(precision), source, static_cast<Precision>(source_type), stride,
                 first, count, n, k, data, scale, sums);
  return KEV_OK;
}

int kev_unpack_rows(void* pool, const Weight* weight, int64_t first, int64_t count, float* out, int64_t ldo) {
  if (const int status = check_weight(weight)) return status;
  if (first < 0 || count < 0 || first > weight->n || count > weight->n - first) return KEV_BAD_RANGE;
  if (ldo < weight->k || ldo > LARGEST) return KEV_BAD_STRIDE;
  if (count > 0 && out == nullptr) return KEV_MISSING;
  kev::parallel(pool_of(pool), (count + 15) / 16, [&](int64_t chunk) {
    const int64_t last = chunk * 16 + 16 < count ? chunk * 16 + 16 : count;
    for (int64_t i = chunk * 16; i < last; ++i) kev::unpack_row(*weight, first + i, out + i * ldo);
  });
  return KEV_OK;
}

int kev_linear(void* pool, const Weight* weight, const float* x, int64_t rows, int64_t ldx, const float* bias, float* y,
               int64_t ldy, void* scratch) {
  if (const int status = check_rows(weight, x, rows, ldx, scratch)) return status;
  if (ldy < weight->n || ldy > LARGEST) return KEV_BAD_STRIDE;
  if (rows > 0 && y == nullptr) return KEV_MISSING;
  kev::linear(pool_of(pool), *weight, x, rows, ldx, bias, y, ldy, scratch);
  return KEV_OK;
}

int kev_linear_argmax(void* pool, const Weight* weight, const float* x, int64_t rows, int64_t ldx, const float* bias,
                      float softcap, int64_t* index, float* value, void* scratch) {
  if (const int status = check_rows(weight, x, rows, ldx, scratch)) return status;
  if (weight->n == 0) return KEV_BAD_SHAPE;
  if (rows > 0 && (index == nullptr || value == nullptr)) return KEV_MISSING;
  kev::linear_argmax(pool_of(pool), *weight, x, rows, ldx, bias, softcap, index, value, scratch);
  return KEV_OK;
}
