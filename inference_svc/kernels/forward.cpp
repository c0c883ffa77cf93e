#include "forward.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "forward_flow.h"
#include "forward_parts.h"
#include "pages.h"

namespace kev {
namespace {

constexpr int64_t kSerialNumbers = 16384;  // below this a rowwise pass is not worth waking anybody
constexpr int64_t kRowsPerChunk = 4;
constexpr int64_t kLargeWeight = 256 << 10;  // bytes worth a large page
constexpr int64_t kPassRowsPerThread = 16;  // with fewer, threads share the outputs instead of the rows

int64_t up_width(const Model& model) { return model.gated ? 2 * model.mlp_width : model.mlp_width; }

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

// Rows of which threads share the outputs, at most: experts gather rows from everywhere, so all of them.
int64_t shared_rows(const Model& model, int64_t threads, int64_t max_rows, int64_t max_wanted) {
  if (most_experts(model) > 0) return std::max(max_rows, max_wanted);
  return std::max(std::min(max_rows, kPassRowsPerThread * threads - 1), max_wanted);
}

void move_to_large_pages(const Weight& weight) {
  if (weight.data == nullptr) return;
  const int64_t bytes = packed_bytes(static_cast<Precision>(weight.precision), weight.n, weight.k);
  if (bytes >= kLargeWeight) kev::move_to_large_pages(weight.data, bytes);
}

void move_to_large_pages(const Model& model) {
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const Layer& layer = model.layers[i];
    for (const Weight* weight : {&layer.qkv, &layer.out}) move_to_large_pages(*weight);
    for (int64_t m = 0; m < std::max<int64_t>(layer.num_experts, 1); ++m)
      for (const Weight* weight : {&layer.mlps[m].up, &layer.mlps[m].down}) move_to_large_pages(*weight);
  }
  move_to_large_pages(model.head);
}

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
        experts_(most_experts(model) > 0),
        shared_rows_(shared_rows(model, pool_threads(pool), max_rows, max_wanted)),
        hidden_(std::max(max_rows, max_wanted) * model.hidden),
        mixed_(std::max(max_rows, max_wanted) * query_width(model)),
        qkv_(std::max(max_rows, max_wanted) * qkv_width(model)),
        normed_(shared_rows_ * model.hidden),
        up_(shared_rows_ * up_width(model)),
        added_(shared_rows_ * model.hidden),
        last_(max_wanted * model.hidden),
        routes_(max_rows * most_experts(model)),
        gathered_(experts_ ? max_rows * model.hidden : 0),
        expert_out_(experts_ ? max_rows * model.hidden : 0),
        scratch_(scratch_bytes(model, shared_rows_)),
        attention_bytes_(attention_scratch_bytes(1, model.max_context, model.head_size, model.num_heads)),
        attention_scratch_(attention_bytes_ * pool_threads(pool)),
        pass_parts_(model),
        pass_memory_(experts_ ? 0 : pool_threads(pool) * pass_parts_.floats) {}

  int64_t bytes() const {
    return hidden_.bytes() + normed_.bytes() + mixed_.bytes() + qkv_.bytes() + up_.bytes() + added_.bytes() +
           last_.bytes() + routes_.bytes() + gathered_.bytes() + expert_out_.bytes() + scratch_.bytes() +
           attention_scratch_.bytes() + pass_memory_.bytes();
  }

  int run(const Step& step) {
    if (!fits(step)) return 1;
    lap_ = WorkTimes::now();
    embed(step);
    lap(Work::EMBED);
    if (passes(step))
      run_flow(step);
    else
      for (int64_t i = 0; i < model_.num_layers; ++i) run_layer(model_.layers[i], step);
    finish(step);
    lap(Work::HEAD);
    return 0;
  }

  const WorkTimes& times() const { return times_; }

 private:
  // The time since the last lap was spent on this, by all threads.
  void lap(Work work) { lap_ = times_.add(work, lap_, pool_threads(pool_)); }

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

  // There are enough rows for every thread to work on its own.
  bool passes(const Step& step) const { return !experts_ && step.num_rows > shared_rows_ && model_.num_layers > 0; }

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
        if (model_.embedding_columns != nullptr)
          for (int64_t i = 0; i < model_.hidden; ++i) row[i] *= model_.embedding_columns[i];
      }
    });
  }

  void run_layer(const Layer& layer, const Step& step) {
    const int64_t rows = step.num_rows, width = model_.hidden;
    float* hidden = hidden_.get();
    over_rows(rows, width, [&](int64_t first, int64_t last) {
      normalize(layer.before_attention, hidden, width, width, normed_.get(), width, first, last);
    });
    lap(Work::NORM);
    attend(layer, step);
    if (model_.parallel_residual) {
      over_rows(rows, width, [&](int64_t first, int64_t last) {
        normalize(layer.before_mlp, hidden, width, width, normed_.get(), width, first, last);
        join(layer.after_attention, added_.get(), hidden, width, first, last);
      });
    } else {
      over_rows(rows, width, [&](int64_t first, int64_t last) {
        join(layer.after_attention, added_.get(), hidden, width, first, last);
        normalize(layer.before_mlp, hidden, width, width, normed_.get(), width, first, last);
      });
    }
    lap(Work::NORM);
    if (layer.num_experts > 0)
      run_experts(layer, rows);
    else
      run_mlp(layer.mlps[0], normed_.get(), rows, added_.get(), after(layer));
    over_rows(rows, width, [&](int64_t first, int64_t last) {
      join(layer.after_mlp, added_.get(), hidden, width, first, last);
    });
    lap(Work::NORM);
  }

  void attend(const Layer& layer, const Step& step) {
    const int64_t rows = step.num_rows, width = qkv_width(model_);
    float* qkv = qkv_.get();
    linear(pool_, layer.qkv, normed_.get(), rows, model_.hidden, layer.qkv_bias, qkv, width, scratch_.get(),
           &layer.out);
    lap(Work::QKV);
    over_rows(rows, width, [&](int64_t first, int64_t last) {
      place_heads(model_, layer, step, true, qkv, first, last);
    });
    lap(Work::ROTATE);
    mix(layer, step.segments, step.num_segments);
    linear(pool_, layer.out, mixed_.get(), rows, query_width(model_), layer.out_bias, added_.get(), model_.hidden,
           scratch_.get(), layer.num_experts > 0 ? nullptr : &layer.mlps[0].up);
    lap(Work::OUT);
  }

  // Attention proper.
  void mix(const Layer& layer, const Segment* segments, int64_t num_segments) {
    const Attention call = attention_of(model_, layer, qkv_.get(), mixed_.get());
    attention(pool_, call, segments, num_segments, attention_scratch_.get());
    lap(Work::ATTENTION);
  }

  // All layers for many rows. What comes after the last layer's keys and values is computed for the wanted rows alone.
  void run_flow(const Step& step) {
    const int64_t threads = pool_threads(pool_);
    Flow flow(model_, step, {hidden_.get(), qkv_.get(), mixed_.get()}, threads);
    std::vector<WorkTimes> spent(threads);
    parallel(pool_, threads, [&](int64_t worker) {
      float* pass = pass_memory_.get() + worker * pass_parts_.floats;
      flow.work(pass_parts_, {pass, attention_scratch_.get() + worker * attention_bytes_}, &spent[worker]);
    });
    const int64_t before = times_.sum();
    for (const WorkTimes& each : spent) times_.add(each);
    const int64_t now = WorkTimes::now();
    times_.at(Work::WAIT) += (now - lap_) * threads - (times_.sum() - before);
    lap_ = now;
    run_wanted(model_.layers[model_.num_layers - 1], step);
  }

  // One layer for the wanted rows, whose keys and values are stored; they become the first rows.
  void run_wanted(const Layer& layer, const Step& step) {
    const int64_t width = model_.hidden, count = step.num_wanted;
    if (count == 0) return;
    std::vector<int64_t> positions(count), places(count);
    std::vector<Segment> segments(count);
    for (int64_t w = 0; w < count; ++w) {
      const int64_t row = step.wanted[w];
      std::memcpy(last_.get() + w * width, hidden_.get() + row * width, width * sizeof(float));
      positions[w] = step.positions[row];
      places[w] = step.places[row];
      segments[w] = *std::find_if(step.segments, step.segments + step.num_segments, [&](const Segment& segment) {
        return row >= segment.row && row < segment.row + segment.num_rows;
      });
      segments[w].position += row - segments[w].row;
      segments[w].row = w;
      segments[w].num_rows = 1;
    }
    std::memcpy(hidden_.get(), last_.get(), count * width * sizeof(float));
    Step few = step;
    few.positions = positions.data();
    few.places = places.data();
    few.segments = segments.data();
    few.num_rows = few.num_segments = count;
    run_layer(layer, few);
  }

  // What is read after a layer.
  const Weight* after(const Layer& layer) const {
    const bool last = &layer == model_.layers + model_.num_layers - 1;
    return last ? &model_.head : &(&layer)[1].qkv;
  }

  void run_mlp(const Mlp& mlp, const float* x, int64_t rows, float* out, const Weight* next) {
    const int64_t width = mlp.down.k, ld = mlp.up.n;
    float* up = up_.get();
    linear(pool_, mlp.up, x, rows, model_.hidden, mlp.up_bias, up, ld, scratch_.get(), &mlp.down);
    lap(Work::UP);
    over_rows(rows, 4 * width, [&](int64_t first, int64_t last) {
      activate(static_cast<Activation>(model_.activation), up, ld, model_.gated ? up + width : nullptr, ld, width, up,
               ld, first, last);
    });
    lap(Work::ACTIVATE);
    linear(pool_, mlp.down, up, rows, ld, mlp.down_bias, out, model_.hidden, scratch_.get(), next);
    lap(Work::DOWN);
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
      lap(Work::EXPERTS);
      run_mlp(layer.mlps[expert], gathered_.get(), count, expert_out_.get(), nullptr);
      over_rows(count, width, [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; ++m) {
          const float* from = expert_out_.get() + m * width;
          float* to = added_.get() + members[m].first * width;
          for (int64_t i = 0; i < width; ++i) to[i] += members[m].second * from[i];
        }
      });
    }
    lap(Work::EXPERTS);
  }

  void finish(const Step& step) {
    const int64_t width = model_.hidden, vocabulary = model_.vocabulary;
    const int64_t greedy = step.num_greedy, rest = step.num_wanted - greedy;
    float* last = last_.get();
    for (int64_t w = 0; w < step.num_wanted; ++w) {
      const int64_t row = passes(step) ? w : step.wanted[w];
      std::memcpy(last + w * width, hidden_.get() + row * width, width * sizeof(float));
    }
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
  const bool experts_;
  const int64_t shared_rows_;
  Buffer<float> hidden_, mixed_, qkv_, normed_, up_, added_, last_, routes_, gathered_, expert_out_;
  Buffer<char> scratch_;
  const int64_t attention_bytes_;  // of one thread
  Buffer<char> attention_scratch_;
  const RowPass::Parts pass_parts_;
  Buffer<float> pass_memory_;
  WorkTimes times_;
  int64_t lap_ = 0;
};

Executor* executor_create(const Model* model, Pool* pool, int64_t max_rows, int64_t max_wanted) {
  try {
    Executor* made = new Executor(*model, pool, max_rows, max_wanted);
    move_to_large_pages(*model);
    return made;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void executor_destroy(Executor* executor) { delete executor; }

int64_t executor_bytes(const Executor* executor) { return executor->bytes(); }

const WorkTimes& executor_times(const Executor* executor) { return executor->times(); }

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

int kev_executor_times(const void* executor, int64_t* nanoseconds, int64_t count) {
  if (count != static_cast<int64_t>(kev::Work::COUNT)) return 1;
  std::memcpy(nanoseconds, kev::executor_times(static_cast<const kev::Executor*>(executor)).nanoseconds(),
              static_cast<size_t>(count) * sizeof(int64_t));
  return 0;
}

int kev_executor_run(void* executor, const kev::Step* step) {
  return kev::executor_run(static_cast<kev::Executor*>(executor), *step);
}
}
