#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace kev {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kSerialNumbers = 16384;  // below this a rowwise pass is not worth waking anybody
constexpr int64_t kRowsPerChunk = 4;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

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

int64_t widest(const Model& model) {
  return std::max({model.hidden, model.num_heads * model.head_size, model.mlp_width});
}

int64_t up_width(const Model& model) { return model.gated ? 2 * model.mlp_width : model.mlp_width; }

int64_t qkv_width(const Model& model) { return (model.num_heads + 2 * model.num_kv_heads) * model.head_size; }

int64_t most_experts(const Model& model) {
  int64_t most = 0;
  for (int64_t i = 0; i < model.num_layers; ++i) most = std::max(most, model.layers[i].num_experts);
  return most;
}

int64_t scratch_bytes(const Model& model, int64_t rows) {
  int64_t bytes = 0;
  for (Precision precision : {Precision::F32, Precision::BF16, Precision::I8})
    bytes = std::max(bytes, linear_scratch_bytes(precision, rows, widest(model)));
  return bytes;
}

void normalize(const Norm& norm, const float* x, int64_t ldx, int64_t width, float* out, int64_t ldo, int64_t first,
               int64_t last) {
  if (static_cast<NormKind>(norm.kind) == NormKind::RMS)
    rms_norm(x, ldx, norm.weight, norm.offset, norm.eps, width, out, ldo, first, last);
  else
    layer_norm(x, ldx, norm.weight, norm.bias, norm.eps, width, out, ldo, first, last);
}

bool present(const Norm& norm) { return static_cast<NormKind>(norm.kind) != NormKind::NONE; }

// The `count` largest of `logits` [num] after a softmax over all, ties to the lowest index, in ascending order of index.
void choose(const float* logits, int64_t num, int64_t count, bool renormalize, int64_t* index, float* weight) {
  float largest = logits[0];
  for (int64_t i = 1; i < num; ++i) largest = std::max(largest, logits[i]);
  float sum = 0.0f;
  for (int64_t i = 0; i < num; ++i) sum += std::exp(logits[i] - largest);
  std::vector<int64_t> order(num);
  for (int64_t i = 0; i < num; ++i) order[i] = i;
  // NaN compares as the smallest, so that the order stays a strict one; its weight stays NaN.
  auto value = [&](int64_t i) { return std::isnan(logits[i]) ? -INFINITY : logits[i]; };
  std::partial_sort(order.begin(), order.begin() + count, order.end(),
                    [&](int64_t a, int64_t b) { return value(a) > value(b) || (value(a) == value(b) && a < b); });
  std::sort(order.begin(), order.begin() + count);
  float chosen = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    index[i] = order[i];
    weight[i] = std::exp(logits[order[i]] - largest) / sum;
    chosen += weight[i];
  }
  if (!renormalize) return;
  for (int64_t i = 0; i < count; ++i) weight[i] /= chosen;
}

}  // namespace

class Executor {
 public:
  Executor(const Model& model, Pool* pool, int64_t max_rows, int64_t max_wanted)
      : model_(model),
        pool_(pool),
        max_rows_(max_rows),
        max_wanted_(max_wanted),
        hidden_(max_rows * model.hidden),
        normed_(max_rows * model.hidden),
        mixed_(max_rows * model.num_heads * model.head_size),
        qkv_(max_rows * qkv_width(model)),
        up_(max_rows * up_width(model)),
        added_(max_rows * model.hidden),
        last_(max_wanted * model.hidden),
        routes_(max_rows * most_experts(model)),
        gathered_(most_experts(model) > 0 ? max_rows * model.hidden : 0),
        expert_out_(most_experts(model) > 0 ? max_rows * model.hidden : 0),
        scratch_(scratch_bytes(model, std::max(max_rows, max_wanted))),
        attention_scratch_(
            attention_scratch_bytes(pool_threads(pool), model.max_context, model.head_size, model.num_heads)) {}

  int64_t bytes() const {
    return hidden_.bytes() + normed_.bytes() + mixed_.bytes() + qkv_.bytes() + up_.bytes() + added_.bytes() +
           last_.bytes() + routes_.bytes() + gathered_.bytes() + expert_out_.bytes() + scratch_.bytes() +
           attention_scratch_.bytes();
  }

  int run(const Step& step) {
    if (!fits(step)) return 1;
    embed(step);
    for (int64_t i = 0; i < model_.num_layers; ++i) run_layer(model_.layers[i], step);
    finish(step);
    return 0;
  }

 private:
  bool fits(const Step& step) const {
    if (step.num_rows < 0 || step.num_rows > max_rows_ || step.num_wanted > max_wanted_ ||
        step.num_greedy > step.num_wanted)
      return false;
    for (int64_t r = 0; r < step.num_rows; ++r)
      if (step.ids[r] < 0 || step.ids[r] >= model_.vocabulary || step.positions[r] < 0 ||
          step.positions[r] >= model_.max_context || step.places[r] < 0)
        return false;
    for (int64_t w = 0; w < step.num_wanted; ++w)
      if (step.wanted[w] < 0 || step.wanted[w] >= step.num_rows) return false;
    return true;
  }

  // Calls body(first, last) over rows; in one piece when there is little to do. Always through the pool, which gives every
  // chunk the default floating point environment, whatever the caller has set.
  template <class F>
  void over_rows(int64_t rows, int64_t width, F&& body) {
    if (rows * width <= kSerialNumbers) return parallel(pool_, 1, [&](int64_t) { body(0, rows); });
    const int64_t chunks = (rows + kRowsPerChunk - 1) / kRowsPerChunk;
    parallel(pool_, chunks, [&](int64_t chunk) {
      body(chunk * kRowsPerChunk, std::min(rows, (chunk + 1) * kRowsPerChunk));
    });
  }

  void embed(const Step& step) {
    over_rows(step.num_rows, model_.hidden, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        float* row = hidden_.get() + r * model_.hidden;
        unpack_row(model_.embedding, step.ids[r], row);
        if (model_.embedding_scale != 1.0f)
          for (int64_t i = 0; i < model_.hidden; ++i) row[i] *= model_.embedding_scale;
      }
    });
  }

  void run_layer(const Layer& layer, const Step& step) {
    const int64_t rows = step.num_rows, width = model_.hidden;
    float* hidden = hidden_.get();
    over_rows(rows, width, [&](int64_t first, int64_t last) {
      normalize(layer.before_attention, hidden, width, width, normed_.get(), width, first, last);
    });
    attend(layer, step);
    if (model_.parallel_residual) {
      over_rows(rows, width, [&](int64_t first, int64_t last) {
        normalize(layer.before_mlp, hidden, width, width, normed_.get(), width, first, last);
        join(layer.after_attention, first, last);
      });
    } else {
      over_rows(rows, width, [&](int64_t first, int64_t last) {
        join(layer.after_attention, first, last);
        normalize(layer.before_mlp, hidden, width, width, normed_.get(), width, first, last);
      });
    }
    if (layer.num_experts > 0)
      run_experts(layer, rows);
    else
      run_mlp(layer.mlps[0], normed_.get(), rows, added_.get());
    over_rows(rows, width, [&](int64_t first, int64_t last) { join(layer.after_mlp, first, last); });
  }

  // Adds what a block made to the residual stream, through the norm after the block when there is one.
  void join(const Norm& norm, int64_t first, int64_t last) {
    const int64_t width = model_.hidden;
    float* added = added_.get();
    if (present(norm)) normalize(norm, added, width, width, added, width, first, last);
    add(added, width, width, hidden_.get(), width, first, last);
  }

  void attend(const Layer& layer, const Step& step) {
    const int64_t rows = step.num_rows, size = model_.head_size, width = qkv_width(model_);
    const int64_t query_width = model_.num_heads * size, kv_width = model_.num_kv_heads * size;
    float* qkv = qkv_.get();
    linear(pool_, layer.qkv, normed_.get(), rows, model_.hidden, layer.qkv_bias, qkv, width, scratch_.get());
    over_rows(rows, width, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        float* query = qkv + r * width;
        float* key = query + query_width;
        if (present(layer.query)) normalize(layer.query, query, size, size, query, size, 0, model_.num_heads);
        if (present(layer.key)) normalize(layer.key, key, size, size, key, size, 0, model_.num_kv_heads);
      }
      if (layer.rotary_half > 0)  // query and key heads lie side by side
        rotate(qkv, width, model_.num_heads + model_.num_kv_heads, size, layer.rotary_half, layer.cos, layer.sin,
               step.positions, first, last);
      const auto type = static_cast<Precision>(model_.kv_type);
      const int64_t row_bytes = kv_width * (type == Precision::F32 ? 4 : 2);
      for (int64_t r = first; r < last; ++r) {
        const float* key = qkv + r * width + query_width;
        store(key, kv_width, type, static_cast<char*>(layer.keys) + step.places[r] * row_bytes);
        store(key + kv_width, kv_width, type, static_cast<char*>(layer.values) + step.places[r] * row_bytes);
      }
    });
    Attention call{};
    call.q = qkv;
    call.ldq = width;
    call.keys = layer.keys;
    call.values = layer.values;
    call.out = mixed_.get();
    call.ldo = query_width;
    call.num_heads = model_.num_heads;
    call.num_kv_heads = model_.num_kv_heads;
    call.head_size = size;
    call.window = layer.window;
    call.scale = layer.scale;
    call.softcap = layer.softcap;
    call.kv_type = model_.kv_type;
    attention(pool_, call, step.segments, step.num_segments, attention_scratch_.get());
    linear(pool_, layer.out, mixed_.get(), rows, query_width, layer.out_bias, added_.get(), model_.hidden,
           scratch_.get());
  }

  void run_mlp(const Mlp& mlp, const float* x, int64_t rows, float* out) {
    const int64_t width = mlp.down.k, ld = mlp.up.n;
    float* up = up_.get();
    linear(pool_, mlp.up, x, rows, model_.hidden, mlp.up_bias, up, ld, scratch_.get());
    over_rows(rows, 4 * width, [&](int64_t first, int64_t last) {
      activate(static_cast<Activation>(model_.activation), up, ld, model_.gated ? up + width : nullptr, ld, width, up,
               ld, first, last);
    });
    linear(pool_, mlp.down, up, rows, ld, mlp.down_bias, out, model_.hidden, scratch_.get());
  }

  // Each row's chosen experts, summed in ascending order of their index: the row's own order, whoever else chose them.
  void run_experts(const Layer& layer, int64_t rows) {
    const int64_t width = model_.hidden, experts = layer.num_experts, chosen = layer.num_chosen;
    linear(pool_, layer.router, normed_.get(), rows, width, nullptr, routes_.get(), experts, scratch_.get());
    std::vector<int64_t> index(rows * chosen);
    std::vector<float> weight(rows * chosen);
    for (int64_t r = 0; r < rows; ++r)
      choose(routes_.get() + r * experts, experts, chosen, layer.renormalize != 0, index.data() + r * chosen,
             weight.data() + r * chosen);
    std::memset(added_.get(), 0, rows * width * sizeof(float));
    for (int64_t expert = 0; expert < experts; ++expert) {
      std::vector<std::pair<int64_t, float>> members;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < chosen; ++c)
          if (index[r * chosen + c] == expert) members.emplace_back(r, weight[r * chosen + c]);
      if (members.empty()) continue;
      const auto count = static_cast<int64_t>(members.size());
      for (int64_t m = 0; m < count; ++m)
        std::memcpy(gathered_.get() + m * width, normed_.get() + members[m].first * width, width * sizeof(float));
      run_mlp(layer.mlps[expert], gathered_.get(), count, expert_out_.get());
      over_rows(count, width, [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; ++m) {
          const float* from = expert_out_.get() + m * width;
          float* to = added_.get() + members[m].first * width;
          for (int64_t i = 0; i < width; ++i) to[i] += members[m].second * from[i];
        }
      });
    }
  }

  void finish(const Step& step) {
    const int64_t width = model_.hidden, vocabulary = model_.vocabulary;
    const int64_t greedy = step.num_greedy, rest = step.num_wanted - greedy;
    float* last = last_.get();
    for (int64_t w = 0; w < step.num_wanted; ++w)
      std::memcpy(last + w * width, hidden_.get() + step.wanted[w] * width, width * sizeof(float));
    if (step.num_wanted > 0) normalize(model_.final_norm, last, width, width, last, width, 0, step.num_wanted);
    if (greedy > 0)
      linear_argmax(pool_, model_.head, last, greedy, width, model_.head_bias, model_.final_softcap, step.best,
                    step.best_value, scratch_.get());
    if (rest == 0) return;
    linear(pool_, model_.head, last + greedy * width, rest, width, model_.head_bias, step.logits, vocabulary,
           scratch_.get());
    if (model_.final_softcap > 0.0f)
      over_rows(rest, vocabulary, [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; ++r)
          soften(step.logits + r * vocabulary, vocabulary, model_.final_softcap);
      });
  }

  const Model model_;
  Pool* pool_;
  const int64_t max_rows_, max_wanted_;
  Buffer<float> hidden_, normed_, mixed_, qkv_, up_, added_, last_, routes_, gathered_, expert_out_;
  Buffer<char> scratch_, attention_scratch_;
};

Executor* executor_create(const Model* model, Pool* pool, int64_t max_rows, int64_t max_wanted) {
  try {
    return new Executor(*model, pool, max_rows, max_wanted);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void executor_destroy(Executor* executor) { delete executor; }

int64_t executor_bytes(const Executor* executor) { return executor->bytes(); }

int executor_run(Executor* executor, const Step& step) {
  try {
    return executor->run(step);
  } catch (const std::bad_alloc&) {
    return 2;
  }
}

}  // namespace kev

extern "C" {

// Sizes of the structures, so that the description on the other side of the C ABI can be checked against them.
int64_t kev_size_of(int32_t which) {
  switch (which) {
    case 0: return sizeof(kev::Weight);
    case 1: return sizeof(kev::Segment);
    case 2: return sizeof(kev::Norm);
    case 3: return sizeof(kev::Mlp);
    case 4: return sizeof(kev::Layer);
    case 5: return sizeof(kev::Model);
    case 6: return sizeof(kev::Step);
    default: return -1;
  }
}

void* kev_executor_create(const kev::Model* model, void* pool, int64_t max_rows, int64_t max_wanted) {
  return kev::executor_create(model, static_cast<kev::Pool*>(pool), max_rows, max_wanted);
}

void kev_executor_destroy(void* executor) { kev::executor_destroy(static_cast<kev::Executor*>(executor)); }

int64_t kev_executor_bytes(const void* executor) {
  return kev::executor_bytes(static_cast<const kev::Executor*>(executor));
}

int kev_executor_run(void* executor, const kev::Step* step) {
  return kev::executor_run(static_cast<kev::Executor*>(executor), *step);
}
}
