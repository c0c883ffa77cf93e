// The functions of each row alone, as one variant computes them; kernels.h says what they are.
#pragma once

#include "kernels.h"

namespace kev {

struct RowwiseVariant {
  decltype(&kev::rms_norm) rms_norm;
  decltype(&kev::layer_norm) layer_norm;
  decltype(&kev::rotate) rotate;
  decltype(&kev::activate) activate;
  decltype(&kev::add) add;
  decltype(&kev::soften) soften;
  decltype(&kev::store) store;
  decltype(&kev::load) load;
};

extern const RowwiseVariant ROWWISE_PORTABLE;
extern const RowwiseVariant ROWWISE_AVX2;
extern const RowwiseVariant ROWWISE_AVX512;

}  // namespace kev
