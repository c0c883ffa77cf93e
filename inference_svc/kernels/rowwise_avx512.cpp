// The functions of each row alone with AVX-512 (F, BW, VL, DQ).
#include "isa.h"

#if KEV_X86

#include <cmath>
#include <cstring>

#include <immintrin.h>

#include "rowwise_variant.h"

KEV_TARGET_AVX512

#include "vec_avx512.h"

#include "rowwise_body.h"

namespace kev {

const RowwiseVariant ROWWISE_AVX512 = Rowwise::variant();

}  // namespace kev

KEV_TARGET_END

#endif
