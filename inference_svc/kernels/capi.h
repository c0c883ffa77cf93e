// The C ABI of pools and linears. What the calls do is said in kernels.h; here is what is checked before.
//
// Invariants and semantics: functions that return int give KEV_OK, or the first thing found wrong, and then nothing was
// done. Nothing throws. A null pool means the calling thread alone.
#pragma once

#include <stdint.h>

#include "kernels.h"

#if defined(__GNUC__)
#define KEV_API extern "C" __attribute__((visibility("default")))
#else
#define KEV_API extern "C"
#endif

enum KevStatus : int {
  KEV_OK = 0,
  KEV_BAD_PRECISION = 1,
  KEV_BAD_SHAPE = 2,    // negative, or so large that bytes or int32 sums overflow
  KEV_BAD_STRIDE = 3,   // shorter than a row
  KEV_BAD_RANGE = 4,    // rows outside [0, n), or not starting at a multiple of 16
  KEV_MISSING = 5,      // a null pointer where one is needed
  KEV_NOT_ALIGNED = 6,  // packed data or scratch not on a 64-byte border
  KEV_BAD_VARIANT = 7,  // unknown, or not for this machine
};

// Changes whenever a signature, a structure or the packed layout does.
KEV_API int kev_abi_version();
KEV_API const char* kev_status_text(int status);

KEV_API const char* kev_isa_name();
KEV_API int kev_isa_select(const char* name);

// Null: not between 1 and 1024 threads, or the system gives no more.
KEV_API void* kev_pool_create(int num_threads);
KEV_API void kev_pool_destroy(void* pool);
KEV_API int kev_pool_threads(const void* pool);

// Bytes, or -1 for a wrong precision or shape.
KEV_API int64_t kev_packed_bytes(int precision, int64_t n, int64_t k);
KEV_API int64_t kev_linear_scratch_bytes(int precision, int64_t rows, int64_t k);

// Asks the system for huge pages behind memory that was not written yet; weights are read from end to end in every
// step. Nothing is promised.
KEV_API void kev_prefer_huge_pages(void* data, int64_t num_bytes);

KEV_API int kev_pack_rows(void* pool, int precision, const void* source, int source_type, int64_t stride, int64_t first,
                          int64_t count, int64_t n, int64_t k, void* data, float* scale, int32_t* sums);
KEV_API int kev_unpack_rows(void* pool, const kev::Weight* weight, int64_t first, int64_t count, float* out,
                            int64_t ldo);
KEV_API int kev_linear(void* pool, const kev::Weight* weight, const float* x, int64_t rows, int64_t ldx,
                       const float* bias, float* y, int64_t ldy, void* scratch);
KEV_API int kev_linear_argmax(void* pool, const kev::Weight* weight, const float* x, int64_t rows, int64_t ldx,
                              const float* bias, float softcap, int64_t* index, float* value, void* scratch);
