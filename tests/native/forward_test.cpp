// Whole forwards, many rows at once and few: run with the sanitizers, which see what leaves the working memory and what
// two threads touch at once. Both ways must give the same bits, also of questions that read a prefix which the same
// forward computes.
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "inference_svc/kernels/forward.h"
#include "inference_svc/kernels/isa.h"
#include "inference_svc/kernels/pages.h"

namespace {

using kev::Precision;

constexpr int64_t HIDDEN = 40, HEADS = 4, KV_HEADS = 2, SIZE = 16, VOCABULARY = 70, CONTEXT = 90, LAYERS = 3;
constexpr int64_t QKV = (HEADS + 2 * KV_HEADS) * SIZE, TOKENS = 77, MAX_ROWS = 80, MAX_WANTED = 3;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

std::vector<float> numbers(int64_t count, int64_t seed, float scale) {
  std::vector<float> made(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    made[static_cast<size_t>(i)] = scale * static_cast<float>((seed * 131 + i * i % 1013 + i * 7) % 401 - 200) / 200.0f;
  return made;
}

// A decoder over memory of exactly its size.
class Tiny {
 public:
  Tiny(Precision precision, int64_t mlp_width)
      : norm_(numbers(HIDDEN, 3, 0.5f)),
        head_norm_(numbers(SIZE, 4, 0.5f)),
        cos_(numbers(CONTEXT * SIZE / 2, 5, 1.0f)),
        sin_(numbers(CONTEXT * SIZE / 2, 6, 1.0f)),
        arena_(2 * LAYERS, std::vector<float>(CONTEXT * KV_HEADS * SIZE)) {
    const kev::Norm norm{norm_.data(), nullptr, 1e-6f, 1.0f, static_cast<int32_t>(kev::NormKind::RMS), 0};
    const kev::Norm head{head_norm_.data(), nullptr, 1e-6f, 1.0f, static_cast<int32_t>(kev::NormKind::RMS), 0};
    mlps_.resize(LAYERS);
    layers_.resize(LAYERS);
    for (int64_t i = 0; i < LAYERS; ++i) {
      kev::Mlp& mlp = mlps_[i];
      mlp = {};
      mlp.up = packed(precision, 2 * mlp_width, HIDDEN, 10 + i);
      mlp.down = packed(precision, HIDDEN, mlp_width, 20 + i);
      kev::Layer& layer = layers_[i];
      layer = {};
      layer.before_attention = layer.after_attention = layer.before_mlp = layer.after_mlp = norm;
      layer.query = layer.key = head;
      layer.qkv = packed(precision, QKV, HIDDEN, 30 + i);
      layer.out = packed(precision, HIDDEN, HEADS * SIZE, 40 + i);
      layer.cos = cos_.data();
      layer.sin = sin_.data();
      layer.keys = arena_[2 * i].data();
      layer.values = arena_[2 * i + 1].data();
      layer.mlps = &mlp;
      layer.rotary_half = SIZE / 2;
      layer.window = i == 1 ? 9 : 0;
      layer.scale = 0.25f;
    }
    model.layers = layers_.data();
    model.embedding = model.head = packed(precision, VOCABULARY, HIDDEN, 50);
    model.final_norm = norm;
    model.num_layers = LAYERS;
    model.hidden = HIDDEN;
    model.num_heads = HEADS;
    model.num_kv_heads = KV_HEADS;
    model.head_size = SIZE;
    model.mlp_width = mlp_width;
    model.vocabulary = VOCABULARY;
    model.max_context = CONTEXT;
    model.embedding_scale = 2.0f;
    model.activation = static_cast<int32_t>(kev::Activation::GELU_TANH);
    model.gated = 1;
    model.kv_type = static_cast<int32_t>(precision == Precision::F32 ? Precision::F32 : Precision::BF16);
  }

  kev::Model model{};

 private:
  kev::Weight packed(Precision precision, int64_t n, int64_t k, int64_t seed) {
    const std::vector<float> source = numbers(n * k, seed, 0.3f);
    void* memory = nullptr;
    CHECK(posix_memalign(&memory, 64, static_cast<size_t>(kev::packed_bytes(precision, n, k))) == 0);
    data_.emplace_back(memory);
    scales_.push_back(std::make_unique<std::vector<float>>(n));
    sums_.push_back(std::make_unique<std::vector<int32_t>>(n));
    kev::pack_rows(nullptr, precision, source.data(), Precision::F32, k, 0, n, n, k, memory, scales_.back()->data(),
                   sums_.back()->data());
    return {n, k, memory, scales_.back()->data(), sums_.back()->data(), static_cast<int32_t>(precision), 0};
  }

  std::vector<float> norm_, head_norm_, cos_, sin_;
  std::vector<std::vector<float>> arena_;
  std::vector<kev::Mlp> mlps_;
  std::vector<kev::Layer> layers_;
  std::vector<std::unique_ptr<void, Free>> data_;
  std::vector<std::unique_ptr<std::vector<float>>> scales_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> sums_;
};

struct Answer {
  int64_t best = -1;
  float value = 0.0f;
  std::vector<float> logits = std::vector<float>(VOCABULARY);

  bool operator==(const Answer& other) const {
    return best == other.best && std::memcmp(&value, &other.value, sizeof value) == 0 &&
           std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0;
  }
};

// The text in forwards of at most `rows`, in segments of 16; the best token of the row before the last, and the logits
// of the last.
Answer run(const kev::Model& model, kev::Pool* pool, int64_t rows) {
  kev::Executor* executor = kev::executor_create(&model, pool, rows, MAX_WANTED);
  CHECK(executor != nullptr);
  Answer answer;
  for (int64_t first = 0; first < TOKENS; first += rows) {
    const int64_t last = first + rows < TOKENS ? first + rows : TOKENS;
    std::vector<int64_t> ids, positions, wanted;
    std::vector<kev::Segment> segments;
    for (int64_t p = first; p < last; ++p) {
      ids.push_back(p * 37 % VOCABULARY);
      positions.push_back(p);
      if (p == first || p % 16 == 0) segments.push_back({p - first, 0, p, 0, 0, 0});
      ++segments.back().num_rows;
    }
    kev::Step step{};
    if (first <= TOKENS - 2 && TOKENS - 2 < last) {
      wanted.push_back(TOKENS - 2 - first);
      step.num_greedy = 1;
    }
    if (last == TOKENS) wanted.push_back(TOKENS - 1 - first);
    step.ids = ids.data();
    step.positions = step.places = positions.data();
    step.segments = segments.data();
    step.wanted = wanted.data();
    step.num_rows = last - first;
    step.num_segments = static_cast<int64_t>(segments.size());
    step.num_wanted = static_cast<int64_t>(wanted.size());
    step.best = &answer.best;
    step.best_value = &answer.value;
    step.logits = answer.logits.data();
    CHECK(kev::executor_run(executor, step) == 0);
  }
  kev::executor_destroy(executor);
  return answer;
}

// A text of its own, whose keys and values lie at [prefix_start, + num_prefix) and from private_start on.
struct Text {
  int64_t first, last;  // positions that are computed
  int64_t prefix_start, num_prefix, private_start;
};

constexpr int64_t PREFIX = 33;
// The prefix itself, two questions of one row and two of several over it, and one that has none; in the order of rows.
const Text TEXTS[] = {{0, PREFIX, 0, 0, 2},
                      {PREFIX, PREFIX + 1, 2, PREFIX, 36},
                      {PREFIX, PREFIX + 11, 2, PREFIX, 38},
                      {PREFIX, PREFIX + 1, 2, PREFIX, 50},
                      {0, 9, 0, 0, 52},
                      {PREFIX, PREFIX + 17, 2, PREFIX, 62}};
constexpr int64_t NUM_TEXTS = sizeof TEXTS / sizeof TEXTS[0];

// The best tokens of the last rows of texts [first, last), computed in one forward.
void run_texts(const kev::Model& model, kev::Pool* pool, int64_t first, int64_t last, Answer* answers) {
  std::vector<int64_t> ids, positions, places, wanted;
  std::vector<kev::Segment> segments;
  for (int64_t t = first; t < last; ++t) {
    const Text& text = TEXTS[t];
    segments.push_back({static_cast<int64_t>(ids.size()), text.last - text.first, text.first, text.prefix_start,
                        text.num_prefix, text.private_start});
    for (int64_t p = text.first; p < text.last; ++p) {
      ids.push_back((t * 17 + p * 37) % VOCABULARY);
      positions.push_back(p);
      places.push_back(text.private_start + p - text.num_prefix);
    }
    wanted.push_back(static_cast<int64_t>(ids.size()) - 1);
  }
  std::vector<int64_t> best(wanted.size());
  std::vector<float> values(wanted.size());
  kev::Step step{};
  step.ids = ids.data();
  step.positions = positions.data();
  step.places = places.data();
  step.segments = segments.data();
  step.wanted = wanted.data();
  step.num_rows = static_cast<int64_t>(ids.size());
  step.num_segments = static_cast<int64_t>(segments.size());
  step.num_wanted = step.num_greedy = static_cast<int64_t>(wanted.size());
  step.best = best.data();
  step.best_value = values.data();
  kev::Executor* executor = kev::executor_create(&model, pool, step.num_rows, step.num_wanted);
  CHECK(executor != nullptr && kev::executor_run(executor, step) == 0);
  kev::executor_destroy(executor);
  for (int64_t t = first; t < last; ++t) {
    answers[t].best = best[static_cast<size_t>(t - first)];
    answers[t].value = values[static_cast<size_t>(t - first)];
  }
}

void compare_texts(Precision precision) {
  const Tiny alone(precision, 64), together(precision, 64);
  Answer expected[NUM_TEXTS], found[NUM_TEXTS];
  for (int64_t t = 0; t < NUM_TEXTS; ++t) run_texts(alone.model, nullptr, t, t + 1, expected);
  for (int threads : {1, 2, 3}) {
    kev::Pool* pool = kev::pool_create(threads);
    run_texts(together.model, pool, 0, NUM_TEXTS, found);
    for (int64_t t = 0; t < NUM_TEXTS; ++t) CHECK(found[t] == expected[t]);
    kev::pool_destroy(pool);
  }
}

void compare(Precision precision, int64_t mlp_width) {
  const Tiny few(precision, mlp_width), many(precision, mlp_width);
  const Answer expected = run(few.model, nullptr, 7);
  CHECK(expected.best >= 0);
  for (int threads : {1, 3}) {
    kev::Pool* pool = kev::pool_create(threads);
    CHECK(pool != nullptr);
    for (int64_t rows : {int64_t{50}, MAX_ROWS}) CHECK(run(many.model, pool, rows) == expected);
    kev::pool_destroy(pool);
  }
}

// Pages may become large; what lies on them stays, also beside what was asked for.
void test_large_pages() {
  std::vector<unsigned char> memory(5 << 20);
  const auto expected = [](size_t i) { return static_cast<unsigned char>(i * 37 >> 7); };
  kev::prefer_large_pages(memory.data(), static_cast<int64_t>(memory.size()));
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = expected(i);
  kev::move_to_large_pages(memory.data() + 777, (3 << 20) + 5);
  for (size_t i = 0; i < memory.size(); ++i) CHECK(memory[i] == expected(i));
}

}  // namespace

int main() {
  test_large_pages();
  for (const char* name : {"portable", "avx2", "avx512_bf16_vnni"}) {
    if (!kev::isa_select(name)) continue;
    for (Precision precision : {Precision::F32, Precision::BF16, Precision::I8})
      for (int64_t mlp_width : {int64_t{37}, int64_t{64}, int64_t{96}}) compare(precision, mlp_width);
    for (Precision precision : {Precision::F32, Precision::BF16, Precision::I8}) compare_texts(precision);
  }
  return 0;
}
