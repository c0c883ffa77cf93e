// Attention of every variant over memory that ends where it must: run with the address and the undefined behaviour
// sanitizer, which see what is read or written beyond, and with the one for races. Results are compared with plain sums
// in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "inference_svc/kernels/isa.h"
#include "inference_svc/kernels/kernels.h"

namespace {

using kev::Attention;
using kev::Precision;
using kev::Segment;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Exactly so many bytes on a 64-byte border, all of them NaN.
std::unique_ptr<void, Free> aligned(int64_t bytes) {
  void* memory = nullptr;
  CHECK(posix_memalign(&memory, 64, static_cast<size_t>(bytes)) == 0);
  std::memset(memory, 0xFF, static_cast<size_t>(bytes));
  return std::unique_ptr<void, Free>(memory);
}

// Few bits, so that a bfloat16 holds them.
float number(int64_t seed) { return static_cast<float>(seed * 7919 % 255 - 127) / 64.0f; }

struct Shape {
  int64_t num_heads, num_kv_heads, head_size, window;
  float softcap;
};

// Rows `first` to `length` of a question whose prefix lies behind its other positions, at the very end of the arena;
// or is that of the question before.
struct Question {
  int64_t length, first, num_prefix;
  bool shares = false;
};

class Case {
 public:
  Case(const Shape& shape, const std::vector<Question>& questions, Precision type)
      : shape_(shape), width_(shape.num_kv_heads * shape.head_size), size_(type == Precision::F32 ? 4 : 2) {
    int64_t places = 0, rows = 0;
    for (const Question& question : questions) {
      const int64_t num_private = question.length - question.num_prefix;
      const int64_t prefix = question.shares ? segments_.back().prefix_start : places + num_private;
      segments_.push_back(
          {rows, question.length - question.first, question.first, prefix, question.num_prefix, places});
      places += question.shares ? num_private : question.length;
      rows += question.length - question.first;
    }
    q_.resize(static_cast<size_t>(rows * shape.num_heads * shape.head_size));
    for (size_t i = 0; i < q_.size(); ++i) q_[i] = number(static_cast<int64_t>(i) + 5);
    out_.resize(q_.size());
    keys_.resize(static_cast<size_t>(places * width_));
    values_.resize(keys_.size());
    for (size_t i = 0; i < keys_.size(); ++i) {
      keys_[i] = number(static_cast<int64_t>(i) * 3);
      values_[i] = number(static_cast<int64_t>(i) * 5 + 1);
    }
    longest_ = 0;
    for (const Question& question : questions) longest_ = std::max(longest_, question.length);
    call_ = {q_.data(), shape.num_heads * shape.head_size, nullptr, nullptr, out_.data(),
             shape.num_heads * shape.head_size, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.window,
             1.0f / std::sqrt(static_cast<float>(shape.head_size)), shape.softcap, static_cast<int32_t>(type), 0};
  }

  void run(kev::Pool* pool) {
    const auto keys = arena(keys_), values = arena(values_);
    call_.keys = keys.get();
    call_.values = values.get();
    const auto scratch = aligned(
        kev::attention_scratch_bytes(kev::pool_threads(pool), longest_, shape_.head_size, shape_.num_heads));
    kev::attention(pool, call_, segments_.data(), static_cast<int64_t>(segments_.size()), scratch.get());
  }

  void check(double tolerance) const {
    for (const Segment& segment : segments_)
      for (int64_t r = 0; r < segment.num_rows; ++r)
        for (int64_t h = 0; h < shape_.num_heads; ++h) check_row(segment, r, h, tolerance);
  }

 private:
  std::unique_ptr<void, Free> arena(const std::vector<float>& numbers) const {
    auto memory = aligned(static_cast<int64_t>(numbers.size()) * size_);
    for (size_t i = 0; i < numbers.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &numbers[i], sizeof bits);
      if (size_ == 4)
        static_cast<uint32_t*>(memory.get())[i] = bits;
      else
        static_cast<uint16_t*>(memory.get())[i] = static_cast<uint16_t>(bits >> 16);
    }
    return memory;
  }

  void check_row(const Segment& segment, int64_t r, int64_t h, double tolerance) const {
    const int64_t position = segment.position + r, size = shape_.head_size;
    const int64_t low = shape_.window > 0 ? std::max<int64_t>(0, position - shape_.window + 1) : 0;
    const int64_t place = ((segment.row + r) * shape_.num_heads + h) * size;
    const float* q = q_.data() + place;
    std::vector<double> scores;
    double largest = -INFINITY, sum = 0;
    for (int64_t p = low; p <= position; ++p) {
      double score = 0;
      for (int64_t i = 0; i < size; ++i) score += double{q[i]} * at(keys_, segment, p, h)[i];
      score *= call_.scale;
      if (shape_.softcap > 0) score = shape_.softcap * std::tanh(score / shape_.softcap);
      scores.push_back(score);
      largest = std::max(largest, score);
    }
    for (double& score : scores) sum += score = std::exp(score - largest);
    for (int64_t i = 0; i < size; ++i) {
      double expected = 0;
      for (int64_t p = low; p <= position; ++p)
        expected += scores[static_cast<size_t>(p - low)] / sum * at(values_, segment, p, h)[i];
      CHECK(std::abs(out_[static_cast<size_t>(place + i)] - expected) < tolerance);
    }
  }

  const float* at(const std::vector<float>& numbers, const Segment& segment, int64_t position, int64_t head) const {
    const int64_t place = position < segment.num_prefix ? segment.prefix_start + position
                                                        : segment.private_start + position - segment.num_prefix;
    const int64_t kv_head = head / (shape_.num_heads / shape_.num_kv_heads);
    return numbers.data() + place * width_ + kv_head * shape_.head_size;
  }

  Shape shape_;
  int64_t width_, size_, longest_;
  std::vector<Segment> segments_;
  std::vector<float> q_, out_, keys_, values_;
  Attention call_;
};

}  // namespace

int main() {
  constexpr Shape SHAPES[] = {
      {1, 1, 1, 0, 0},  {4, 1, 17, 7, 0},  {6, 2, 40, 33, 3},
      {5, 5, 64, 0, 0}, {100, 1, 9, 0, 0}, {4, 1, 24, 199, 0}};
  const std::vector<Question> questions = {
      {1, 0, 0}, {70, 0, 0}, {64, 63, 31}, {33, 10, 33}, {5, 5, 2}, {290, 288, 1}, {150, 60, 9}};
  const std::vector<Question> shared = {
      {194, 193, 193},       {260, 259, 193, true}, {196, 195, 193, true}, {260, 259, 193, true},
      {197, 196, 193, true}, {200, 190, 193, true}, {198, 197, 193, true}, {195, 194, 193, true},
      {210, 130, 193, true}};
  kev::Pool* pool = kev::pool_create(2);
  for (const char* name : {"portable", "avx2", "avx512_bf16_vnni"}) {
    if (!kev::isa_select(name)) {
      std::printf("attention: this machine cannot run %s\n", name);
      continue;
    }
    for (const Shape& shape : SHAPES) {
      for (Precision type : {Precision::F32, Precision::BF16}) {
        for (const auto& asked : {questions, shared}) {
          Case some(shape, asked, type);
          some.run(pool);
          some.check(type == Precision::F32 ? 2e-5 : 4e-2);
        }
      }
    }
  }
  kev::pool_destroy(pool);
  std::puts("attention: done");
  return 0;
}
