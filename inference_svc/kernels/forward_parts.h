// What both ways through a layer are made of: all rows together (forward.cpp), or a block of rows (forward_rows.cpp).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "forward.h"

namespace kev {

constexpr int64_t kAlignment = 64;

inline int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Working memory of one kind, 64-byte aligned.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : bytes_(rounded(std::max<int64_t>(count, 1) * static_cast<int64_t>(sizeof(T)))) {
    data_ = static_cast<T*>(std::aligned_alloc(kAlignment, bytes_));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(static_cast<void*>(data_), 0, bytes_);
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
  T* data_;
};

inline int64_t query_width(const Model& model) { return model.num_heads * model.head_size; }
inline int64_t kv_width(const Model& model) { return model.num_kv_heads * model.head_size; }
inline int64_t qkv_width(const Model& model) { return query_width(model) + 2 * kv_width(model); }
inline int64_t widest(const Model& model) { return std::max({model.hidden, query_width(model), model.mlp_width}); }

inline bool present(const Norm& norm) { return static_cast<NormKind>(norm.kind) != NormKind::NONE; }

inline void normalize(const Norm& norm, const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo,
                      int64_t first, int64_t last) {
  if (static_cast<NormKind>(norm.kind) == NormKind::RMS)
    rms_norm(x, ldx, norm.weight, norm.offset, norm.eps, width, out, ldo, first, last);
  else
    layer_norm(x, ldx, norm.weight, norm.bias, norm.eps, width, out, ldo, first, last);
}

// Adds what a block made to the residual stream, through the norm after the block when there is one.
inline void join(const Norm& norm, float* added, float* hidden, int64_t width, int64_t first, int64_t last) {
  if (present(norm)) normalize(norm, added, width, width, added, width, first, last);
  add(added, width, width, hidden, width, first, last);
}

// Attention of a layer over all rows' queries.
inline Attention attention_of(const Model& model, const Layer& layer, const float* qkv, float* out) {
  Attention call{};
  call.q = qkv;
  call.ldq = qkv_width(model);
  call.keys = layer.keys;
  call.values = layer.values;
  call.out = out;
  call.ldo = query_width(model);
  call.num_heads = model.num_heads;
  call.num_kv_heads = model.num_kv_heads;
  call.head_size = model.head_size;
  call.window = layer.window;
  call.scale = layer.scale;
  call.softcap = layer.softcap;
  call.kv_type = model.kv_type;
  return call;
}

// What lies between the linear and the attention, for rows [first, last): norms of the heads (of the queries only when
// `queries`), rotation, keys and values into the arena.
inline void place_heads(const Model& model, const Layer& layer, const Step& step, bool queries, float* qkv,
                        int64_t first, int64_t last) {
  const int64_t size = model.head_size, width = qkv_width(model), keys_at = query_width(model);
  for (int64_t r = first; r < last; ++r) {
    float* query = qkv + r * width;
    float* key = query + keys_at;
    if (queries && present(layer.query)) normalize(layer.query, query, size, size, query, size, 0, model.num_heads);
    if (present(layer.key)) normalize(layer.key, key, size, size, key, size, 0, model.num_kv_heads);
  }
  if (layer.rotary_half > 0) {  // query and key heads lie side by side
    float* from = queries ? qkv : qkv + keys_at;
    const int64_t heads = queries ? model.num_heads + model.num_kv_heads : model.num_kv_heads;
    rotate(from, width, heads, size, layer.rotary_half, layer.cos, layer.sin, step.positions, first, last);
  }
  const auto type = static_cast<Precision>(model.kv_type);
  const int64_t stored = kv_width(model), row_bytes = stored * (type == Precision::F32 ? 4 : 2);
  for (int64_t r = first; r < last; ++r) {
    const float* key = qkv + r * width + keys_at;
    store(key, stored, type, static_cast<char*>(layer.keys) + step.places[r] * row_bytes);
    store(key + stored, stored, type, static_cast<char*>(layer.values) + step.places[r] * row_bytes);
  }
}

}  // namespace kev
