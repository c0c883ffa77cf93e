// The C ABI of attention and of the functions of each row alone, for tests and measurements: a forward calls them in
// C++.
#pragma once

#include "capi.h"

// Bytes, or -1 for a wrong shape.
KEV_API int64_t kev_attention_scratch_bytes(int num_threads, int64_t max_context, int64_t head_size, int64_t num_heads);
KEV_API int kev_attention(void* pool, const kev::Attention* call, const kev::Segment* segments, int64_t num_segments,
                          void* scratch);

KEV_API int kev_rms_norm(const float* x, int64_t ldx, const float* weight, float offset, float eps, int64_t width,
                         float* out, int64_t ldo, int64_t first, int64_t last);
KEV_API int kev_layer_norm(const float* x, int64_t ldx, const float* weight, const float* bias, float eps,
                           int64_t width, float* out, int64_t ldo, int64_t first, int64_t last);
KEV_API int kev_rotate(float* x, int64_t ldx, int64_t num_heads, int64_t head_size, int64_t half, const float* cos,
                       const float* sin, const int64_t* positions, int64_t first, int64_t last);
KEV_API int kev_activate(int kind, const float* gate, int64_t ldg, const float* up, int64_t ldu, int64_t width,
                         float* out, int64_t ldo, int64_t first, int64_t last);
KEV_API int kev_add(const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo, int64_t first, int64_t last);
KEV_API int kev_soften(float* x, int64_t count, float softcap);
KEV_API int kev_store(const float* x, int64_t count, int type, void* out);
KEV_API int kev_load(const void* x, int64_t count, int type, float* out);
