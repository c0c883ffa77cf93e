// The functions of each row alone, of every variant, over memory that ends where it must: run with the address and the
// undefined behaviour sanitizer. Results are compared between widths: a row's numbers may not depend on what follows
// them.
#include <cmath>
#include <memory>
#include <vector>

#include "check.h"
#include "inference_svc/kernels/isa.h"
#include "inference_svc/kernels/kernels.h"

namespace {

using kev::Activation;
using kev::Precision;

constexpr int64_t ROWS = 3;

// Each in memory of exactly its size.
std::vector<float> numbers(int64_t count, int64_t seed) {
  std::vector<float> made(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    made[static_cast<size_t>(i)] = static_cast<float>((seed + i) * 7919 % 2003 - 1001) / 300.0f;
  made.shrink_to_fit();
  return made;
}

bool finite(const std::vector<float>& numbers) {
  for (float x : numbers)
    if (!std::isfinite(x)) return false;
  return true;
}

void test_norms(int64_t width) {
  const std::vector<float> x = numbers(ROWS * width, 1), weight = numbers(width, 2), bias = numbers(width, 3);
  std::vector<float> out(x.size());
  kev::rms_norm(x.data(), width, weight.data(), 1.0f, 1e-6f, width, out.data(), width, 0, ROWS);
  CHECK(finite(out));
  kev::layer_norm(x.data(), width, weight.data(), bias.data(), 1e-6f, width, out.data(), width, 0, ROWS);
  CHECK(finite(out));
  kev::layer_norm(x.data(), width, weight.data(), nullptr, 1e-6f, width, out.data(), width, ROWS, ROWS);
}

void test_pointwise(int64_t width) {
  const std::vector<float> x = numbers(ROWS * width, 4), up = numbers(ROWS * width, 5);
  for (Activation kind : {Activation::SILU, Activation::GELU_TANH, Activation::GELU, Activation::RELU}) {
    std::vector<float> gated = x, plain = x;
    kev::activate(kind, gated.data(), width, up.data(), width, width, gated.data(), width, 0, ROWS);
    kev::activate(kind, plain.data(), width, nullptr, 0, width, plain.data(), width, 0, ROWS);
    for (size_t i = 0; i < x.size(); ++i) CHECK(gated[i] == plain[i] * up[i]);
  }
  std::vector<float> sum = x, soft = x;
  kev::add(up.data(), width, width, sum.data(), width, 0, ROWS);
  kev::soften(soft.data(), ROWS * width, 2.0f);
  for (size_t i = 0; i < x.size(); ++i) CHECK(sum[i] == x[i] + up[i] && std::abs(soft[i]) <= 2.0f);
}

void test_storage(int64_t count) {
  const std::vector<float> x = numbers(count, 6);
  std::vector<float> single(x.size()), back(x.size());
  std::vector<uint16_t> half(x.size());
  kev::store(x.data(), count, Precision::F32, single.data());
  CHECK(single == x);
  kev::store(x.data(), count, Precision::BF16, half.data());
  kev::load(half.data(), count, Precision::BF16, back.data());
  for (size_t i = 0; i < x.size(); ++i) CHECK(std::abs(back[i] - x[i]) <= std::abs(x[i]) / 256);
}

void test_rotation(int64_t half) {
  const int64_t num_heads = 2, head_size = 2 * half, positions[ROWS] = {4, 0, 2};
  const std::vector<float> cos(static_cast<size_t>(5 * half), 0.6f), sin(static_cast<size_t>(5 * half), 0.8f);
  const std::vector<float> x = numbers(ROWS * num_heads * head_size, 7);
  std::vector<float> turned = x;
  kev::rotate(turned.data(), num_heads * head_size, num_heads, head_size, half, cos.data(), sin.data(), positions, 0,
              ROWS);
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[static_cast<size_t>(i)], b = x[static_cast<size_t>(i + half)];
    CHECK(std::abs(turned[static_cast<size_t>(i)] - (a * 0.6f - b * 0.8f)) < 1e-5f);
    CHECK(std::abs(turned[static_cast<size_t>(i + half)] - (b * 0.6f + a * 0.8f)) < 1e-5f);
  }
}

}  // namespace

int main() {
  for (const char* name : {"portable", "avx2", "avx512_bf16_vnni"}) {
    if (!kev::isa_select(name)) {
      std::printf("rowwise: this machine cannot run %s\n", name);
      continue;
    }
    for (int64_t width : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100}) {
      test_norms(width);
      test_pointwise(width);
      test_storage(width);
      test_rotation(width);
    }
  }
  std::puts("rowwise: done");
  return 0;
}
