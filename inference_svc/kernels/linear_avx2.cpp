// Linears with AVX2 and FMA.
//
// Invariants and semantics: bf16 sums take the two numbers of a step one after the other, by one FMA each. int8
// products are |x| times w with the sign of x, both within 127, so that no pair of them overflows 16 bits.
#include "linear_panels.h"

#if KEV_X86

#include <immintrin.h>

#include <cstring>

KEV_TARGET_AVX2

#include "linear_tiles.h"
#include "quantize.h"

namespace kev {
namespace {

constexpr int64_t LANES = 8;

// Two halves of a panel.
struct Floats {
  __m256 of[2];
};

struct Words {
  __m256i of[2];
};

inline __m256i word_at(const unsigned char* x) {
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return _mm256_set1_epi32(word);
}

inline Words load_words(const unsigned char* w) {
  const auto* words = reinterpret_cast<const __m256i*>(w);
  return {{_mm256_load_si256(words), _mm256_load_si256(words + 1)}};
}

// All ones in the first `count` lanes.
inline __m256i first_lanes(int64_t count) {
  const int32_t clipped = static_cast<int32_t>(count < 0 ? 0 : count > LANES ? LANES : count);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(clipped), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Adds the bias and stores what lies inside n. `output` is that of lane 0.
inline void put(const Panels& job, __m256 y, int64_t row, int64_t output, __m256i lanes) {
  if (job.bias != nullptr) y = _mm256_add_ps(y, _mm256_maskload_ps(job.bias + output, lanes));
  _mm256_maskstore_ps(job.y + row * job.ldy + (output - job.first_output), lanes, y);
}

struct FloatStep {
  using Sum = Floats;
  static constexpr int MAX_PANELS = 1;
  static Sum zero() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
  static void store(const Panels& job, const Sum& sum, int64_t row, int64_t panel) {
    for (int half = 0; half < 2; ++half) {
      const int64_t output = panel * PANEL_OUTPUTS + half * LANES;
      if (output < job.n) put(job, sum.of[half], row, output, first_lanes(job.n - output));
    }
  }
};

struct F32Step : FloatStep {
  using Weights = Floats;
  using Values = __m256;
  static constexpr int MAX_ROWS = 6;
  static Weights load(const unsigned char* w) {
    const Words words = load_words(w);
    return {{_mm256_castsi256_ps(words.of[0]), _mm256_castsi256_ps(words.of[1])}};
  }
  static Values broadcast(const unsigned char* x) { return _mm256_castsi256_ps(word_at(x)); }
  static Sum dot(const Sum& sum, Values values, const Weights& weights) {
    return {{_mm256_fmadd_ps(values, weights.of[0], sum.of[0]), _mm256_fmadd_ps(values, weights.of[1], sum.of[1])}};
  }
};

// A word holds two bfloat16, the first in its lower half.
inline __m256 first_of(__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }

inline __m256 second_of(__m256i words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u))));
}

struct Bf16Step : FloatStep {
  struct Weights {
    Floats first;
    Floats second;
  };
  struct Values {
    __m256 first;
    __m256 second;
  };
  static constexpr int MAX_ROWS = 4;
  static Weights load(const unsigned char* w) {
    const Words words = load_words(w);
    return {{{first_of(words.of[0]), first_of(words.of[1])}}, {{second_of(words.of[0]), second_of(words.of[1])}}};
  }
  static Values broadcast(const unsigned char* x) { return {first_of(word_at(x)), second_of(word_at(x))}; }
  static Sum dot(const Sum& sum, const Values& values, const Weights& weights) {
    const Sum first = {{_mm256_fmadd_ps(values.first, weights.first.of[0], sum.of[0]),
                        _mm256_fmadd_ps(values.first, weights.first.of[1], sum.of[1])}};
    return {{_mm256_fmadd_ps(values.second, weights.second.of[0], first.of[0]),
             _mm256_fmadd_ps(values.second, weights.second.of[1], first.of[1])}};
  }
};

struct I8Step {
  using Sum = Words;
  using Weights = Words;
  struct Values {
    __m256i signed_values;
    __m256i magnitudes;
  };
  static constexpr int MAX_ROWS = 4;
  static constexpr int MAX_PANELS = 1;
  static Sum zero() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
  static Weights load(const unsigned char* w) { return load_words(w); }
  static Values broadcast(const unsigned char* x) {
    const __m256i values = word_at(x);
    return {values, _mm256_abs_epi8(values)};
  }
  static __m256i dot_half(__m256i sum, const Values& values, __m256i weights) {
    const __m256i pairs = _mm256_maddubs_epi16(values.magnitudes, _mm256_sign_epi8(weights, values.signed_values));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Sum dot(const Sum& sum, const Values& values, const Weights& weights) {
    return {{dot_half(sum.of[0], values, weights.of[0]), dot_half(sum.of[1], values, weights.of[1])}};
  }
  static void store(const Panels& job, const Sum& sum, int64_t row, int64_t panel) {
    for (int half = 0; half < 2; ++half) {
      const int64_t output = panel * PANEL_OUTPUTS + half * LANES;
      if (output >= job.n) return;
      const __m256i lanes = first_lanes(job.n - output);
      const __m256 scale =
          _mm256_mul_ps(_mm256_set1_ps(job.x_scale[row]), _mm256_maskload_ps(job.scale + output, lanes));
      put(job, _mm256_mul_ps(_mm256_cvtepi32_ps(sum.of[half]), scale), row, output, lanes);
    }
  }
};

int64_t find_larger(const float* y, int64_t count, float limit) {
  const __m256 limits = _mm256_set1_ps(limit);
  for (int64_t i = 0; i < count; i += LANES) {
    const __m256i lanes = first_lanes(count - i);
    const __m256 larger = _mm256_cmp_ps(_mm256_maskload_ps(y + i, lanes), limits, _CMP_NLE_UQ);
    const int found = _mm256_movemask_ps(_mm256_and_ps(larger, _mm256_castsi256_ps(lanes)));
    if (found != 0) return i + __builtin_ctz(static_cast<unsigned int>(found));
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
}  // namespace kev

KEV_TARGET_END

namespace kev {
const LinearVariant* linear_avx2() { return &VARIANT; }
}  // namespace kev

#else

namespace kev {
const LinearVariant* linear_avx2() { return nullptr; }
}  // namespace kev

#endif
