// Linears in plain C++, for any machine. Sums are product, then addition; int8 rows are stored as they are.
#include <cstring>

#include "linear_panels.h"
#include "linear_tiles.h"
#include "quantize.h"

namespace kev {
namespace {

struct FloatSum {
  float of[PANEL_OUTPUTS];
};

struct IntSum {
  int32_t of[PANEL_OUTPUTS];
};

inline void put(const Panels& job, const float* y, int64_t row, int64_t panel) {
  const int64_t output = panel * PANEL_OUTPUTS;
  const int64_t count = job.n - output < PANEL_OUTPUTS ? job.n - output : PANEL_OUTPUTS;
  float* out = job.y + row * job.ldy + (output - job.first_output);
  for (int64_t i = 0; i < count; ++i) out[i] = job.bias == nullptr ? y[i] : y[i] + job.bias[output + i];
}

struct FloatStep {
  using Sum = FloatSum;
  static constexpr int MAX_ROWS = 2;
  static constexpr int MAX_PANELS = 1;
  static Sum zero() { return Sum{}; }
  static void store(const Panels& job, const Sum& sum, int64_t row, int64_t panel) { put(job, sum.of, row, panel); }
};

struct F32Step : FloatStep {
  using Weights = FloatSum;
  using Values = float;
  static Weights load(const unsigned char* w) {
    Weights weights;
    std::memcpy(weights.of, w, sizeof weights.of);
    return weights;
  }
  static Values broadcast(const unsigned char* x) {
    float value;
    std::memcpy(&value, x, sizeof value);
    return value;
  }
  static Sum dot(Sum sum, Values value, const Weights& weights) {
    for (int i = 0; i < PANEL_OUTPUTS; ++i) sum.of[i] += value * weights.of[i];
    return sum;
  }
};

// Two bfloat16 in a word: the first in its lower half.
inline float lower(uint32_t word) {
  word <<= 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline float upper(uint32_t word) {
  word &= 0xFFFF0000u;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

struct Bf16Step : FloatStep {
  struct Weights {
    uint32_t of[PANEL_OUTPUTS];
  };
  struct Values {
    float first;
    float second;
  };
  static Weights load(const unsigned char* w) {
    Weights weights;
    for (int i = 0; i < PANEL_OUTPUTS; ++i) weights.of[i] = word_of(w + 4 * i);
    return weights;
  }
  static Values broadcast(const unsigned char* x) { return {lower(word_of(x)), upper(word_of(x))}; }
  static Sum dot(Sum sum, Values values, const Weights& weights) {
    for (int i = 0; i < PANEL_OUTPUTS; ++i) sum.of[i] += values.first * lower(weights.of[i]);
    for (int i = 0; i < PANEL_OUTPUTS; ++i) sum.of[i] += values.second * upper(weights.of[i]);
    return sum;
  }

 private:
  // Rows and weights hold 16-bit numbers one after the other, whatever the byte order of the machine.
  static uint32_t word_of(const unsigned char* x) {
    uint16_t first;
    uint16_t second;
    std::memcpy(&first, x, sizeof first);
    std::memcpy(&second, x + 2, sizeof second);
    return first | static_cast<uint32_t>(second) << 16;
  }
};

// Bytes are taken in pairs, as the low and the high half of 16 bits: products stay within 127 * 127, so two of them fit
// there.
struct Halves {
  int16_t low[2 * PANEL_OUTPUTS];
  int16_t high[2 * PANEL_OUTPUTS];
};

inline Halves halves_of(const int16_t* pairs) {
  Halves halves;
  for (int i = 0; i < 2 * PANEL_OUTPUTS; ++i) {
    halves.low[i] = static_cast<int16_t>(static_cast<int16_t>(static_cast<uint16_t>(pairs[i]) << 8) >> 8);
    halves.high[i] = static_cast<int16_t>(pairs[i] >> 8);
  }
  return halves;
}

struct I8Step {
  using Sum = IntSum;
  using Weights = Halves;
  using Values = Halves;
  static constexpr int MAX_ROWS = 4;
  static constexpr int MAX_PANELS = 1;
  static Sum zero() { return Sum{}; }
  static Weights load(const unsigned char* w) {
    int16_t pairs[2 * PANEL_OUTPUTS];
    std::memcpy(pairs, w, sizeof pairs);
    return halves_of(pairs);
  }
  static Values broadcast(const unsigned char* x) {
    int32_t word;
    std::memcpy(&word, x, sizeof word);
    int32_t words[PANEL_OUTPUTS];
    for (int i = 0; i < PANEL_OUTPUTS; ++i) words[i] = word;
    int16_t pairs[2 * PANEL_OUTPUTS];
    std::memcpy(pairs, words, sizeof pairs);
    return halves_of(pairs);
  }
  static Sum dot(Sum sum, const Values& values, const Weights& weights) {
    int16_t sums[2 * PANEL_OUTPUTS];
    for (int i = 0; i < 2 * PANEL_OUTPUTS; ++i) {
      const auto low = static_cast<int16_t>(values.low[i] * weights.low[i]);
      const auto high = static_cast<int16_t>(values.high[i] * weights.high[i]);
      sums[i] = static_cast<int16_t>(low + high);
    }
    int32_t words[PANEL_OUTPUTS];
    std::memcpy(words, sums, sizeof words);
    for (int i = 0; i < PANEL_OUTPUTS; ++i) sum.of[i] += static_cast<int16_t>(words[i]) + (words[i] >> 16);
    return sum;
  }
  static void store(const Panels& job, const Sum& sum, int64_t row, int64_t panel) {
    const int64_t output = panel * PANEL_OUTPUTS;
    float y[PANEL_OUTPUTS];
    for (int i = 0; i < PANEL_OUTPUTS; ++i) {
      const bool inside = output + i < job.n;
      y[i] = inside ? static_cast<float>(sum.of[i]) * (job.x_scale[row] * job.scale[output + i]) : 0.0f;
    }
    put(job, y, row, panel);
  }
};

int64_t find_larger(const float* y, int64_t count, float limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(y[i] <= limit)) return i;
  }
  return count;
}

constexpr LinearVariant VARIANT = {
    round_row_plainly,
    quantize_row_plainly,
    {panels<F32Step>, panels<Bf16Step>, panels<I8Step>},
    find_larger,
};

}  // namespace

const LinearVariant* linear_portable() { return &VARIANT; }

}  // namespace kev
