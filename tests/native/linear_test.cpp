// Linears of every variant over memory that ends where it must: run with the address and the undefined behaviour
// sanitizer, which see what is read or written beyond. Results are compared with plain sums in double.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "check.h"
#include "inference_svc/kernels/isa.h"
#include "inference_svc/kernels/kernels.h"

namespace {

using kev::Precision;

constexpr Precision PRECISIONS[] = {Precision::F32, Precision::BF16, Precision::I8};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Exactly so many bytes on a 64-byte border.
std::unique_ptr<void, Free> aligned(int64_t bytes) {
  void* memory = nullptr;
  CHECK(posix_memalign(&memory, 64, static_cast<size_t>(bytes)) == 0);
  std::memset(memory, 0xFF, static_cast<size_t>(bytes));
  return std::unique_ptr<void, Free>(memory);
}

float number(int64_t seed) { return static_cast<float>(static_cast<int>(seed * 7919 % 2003) - 1001) / 500.0f; }

std::vector<float> numbers(int64_t count, int64_t seed) {
  std::vector<float> made(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) made[static_cast<size_t>(i)] = number(seed + i * i % 1009 + i);
  return made;
}

struct Packed {
  std::unique_ptr<void, Free> data;
  std::vector<float> scale;
  std::vector<int32_t> sums;
  kev::Weight weight;

  Packed(kev::Pool* pool, Precision precision, const std::vector<float>& source, int64_t n, int64_t k)
      : data(aligned(kev::packed_bytes(precision, n, k))),
        scale(static_cast<size_t>(n)),
        sums(static_cast<size_t>(n)),
        weight{n, k, data.get(), scale.data(), sums.data(), static_cast<int32_t>(precision), 0} {
    const int64_t head = n / 32 * 16;  // in two pieces
    kev::pack_rows(pool, precision, source.data(), Precision::F32, k, 0, head, n, k, data.get(), scale.data(),
                   sums.data());
    kev::pack_rows(pool, precision, source.data() + head * k, Precision::F32, k, head, n - head, n, k, data.get(),
                   scale.data(), sums.data());
  }
};

// Within what the precision loses: 2^-7 of every factor in bf16, one part in 127 of the largest in int8.
double tolerance(Precision precision) {
  return precision == Precision::F32 ? 1e-5 : precision == Precision::BF16 ? 0.02 : 0.05;
}

void test_shape(kev::Pool* pool, Precision precision, int64_t n, int64_t k, int64_t rows) {
  const int64_t ldx = k + 3, ldy = n + 2;
  const auto source = numbers(n * k, 1), bias = numbers(n, 5);
  const Packed packed(pool, precision, source, n, k);
  const auto x = numbers((rows - 1) * ldx + k, 3);  // the last row ends with its last number
  std::vector<float> y(static_cast<size_t>((rows - 1) * ldy + n), -7.0f);
  const auto scratch = aligned(kev::linear_scratch_bytes(precision, rows, k));
  kev::linear(pool, packed.weight, x.data(), rows, ldx, bias.data(), y.data(), ldy, scratch.get());
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t j = 0; j < n; ++j) {
    kev::unpack_row(packed.weight, j, row.data());
    for (int64_t i = 0; i < k; ++i) {
      CHECK(std::fabs(row[static_cast<size_t>(i)] - source[static_cast<size_t>(j * k + i)]) <= 2 * tolerance(precision));
    }
  }
  std::vector<int64_t> index(static_cast<size_t>(rows));
  std::vector<float> value(static_cast<size_t>(rows));
  kev::linear_argmax(pool, packed.weight, x.data(), rows, ldx, bias.data(), 0.0f, index.data(), value.data(),
                     scratch.get());
  for (int64_t r = 0; r < rows; ++r) {
    int64_t best = 0;
    for (int64_t j = 0; j < n; ++j) {
      double exact = bias[static_cast<size_t>(j)], size = 1.0;
      for (int64_t i = 0; i < k; ++i) {
        const double product =
            static_cast<double>(x[static_cast<size_t>(r * ldx + i)]) * source[static_cast<size_t>(j * k + i)];
        exact += product;
        size += std::fabs(product);
      }
      const float found = y[static_cast<size_t>(r * ldy + j)];
      CHECK(std::fabs(found - exact) <= tolerance(precision) * size);
      if (found > y[static_cast<size_t>(r * ldy + best)]) best = j;
    }
    CHECK(index[static_cast<size_t>(r)] == best);
    CHECK(value[static_cast<size_t>(r)] == y[static_cast<size_t>(r * ldy + best)]);
    for (int64_t j = n; j < ldy && r + 1 < rows; ++j) CHECK(y[static_cast<size_t>(r * ldy + j)] == -7.0f);
  }
}

// Whatever weight is named as the next, and however many threads there are for the shares, no bit changes.
void test_next(Precision precision) {
  constexpr int64_t N = 330, K = 70, ROWS = 8;
  const Packed packed(nullptr, precision, numbers(N * K, 1), N, K);
  const auto x = numbers(ROWS * K, 3);
  const auto scratch = aligned(kev::linear_scratch_bytes(precision, ROWS, K));
  std::vector<float> expected(ROWS * N), found(ROWS * N);
  kev::linear(nullptr, packed.weight, x.data(), ROWS, K, nullptr, expected.data(), N, scratch.get());
  for (int threads : {2, 5, 70}) {
    kev::Pool* pool = kev::pool_create(threads);
    CHECK(pool != nullptr);
    for (int64_t n : {int64_t{1}, int64_t{17}, int64_t{500}}) {
      const Packed next(nullptr, precision, numbers(n * K, 2), n, K);
      kev::linear(pool, packed.weight, x.data(), ROWS, K, nullptr, found.data(), N, scratch.get(), &next.weight);
      CHECK(found == expected);
    }
    kev::pool_destroy(pool);
  }
}

void test_odd_rows(kev::Pool* pool, Precision precision) {
  constexpr int64_t N = 33, K = 21, ROWS = 6;
  const Packed packed(pool, precision, numbers(N * K, 1), N, K);
  auto x = numbers(ROWS * K, 3);
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max(),
                       std::numeric_limits<float>::denorm_min()};
  for (int64_t r = 0; r < 5; ++r) x[static_cast<size_t>(r * K + r)] = odd[r];
  std::vector<float> y(ROWS * N);
  const auto scratch = aligned(kev::linear_scratch_bytes(precision, ROWS, K));
  kev::linear(pool, packed.weight, x.data(), ROWS, K, nullptr, y.data(), N, scratch.get());
  for (int64_t j = 0; j < N; ++j)
    CHECK(std::isnan(y[static_cast<size_t>(j)]) && std::isfinite(y[static_cast<size_t>(4 * N + j)]));
  kev::linear(pool, packed.weight, x.data(), 0, K, nullptr, nullptr, N, nullptr);
}

}  // namespace

int main() {
  constexpr int64_t SIZES[][2] = {{1, 1},   {15, 17},   {16, 16}, {17, 31}, {31, 15},
                                  {64, 64}, {100, 101}, {130, 6}, {8300, 3}, {3, 4173}};
  kev::Pool* pool = kev::pool_create(2);
  for (const char* name : {"portable", "avx2", "avx512_bf16_vnni"}) {
    if (!kev::isa_select(name)) {
      std::printf("linear: this machine cannot run %s\n", name);
      continue;
    }
    for (Precision precision : PRECISIONS) {
      for (const auto& size : SIZES) {
        for (int64_t rows : {1, 2, 5, 6, 7, 13, 25}) test_shape(pool, precision, size[0], size[1], rows);
      }
      test_odd_rows(pool, precision);
      test_next(precision);
    }
  }
  kev::pool_destroy(pool);
  std::puts("linear: done");
  return 0;
}
