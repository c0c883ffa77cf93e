// The functions of each row alone with AVX2 and FMA.
#include "isa.h"

#if KEV_X86

#include <cmath>
#include <cstring>

#include <immintrin.h>

#include "rowwise_variant.h"

KEV_TARGET_AVX2

#include "vec_avx2.h"

#include "rowwise_body.h"

namespace kev {

const RowwiseVariant ROWWISE_AVX2 = Rowwise::variant();

}  // namespace kev

KEV_TARGET_END

#endif
